"""abc-hybrid on a GPU: sinks, slots and a window read by one softmax, forward, backward and one step.

What is computed
    Blocks of C tokens, counted from the first token of a row. Block j of queries reads the keys of blocks j + 1 - W / C
    to j, the sinks before those, and the slots after block j - W / C. With alpha = exp(log alpha), zero for sinks,

        m_c[n] = sum_i alpha_i[n],  K~_c[n] = sum_i alpha_i[n] k_i / m_c[n]      over the tokens i of blocks 0 to c,

    and V~_c alike: the *state* c, stored in the dtype of the inputs, with log m in float32.

The kernels, in the order in which they run (R reads, W writes)
    forward   sum_segments    R k, v, log alpha; W the sums of each segment of blocks, added up by torch   states.py
              write_states    R k, v, log alpha, sums before a segment; W states, log m                    states.py
              read            R q, k, v, states, log m; W out, log-sum-exps                                read.py
    backward  query_gradients R q, k, v, out, do, states; W dq, gradients of states, <do, out>, and for
                              each block the gradients of sinks, added up by torch                         backward.py
              key_gradients   R q, k, v, do, log-sum-exps; W dk, dv of the window                          backward.py
              sum_back        R gradients of states; W their sums over each segment, added up by torch     states.py
              write_gradients R k, v, log alpha, gradients of states; adds to dk, dv; W d log alpha        states.py
    decoding  take_and_read   one token enters the window, a block may leave it for the slots; W out      step_triton.py

Names in kernels
    q, k, v, x = log alpha (b, heads, tokens, width); strides s + tensor + b, h or t; T tokens, of which a row's first
    ``starts`` are padding; G key heads, R query heads of each; NB blocks, NS states; constants: C tokens of a block, W
    of the window, KT of a tile of it, S sinks and SP of their tile, N slots and NP of their tile, D columns and BD, RT
    query heads of a tile, SEG blocks of a segment; PREC is the precision of products.
"""

from attnlab.kernels.hybrid.attention import MOST_ROWS, hybrid_attention, supports
from attnlab.kernels.hybrid.step import hybrid_step

__all__ = ["MOST_ROWS", "hybrid_attention", "hybrid_step", "supports"]
