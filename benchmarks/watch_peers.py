"""``al.watch`` beside what makes W: eager attention, nnsight and TransformerLens, in time and memory on a CPU.

    python -m venv ENV && ENV/bin/pip install torch transformers nnsight transformer_lens
    python benchmarks/watch_peers.py --peers ENV/bin/python [--text FILE] [--write benchmarks/results]
    python benchmarks/watch_peers.py --tiny [--peers ENV/bin/python]        # a dry run on a model made here

Each measurement is a process of its own (watch_peers_worker.py) with one thread, which may take 8 GiB: nnsight and
TransformerLens run in the environment of ``--peers`` and are left out without it, all else in this one. Peers compute
entropy, the 8 largest weights, mass on sinks and on recent keys and what keys receive from W, in two ways: W of all
layers is kept first, as their guides show it, or each layer's W is read by a hook and dropped. Ratios are to the model
alone (SDPA) in the same run; memory is that of the model alone and what the passes add. Times are processor time, so
that other work on the machine counts little; medians. TransformerLens is its TransformerBridge, which takes a folder:
HookedTransformer, removed in version 4, knew models by their hub names only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from audit import tiny_model
from storing import make_results, read_results, write_results
from watch_peers_worker import WAYS

import attnlab as al
from attnlab.data import bundled_text, texts

Row = dict[str, Any]
TABLE, SUMMARY = "ways", "ratios"
ALONE, EXACT = "model alone", "al.watch, all statistics"
PACKAGES = ("torch", "transformers", "nnsight", "transformer_lens")
LIBRARIES = ("nnsight", "TransformerLens")
# The largest difference of a mean statistic from that of al.watch that counts as the same.
MUST = 1e-3
ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the Python of an environment with nnsight and transformer_lens")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, help="a plain text; by default what attnlab comes with")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="no repeat begins after this many in one process")
    parser.add_argument("--gib", type=float, default=8, help="memory that a process may take")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a small model with random weights")
    parser.add_argument("--write", type=Path, help="a folder: write watch_peers.json there")
    args = parser.parse_args(argv)
    if args.tiny:
        args.model, args.tokens, args.repeats = "tiny", [24, 48], 1
    loaded = tiny_model() if args.tiny else al.load_model(args.model)
    text = bundled_text() if args.text is None else next(texts(args.text, unit="file"))[: 10 * max(args.tokens)]
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < max(args.tokens):
        parser.error(f"the text has {len(ids)} tokens, fewer than {max(args.tokens)}; choose a longer one with --text")
    pythons = {way: python for way in WAYS if (python := python_of(way, args.peers)) is not None}
    rows: list[Row] = []
    limits = {"repeats": args.repeats, "seconds": args.seconds, "gib": args.gib}
    config = {"text": "bundled" if args.text is None else args.text.name, "threads": 1, **limits, "must": MUST}
    config["peers"] = None if args.peers is None else versions_of(args.peers)
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.save_pretrained(Path(folder) / "model")
        loaded.tokenizer.save_pretrained(Path(folder) / "model")
        del loaded
        for tokens in args.tokens:
            answers: dict[str, Any] = {}
            for way, python in pythons.items():
                task = {"way": way, "model": str(Path(folder) / "model"), "ids": ids[:tokens], **limits}
                answers[way] = asked(python, task, Path(folder))
                rows.append(row_of(args.model, tokens, way, answers))
                print(json.dumps(rows[-1]), flush=True)
                if args.write:
                    write(args.write / "watch_peers.json", rows, config)
    check(rows)
    return rows


def python_of(way: str, peers: Path | None) -> Path | None:
    """The Python that runs a way; None where it has no environment."""
    return peers if way.startswith(LIBRARIES) else Path(sys.executable)


def versions_of(python: Path) -> dict[str, str]:
    """Of the packages of another environment that matter here."""
    code = "import json, importlib.metadata as m, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    printed = subprocess.run([python, "-I", "-c", code, *PACKAGES], check=True, capture_output=True, text=True).stdout
    return json.loads(printed)


def asked(python: Path, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The answer of a process of its own."""
    question, answer = folder / "task.json", folder / "answer.json"
    question.write_text(json.dumps(task), encoding="utf-8")
    worker = Path(__file__).with_name("watch_peers_worker.py")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    # attnlab is this tree's; the peers' environment sees no path of this one.
    isolated = [] if python == Path(sys.executable) else ["-I"]
    subprocess.run(
        [python, *isolated, worker, question, answer], check=True, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    return json.loads(answer.read_text(encoding="utf-8"))


def row_of(model: str, tokens: int, way: str, answers: dict[str, Any]) -> Row:
    """Medians of a way, their ratios to the model alone, and how far its statistics are from those of al.watch."""
    answer, alone, exact = answers[way], answers[ALONE], answers.get(EXACT)
    row: Row = {"model": model, "tokens": tokens, "way": way, "fits": answer["fits"]}
    if not answer["fits"]:
        return row
    row["s"], row["repeats"] = statistics.median(answer["seconds"]), len(answer["seconds"])
    row |= {"loaded MiB": answer["loaded MiB"], "peak MiB": answer["peak MiB"]}
    if alone["fits"]:
        row["time / model"] = row["s"] / statistics.median(alone["seconds"])
        # What a library loads beside the model differs between environments, and is no cost of the statistics.
        growth = answer["peak MiB"] - answer["loaded MiB"]
        row["memory / model"] = (alone["loaded MiB"] + growth) / alone["peak MiB"]
    if way != ALONE and exact is not None and exact["fits"]:
        row["difference"] = difference(answer["means"], exact["means"])
    return row


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between the means of two ways."""
    return max(
        abs(a - b)
        for name in one
        for layers in zip(one[name], other[name], strict=True)
        for a, b in zip(*layers, strict=True)
    )


def check(rows: list[Row]) -> None:
    """All ways measure the same, or there is nothing to compare."""
    other = [f"{row['way']} at {row['tokens']} tokens" for row in rows if row.get("difference", 0.0) > MUST]
    if other:
        raise SystemExit(f"statistics differ from those of al.watch by more than {MUST}: {', '.join(other)}")


def ratios(rows: list[Row]) -> list[Row]:
    """A row for each way: time and memory in units of the model alone, a column for each length."""
    summary: dict[str, Row] = {}
    for measure in ("time", "memory"):
        for row in rows:
            ratio = row.get(f"{measure} / model") if row["fits"] else "does not fit"
            column = f"{measure} {row['tokens']}"
            summary.setdefault(row["way"], {"way": row["way"]})[column] = ratio
    return list(summary.values())


def write(path: Path, rows: list[Row], config: dict[str, Any]) -> None:
    """The results file, with the rows of other lengths that it has."""
    before = read_results(path)
    new = {(row["model"], row["tokens"]) for row in rows}
    old = (before or {"tables": {TABLE: []}})["tables"][TABLE]
    old = [row for row in old if (row["model"], row["tokens"]) not in new]
    tables = {TABLE: rows, SUMMARY: ratios(sorted([*old, *rows], key=lambda row: row["tokens"]))}
    keys = {TABLE: ["model", "tokens", "way"], SUMMARY: ["way"]}
    write_results(path, make_results("watch_peers", None, tables, config=config, keys=keys), before=before)


if __name__ == "__main__":
    main()
