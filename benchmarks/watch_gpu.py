"""Statistics of attention without W: times and memory beside torch's SDPA in the same run on one GPU, and errors.

python benchmarks/watch_gpu.py [--part times ...] [--write benchmarks/results/watch_gpu.json]. Times are medians between
events around some calls in a row, as the layers of a model follow each other. --tiny computes the errors of small calls
on a CPU, by Triton's interpreter (TRITON_INTERPRET=1), without times.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from abc_gpu import eager_ms
from kernel_parts import Row, run_parts
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnlab as al
from attnlab.kernels import statistics, statistics_tiles
from attnlab.linalg.streaming import CallStatistics, Measures, Text, attention_statistics, removed_in, stream_rows
from attnlab.linalg.streaming_gpu import stream_by_kernel


class Shape(NamedTuple):
    """Sizes of a causal call; the issue's comes first in ``SHAPES``."""

    B: int
    H: int
    G: int
    T: int
    D: int


SHAPES = (Shape(1, 9, 3, 32768, 64), Shape(1, 9, 3, 8192, 64), Shape(1, 16, 8, 8192, 128))
TINY = (Shape(1, 2, 1, 70, 16),)
# The longest text whose W is made: for errors, and for the eager peer.
DENSE = 4096
# Columns of ``times`` that the summary has.
IN_SUMMARY = ("rows", "rows and squares", "rows ranked by lengths", "keys and squares", "removed share", "everything")
# By the pass and the width of a head: rows, keys, warps, stages, numbers that a sum is kept as, registers of a thread
# (0: any), tiles that a bin reaches over. A tile of the first pass serves both rankings.
ROWS, RANKED, COLUMNS = PASSES = "rows", "rows ranked by lengths", "columns"
TILES = {
    (ROWS, 64): (
        (64, 128, 4, 2, 4, 0), (64, 128, 4, 2, 4, 0, 2), (64, 64, 4, 2, 4, 128), (64, 64, 4, 2, 4, 128, 2),
        (64, 64, 4, 2, 4, 128, 4), (64, 64, 4, 3, 4, 168, 2), (128, 64, 8, 3, 4, 128, 2),
    ),
    (COLUMNS, 64): ((64, 128, 4, 3, 8, 0), (64, 128, 4, 2, 8, 128), (64, 64, 4, 3, 8, 96), (128, 128, 4, 2, 8, 0)),
    (ROWS, 128): ((64, 64, 4, 2, 4, 0), (64, 64, 4, 2, 4, 0, 2), (64, 64, 4, 2, 8, 0)),
    (COLUMNS, 128): ((64, 64, 4, 2, 8, 0), (64, 64, 4, 3, 8, 0)),
}  # fmt: skip


def layer_ms(job: Callable[[], Any], repeats: int = 7) -> float:
    """Time of a call among others: what a layer adds to a model whose kernels are launched ahead."""
    return eager_ms(job, repeats, calls=6)


def made(shape: Shape, device: str, dtype: torch.dtype) -> tuple[al.AttentionCall, Text]:
    """A call like that of a layer, with two sets of keys."""
    q, k, v = (torch.randn(shape.B, shape.T, heads, shape.D, device=device, dtype=dtype).transpose(1, 2)
               for heads in (shape.H, shape.G, shape.G))  # fmt: skip
    members = torch.rand(1, shape.T, 2, device=device) > 0.5
    return al.AttentionCall(q, k, v, causal=True), Text(members)


def errors(shapes: tuple[Shape, ...], device: str) -> Iterator[Row]:
    """The largest difference to W in float32, in units of the statistic's largest number where that is above 1."""
    kinds = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32, torch.float16)
    for shape in shapes:
        for dtype in kinds:
            call, text = made(shape._replace(T=min(shape.T, DENSE)), device, dtype)
            measures = Measures(block=64)
            actual, output = stream_by_kernel(call, measures, text)
            wide = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
            expected, exact = stream_rows(wide, al.Softmax(), measures, text, softmax=True)
            row = shape._asdict() | {"T": call.q.shape[2], "dtype": str(dtype).removeprefix("torch.")}
            yield row | {"error of output": _off(output, exact)} | _differences(actual, expected)


