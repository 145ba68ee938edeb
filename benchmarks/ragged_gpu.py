"""Decoding over a cache of which three quarters were evicted, heads unevenly: times, bytes and tokens a second.

python benchmarks/ragged_gpu.py [--part errors ...] [--write benchmarks/results/ragged_gpu.json]. In the same run on one
GPU: attention over keys without padding by our kernel, over the full cache and over padded keys by torch's SDPA. Times
are medians of CUDA-graph replays, and results are compared before. --tiny runs small sizes on a CPU by Triton's
interpreter (TRITON_INTERPRET=1), without times.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from abc_gpu import eager_ms, graph_ms
from kernel_parts import Row, run_parts
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnlab as al
from attnlab.caches import KeptKeys
from attnlab.caches.ragged import RaggedKeys, attend_by_segment
from attnlab.kernels.ragged import Tiles, ragged_attention, tiles_for

# The bytes of tiles that fit into a multiprocessor.
MOST_SHARED = 200 * 1024
# The largest relative error of an output, ||ours - PyTorch in float32|| / ||PyTorch||.
MOST_ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


class Shape(NamedTuple):
    """Sequences, query heads, key/value heads, tokens, head size; the share of keys that is kept."""

    B: int
    H: int
    G: int
    T: int
    D: int
    kept: float = 0.25

    @property
    def scale(self) -> float:
        return self.D**-0.5


# SmolLM2's heads, and 8 of 128.
SHAPES = (Shape(32, 9, 3, 32768, 64), Shape(32, 32, 8, 32768, 128))
# Tokens of a question.
QUESTION = (16, 128)
TINY = (Shape(2, 6, 2, 300, 16), Shape(1, 4, 2, 300, 48))


def uneven(shape: Shape, rows: int, device: str) -> Tensor:
    """Which keys stay: budgets that the heads of a row share, from a fifth of the mean on, as AdaKV shares them."""
    mean = shape.kept * shape.T
    draws = torch.distributions.Dirichlet(torch.full((shape.G,), 2.0)).sample((rows,))
    counts = (0.2 * mean + 0.8 * mean * shape.G * draws).clamp(max=shape.T).to(device)
    # A key is kept with the chance that its head's budget gives it.
    return torch.rand(rows, shape.G, shape.T, device=device) < (counts / shape.T).unsqueeze(-1)


def made(
    shape: Shape, rows: int, device: str, dtype: torch.dtype, queries: int = 1
) -> tuple[Tensor, Tensor, Tensor, RaggedKeys]:
    """Queries of every row and head, all keys and values, and those that stay, without padding."""
    q = torch.randn(rows, shape.H, queries, shape.D, device=device, dtype=dtype)
    k, v = (torch.randn(rows, shape.G, shape.T, shape.D, device=device, dtype=dtype) for _ in range(2))
    keep = uneven(shape, rows, device)
    columns = torch.arange(shape.T, device=device, dtype=torch.int32).expand(keep.shape)
    return q, k, v, RaggedKeys(keep, {"keys": k, "values": v, "columns": columns})


def ours(shape: Shape, q: Tensor, held: RaggedKeys, tiles: Tiles | None = None) -> Tensor:
    """The kernel's output."""
    return ragged_attention(
        q, held.buffers["keys"], held.buffers["values"], held.starts, held.counts, scale=shape.scale,
        longest=held.longest, total=held.total, tiles=tiles,
    )  # fmt: skip


def error(shape: Shape, q: Tensor, held: RaggedKeys, tiles: Tiles | None = None) -> float:
    """||ours - PyTorch in float32|| / ||PyTorch||; an error if that is not small."""
    keys, values = held.buffers["keys"], held.buffers["values"]
    expected = attend_by_segment(q.float(), keys, values, held.starts, held.counts, scale=shape.scale)
    off = float((ours(shape, q, held, tiles).float() - expected).norm() / expected.norm())
    if not off < MOST_ERROR[q.dtype]:
        raise SystemExit(f"the kernel is off by {off:.2g} at {shape}: no times")
    return off


