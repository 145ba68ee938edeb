"""The cost of record and swap on top of a model's own SDPA forward pass: python benchmarks/hf_overhead.py [--json].

A model of BERT-base's size, 8 sentences of 128 tokens, with padding and without; entering the context counts as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from bert import SIZES, batch_for, bert
from storing import make_results

from attnlab.adapters import record, swap
from attnlab.measure import median_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a dry run on small shapes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    size = SIZES["tiny" if args.tiny else "full"]
    torch.manual_seed(0)
    model = bert(size, args.device, "sdpa")
    rows = [overhead(model, size, padded, args.repeats, args.device) for padded in (False, True)]
    if args.json:
        print(json.dumps(make_results("hf_overhead", None, {"ratios": rows}, config=size), indent=1))
        return
    for row in rows:
        print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in row.items()))


def overhead(model: Any, size: dict[str, int], padded: bool, repeats: int, device: str) -> dict[str, Any]:
    """Medians over interleaved repeats, as ratios to the model left alone; the second "own" shows the noise."""
    batch = batch_for(size, device, shortest=size["length"] // 2 if padded else None)

    def own() -> None:
        model(**batch)

    def recorded() -> None:
        with record(model):
            model(**batch)

    def swapped() -> None:
        with swap(model, "softmax"):
            model(**batch)

    def both() -> None:
        with swap(model, "softmax"), record(model):
            model(**batch)

    jobs: dict[str, Callable[[], None]] = {
        "own": own,
        "record": recorded,
        "swap": swapped,
        "both": both,
        "own again": own,
    }
    with torch.inference_mode():
        t = median_seconds(jobs, repeats=repeats, warmup=2, device=device)
    return {
        "what": "padded" if padded else "no padding",
        "own_ms": 1e3 * t["own"],
        "record_over_own": t["record"] / t["own"],
        "swap_softmax_over_own": t["swap"] / t["own"],
        "swap_and_record_over_own": t["both"] / t["own"],
        "own_over_own": t["own again"] / t["own"],
    }


if __name__ == "__main__":
    main()
