"""abc-hybrid's and abc-select's kernels: errors against PyTorch, then times beside torch's SDPA in one run on a GPU.

python benchmarks/hybrid_gpu.py [--part errors ...] [--write benchmarks/results/hybrid_gpu.json]. Times are medians of
CUDA-graph replays. --tiny runs small sizes on a CPU by Triton's interpreter (TRITON_INTERPRET=1), without times. The
parts of abc-select begin with select; select-tiles times other tiles of its kernels and is run only where named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from abc_gpu import eager_ms, forward_and_both, graph_ms
from kernel_parts import Row, run_parts
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnlab as al
from attnlab.attention import grouped, ungrouped
from attnlab.kernels.hybrid import hybrid_attention, hybrid_step
from attnlab.kernels.select import attention as select_kernels
from attnlab.kernels.select import select_attention
from attnlab.mechanisms._bounded.selected import LARGEST, Selection, Tokens, attend, read_at_most
from attnlab.mechanisms._device import compiled_parts, without_kernels


class Shape(NamedTuple):
    """Sizes of a call; the issue's come first in ``SHAPES``."""

    B: int
    H: int
    G: int
    T: int
    D: int
    slots: int = 64
    window: int = 64
    sinks: int = 4
    block: int = 32

    @property
    def memory(self) -> dict[str, Any]:
        return {"window": self.window, "sinks": self.sinks, "block": self.block}


SHAPES = (
    Shape(8, 8, 8, 2048, 128),
    Shape(8, 8, 8, 2048, 64),
    Shape(1, 8, 8, 32768, 128),
    Shape(8, 9, 3, 2048, 64),
    Shape(8, 8, 8, 2048, 128, block=16),
    Shape(8, 8, 8, 2048, 128, block=64),
    Shape(8, 8, 8, 2048, 64, slots=32, block=16),
    Shape(8, 9, 3, 2048, 64, slots=0, window=128),
)
TINY = (Shape(1, 1, 1, 70, 16, 3, 16, 2, 16), Shape(1, 2, 1, 70, 16, 0, 32, 2, 32))
STEPS = (Shape(64, 16, 16, 1, 128), Shape(64, 9, 3, 1, 64), Shape(16, 8, 8, 1, 64, slots=32, block=16))
CONTEXTS = (2048, 8192, 32768)


class FixedControl(al.AbcHybrid):
    """A hybrid with the log alpha that the kernels get; its PyTorch path is called directly."""

    log: Tensor

    def log_alpha(self, _call: al.AttentionCall) -> Tensor:
        return self.log


