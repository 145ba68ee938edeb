"""Perplexity against the budget of the key/value cache, for every policy, on held-out text.

python benchmarks/kv_policies.py --model FOLDER --text FILE [--text FILE] [--budgets 16 32 64 128] [--write results]
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.cache_policies import RANKINGS, KVPolicy, perplexity
from attnlab.hf import load_model
from attnlab.provenance import provenance, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a decoder-only Hugging Face model")
    parser.add_argument("--text", action="append", required=True, type=Path, help="held-out text; .xz and .gz are read")
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=16, help="of each text, spread evenly over it")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that every policy keeps in the second table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="a folder: write kv_policies.json there")
    args = parser.parse_args()
    loaded = load_model(args.model)
    model = loaded.model.to(args.device)
    rows = []
    for path in args.text:
        ids = sequences(loaded.tokenizer, path, args.length, args.sequences).to(args.device)
        rows += measure(model, ids, path.name.split(".xz")[0], args)
    config = {
        "model": Path(args.model).name,
        "texts": [path.name for path in args.text],
        "length": args.length,
        "sequences": args.sequences,
        "sinks": args.sinks,
        "budgets": args.budgets,
    }
    result = {
        "name": "kv_policies",
        "paper": "OVA",
        "config": config,
        "seed": args.seed,
        **provenance(),
        "tables": {"perplexity": rows},
    }
    if args.write:
        write_json(args.write / "kv_policies.json", result)
    if args.json:
        print(json.dumps(result, indent=1))


def measure(model: Any, ids: Tensor, text: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Targets whose context exceeds the smallest budget are the ones a policy can lose; all are counted alike."""
    rows = []
    for budget in [None, *args.budgets]:
        for by in ["full cache"] if budget is None else RANKINGS:
            for sinks in (0,) if budget is None or by == "recency" else (0, args.sinks):
                policy = None
                if budget is not None:
                    policy = KVPolicy(budget, by=by, sinks=None if by == "recency" else sinks, seed=args.seed)
                start = time.perf_counter()
                found = perplexity(model, ids, policy)
                rows.append(
                    {
                        "text": text,
                        "budget": budget,
                        "policy": by,
                        "sinks": policy.split()[0] if policy else None,
                        "recent": policy.split()[1] if policy else None,
                        "perplexity": found["perplexity"],
                        "loss": found["loss"],
                        "loss over full": found["loss"] - (rows[0]["loss"] if rows else found["loss"]),
                        "tokens": found["tokens"],
                        "seconds": time.perf_counter() - start,
                    }
                )
                if not args.json:
                    row = rows[-1]
                    print(f"{text} {budget} {by} sinks {row['sinks']}: {row['perplexity']:.3f}", flush=True)
    return rows


def sequences(tokenizer: Any, path: Path, length: int, count: int) -> Tensor:
    """``count`` passages of ``length`` tokens, evenly spread over the text, each after the model's first token."""
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="utf-8") as file:
        text = file.read()
    places = [i * len(text) // count for i in range(count)]
    first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    passages = []
    for place in places:
        ids = tokenizer(text[place : place + 12 * length], add_special_tokens=False)["input_ids"]
        passages.append((first + ids)[:length])
    if any(len(ids) < length for ids in passages):
        raise ValueError(f"{path} is too short for {count} passages of {length} tokens")
    return torch.tensor(passages)


if __name__ == "__main__":
    main()
