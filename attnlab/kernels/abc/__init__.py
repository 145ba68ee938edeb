"""ABC_MLP on a GPU: the memory is written and read by Triton kernels, forward and backward.

What is computed (ABC, Eqs. 3-5, 12, Appendix B.1)
    A memory of n slots stands for all keys up to a query. s_i[n] = log alpha_i[n], the control logits, say how much of
    key i goes into slot n:

        z_t[n] = log sum_{i <= t} exp(s_i[n])                  the logarithm of a slot's total weight
        K~_t[n] = sum_{i <= t} exp(s_i[n] - z_t[n]) k_i         an average of keys; V~_t of values
        S_t = K~_t q_t,  p_t = softmax_n(scale S_t),  out_t = V~_t^T p_t

    Without ``causal`` all queries read the memory after the last key. A *state* is (K~, V~, z) of one sequence and key
    head at one place.

How it is cut
    chunk     C consecutive tokens of a sequence. States are stored only before chunks; within a chunk, queries and keys
              meet in pairs, so that everything is a product of matrices.
    segment   a run of chunks. Kernels that walk along a sequence are launched twice where there are few sequences and
              heads: first for each segment's total, then from the totals beyond it.
    tile      the slots by columns that one program holds. ``TilePlan`` (plan.py) has the sizes of chunks and tiles and
              all dtypes, for a head size, a number of slots and a dtype; ``CallForm`` says what else a kernel is
              compiled for.

The kernels, in the order in which they run (R reads, W writes; saved: kept in one buffer for the backward pass)
    forward   cut_sequences    only packed sequences: where each chunk lies                            packing.py
              weigh_logits     R s; W weights exp(s - top), and for each chunk top and their sum       state.py
              write_states     R k, v, weights; walks forward; W saved: the state before each chunk,
                               z before and after it; the last state                                   state.py
              read_states      R q, k, v, s, saved; W out; saved: scores S, flags of chunks            output.py
    backward  query_gradients  R q, k, v, s, do, saved; W dq; for each query and slot the shares
                               g / weight and p / weight (g = dL/dS) and row offsets                   query_backward.py
              sum_back         R q, do, shares; walks backward; W after each chunk the sums of
                               share_t q_t and share_t do_t over all later queries, and offsets        state_backward.py
              key_gradients    R q, k, v, s, do, shares, sums, offsets; W dk, dv, ds                   key_backward.py
    decoding  fold_and_read    one token into the memory, in place, and its output                     step_triton.py
    read_states, query_gradients and key_gradients are launched twice: for all chunks, then for wide ones (below).

Where numerical care is taken
    References. exp(s_i - z_t) is taken as exp(s_i - r) exp(r - z_t). One r serves rows whose running maximum is at most
    60 below it. A chunk whose logits climb further is *wide*: a second launch loops over several r. (control.py)
    The gradient of the logits is sum_t exp(s_i - z_t) y_t (a_t k_i - a_t K~_t). Where one key fills a slot both terms
    nearly cancel, so both take the same rounded factors (chunk.py), and the sums over later queries, stored in bf16,
    have their rounding corrected in the offsets (``CORRECT_SUMS``, state_backward.py).
    Few slots. With up to 32 slots bf16 states have *low parts*, what rounding takes, in slots that are mostly one key
    (``LOW_PARTS``). With fewer than 8, bf16 is computed in float32; with up to 32, float32 in float64. (plan.py)
    Averages stay averages: old and new parts have weights that sum to one, so that nothing overflows.
    Empty slots have z = EMPTY (-1e30); hidden keys are not loaded, since they may be NaN.

The host
    attention.py  checks, autograd           forward_pass.py, backward_pass.py  buffers and launches
    step.py       ``abc_step``               records.py         Inputs, State, Saved: the tensors that passes share
    ops.py        torch.compile's operators  recorded_calls.py  a call of known sizes repeats recorded launches
    Arguments are launched by name. All kernels list them in the same groups: inputs, saved tensors, tensors from other
    kernels, outputs, packing; strides, sizes; then constants: tiles, the call, tiles without padding, numbers.

Names in kernels
    q, k, v, s, do (b, heads, tokens, width); strides s + tensor + b, h or t (sqb: of q's batch; o is out or do, d is
    dq), sm of the mask's rows. T tokens, NT chunks of a row, G key heads, R query heads of a key head, N slots,
    D columns. C, NP, BN, BD: tokens, padded slots, slots of a walk's tile, columns of a tile. CT the dtype of products'
    operands, PREC their precision. ``a`` stands for q or do, ``y`` for g or p, ``x`` for a chunk's logits.
"""

from attnlab.kernels.abc.attention import HEAD_SIZES, MOST_SLOTS, abc_attention, check_sizes, supports
from attnlab.kernels.abc.records import State
from attnlab.kernels.abc.step import abc_step

__all__ = ["HEAD_SIZES", "MOST_SLOTS", "State", "abc_attention", "abc_step", "check_sizes", "supports"]
