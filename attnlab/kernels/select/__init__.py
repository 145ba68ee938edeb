"""abc-select on a GPU: sinks, a window and the keys of the highest scores read by one softmax.

What is computed
    A query at place p sees the keys from s(p) to p, where s(p) = max(0, p // B B + B - W) for a window of W that tokens
    leave B at a time, and of the earlier ones the first S (sinks) and the N of the highest scores u (of equal ones the
    later). Whether key j is among them depends on s = s(p) alone. With y_j the place of the N-th key of a higher score,

        selected(p, j) = j < s <= y_j

    since keys only ever leave; y of sinks is infinite. So a *segment* of Q queries is read as in Flash Attention: by
    tiles of the list of all keys that any of its queries selects, and of its windows, each query with its own mask.

Gradients
    With weights P, Delta = <do, out> and dS_pj = P_pj (<do_p, v_j> - Delta_p) those of q, k and v are softmax's. Scores
    learn by those keys that are *counted*: j < s <= z_j, with z_j the place of the (N + M)-th key of a higher score. Out
    of gates that are 1 for keys that are seen and 0 for others,

        P_pj = gate_pj e_pj / sum_i gate_pi e_pi,   e_pj = exp(min(q_p k_j - max_i q_p k_i, 3)),   i over keys seen

        d gate_pj = P~_pj (<do_p, v_j> - Delta_p),  P~_pj = e_pj / sum_i gate_pi e_pi, which is P_pj for keys seen
        d u_j     = sum_p d gate_pj sigma'(u_j - middle_p)

    over queries p that count j, of all heads that read it; middle_p, which has no gradient, is the mean of the lowest
    score that is selected and the highest that is only counted, and sigma' is 0 where all that are counted are selected.

    No sum is by atomic additions: gradients of listed keys are stored for each segment, and each key adds up those of
    the segments that list it, in their order. The same inputs give the same bits.

The kernels, in the order in which they run (R reads, W writes)
    forward   last_reads       R scores; W y and z, by comparing all pairs of keys                        choose.py
              list_keys        R y, z, scores; W the list of each segment, and middle                     choose.py
              read             R q, k, v, lists; W out, log-sum-exps, largest scores                      read.py
    backward  query_gradients  R q, k, v, out, do, lists; W dq, Delta                                     backward.py
              listed_gradients R q, k, v, do, lists; W for each segment the gradients of its list         backward.py
              key_gradients    R q, k, v, do, and those of all segments; W dk, dv, du                     backward.py
    decoding  take_and_read    one token enters, another may leave; W out                                 step_triton.py

Names in kernels
    q, k, v, score (b, heads, tokens, width); strides s + tensor + b, h or t; T tokens, L of them leave the window by the
    end; G key heads, R query heads of each; NS segments; constants: W, B, S, N, M and Q as above, CAP and MORE the room
    of a list for keys that are selected and only counted, V windows that begin in a segment, D and E columns and BD and
    BE of their tiles, KT, LT and CT keys of a tile; LEARN whether scores have gradients; PREC the precision of products.
"""

from attnlab.kernels.select.attention import select_attention, supports
from attnlab.kernels.select.step import select_step
from attnlab.kernels.select.step import supports as supports_step

__all__ = ["select_attention", "select_step", "supports", "supports_step"]