def _differences(actual: CallStatistics, expected: CallStatistics) -> Row:
    names = [f.name for f in fields(CallStatistics) if not f.name.endswith("places")]
    pairs = {name: (getattr(actual, name), getattr(expected, name)) for name in names}
    return {f"error of {name}": _off(one, other) for name, (one, other) in pairs.items() if one is not None}


def _off(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1))


def times(shapes: tuple[Shape, ...], device: str) -> Iterator[Row]:
    """One layer: SDPA, statistics of rows, the second pass, the removed share, everything, and eager attention."""
    for shape in shapes:
        call, text = made(shape, device, torch.bfloat16)
        exact = layer_ms(partial(sdpa, call.q, call.k, call.v, is_causal=True, enable_gqa=True))
        first = _first_pass(call, text)
        row = _first_pass(call, text, squares=True)()
        assert row.sum_of_squares is not None
        second = partial(statistics.column_statistics, call, row.lse, received=True, block=256, first=0)
        timed = {
            "rows": layer_ms(first),
            "rows and squares": layer_ms(_first_pass(call, text, squares=True)),
            "rows and sets": layer_ms(_first_pass(call, text, sets=True)),
            "rows ranked by lengths": layer_ms(_first_pass(call, text, norm_largest=True)),
            "keys and squares": layer_ms(second),
            "removed share": layer_ms(partial(removed_in, call, row.output, row.sum_of_squares)),
            "everything": layer_ms(partial(stream_by_kernel, call, Measures(block=256), text)),
        }
        if shape.T <= 2 * DENSE:
            timed["eager with W"] = layer_ms(partial(_eager, call))
        result = shape._asdict() | {"SDPA ms": exact} | {f"{name} ms": ms for name, ms in timed.items()}
        yield result | {f"{name} / SDPA": ms / exact for name, ms in timed.items()}


def summary(rows: Iterable[Row]) -> Iterator[Row]:
    """Times as multiples of SDPA's."""
    for row in rows:
        ratios = {name.replace(" ", "_"): row[f"{name} / SDPA"] for name in IN_SUMMARY}
        yield {"tokens": row["T"], "heads": row["H"], "width": row["D"], "SDPA_ms": row["SDPA ms"]} | ratios


def _first_pass(
    call: al.AttentionCall, text: Text, *, sets: bool = False, norm_largest: bool = False, squares: bool = False
) -> Callable[[], statistics.RowStatistics]:
    members = text.members if sets else text.members[..., :0]
    return partial(
        statistics.row_statistics, call, largest=8, sinks=4, recent=64, places=None, near=True,
        norm_largest=norm_largest, squares=squares, members=members, wide_output=True,
    )  # fmt: skip


def _eager(call: al.AttentionCall) -> tuple[Tensor, Tensor]:
    """The output and W, as transformers' eager attention with output_attentions computes them."""
    w = al.Softmax().weights(call)
    return w @ call.v.repeat_interleave(call.groups, 1), w


def tiles(shapes: tuple[Shape, ...], device: str) -> Iterator[Row]:
    """Both passes with other tiles, at the longest text of each width."""
    for shape in (shapes[0], shapes[-1]):
        call, text = made(shape, device, torch.bfloat16)
        for name in (ROWS, COLUMNS):
            for tile in TILES[name, shape.D]:
                yield tile_row(call, text, name, tile)


def tile_row(call: al.AttentionCall, text: Text, name: str, tile: tuple[int, ...]) -> Row:
    """The times of a pass with one tile; what does not compile has no time."""
    kinds = (statistics_tiles.ROW_TILE, statistics_tiles.RANKED_ROW_TILE, statistics_tiles.COLUMN_TILE)
    own, width = [dict(kept) for kept in kinds], 64 if call.q.shape[-1] <= 64 else 128
    # The time of the second pass does not depend on these numbers.
    lse = torch.full(call.q.shape[:3], 10.0, device=call.q.device)
    jobs: dict[str, Callable[[], Any]] = {
        ROWS: _first_pass(call, text),
        RANKED: _first_pass(call, text, norm_largest=True, squares=True),
        COLUMNS: partial(statistics.column_statistics, call, lse, received=True, block=256, first=0),
    }
    timed: Row = {"D": width, **statistics_tiles.Tile(*tile)._asdict()}
    jobs = {kind: job for kind, job in jobs.items() if (kind == COLUMNS) == (name == COLUMNS)}
    for kept in kinds:
        kept[width] = statistics_tiles.Tile(*tile)
    for kind, job in jobs.items():
        try:
            timed[f"{kind} ms"] = layer_ms(job, 3)
        except Exception as error:
            timed[f"{kind} ms"] = float("inf")
            print(tile, kind, type(error).__name__, str(error)[:200])
    for kept, before in zip(kinds, own, strict=True):
        kept.update(before)
    return timed