def errors(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """The kernel against PyTorch, and bytes really held beside those of the kept keys and values."""
    for shape in shapes:
        q, _, _, held = made(shape, shape.B, device, dtype)
        pairs = sum(held.buffers[name].untyped_storage().nbytes() for name in ("keys", "values"))
        padded = held.longest * held.counts.numel() * held.nominal_bytes() / held.total
        nominal = held.nominal_bytes()
        yield shape._asdict() | {
            "error": error(shape, q, held), "error of several": error(shape, q.repeat(1, 1, 5, 1), held),
            "kept keys": held.total, "most of a head": held.longest,
            "bytes / nominal": held.nbytes() / nominal, "keys and values / nominal": pairs / nominal,
            "padded / nominal": padded / nominal,
        }  # fmt: skip


def times(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """A step over the kept keys, over the full cache, and over kept keys padded to the longest head."""
    for shape in shapes:
        q, k, v, held = made(shape, shape.B, device, dtype)
        error(shape, q, held)
        step = graph_ms(partial(ours, shape, q, held), each=10)
        grouped = q.view(shape.B, shape.G, -1, shape.D)
        full = {
            "full cache ms": graph_ms(partial(sdpa, q, k, v, enable_gqa=True), each=3),
            # The query heads of a group as queries of one head: the same products.
            "full cache, heads as queries ms": graph_ms(partial(sdpa, grouped, k, v), each=3),
        }
        del k, v
        k, v = held.padded("keys"), held.padded("values")
        mask = torch.arange(held.longest, device=device) >= held.longest - held.count_by_head()[..., None]
        mask = mask.repeat_interleave(shape.H // shape.G, 1).unsqueeze(2)
        padded = graph_ms(partial(sdpa, q, k, v, attn_mask=mask, enable_gqa=True), each=3)
        del k, v
        yield shape._asdict() | full | {
            "padded ms": padded, "step ms": step, "step / full cache": step / full["full cache ms"],
            "step / best of full cache": step / min(full.values()), "step / padded": step / padded,
            "TB/s": held.nominal_bytes() / step / 1e9,
        }  # fmt: skip


def question(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Several new tokens at once, over the kept keys and over the full cache, where they need a mask."""
    for shape, count in itertools.product(shapes, QUESTION):
        q, k, v, held = made(shape, shape.B, device, dtype, count)
        off = error(shape, q, held)
        mask = torch.ones(count, shape.T, dtype=torch.bool, device=device).tril(shape.T - count)
        full = graph_ms(partial(sdpa, q, k, v, attn_mask=mask, enable_gqa=True), each=3)
        del k, v
        ms = graph_ms(partial(ours, shape, q, held), each=3)
        yield shape._asdict() | {
            "queries": count, "error": off, "full cache ms": full, "ms": ms, "ratio": ms / full,
        }  # fmt: skip


def equal_memory(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Tokens a second of attention, with as many sequences as the bytes of the full cache hold."""
    for shape in shapes:
        q, k, v, held = made(shape, shape.B, device, dtype)
        full, least = k.nbytes + v.nbytes, graph_ms(partial(sdpa, q, k, v, enable_gqa=True), each=3)
        rows = int(shape.B * full / held.nbytes())
        del k, v, held
        q, k, v, held = made(shape, rows, device, dtype)
        while held.nbytes() > full:
            rows -= 1
            held.select(torch.arange(rows, device=device))
        del k, v
        q = q[:rows]
        error(shape, q, held)
        step = graph_ms(partial(ours, shape, q, held), each=3)
        yield shape._asdict() | {
            "sequences": rows, "GB": full / 1e9, "step ms": step, "full cache ms": least,
            "tokens/s": 1e3 * rows / step, "tokens/s of the full cache": 1e3 * shape.B / least,
            "ratio": (rows / step) / (shape.B / least),
        }  # fmt: skip


def growing(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """A step with its new key, through ``KeptKeys`` as a model takes it, host included; bytes after 100 of them."""
    for shape in shapes:
        q, k, v, held = made(shape, shape.B, device, dtype)
        kept = KeptKeys(al.KVPolicy(int(shape.kept * shape.T), by="value-norm", when="prefill"), 0)
        kept.store, kept.compressed, kept.whole, kept.length = held, True, False, shape.T
        kept.tokens = (shape.T,) * shape.B
        new = k[:, :, :1].clone(), v[:, :, :1].clone()
        del k, v, held

        def step(
            kept: KeptKeys = kept, new: tuple[Tensor, Tensor] = new, q: Tensor = q, scale: float = shape.scale
        ) -> None:
            kept.append(*new)
            kept.attend(q, scale=scale)

        with torch.no_grad():
            ms = eager_ms(step, repeats=100)
        yield shape._asdict() | {"step ms": ms, "bytes / nominal": kept.nbytes() / kept.nominal_bytes()}


def sweep(shapes: tuple[Shape, ...], device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Times of other tiles, the fastest first."""
    for shape in shapes:
        q, k, v, held = made(shape, shape.B, device, dtype)
        del k, v
        chosen = tiles_for(shape.D, shape.D, q.element_size(), held.total)
        others = [
            Tiles(keys, span, *compiled)
            for keys, span, compiled in itertools.product((64, 128), (512, 1024, 2048), ((4, 2), (4, 4), (8, 3)))
        ]
        rows = []
        for tiles in (chosen, *others):
            if 2 * tiles.stages * tiles.keys * shape.D * q.element_size() > MOST_SHARED:
                continue
            error(shape, q, held, tiles)
            ms = graph_ms(partial(ours, shape, q, held, tiles), each=10)
            rows.append(shape._asdict() | tiles._asdict() | {"chosen": tiles == chosen, "step ms": ms})
        yield from sorted(rows, key=lambda row: row["step ms"])[:12]


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "errors": errors, "times": times, "question": question, "equal_memory": equal_memory, "growing": growing,
    "sweep": sweep,
}  # fmt: skip


def main() -> None:
    usual = [part for part in PARTS if part != "sweep"]
    full, tiny = (SHAPES, "cuda", torch.bfloat16), (TINY, "cpu", torch.float32)
    run_parts("ragged_gpu", __doc__, PARTS, full=full, tiny=tiny, usual=usual)


if __name__ == "__main__":
    main()
