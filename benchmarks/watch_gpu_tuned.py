"""The tiles of ``kernels.statistics`` chosen on this GPU, then ``watch_gpu.py`` with them.

python benchmarks/watch_gpu_tuned.py [--write benchmarks/results/watch_gpu.json]. Every tile is first compiled, run and
compared with rows in PyTorch by a process of its own, so that one that faults is only left out. 100 s on 16 cores.
What was chosen is a table of the file; it becomes the default by hand (``ROW_TILE``, ``PAIR_TILE`` and others).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import watch_gpu
from flash_floor import flash
from kernel_parts import Row
from storing import make_results, write_results

import attnlab as al
from attnlab.kernels import statistics_largest as of_tiles
from attnlab.kernels import statistics_tiles
from attnlab.linalg import removed_share
from attnlab.linalg.streaming import Measures, Text, stream_rows
from attnlab.linalg.streaming_gpu import stream_by_kernel

ALL = [(name, width, tile) for (name, width), tiles in watch_gpu.TILES.items() for tile in tiles]
SHAPES = {shape.D: shape for shape in (watch_gpu.SHAPES[-1], watch_gpu.SHAPES[0])}
KINDS = dict(zip(watch_gpu.PASSES, ("ROW_TILE", "RANKED_ROW_TILE", "COLUMN_TILE"), strict=True))
# Pairs of a row and a bin that are scored at once, warps, stages, registers of a thread.
PAIRS = ((64, 4, 1, 128), (64, 4, 1, 64), (64, 8, 1, 0), (128, 4, 1, 0), (32, 1, 1, 0))
FLOORS = ((64, 64, 4, 3), (128, 128, 8, 2))
# A process that takes longer is ended, and an error beyond this is a fault.
PATIENCE, LARGEST_ERROR = 60, 1e-2


def check_tile(number: int) -> float:
    """Compile and run a tile; the largest error of the statistics that are made with it."""
    name, width, tile = ALL[number]
    watch_gpu.tile_row(*watch_gpu.made(SHAPES[width], "cuda", torch.bfloat16), name, tile)
    use(name, tile, width)
    return largest_error(width)


def check_pairs(number: int) -> float:
    """Compile and run a way to score pairs, with tiles of 128 and of 64 keys; the largest error."""
    use_pairs(of_tiles.PairTile(*PAIRS[number]))
    call, text = watch_gpu.made(SHAPES[64], "cuda", torch.bfloat16)
    errors = []
    for keys in (128, 64):
        use(watch_gpu.ROWS, next(t for n, w, t in ALL if (n, w, t[1]) == (watch_gpu.ROWS, 64, keys)), 64)
        for norm_largest in (False, True):
            watch_gpu._first_pass(call, text, norm_largest=norm_largest, squares=norm_largest)()
        errors.append(largest_error(64))
    return max(errors)


def largest_error(width: int) -> float:
    call, text = watch_gpu.made(SHAPES[width]._replace(T=2048), "cuda", torch.bfloat16)
    measures = Measures(block=128)
    actual, _ = stream_by_kernel(call, measures, text)
    wide = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    expected, _ = stream_rows(wide, al.Softmax(), measures, text, softmax=True)
    return max(watch_gpu._differences(actual, expected).values())


def warm(what: str) -> None:
    """Compile what the parts of ``watch_gpu`` need beside the tiles."""
    if what == "errors":
        list(watch_gpu.errors(watch_gpu.SHAPES[1:], "cuda"))
    for shape in watch_gpu.SHAPES if what == "times" else ():
        call, text = watch_gpu.made(shape, "cuda", torch.bfloat16)
        stream_by_kernel(call, Measures(block=256), text)
        watch_gpu._first_pass(call, text, sets=True)()
        watch_gpu._first_pass(call, text, squares=True)()
        watch_gpu._first_pass(call, text, norm_largest=True)()


def use(name: str, tile: tuple[int, ...], width: int) -> None:
    """A tile for a pass; one of the first pass for both rankings."""
    names = [name] if name != watch_gpu.ROWS else [watch_gpu.ROWS, watch_gpu.RANKED]
    for kind in names:
        getattr(statistics_tiles, KINDS[kind])[width] = statistics_tiles.Tile(*tile)


def use_pairs(way: of_tiles.PairTile) -> None:
    """One way to score pairs, of small bins and of large ones."""
    of_tiles.PAIR_TILE = of_tiles.SMALL_PAIR_TILE = way


def sound() -> tuple[list[int], list[int]]:
    """The tiles and the ways to score pairs that compile, run and are right, each tried by a process of its own."""
    tiles, pairs = ([f"{kind}{i}" for i in range(n)] for kind, n in (("tile", len(ALL)), ("pairs", len(PAIRS))))
    kept, begin = {}, time.time()
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder) / name for name in (*tiles, *pairs, "errors", "times")}
        started = {}
        for name, log in logs.items():
            with log.open("w") as file:
                started[name] = subprocess.Popen([sys.executable, __file__, "--try", name], stdout=file, stderr=file)
        end_all(list(started.values()), begin + PATIENCE)
        for name, process in started.items():
            said = logs[name].read_text().strip()
            print(name, process.returncode, said[-300:], flush=True)
            if name not in ("errors", "times"):
                kept[name] = process.returncode == 0 and float(said.splitlines()[-1]) < LARGEST_ERROR
    print(f"tried in {time.time() - begin:.0f} s", flush=True)
    return [i for i, name in enumerate(tiles) if kept[name]], [i for i, name in enumerate(pairs) if kept[name]]


def end_all(processes: list[subprocess.Popen[bytes]], end: float) -> None:
    """Wait for processes until ``end``, and end those that take longer."""
    while any(p.poll() is None for p in processes) and time.time() < end:
        time.sleep(0.2)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def floors() -> Iterator[Row]:
    """Flash attention without statistics, by Triton, and SDPA."""
    call, _ = watch_gpu.made(watch_gpu.SHAPES[0], "cuda", torch.bfloat16)
    exact = partial(watch_gpu.sdpa, call.q, call.k, call.v, is_causal=True, enable_gqa=True)
    yield {"of": "SDPA", "ms": watch_gpu.layer_ms(exact)}
    for tile in FLOORS:
        job = partial(flash, call.q, call.k, call.v, tile)
        off = float((job() - exact()).abs().max())
        yield {"of": "Triton, no statistics", "tile": str(tile), "ms": watch_gpu.layer_ms(job), "error": off}


def chosen(rows: list[Row], pairs: list[int]) -> Iterator[Row]:
    """The fastest tile of each pass and width, way to score pairs, and stream of removed shares; they are then used."""
    for width in SHAPES:
        for kind in KINDS:
            fit = [r for r in rows if r["D"] == width and f"{kind} ms" in r]
            if fit:
                best = min(fit, key=lambda row: float(row[f"{kind} ms"]))
                tile = statistics_tiles.Tile(*(best[name] for name in statistics_tiles.Tile._fields))
                getattr(statistics_tiles, KINDS[kind])[width] = tile
                yield {"D": width, "pass": kind, "ms": best[f"{kind} ms"]} | tile._asdict()
    call, text = watch_gpu.made(watch_gpu.SHAPES[0], "cuda", torch.bfloat16)
    job, timed = watch_gpu._first_pass(call, text, norm_largest=True, squares=True), {}
    for way in [of_tiles.PairTile(*PAIRS[i]) for i in pairs]:
        use_pairs(way)
        timed[way] = watch_gpu.layer_ms(job, 3)
        yield {"D": 64, "pass": "pairs", "ms": timed[way]} | way._asdict()
    if timed:
        use_pairs(min(timed, key=lambda way: timed[way]))
    yield aside(call, text)


def aside(call: al.AttentionCall, text: Text) -> Row:
    """Everything with removed shares on a stream of their own and without: used if it is as right and faster."""
    job, timed, made = partial(stream_by_kernel, call, Measures(block=256), text), {}, {}
    for beside in (False, True):
        removed_share.SIDE_STREAM = beside
        timed[beside] = watch_gpu.layer_ms(job, 5)
        made[beside] = job()[0]
    off = max(watch_gpu._differences(made[True], made[False]).values())
    removed_share.SIDE_STREAM = off < LARGEST_ERROR and timed[True] <= timed[False]
    return {
        "D": 64, "pass": "everything", "ms": timed[True], "one stream ms": timed[False], "error": off,
        "side stream": removed_share.SIDE_STREAM,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="attempt")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.attempt:
        if args.attempt in ("errors", "times"):
            warm(args.attempt)
        elif args.attempt.startswith("tile"):
            print(check_tile(int(args.attempt.removeprefix("tile"))))
        else:
            print(check_pairs(int(args.attempt.removeprefix("pairs"))))
        return
    (kept, pairs), tables = sound(), {}
    timed = (
        watch_gpu.tile_row(*watch_gpu.made(SHAPES[width], "cuda", torch.bfloat16), name, tile)
        for name, width, tile in (ALL[i] for i in kept)
    )
    tables["tiles"] = shown("tiles", timed)
    tables["chosen"] = shown("chosen", chosen(tables["tiles"], pairs))
    for name, part in {"floors": lambda *_: floors(), **watch_gpu.PARTS}.items():
        if name in ("cpu", "tiles"):
            continue
        tables[name] = shown(name, part(watch_gpu.SHAPES, "cuda"))
        if "times" in tables:
            tables["summary"] = list(watch_gpu.summary(tables["times"]))
        if args.write:
            config = {"dtype": "bfloat16"}
            write_results(args.write, make_results("watch_gpu", "attnlab", tables, config=config))


def shown(name: str, rows: Iterator[Row]) -> list[Row]:
    """The rows, printed as they come; those before a failure where there is one."""
    kept: list[Row] = []
    try:
        for row in rows:
            kept.append(row)
            print(name, ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    except Exception as error:
        print(name, "failed:", type(error).__name__, str(error)[:300])
    sys.stdout.flush()
    return kept


if __name__ == "__main__":
    main()
