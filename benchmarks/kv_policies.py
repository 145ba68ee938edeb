"""Perplexity against the budget of the key/value cache, for every policy, on held-out text.

python benchmarks/kv_policies.py --model FOLDER [--text FILE] [--sampled] [--budgets 16 32 64] [--write results]

``--sampled`` reads text drawn from the model itself with a full cache: no model can do better there than the full
cache, and what a policy loses is an estimate of the divergence between the two.
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
    parser.add_argument("--text", action="append", default=[], type=Path, help="held-out text; .xz and .gz are read")
    parser.add_argument("--sampled", action="store_true", help="text drawn from the model with a full cache")
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=16, help="of each text, spread evenly over it")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that every policy keeps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="a folder: write kv_policies.json there")
    args = parser.parse_args()
    loaded = load_model(args.model)
    model = loaded.model.to(args.device)
    rows = []
    if args.sampled:
        rows += measure(model, sampled(model, args.length, args.sequences, args.seed), "sampled", args)
    for path in args.text:
        ids = sequences(loaded.tokenizer, path, args.length, args.sequences).to(args.device)
        rows += measure(model, ids, path.name.split(".xz")[0], args)
    config = {
        "model": Path(args.model).name,
        "texts": ["sampled"] * args.sampled + [path.name for path in args.text],
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
    """One row per policy and budget, after one for the full cache; all policies keep the same first tokens."""
    rows: list[dict[str, Any]] = []
    policies = [None, *(KVPolicy(n, by=by, sinks=args.sinks, seed=args.seed) for n in args.budgets for by in RANKINGS)]
    for policy in policies:
        start = time.perf_counter()
        found = perplexity(model, ids, policy)
        sinks, recent, ranked = policy.split() if policy else (None, None, None)
        row = {
            "text": text,
            "policy": policy.by if policy else "full cache",
            "budget": policy.budget if policy else None,
            "sinks": sinks,
            "recent": recent,
            "ranked": ranked,
            "perplexity": found["perplexity"],
            "loss_over_full": found["loss"] - (rows[0]["loss"] if rows else found["loss"]),
            "loss": found["loss"],
            "tokens": found["tokens"],
            "seconds": time.perf_counter() - start,
        }
        rows.append(row)
        if not args.json:
            print(f"{text} {row['policy']} budget {row['budget']}: {row['perplexity']:.3f}", flush=True)
    return rows


def sampled(model: Any, length: int, count: int, seed: int) -> Tensor:
    """Passages drawn from the model token by token."""
    first = torch.full((count, 1), model.config.bos_token_id, device=model.device)
    torch.manual_seed(seed)
    return model.generate(
        first,
        attention_mask=torch.ones_like(first),
        pad_token_id=model.config.eos_token_id,
        do_sample=True,
        top_k=0,
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
    )


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
