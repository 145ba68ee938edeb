"""abc-hybrid's kernels: errors against the PyTorch path, then times beside torch's SDPA in the same run on one GPU.

python benchmarks/hybrid_gpu.py [--part errors ...] [--write benchmarks/results/hybrid_gpu.json]. Times are medians of
CUDA-graph replays. --tiny runs small sizes on a CPU by Triton's interpreter (TRITON_INTERPRET=1), without times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from abc_gpu import forward_and_both, graph_ms
from kernel_parts import Row, run_parts
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnlab as al
from attnlab.kernels.hybrid import hybrid_attention, hybrid_step
from attnlab.mechanisms._bounded.hybrid_cache import WriteControl


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

    def control_of(self, _call: al.AttentionCall) -> WriteControl:
        return WriteControl(self.log, None)


def made(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and log alpha."""
    sizes = ((shape.H, shape.D), (shape.G, shape.D), (shape.G, shape.D), (shape.G, shape.slots))
    q, k, v, logits = (torch.randn(shape.B, n, shape.T, w, device=device) for n, w in sizes)
    return [t.requires_grad_() for t in (q.to(dtype), k.to(dtype), v.to(dtype), logits.log_softmax(-1))]


def errors(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """||kernels - PyTorch in float32|| / ||PyTorch|| of the output and of all gradients, at most 4,096 tokens."""
    from attnlab.mechanisms._device import without_kernels

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
    from torch.profiler import ProfilerActivity, profile

    for shape in shapes[:2]:
        ours = made(shape, device, dtype)
        pull = torch.randn_like(ours[0])
        job = partial(_both, ours, shape, pull)
        for _ in range(3):
            job()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                job()
            torch.cuda.synchronize()
        for event in profiler.key_averages():
            yield {"T": shape.T, "D": shape.D, "kernel": event.key[:60], "us": event.device_time_total / 5}


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


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "errors": errors,
    "times": times,
    "decode": decode,
    "launches": launches,
}


def main() -> None:
    # Autograd's own thread would add host time that a training step of many layers hides.
    torch.autograd.set_multithreading_enabled(False)
    full, tiny = (SHAPES, "cuda", torch.bfloat16), (TINY, "cpu", torch.float32)
    run_parts("hybrid_gpu", __doc__, PARTS, full=full, tiny=tiny, paper="ABC")


if __name__ == "__main__":
    main()
