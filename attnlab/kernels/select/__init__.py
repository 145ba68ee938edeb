"""abc-select on a GPU: sinks, a window and the keys of the highest scores read by one softmax.

What is computed
    A query at place p sees the keys from s(p) to p, where s(p) = max(0, p // B B + B - W) for a window of W that tokens
    leave B at a time, and of the earlier ones the first S (sinks) and the N of the highest scores u (of equal ones the
    later). Which those are depends on s = s(p) alone. The N-th highest score before s never falls as s grows, so a key
    that is not selected before one window is before none that follow: with y_j the last that it is selected before,

        selected(p, j) = j < s <= y_j

    and y of sinks is that of the last query. So a *segment* of Q queries is read as in Flash Attention: by tiles of its
    windows, and of the list of all keys that any of its queries selects, each query with its own mask.

Gradients
    With weights P, Delta = <do, out> and dS_pj = P_pj (<do_p, v_j> - Delta_p), q, k and v have those of softmax. Scores
    learn by the keys that are *counted*: j < s <= z_j, with z_j as y_j for the N + M highest. With gates that are 1 for
    keys that are seen and 0 for others,

        P_pj = gate_pj e_pj / sum_i gate_pi e_pi,   e_pj = exp(min(q_p k_j - max_i q_p k_i, 3)),   i over keys seen

        d gate_pj = P~_pj (<do_p, v_j> - Delta_p),  P~_pj = e_pj / sum_i gate_pi e_pi, which is P_pj for keys seen
        d u_j     = sum_p d gate_pj sigma'(u_j - middle_p)

    over queries p that count j, of all heads that read it. middle_p, which has no gradient, is the mean of the lowest
    score that is selected and the next; where there is no next, d u_j is 0.

    No sum is by atomic additions. The gradients of a listed key are stored for each segment that lists it, beside each
    other, since those are neighbours, and then added in their order: the same inputs give the same bits.

The kernels, in the order in which they run (R reads, W writes)
    forward   thresholds       R ranks of scores; W the N-th and (N + M)-th highest before each window, and middle,
                               by bisection                                                               choose.py
              last_reads       R these; W y and z, by bisection, and how many segments list each key      choose.py
              list_keys        R y, z; W the list of each segment                                         choose.py
              read             R q, k, v, lists; W out, log-sum-exps, largest scores                      read.py
    backward  query_gradients  R q, k, v, out, do, lists; W dq, Delta                                     backward.py
              listed_gradients R q, k, v, do, lists; W for each segment the gradients of its list         backward.py
              key_gradients    R q, k, v, do, and what segments have written; W dk, dv, du                backward.py
    decoding  take_and_read    one token enters, another may leave; W out                                 step_triton.py

Names in kernels
    q, k, v, score (b, heads, tokens, width); strides s + tensor + b, h or t; T tokens, L of which leave the window by
    the end; NW windows that begin at different places; G key heads, R query heads of each; NS segments; constants: W,
    B, S, N, M and Q as above, CAP and MORE the room of a list for keys that are selected, and only counted, D and E
    columns, BD and BE those of their tiles, KT, LT and MT keys and QT queries of a tile; STAGES of loads of what
    segments have written; LEARN whether scores have gradients; PREC the precision of products.
"""

from attnlab.kernels.select.attention import select_attention, supports
from attnlab.kernels.select.step import select_step
from attnlab.kernels.select.step import supports as supports_step

__all__ = ["select_attention", "select_step", "supports", "supports_step"]
