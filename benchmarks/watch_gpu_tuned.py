"""The tiles of ``kernels.statistics`` chosen on this GPU, then ``watch_gpu.py`` with them.

python benchmarks/watch_gpu_tuned.py [--write benchmarks/results/watch_gpu.json]. Every tile is first compiled, run and
compared with rows in PyTorch by a process of its own, so that one that faults is only left out. 100 s on 16 cores.
What was chosen is a table of the file; it becomes the default by hand (``ROW_TILE`` and others).
"""

from __future__ import annotations

import argparse
import json
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
from attnlab.kernels import statistics
from attnlab.kernels import statistics_largest as of_tiles
from attnlab.linalg.streaming import Measures, stream_rows
from attnlab.linalg.streaming_gpu import stream_by_kernel

ALL = [(width, tile) for width, tiles in watch_gpu.TILES.items() for tile in tiles]
SHAPES = {shape.D: shape for shape in (watch_gpu.SHAPES[-1], watch_gpu.SHAPES[0])}
KINDS = {"rows": "ROW_TILE", "rows ranked by lengths": "RANKED_ROW_TILE", "columns": "COLUMN_TILE"}
# Pairs of a row and a tile that are scored at once, and warps.
PAIRS = ((64, 4), (128, 4), (64, 2), (32, 4))
FLOORS = ((64, 64, 4, 3), (128, 128, 8, 2))
# A process that takes longer is ended, and an error beyond this is a fault.
PATIENCE, LARGEST_ERROR = 75, 1e-2


def check(number: int) -> float:
    """Compile and run a tile; the largest error of its statistics."""
    width, tile = ALL[number]
    watch_gpu._tile_ms(*watch_gpu.made(SHAPES[width], "cuda", torch.bfloat16), tile)
    use(dict.fromkeys(KINDS, tile), width)
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


def use(tiles: dict[str, tuple[int, ...]], width: int) -> None:
    for kind, tile in tiles.items():
        getattr(statistics, KINDS[kind])[width] = statistics.Tile(*tile)


def sound() -> list[int]:
    """The tiles that compile, run and are right, each tried by a process of its own."""
    names, begin = ["errors", "times", *map(str, range(len(ALL)))], time.time()
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder) / name for name in names}
        started = {}
        for name, log in logs.items():
            with log.open("w") as file:
                started[name] = subprocess.Popen([sys.executable, __file__, "--try", name], stdout=file, stderr=file)
        while any(p.poll() is None for p in started.values()) and time.time() - begin < PATIENCE:
            time.sleep(0.2)
        kept = []
        for name, process in started.items():
            if process.poll() is None:
                process.kill()
            process.wait()
            said = logs[name].read_text().strip()
            print(name, ALL[int(name)] if name.isdigit() else "", process.returncode, said[-300:], flush=True)
            if name.isdigit() and process.returncode == 0 and json.loads(said.splitlines()[-1]) < LARGEST_ERROR:
                kept.append(int(name))
    return kept


def floors() -> Iterator[Row]:
    """Flash attention without statistics, by Triton, and SDPA."""
    call, _ = watch_gpu.made(watch_gpu.SHAPES[0], "cuda", torch.bfloat16)
    exact = partial(watch_gpu.sdpa, call.q, call.k, call.v, is_causal=True, enable_gqa=True)
    yield {"of": "SDPA", "ms": watch_gpu.layer_ms(exact)}
    for tile in FLOORS:
        job = partial(flash, call.q, call.k, call.v, tile)
        off = float((job() - exact()).abs().max())
        yield {"of": "Triton, no statistics", "tile": str(tile), "ms": watch_gpu.layer_ms(job), "error": off}


def chosen(rows: list[Row]) -> Iterator[Row]:
    """The fastest tile of each pass and width, which is then used, and of the pairs."""
    for width in SHAPES:
        for kind in KINDS:
            fit = [
                r for r in rows if r["D"] == width and (kind != "columns" or 256 % r["rows"] == 256 % r["keys"] == 0)
            ]
            if fit:
                best = min(fit, key=lambda row: float(row[f"{kind} ms"]))
                tile = tuple(best[name] for name in statistics.Tile._fields)
                use({kind: tile}, width)
                yield {"D": width, "pass": kind, "ms": best[f"{kind} ms"]} | statistics.Tile(*tile)._asdict()
    call, text = watch_gpu.made(watch_gpu.SHAPES[0], "cuda", torch.bfloat16)
    timed = {}
    for pair in PAIRS:
        of_tiles.PAIRS, of_tiles.PAIR_WARPS = pair
        timed[pair] = watch_gpu.layer_ms(watch_gpu._first_pass(call, text, norm_largest=True), 3)
    of_tiles.PAIRS, of_tiles.PAIR_WARPS = min(timed, key=lambda pair: timed[pair])
    for (pairs, warps), ms in timed.items():
        yield {"D": 64, "pass": "pairs", "ms": ms, "rows": pairs, "warps": warps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="attempt")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.attempt:
        if args.attempt.isdigit():
            print(check(int(args.attempt)))
        else:
            warm(args.attempt)
        return
    kept, tables = sound(), {}
    timed = (
        {"D": width} | dict(zip(statistics.Tile._fields, tile, strict=True)) | watch_gpu._tile_ms(
            *watch_gpu.made(SHAPES[width], "cuda", torch.bfloat16), tile
        )
        for width, tile in (ALL[i] for i in kept)
    )  # fmt: skip
    tables["tiles"] = shown("tiles", timed)
    tables["chosen"] = shown("chosen", chosen(tables["tiles"]))
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
