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
    other, since those are neighbours, and then added in a fixed order: the same inputs give the same bits.

Which keys are listed
    Scores and places are compared as one integer, so nothing is sorted and no two are equal. Before a segment only the
    K = N + M best keys of all earlier ones can be listed, and tokens that leave the window within it. The best are
    found by chunks: those of each chunk, those of all chunks before it, and those before the segment of these and the
    tokens of its own chunk. Each is a bisection over numbers that stay in registers. Then every key that is left is
    compared with every other. So the work is linear in the tokens, but for the best of chunks before each chunk.

The kernels, in the order in which they run (R reads, W writes)
    forward   best_of_tokens   R scores; W the best keys of each chunk; of texts of more than one           choose.py
              best_of_chunks   R these; W the best keys before each chunk; of texts of more than two        choose.py
              best_of_tokens   R scores and these; W the best keys before each segment                      choose.py
              list_keys        R these; W the list of each segment with y and z, how many segments list
                               each key, and middle                                                         choose.py
              read             R q, k, v, lists; W out, log-sum-exps, largest scores                        read.py
    backward  query_gradients  R q, k, v, out, do, lists; W dq, Delta                                       backward.py
              sum_lives        R how many segments list each key; W where its rows end                      backward.py
              listed_gradients R q, k, v, do, lists; W for each segment the gradients of its list           backward.py
              sum_rows         RW these: sums of at most PIECE rows of a key                                backward.py
              key_gradients    R q, k, v, do, and these; W dk, dv, du                                       backward.py
    decoding  take_and_read    one token enters, another may leave; W out                                 step_triton.py

Names in kernels
    q, k, v, score (b, heads, tokens, width); strides s + tensor + b, h or t; T tokens, L of which leave the window by
    the end; NW windows that begin at different places; G key heads, R query heads of each; NS segments, NQ parts of
    QB queries, NC chunks of C tokens; constants: W, B, S, N, M, K and Q as above, ENTER the tokens that may leave the
    window within a segment, CAP and ROOM the room of a list for keys that are selected, and for all, D and E columns,
    BD and BE those of their tiles, KT, LT, BT and MT keys and QT queries of a tile, KP, EP, SP and AP powers of 2 that
    K, ENTER, S and keys to list fit in; STAGES of loads of what segments have written; LEARN whether scores have
    gradients; PREC the precision of products.
"""

from attnlab.kernels.select.attention import select_attention, supports
from attnlab.kernels.select.step import select_step
from attnlab.kernels.select.step import supports as supports_step

__all__ = ["select_attention", "select_step", "supports", "supports_step"]
