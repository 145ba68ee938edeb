"""Tokenising a file: ours (streamed to memory-mapped arrays) against `tokenizers` on the whole file in one batch.

    python benchmarks/tokenise.py [--megabytes 10 100] [--text FILE] [--repeats 3] [--json]

Every measurement is a fresh process, in turns. Ratios are the peer's time over ours (above 1: ours is faster);
processor seconds, over all threads, are the fairer measure on a machine that others use too. The peak is resident
memory beyond what the process held before it began. ``second`` is a start with the arrays at hand.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from storing import make_results

from attnlab.data import bundled_text, load_tokeniser, tokenise, train_wordpiece

JOBS = ("ours", "second", "one batch", "one batch, fast")


def write_sample(path: Path, megabytes: int, text: Path | None) -> None:
    """The first bytes of ``text`` (repeated if short), or made-up lines with a Zipf distribution of words."""
    size = megabytes * 1_000_000
    with open(path, "wb") as out:
        while out.tell() < size:
            if text is not None:
                with open(text, "rb") as file:
                    out.write(file.read(size - out.tell()))
                continue
            rng = np.random.default_rng(out.tell())
            stems = sorted(set(bundled_text().split()))
            words = np.array([a + b for a in stems for b in ("", "ing", "ed", "ness", "ly", "less")])
            picked = words[(rng.zipf(1.2, size=200_000) * 7919) % len(words)]
            lines = [" ".join(row) for row in picked.reshape(-1, 20)]
            out.write(("\n".join(lines) + "\n").encode())


def memory(name: str) -> float:
    """A line of Linux's account of this process, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def reset_peak() -> float:
    """Reset the peak of memory after the imports; returns the memory in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def measure(job: str, path: Path, folder: Path) -> dict[str, float]:
    """Time and extra peak memory of one job in this process."""
    tokeniser = load_tokeniser(folder)
    held = reset_peak()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    if job in ("ours", "second"):
        n = len(tokenise(path, tokeniser, cache=folder / "cache").tokens)
    else:
        lines = [line for line in path.read_text().split("\n") if line.strip()]
        encode = tokeniser.tokenizer.encode_batch if job == "one batch" else tokeniser.tokenizer.encode_batch_fast
        ids = [np.array(e.ids, np.uint16) for e in encode(lines, add_special_tokens=False)]
        n = len(np.concatenate(ids))
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor": processor, "peak_mb": memory("VmHWM") - held, "tokens": n}


def table(megabytes: list[int], text: Path | None, repeats: int) -> list[dict[str, object]]:
    """One row per size and job."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "sample.txt"
        write_sample(path, 2, text)
        train_wordpiece(path.read_text(errors="ignore").split("\n"), vocab_size=8192).save(folder)
        for size in megabytes:
            write_sample(path, size, text)
            measured: dict[str, list[dict[str, float]]] = {job: [] for job in JOBS}
            for _ in range(repeats):
                subprocess.run(["rm", "-rf", str(folder / "cache")], check=True)
                for job in JOBS:
                    command = [sys.executable, __file__, "--measure", job, str(path), str(folder)]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    measured[job].append(json.loads(done.stdout))
            median = {
                (job, key): statistics.median(m[key] for m in measured[job]) for job in JOBS for key in measured[job][0]
            }
            rows += [
                {
                    "megabytes": size,
                    "job": job,
                    "seconds": round(median[job, "seconds"], 3),
                    "over ours": round(median[job, "seconds"] / median["ours", "seconds"], 3),
                    "processor seconds": round(median[job, "processor"], 3),
                    "processor over ours": round(median[job, "processor"] / median["ours", "processor"], 3),
                    "peak MB": round(median[job, "peak_mb"]),
                    "tokens": int(median[job, "tokens"]),
                }
                for job in JOBS
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--text", type=Path, help="a plain text file to take the samples from")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        job, path, folder = args.measure
        print(json.dumps(measure(job, Path(path), Path(folder))))
        return
    rows = table(args.megabytes, args.text, args.repeats)
    if args.json:
        print(json.dumps(make_results("tokenise", None, {"tokenise": rows}, config={}), indent=1))
        return
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
