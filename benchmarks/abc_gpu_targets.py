"""Targets of ABC_MLP's kernels on one H200 in bf16, beside what a run of abc_gpu.py measured.

python benchmarks/abc_gpu_targets.py RESULTS.json adds tables to it: the targets, a line through the shapes, and other
sizes beside that line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from abc_gpu_cost import Row, moved

from attnlab.provenance import write_json


def targets(tables: dict[str, list[Row]]) -> list[Row]:
    """Each target with a required and a desired upper bound."""
    large, long, short = tables["shapes"]
    step = tables["decode"][0]
    names = [
        f"D {r['D']}, slots {r['slots']}" + ", grouped" * (r["groups"] < r["H"]) + ", packed" * (r["packed"] > 1)
        for r in tables["others"]
    ]
    host = max(r["host ms"] for r in tables["host"] if r["what"] == "both")
    rows = [
        ("8 x 2,048 forward, of SDPA's time", 1.0, 0.85, large["forward / SDPA"]),
        ("8 x 2,048 forward and backward", 0.9, 0.7, large["both / SDPA"]),
        ("1 x 32,768 forward", 1 / 11, 1 / 14, long["forward / SDPA"]),
        ("1 x 32,768 forward and backward", 1 / 13, 1 / 17, long["both / SDPA"]),
        ("16 x 512 forward", 2.3, 1.5, short["forward / SDPA"]),
        ("decoding step, ms", 0.045, 0.038, step["step ms"]),
        ("one of ten steps, ms", 0.045, 0.038, step["one of ten ms"]),
        ("host, forward and backward, ms", 0.25, None, host),
        ("memory at the longest, of inputs and gradients", 2.0, None,
         tables["lengths"][-1]["peak / inputs and gradients"]),
    ]  # fmt: skip
    if "fla forward ms" in short:
        rows.insert(5, ("16 x 512 forward, of fla's time", 1 / 5, None, 1 / short["fla / forward"]))
    for name, row in zip(names, tables["others"], strict=True):
        for what in ("forward", "both"):
            rows.append((f"{name}, {what}, by bytes moved", 1.3, None, row[f"{what} / by bytes"]))
    return [
        {"target": name, "must": must, "goal": goal, "measured": got, "measured / must": got / must}
        for name, must, goal, got in rows
    ]


def by_line(tables: dict[str, list[Row]]) -> tuple[list[Row], list[Row]]:
    """The shapes' times as a line, a fixed time and bytes at a rate; and other sizes beside what it predicts."""
    lines: list[Row] = []
    rows: list[Row] = [{name: row[name] for name in ("D", "slots", "groups", "packed")} for row in tables["others"]]
    for what in ("forward", "both"):
        mb = np.array([row[f"moved MB {what}"] for row in tables["roofline"]])
        ms = np.array([row[f"{what} ms"] for row in tables["shapes"]])
        rate, fixed = np.polyfit(mb, ms, 1)
        off = np.abs(ms / (fixed + rate * mb) - 1).max()
        lines.append({"what": what, "fixed us": 1e3 * fixed, "TB/s": 1e-3 / rate, "largest misfit": float(off)})
        for row, measured in zip(rows, tables["others"], strict=True):
            shape = tuple(measured[name] for name in ("B", "H", "T", "D", "slots"))
            case_mb = moved(shape, measured["groups"], measured["packed"])[f"moved MB {what}"]
            row[f"{what} / by line"] = measured[f"{what} ms"] / (fixed + rate * case_mb)
    return lines, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    results = json.loads(path.read_text(encoding="utf-8"))
    tables = results["tables"]
    tables["targets"] = targets(tables)
    tables["line"], tables["by_line"] = by_line(tables)
    write_json(path, results)


if __name__ == "__main__":
    main()
