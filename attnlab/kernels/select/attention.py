"""``select_attention``: what the kernels take, their launches, and both passes as operators for torch.compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from attnlab.kernels.hybrid.attention import dense_rows, precision
from attnlab.kernels.launching import INTERPRETED, Options, launch, with_strides
from attnlab.kernels.select.backward import key_gradients, listed_gradients, query_gradients, sum_lives, sum_rows
from attnlab.kernels.select.choose import best_of_chunks, best_of_tokens, list_keys
from attnlab.kernels.select.read import read
from attnlab.shapes import Float

__all__ = ["MOST_SLOTS", "select_attention", "supports"]

# On a GPU float32 stays in PyTorch; Triton's interpreter takes it, so that the arithmetic is tested to more digits.
DTYPES = (torch.bfloat16, torch.float16, *((torch.float32,) if INTERPRETED else ()))
MOST_WIDTH, MOST_SLOTS, MOST_SINKS = 128, 1024, 64
# The heads of a group are an axis of the grid.
MOST_GROUP = 1024
# Queries that share a list, those of them that a program reads it for, tokens of a chunk, and the best keys of chunks
# that a program holds at once.
SEGMENT = 128
QUERIES = 64
CHUNK = 1024
MOST_BEST = 4096
# Keys whose rows are counted at once, and rows of a key that are added up one after another.
MOST_LIVES = 4096
PIECE = 32
# Keys of a tile, warps, stages of loads and registers of a thread, for heads of up to 64 columns and for wider ones:
# three or four programs of a multiprocessor hide each other's waiting. Compiled for sm_90, next to nothing is spilled.
TILES = {
    "best_of_tokens": ((0, 1, 1, 168),) * 2,
    "best_of_chunks": ((0, 4, 1, 168),) * 2,
    "list_keys": ((16, 1, 1, 168),) * 2,
    "read": ((64, 4, 2, 128), (32, 4, 2, 168)),
    "query_gradients": ((64, 4, 2, 168), (32, 4, 2, 168)),
    "listed_gradients": ((64, 4, 1, 168), (64, 4, 1, 255)),
    "sum_lives": ((0, 8, 1, 128),) * 2,
    "sum_rows": ((8, 2, 1, 128),) * 2,
    "key_gradients": ((64, 4, 1, 168), (64, 4, 1, 255)),
}
KERNELS = (
    best_of_tokens,
    best_of_chunks,
    list_keys,
    read,
    query_gradients,
    listed_gradients,
    sum_lives,
    sum_rows,
    key_gradients,
)


def supports(d: int, e: int, dtype: torch.dtype, *, slots: int, sinks: int, heads: int) -> bool:
    """Whether the kernels are made for these sizes, with so many query heads of a key/value head."""
    widths = min(d, e) >= 1 and max(d, e) <= MOST_WIDTH
    return widths and dtype in DTYPES and slots <= MOST_SLOTS and sinks <= MOST_SINKS and heads <= MOST_GROUP


def select_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t e"],
    score: Float[Tensor, "b g t"],
    *,
    slots: int,
    window: int,
    block: int,
    sinks: int,
    scale: float | None = None,
    spare: int = 0,
    clamp: float = 0.0,
) -> Float[Tensor, "b h t e"]:
    """The output of ``abc-select``, causal, with gradients by q, k and v.

    Scores are compared in float32; of equal ones the later is higher, and NaN is highest. With ``spare`` keys just not
    selected that are counted, scores have a gradient, too: such a key is taken to weigh at most exp(``clamp``) times
    the largest weight. The same inputs give the same bits.
    """
    (b, h, t, d), (g, e) = q.shape, (k.shape[1], v.shape[3])
    if k.shape != (b, g, t, d) or v.shape != (b, g, t, e) or h % max(1, g) or score.shape != (b, g, t):
        shapes = [tuple(x.shape) for x in (q, k, v, score)]
        raise ValueError(f"q, k, v and scores do not agree: {shapes}")
    served = supports(d, e, q.dtype, slots=slots, sinks=sinks, heads=h // max(1, g))
    if not served or window % block or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"the kernels take heads of up to {MOST_WIDTH}, {MOST_SLOTS} slots and {MOST_SINKS} sinks, and a window of "
            f"whole blocks, in {DTYPES}; got heads of {d} and {e}, {slots} slots, {sinks} sinks, blocks of {block}, "
            f"window {window}, {[x.dtype for x in (q, k, v)]}"
        )
    scale = d**-0.5 if scale is None else scale
    if 0 in (b, h, t):
        return q.new_zeros(b, h, t, e)
    q, k, v = map(dense_rows, (q, k, v))
    return _forward(q, k, v, score.float().contiguous(), slots, window, block, sinks, scale, spare, clamp)[0]


@lru_cache(maxsize=1024)
def _options(
    kernel: str, d: int, e: int, heads: int, slots: int, window: int, block: int, sinks: int, spare: int, clamp: float,
    left: int, dtype: torch.dtype, of_chunks: bool = False,
) -> Options:  # fmt: skip
    """The constants of a kernel, in the order of its parameters, and its warps; ``left`` keys leave the window.

    ``of_chunks`` is whether ``best_of_tokens`` takes those of each chunk, not of all tokens before each segment.
    """
    columns, value_columns = (max(16, triton.next_power_of_2(width)) for width in (d, e))
    cap, room = _room(slots, block, sinks, spare, left)
    tile, warps, stages, registers = TILES[kernel][max(columns, value_columns) > 64]
    best, entering = slots + spare, _entering(block)
    of_all = best * (left // CHUNK)
    values: dict[str, Any] = {
        "R": heads, "W": window, "B": block, "S": sinks, "N": slots, "M": spare, "Q": SEGMENT, "QB": QUERIES, "QT": 32,
        "CAP": cap, "ROOM": room, "K": best, "KP": triton.next_power_of_2(best), "C": CHUNK, "OF_CHUNKS": of_chunks,
        "LISTED": left >= CHUNK and not of_chunks, "MT": _together(kernel, left, of_all), "WHOLE": of_all <= MOST_BEST,
        "AP": triton.next_power_of_2(max(2, best + entering)),
        "SP": triton.next_power_of_2(max(1, sinks)), "ENTER": entering, "EP": triton.next_power_of_2(max(1, entering)),
        "BT": min(tile, triton.next_power_of_2(block)), "D": d, "BD": columns, "E": e,
        "BE": value_columns, "BC": triton.next_power_of_2(d + e), "KT": tile, "LT": tile, "STAGES": 3, "PIECE": PIECE,
        "CLAMP": clamp, "LEARN": spare > 0, "PREC": precision(dtype),
    }  # fmt: skip
    taken = next(k.arg_names for k in KERNELS if k.__name__ == kernel)
    constants = ((name, values[name]) for name in taken if name in values)
    return (*constants, ("num_warps", warps), ("num_stages", stages), ("maxnreg", registers))


def _together(kernel: str, left: int, of_all: int) -> int:
    """How many numbers a program holds, of all keys that leave the window or of the best of all chunks."""
    most, count = (MOST_LIVES, left) if kernel == "sum_lives" else (MOST_BEST, of_all)
    return min(most, triton.next_power_of_2(max(1, count)))


def _room(slots: int, block: int, sinks: int, spare: int, left: int) -> tuple[int, int]:
    """How many keys a segment may select, and how many it may select or count."""
    most = min(left, slots + sinks + _entering(block))
    return most, min(left, slots + sinks + spare + _entering(block))


def _entering(block: int) -> int:
    """How many keys may leave the window between the first query of a segment and its last."""
    steps = 0 if block % SEGMENT == 0 else SEGMENT // block - 1 if SEGMENT % block == 0 else (SEGMENT - 1) // block + 1
    return steps * block


class _Launches:
    """The launches of one call: its sizes, and what all kernels take."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, how: tuple[Any, ...]) -> None:
        slots, window, block, sinks, self.scale, self.spare, clamp = how
        (self.b, self.h, self.t, self.d), (self.g, self.e) = q.shape, (k.shape[1], v.shape[3])
        self.rows, self.heads = self.b * self.g, self.h // self.g
        self.segments, self.parts = -(-self.t // SEGMENT), -(-self.t // QUERIES)
        # s(t - 1): how many keys are before the last query's window, and how many windows begin at s(0) to there.
        self.left = max(0, (self.t - 1) // block * block - (window - block))
        self.windows = self.left // block + 1
        # Chunks that are over before the last segment's first window.
        last = (self.segments - 1) * SEGMENT // block * block - (window - block)
        self.chunks, self.best, self.entering = max(0, last) // CHUNK, slots + self.spare, _entering(block)
        self.cap, self.room = _room(slots, block, sinks, self.spare, self.left)
        self.how = (self.d, self.e, self.heads, slots, window, block, sinks, self.spare, clamp, self.left, q.dtype)

    def options(self, kernel: Any, of_chunks: bool = False) -> Options:
        return _options(kernel.__name__, *self.how, of_chunks)

    def tile(self, kernel: Any, name: str) -> int:
        size: int = dict(self.options(kernel))[name]
        return size

    def launch(
        self, kernel: Any, grid: tuple[int, int], tensors: dict[str, Any], of_chunks: bool = False, **numbers: Any
    ) -> None:
        """Strides of the tensors that ``numbers`` names by their letter, then its other numbers."""
        launch(kernel, (*grid, 1), tensors, with_strides(numbers), self.options(kernel, of_chunks))

    def results(self, q: Tensor) -> tuple[Tensor, ...]:
        """The output, its rows' sums and largest scores, and the lists: what ``_forward`` writes."""
        # Of tokens, then heads: what follows attention in a model reads it so.
        out = _empty(q, self.b, self.t, self.h, self.e, dtype=q.dtype).transpose(1, 2)
        learn, rows = int(self.spare > 0), (self.b, self.g)
        lse, top = _empty(q, self.b, self.h, self.t), _empty(q, self.b, self.h, learn * self.t)
        lives = _empty(q, *rows, 2, self.left, dtype=torch.int32)
        keys = _empty(q, *rows, self.segments, 2 + learn, self.room, dtype=torch.int32)
        counts = _empty(q, *rows, self.segments, 2, dtype=torch.int32)
        return out, lse, top, lives, keys, counts, _empty(q, *rows, learn * self.windows)

    def choose(self, score: Tensor, results: tuple[Tensor, ...]) -> None:
        """Launch what writes the lists."""
        _, _, _, lives, keys, counts, middle = results
        if self.left == 0:
            counts.zero_()
            return
        best, of_chunks, before = (
            _empty(score, self.rows, *of_row, dtype=torch.int64)
            for of_row in (
                (self.segments, self.best + self.entering + 1),
                (self.chunks, self.best),
                (self.chunks if self.chunks > 1 else 0, self.best),
            )
        )
        sizes = {"T": self.t, "L": self.left, "NC": self.chunks}
        if self.chunks:
            tensors = {"score": score, "before": None, "best": of_chunks, "lives": lives}
            grid = self.chunks * self.rows, 1
            self.launch(best_of_tokens, grid, tensors, of_chunks=True, **sizes, NS=self.chunks)
            if self.chunks > 1:
                self.launch(best_of_chunks, grid, {"best": of_chunks, "before": before}, NC=self.chunks)
            else:
                # The best of the first chunk are those before the second.
                before = of_chunks
        tensors = {"score": score, "before": before, "best": best, "lives": lives}
        self.launch(best_of_tokens, (self.segments * self.rows, 1), tensors, **sizes, NS=self.segments)
        tensors = {"score": score, "best": best, "keys": keys, "counts": counts, "lives": lives, "middle": middle}
        grid = self.segments * self.rows, 1
        self.launch(list_keys, grid, tensors, T=self.t, L=self.left, NW=self.windows, NS=self.segments)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


@torch.library.custom_op("attnlab::select_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, score: Tensor, slots: int, window: int, block: int, sinks: int,
    scale: float, spare: int, clamp: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, and what the backward pass needs besides."""
    call = _Launches(q, k, v, (slots, window, block, sinks, scale, spare, clamp))
    results = call.results(q)
    out, lse, top, _, keys, counts, _ = results
    call.choose(score, results)
    call.launch(
        read,
        (call.parts * call.rows, call.heads),
        {"q": q, "k": k, "v": v, "keys": keys, "counts": counts, "out": out, "lse": lse, "top": top},
        q=q, k=k, v=v, o=out, T=call.t, G=call.g, NQ=call.parts, NS=call.segments, scale=scale,
    )  # fmt: skip
    return results  # type: ignore[return-value]


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, score: Tensor, slots: int, window: int, block: int, sinks: int,
    scale: float, spare: int, clamp: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _Launches(q, k, v, (slots, window, block, sinks, scale, spare, clamp)).results(q)


@torch.library.custom_op("attnlab::select_backward", mutates_args=())
def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, score: Tensor, out: Tensor, lse: Tensor, top: Tensor,
    lives: Tensor, keys: Tensor, counts: Tensor, middle: Tensor, slots: int, window: int, block: int,
    sinks: int, scale: float, spare: int, clamp: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and, to learn, that of the scores."""
    call = _Launches(q, k, v, (slots, window, block, sinks, scale, spare, clamp))
    do = dense_rows(do)
    dq, dk, dv, d_score = _gradients(q, k, v, score, spare)
    delta, inputs = torch.empty_like(lse), {"q": q, "k": k, "v": v}
    lists, sizes = {"keys": keys, "counts": counts}, {"T": call.t, "L": call.left, "G": call.g, "NS": call.segments}
    call.launch(
        query_gradients,
        (call.parts * call.rows, call.heads),
        {**inputs, **lists, "out": out, "lse": lse, "do": do, "dq": dq, "delta": delta},
        q=q, k=k, v=v, o=out, d=do, g=dq, T=call.t, G=call.g, NQ=call.parts, NS=call.segments, scale=scale,
    )  # fmt: skip
    # The gradients of a key by each segment that lists it, one after another, and where those of each key end.
    ends, part = torch.empty_like(lives), _empty(q, call.rows, call.segments * call.cap, call.d + call.e)
    part_score = _empty(q, call.rows, call.segments * call.room) if spare else None
    parts = {"ends": ends, "part": part, "part_score": part_score}
    if call.left:
        call.launch(sum_lives, (2 * call.rows, 1), {"lives": lives, "ends": ends}, L=call.left)
        call.launch(
            listed_gradients,
            (call.segments * call.rows, triton.cdiv(call.room, call.tile(listed_gradients, "LT"))),
            {**inputs, "score": score, **lists, "ends": ends, "middle": middle, "lse": lse, "top": top, "delta": delta,
             "do": do, "part": part, "part_score": part_score},
            q=q, k=k, v=v, d=do, **sizes, NW=call.windows, scale=scale,
        )  # fmt: skip
        grid = triton.cdiv(call.left, call.tile(sum_rows, "KT")) * call.rows, triton.cdiv(call.segments, PIECE)
        call.launch(sum_rows, grid, parts, L=call.left, NS=call.segments)
    tiles = triton.cdiv(call.t, call.tile(key_gradients, "KT"))
    call.launch(
        key_gradients,
        (tiles * call.rows, 1),
        {**inputs, "ends": ends, "lse": lse, "delta": delta, "do": do, "part": part, "part_score": part_score, "dk": dk,
         "dv": dv, "d_score": d_score},
        q=q, k=k, v=v, d=do, **sizes, scale=scale,
    )  # fmt: skip
    return dq, dk, dv, d_score


def _gradients(q: Tensor, k: Tensor, v: Tensor, score: Tensor, spare: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, h, t, d = q.shape
    dq = _empty(q, b, t, h, d, dtype=q.dtype).transpose(1, 2)
    dk, dv = (_empty(x, *x.shape, dtype=x.dtype) for x in (k, v))
    return dq, dk, dv, _empty(q, b, k.shape[1], t if spare else 0, dtype=score.dtype)


@_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, score: Tensor, out: Tensor, lse: Tensor, top: Tensor,
    lives: Tensor, keys: Tensor, counts: Tensor, middle: Tensor, slots: int, window: int, block: int,
    sinks: int, scale: float, spare: int, clamp: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(q, k, v, score, spare)


def _save_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, score, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, score, *output)
    ctx.set_materialize_grads(False)


def _gradient(ctx, do, *_):  # type: ignore[no-untyped-def]
    if do is None:
        return (None,) * 11
    dq, dk, dv, d_score = _backward(do, *ctx.saved_tensors, *ctx.how)
    return dq, dk, dv, d_score if d_score.numel() else None, *(None,) * 7


_forward.register_autograd(_gradient, setup_context=_save_context)
