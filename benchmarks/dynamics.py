"""Tau against scipy in a loop, IBM Model 1 against nltk, beta against its output layer: run with --json for a file.

python benchmarks/dynamics.py [--tiny] [--source FILE --target FILE]   (parallel text, a sentence a line, may be .gz)
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from storing import make_results
from torch import nn

from attnlab.dynamics import (
    Bitext,
    bitext,
    count_table,
    fit_ibm,
    kendall_tau,
    learnable_from_cooccurrence,
    lexical_probe,
)
from attnlab.measure import median_seconds

SIZES = {
    "full": {
        "rows": 500,
        "sentences": 1000,
        "em_steps": 5,
        "targets": 14,
        "length": 14,
        "vocabulary": 8000,
        "batch": 16,
    },
    "tiny": {"rows": 20, "sentences": 50, "em_steps": 2, "targets": 3, "length": 5, "vocabulary": 100, "batch": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a dry run on small shapes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--target", type=Path)
    args = parser.parse_args()
    size = SIZES["tiny" if args.tiny else "full"]
    torch.manual_seed(0)
    sources, targets = (ids(args.source), ids(args.target)) if args.source and args.target else generated(size)
    rows = [
        *[tau(size["rows"], length, args.repeats) for length in (14, 40, 180)],
        em(sources[: size["sentences"]], targets[: size["sentences"]], size["em_steps"], args.repeats),
        table(bitext(sources, targets, null=True)),
        probe(size, args.repeats),
    ]
    if args.json:
        print(json.dumps(make_results("dynamics_speed", "ktiw", {"ratios": rows}, config=size), indent=1))
        return
    for row in rows:
        print(row.pop("what"))
        print("   " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))


def tau(rows: int, length: int, repeats: int) -> dict[str, Any]:
    """Kendall's tau-b of a batch, and scipy's of each row."""
    from scipy.stats import kendalltau

    u, v = torch.randn(2, rows, length)
    jobs = {
        "ours": lambda: kendall_tau(u, v),
        "scipy": lambda: [kendalltau(a, b).statistic for a, b in zip(u.numpy(), v.numpy(), strict=True)],
    }
    seconds = median_seconds(jobs, repeats=repeats)
    ratio = seconds["scipy"] / seconds["ours"]
    return {"what": f"tau, {rows} rows of {length}", "seconds": seconds["ours"], "scipy / ours": ratio}


def em(sources: list[list[int]], targets: list[list[int]], steps: int, repeats: int) -> dict[str, Any]:
    """EM with a NULL word and nltk's; no output word twice in a sentence, where nltk differs from the textbook."""
    try:
        from nltk.translate import AlignedSent
        from nltk.translate import IBMModel1 as Peer
    except ImportError:
        return {"what": "EM: nltk is not installed"}

    targets = [list(dict.fromkeys(y)) for y in targets]
    aligned = [AlignedSent([str(o) for o in y], [str(i) for i in x]) for x, y in zip(sources, targets, strict=True)]
    corpus = bitext(sources, targets, null=True)
    jobs = {"ours": lambda: fit_ibm(corpus, steps=steps, tolerance=0), "nltk": lambda: Peer(aligned, steps)}
    seconds = median_seconds(jobs, repeats=min(3, repeats))
    ratio = seconds["nltk"] / seconds["ours"]
    return {"what": f"EM, {len(sources)} pairs, {steps} steps", "seconds": seconds["ours"], "nltk / ours": ratio}


def table(corpus: Bitext) -> dict[str, Any]:
    """The count table of the whole corpus, and the diagnosis from it."""
    seconds = median_seconds({"ours": lambda: count_table(corpus)}, repeats=1, warmup=0)["ours"]
    diagnosed = learnable_from_cooccurrence(corpus)
    return {
        "what": f"count table of {len(corpus)} pairs",
        "seconds": seconds,
        "entries": len(count_table(corpus)),
        "sharpness in bits": diagnosed.bits,
        "by chance": diagnosed.chance,
    }


def probe(size: dict[str, int], repeats: int) -> dict[str, Any]:
    """beta of a batch, and the output layer alone on as many pairs."""
    width, vocabulary = 256, size["vocabulary"]
    hidden, output = nn.Linear(2 * width, width), nn.Linear(width, vocabulary)
    h, s = torch.randn(size["batch"], size["length"], width), torch.randn(size["batch"], size["targets"], width)
    y = torch.randint(0, vocabulary, s.shape[:2])
    pairs = torch.randn(size["batch"] * size["length"] * size["targets"], 2 * width)

    def network(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return output(torch.relu(hidden(torch.cat([a, b], -1))))

    def products() -> None:
        for chunk in pairs.split(2048):
            output(torch.relu(hidden(chunk)))

    with torch.inference_mode():
        jobs = {"ours": lambda: lexical_probe(network, h, s, y, vocabulary=vocabulary), "layer": products}
        seconds = median_seconds(jobs, repeats=repeats)
    ratio = seconds["ours"] / seconds["layer"]
    return {"what": "beta of a batch", "seconds": seconds["ours"], "ours / output layer": ratio}


def generated(size: dict[str, int]) -> tuple[list[list[int]], list[list[int]]]:
    """Zipfian sentences of about Multi30k's length, translated word by word with noise."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 8001)
    sources = [rng.choice(8000, rng.integers(8, 21), p=share / share.sum()) for _ in range(size["sentences"])]
    targets = [np.where(rng.random(len(x)) < 0.8, x, rng.integers(0, 8000, len(x))) for x in sources]
    return [x.tolist() for x in sources], [y.tolist() for y in targets]


def ids(path: Path) -> list[list[int]]:
    known: dict[str, int] = {}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [[known.setdefault(word, len(known)) for word in line.lower().split()] for line in lines]


if __name__ == "__main__":
    main()