def _kernel_us(job: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """The mean time of each kernel of a call that takes over 5 us."""
    from torch.profiler import ProfilerActivity, profile

    job()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            job()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profiled.key_averages():
        # Several kernels of torch begin with the same words.
        name = event.key.removeprefix("void ").removeprefix("at::native::").removeprefix("(anonymous namespace)::")[:24]
        spent[name] = spent.get(name, 0) + event.device_time_total / repeats
    return {name: us for name, us in sorted(spent.items(), key=lambda item: -item[1]) if us > 5}


def parts(shapes: tuple[Shape, ...], device: str) -> Iterator[Row]:
    """The kernels of everything, and of the removed share, at each shape."""
    for shape in shapes:
        call, text = made(shape, device, torch.bfloat16)
        row = _first_pass(call, text, squares=True)()
        assert row.sum_of_squares is not None
        jobs: dict[str, Callable[[], Any]] = {
            "everything": partial(stream_by_kernel, call, Measures(block=256), text),
            "removed": partial(removed_in, call, row.output, row.sum_of_squares),
        }
        for name, job in jobs.items():
            yield {"T": shape.T, "D": shape.D, "of": name} | {k: round(us) for k, us in _kernel_us(job).items()}


def memory(shapes: tuple[Shape, ...], device: str) -> Iterator[Row]:
    """Peak memory and time of a model of SmolLM2-135M's width, with and without watching."""
    from transformers import LlamaConfig, LlamaForCausalLM

    length = shapes[0].T
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=length,
    )  # fmt: skip
    with torch.device(device):
        model: Any = LlamaForCausalLM(config).eval()
    model = model.to(torch.bfloat16)
    ids = torch.randint(0, 49152, (1, length), device=device)
    measured = {}
    for name in ("model", "watched"):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            with torch.no_grad():
                if name == "watched":
                    with al.watch(model) as seen:
                        model(ids, logits_to_keep=1, use_cache=False)
                    assert len(seen) == config.num_hidden_layers
                else:
                    model(ids, logits_to_keep=1, use_cache=False)
            torch.cuda.synchronize()
            measured[f"{name} s"] = time.perf_counter() - begin
            measured[f"{name} MiB"] = torch.cuda.max_memory_allocated() / 2**20
    ratio = measured["watched MiB"] / measured["model MiB"]
    yield {
        "T": length,
        **measured,
        "memory / model": ratio,
        "time / model": measured["watched s"] / measured["model s"],
    }


def cpu(shapes: tuple[Shape, ...], device: str) -> Iterator[Row]:
    """Processor time beside SDPA's on the CPU, one thread."""
    del shapes, device
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    call, text = made(Shape(1, 9, 3, 8192, 64), "cpu", torch.float32)
    exact = _seconds(partial(sdpa, call.q, call.k, call.v, is_causal=True, enable_gqa=True))
    row = {"T": 8192, "SDPA s": exact}
    only_rows = Measures(norm=False, removed=False, received=False)
    for name, measures in (("rows", only_rows), ("everything", Measures(block=64))):
        row[f"{name} s"] = _seconds(partial(attention_statistics, call, al.Softmax(), measures, text, softmax=True))
        row[f"{name} / SDPA"] = row[f"{name} s"] / exact
    torch.set_num_threads(threads)
    yield row


def _seconds(job: Callable[[], Any]) -> float:
    """The least processor time of two calls after one."""
    job()
    spent = []
    for _ in range(2):
        begin = time.process_time()
        job()
        spent.append(time.process_time() - begin)
    return min(spent)


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "errors": errors,
    "times": times,
    "memory": memory,
    "cpu": cpu,
    "tiles": tiles,
    "parts": parts,
}


def main() -> None:
    usual = [part for part in PARTS if part not in ("tiles", "parts")]
    run_parts("watch_gpu", __doc__, PARTS, full=(SHAPES, "cuda"), tiny=(TINY, "cpu"), usual=usual, paper="attnlab")


if __name__ == "__main__":
    main()