def made(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and log alpha."""
    sizes = ((shape.H, shape.D), (shape.G, shape.D), (shape.G, shape.D), (shape.G, shape.slots))
    q, k, v, logits = (torch.randn(shape.B, n, shape.T, w, device=device) for n, w in sizes)
    return [t.requires_grad_() for t in (q.to(dtype), k.to(dtype), v.to(dtype), logits.log_softmax(-1))]


def errors(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """||kernels - PyTorch in float32|| / ||PyTorch|| of the output and of all gradients, at most 4,096 tokens."""
    for shape in shapes:
        shape = shape._replace(B=1, T=min(shape.T, 4096))
        ours = made(shape, device, dtype)
        theirs = [t.detach().float().requires_grad_() for t in ours]
        mech = FixedControl(slots=shape.slots, control="x", **shape.memory)
        mech.log = theirs[3]
        x = torch.zeros(shape.B, shape.T, 1, device=device)
        with without_kernels():
            q, k, v, _ = theirs
            expected = mech.forward(al.AttentionCall(q, k, v, x=x, causal=True))
        out = hybrid_attention(*ours, **shape.memory)
        pull = torch.randn_like(out)
        got = torch.autograd.grad(out, ours, pull)
        want = torch.autograd.grad(expected, theirs, pull.float(), allow_unused=True, materialize_grads=True)
        pairs = zip(("out", "dq", "dk", "dv", "d log alpha"), (out, *got), (expected, *want), strict=True)
        yield shape._asdict() | {f"error of {name}": relative(a, b) for name, a, b in pairs}


def relative(got: Tensor, want: Tensor) -> float:
    difference = (got.float() - want.float()).norm()
    return float((difference / want.float().norm().clamp(min=1e-30)).detach())


def times(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Forward, and forward with backward, beside SDPA's."""
    for shape in shapes:
        ours = made(shape, device, dtype)
        ahead, both = forward_and_both(partial(hybrid_attention, *ours, **shape.memory), ours)
        q, k, v, _ = ours
        exact = partial(sdpa, q, k, v, is_causal=True, enable_gqa=shape.H != shape.G)
        exact_ahead, exact_both = forward_and_both(exact, [q, k, v])
        yield shape._asdict() | {
            "forward ms": ahead, "both ms": both, "SDPA forward ms": exact_ahead, "SDPA both ms": exact_both,
            "forward / SDPA": ahead / exact_ahead, "both / SDPA": both / exact_both,
        }  # fmt: skip


def launches(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """The time of every kernel of both passes, at the first two shapes."""
    for shape in shapes[:2]:
        ours = made(shape, device, dtype)
        job = partial(_both, ours, shape, torch.randn_like(ours[0]))
        for kernel, us in kernel_times(job):
            yield {"T": shape.T, "D": shape.D, "kernel": kernel, "us": us}


def kernel_times(job: Callable[[], Any]) -> Iterator[tuple[str, float]]:
    """The kernels of a job, with their microseconds in one run of it."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        job()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            job()
        torch.cuda.synchronize()
    for event in profiler.key_averages():
        yield event.key[:60], event.device_time_total / 5


def _both(ours: list[Tensor], shape: Shape, pull: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(hybrid_attention(*ours, **shape.memory), ours, pull)


def decode(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """One step, of many in a graph, so that blocks leave the window in their turn; and SDPA over growing caches."""
    del shapes
    for shape in STEPS:
        step, q = _step(shape, device, dtype)
        with torch.no_grad():
            ours = graph_ms(step, each=2 * shape.block)
        for context in CONTEXTS:
            k, v = (torch.randn(shape.B, shape.G, context, shape.D, device=device, dtype=dtype) for _ in range(2))
            theirs = graph_ms(partial(sdpa, q, k, v, enable_gqa=shape.H != shape.G))
            del k, v
            row = {**shape._asdict(), "T": context}
            yield row | {"step ms": ours, "SDPA ms": theirs, "SDPA / step": theirs / ours}


def _step(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Tensor]:
    """A step of a cache whose window is full."""
    b, g, d, n = shape.B, shape.G, shape.D, shape.slots

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype)

    q, k, v = random(b, shape.H, 1, d), random(b, g, 1, d), random(b, g, 1, d)
    slots, z = random(b, g, n, 2 * d).float(), torch.ones(b, g, n, device=device)
    count = torch.full((b, g), 4 * shape.window, device=device)
    kept = [random(b, g, length, d) for length in (shape.sinks, shape.sinks, shape.window, shape.window)]
    control = random(g, n, d).float(), random(g, n).float()
    kept += [slots, z, count]
    return partial(
        hybrid_step, q, k, v, None, kept, control=control, block=shape.block, mass=True, scale=d**-0.5
    ), q  # fmt: skip


SELECTED = {"slots": 56, "window": 64, "sinks": 4, "block": 16}
SELECT_SHAPES = (
    Shape(8, 8, 8, 2048, 128, **SELECTED),
    Shape(8, 8, 8, 2048, 64, **SELECTED),
    Shape(1, 8, 8, 32768, 128, **SELECTED),
    Shape(16, 9, 3, 2048, 64, **SELECTED),
    Shape(32, 9, 3, 1024, 64, **SELECTED),
    Shape(16, 8, 8, 2048, 128, **SELECTED),
    Shape(32, 8, 8, 1024, 128, **SELECTED),
)
# Those whose kernels are timed one by one: a model's, a wide one, a long text.
LAUNCHED = (SELECT_SHAPES[3], SELECT_SHAPES[0], SELECT_SHAPES[2])
TINY_SELECT = (Shape(1, 3, 1, 150, 16, 5, 32, 2, 16),)
# Other tiles of abc-select's kernels: keys of a tile, warps, stages of loads, registers of a thread.
OTHER_TILES = {
    "best_of_tokens": ((0, 2, 1, 128), (0, 4, 1, 80), (0, 1, 1, 128)),
    "list_keys": ((16, 1, 1, 96), (16, 2, 1, 64), (16, 2, 1, 128), (16, 4, 1, 64), (32, 2, 1, 128)),
    "sum_rows": ((16, 4, 1, 128), (8, 1, 1, 168), (4, 1, 1, 128), (16, 2, 1, 168)),
    "read": ((64, 4, 1, 128), (64, 4, 3, 168), (32, 4, 2, 128), (32, 4, 3, 128), (128, 8, 2, 128)),
    "query_gradients": ((64, 4, 1, 168), (64, 4, 2, 128), (64, 4, 2, 255), (32, 4, 2, 128), (64, 8, 2, 128)),
    "listed_gradients": ((64, 4, 2, 168), (64, 4, 1, 255), (64, 4, 2, 255), (64, 4, 1, 128), (32, 4, 1, 128)),
    "key_gradients": ((64, 4, 2, 168), (64, 4, 1, 255), (64, 4, 2, 255), (64, 4, 1, 128), (32, 4, 1, 128)),
}


class Selecting(NamedTuple):
    """One call of abc-select: q, k, v and scores, and how it reads them."""

    tensors: list[Tensor]
    rules: Selection
    learn: bool

    def tokens(self) -> Tokens:
        _, k, v, score = self.tensors
        return Tokens(k, v, score, torch.arange(k.shape[2], dtype=torch.int32, device=k.device).expand(k.shape[:3]))

    def by_kernels(self) -> Tensor:
        spare = read_at_most(self.rules, learn=self.learn) - self.rules.slots
        q, k, v, score = self.tensors
        return select_attention(q, k, v, score, **self.rules._asdict(), spare=spare, clamp=LARGEST)

    def by_torch(self) -> Tensor:
        q, k = self.tensors[:2]
        newest = torch.arange(k.shape[2], device=k.device).expand(k.shape[0], -1)
        rows, size = grouped(q, q.shape[1] // k.shape[1]), self.rules.block
        with without_kernels():
            out = attend(rows, newest, self.tokens(), self.rules, learn=self.learn, size=size, states=0)
        return ungrouped(out)

    def leaves(self) -> list[Tensor]:
        return self.tensors[: 3 + self.learn]


def selecting(shape: Shape, device: str, dtype: torch.dtype, *, learn: bool) -> Selecting:
    q, k, v, _ = made(shape, device, dtype)
    score = torch.randn(shape.B, shape.G, shape.T, device=device).requires_grad_(learn)
    return Selecting([q, k, v, score], Selection(slots=shape.slots, **shape.memory, scale=shape.D**-0.5), learn)


def select_errors(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Of kernels and of the PyTorch path, both in ``dtype``, to that path in float32: relative, and the largest."""
    del shapes
    for shape in TINY_SELECT if device == "cpu" else SELECT_SHAPES:
        ours = selecting(shape._replace(B=1, T=min(shape.T, 8192)), device, dtype, learn=True)
        exact = ours._replace(tensors=[t.detach().float().requires_grad_() for t in ours.tensors])
        expected = exact.by_torch()
        pull = torch.randn_like(expected).to(dtype)
        wanted = (expected, *torch.autograd.grad(expected, exact.leaves(), pull.float()))
        for name, attended in (("kernels", ours.by_kernels), ("PyTorch", ours.by_torch)):
            out = attended().to(dtype)
            row = {**shape._asdict(), "by": name}
            for tensor, a, b in zip(
                ("out", "dq", "dk", "dv", "du"), (out, *torch.autograd.grad(out, ours.leaves(), pull)), wanted,
                strict=True,
            ):  # fmt: skip
                row |= {f"error of {tensor}": relative(a, b), f"largest of {tensor}": (a - b).abs().max().item()}
            yield row


def select_times(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """abc-select by its kernels, and by PyTorch, compiled as distillation does it, beside SDPA."""
    del shapes
    torch.set_float32_matmul_precision("high")
    for shape in SELECT_SHAPES:
        q, k, v, _ = made(shape, device, dtype)
        exact = partial(sdpa, q, k, v, is_causal=True, enable_gqa=shape.H != shape.G)
        exact_ahead, exact_both = forward_and_both(exact, [q, k, v])
        for learn in (True, False):
            call = selecting(shape, device, dtype, learn=learn)
            ahead, both = forward_and_both(call.by_kernels, call.leaves())
            row = shape._asdict() | {
                "learn": learn, "forward ms": ahead, "both ms": both, "SDPA forward ms": exact_ahead,
                "SDPA both ms": exact_both, "forward / SDPA": ahead / exact_ahead, "both / SDPA": both / exact_both,
            }  # fmt: skip
            # In PyTorch every key is compared with every block at once, which is for texts of ordinary length.
            if learn and shape.T <= 4096:
                # Its launches are far shorter than its kernels, so it needs no graph.
                with compiled_parts(cache(torch.compile)):
                    torch_ahead, torch_both = forward_and_both(call.by_torch, call.leaves(), eager_ms)
                row |= {"PyTorch forward ms": torch_ahead, "PyTorch both ms": torch_both}
                row["PyTorch / kernels"] = torch_both / both
            yield row
    torch.set_float32_matmul_precision("highest")


def select_launches(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """The time of every kernel of the whole mechanism's training step, scores from x included, by shape."""
    del shapes
    for shape in LAUNCHED:
        q, k, v, _ = made(shape, device, dtype)
        x = torch.randn(shape.B, shape.T, shape.H * shape.D, device=device, dtype=dtype).requires_grad_()
        mech, call = al.AbcSelect(slots=shape.slots, **shape.memory), al.AttentionCall(q, k, v, x=x, causal=True)
        # An output with a graph would tie the leaves to the stream it was made on; a captured backward pass cannot
        # wait.
        with torch.no_grad():
            pull = torch.randn_like(mech(call))
        job = partial(_mechanism_step, mech, call, [q, k, v, x, *mech.parameters()], pull)
        sizes = {name: getattr(shape, name) for name in ("B", "H", "G", "T", "D")}
        for kernel, us in kernel_times(job):
            yield {**sizes, "kernel": kernel, "us": us}
        yield {**sizes, "kernel": "all, launched one by one", "us": 1e3 * eager_ms(job)}
        yield {**sizes, "kernel": "all, in a graph", "us": 1e3 * graph_ms(job)}


def _mechanism_step(mech: Any, call: al.AttentionCall, leaves: list[Tensor], pull: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(mech(call), leaves, pull)


def select_tiles(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Both passes with other tiles of one kernel at a time."""
    del shapes
    for shape in LAUNCHED[:2]:
        call, wide = selecting(shape, device, dtype, learn=True), shape.D > 64
        yield {"D": shape.D, "kernel": "as they are", "both ms": forward_and_both(call.by_kernels, call.leaves())[1]}
        for kernel, choices in OTHER_TILES.items():
            usual = select_kernels.TILES[kernel]
            for choice in choices:
                select_kernels.TILES[kernel] = (usual[0], choice) if wide else (choice, usual[1])
                select_kernels._options.cache_clear()
                try:
                    both = forward_and_both(call.by_kernels, call.leaves())[1]
                    yield {"D": shape.D, "kernel": kernel, "tile": choice, "both ms": both}
                except Exception as error:
                    # A choice that does not fit the card must not end the others.
                    yield {"D": shape.D, "kernel": kernel, "tile": choice, "fails": str(error)[:80]}
            select_kernels.TILES[kernel] = usual
            select_kernels._options.cache_clear()


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "select-times": select_times,
    "select-errors": select_errors,
    "select-launches": select_launches,
    "select-tiles": select_tiles,
    "errors": errors,
    "times": times,
    "decode": decode,
    "launches": launches,
}


def main() -> None:
    # Autograd's own thread would add host time that a training step of many layers hides.
    torch.autograd.set_multithreading_enabled(False)
    full, tiny = (SHAPES, "cuda", torch.bfloat16), (TINY, "cpu", torch.float32)
    usual = [part for part in PARTS if part != "select-tiles"]
    run_parts("hybrid_gpu", __doc__, PARTS, full=full, tiny=tiny, usual=usual, paper="ABC")


if __name__ == "__main__":
    main()
