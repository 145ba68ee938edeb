"""Perplexity against the budget of the key/value cache, for every policy, on held-out text, with 95 % intervals.

python benchmarks/kv_policies.py --model FOLDER [--text FILE_OR_STORE] [--sampled] [--budgets 16 64] [--write results]

``--sampled`` reads text drawn from the model itself with a full cache: no model can do better there than the full
cache, and what a policy loses is an estimate of the divergence between the two. ``--write`` keeps the rows of other
models that are there; ``--add FILE`` takes rows that were measured elsewhere.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from storing import make_results, merge_results, read_results, write_results
from torch import Tensor

from attnlab.adapters import load_model
from attnlab.adapters.evict import token_losses
from attnlab.caches import KVPolicy, cache_policy_names
from attnlab.data import load_store

KEYS = {
    "perplexity": ["model", "text", "policy", "budget"],
    "against_mass": ["model", "text", "policy", "budget"],
    "by_budget": ["model", "text", "policy"],
}
# Those of the table in the guide, by the names that it has for them.
POLICIES = ["value-aware", "leave-one-out", "mass", "mass-norm", "recency", "random"]
Row = dict[str, Any]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a decoder-only Hugging Face model")
    parser.add_argument("--add", type=Path, help="a kv_policies.json of another machine, instead of a model")
    parser.add_argument(
        "--text", action="append", default=[], type=Path, help="held-out text (.xz and .gz are read), or a token store"
    )
    parser.add_argument("--sampled", action="store_true", help="text drawn from the model with a full cache")
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument(
        "--policies", nargs="+", default=POLICIES, help=f"of these and {', '.join(cache_policy_names())}"
    )
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=16, help="of each text, spread evenly over it")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that every policy keeps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="a folder: write kv_policies.json there")
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if (args.model is None) == (args.add is None):
        parser.error("name either a --model to measure or a file to --add")
    path = args.write / "kv_policies.json" if args.write else None
    old = read_results(path) if path else None
    if args.add:
        added = json.loads(args.add.read_text(encoding="utf-8"))
        if path:
            write_results(path, together(old, added))
        return
    result = measure_model(args, path, old)
    if args.json:
        print(json.dumps(together(None, result), indent=1))


def measure_model(args: argparse.Namespace, path: Path | None, old: Row | None) -> Row:
    """Every policy on every text; the results file grows row by row, so what is measured is kept when time runs out."""
    loaded = load_model(args.model)
    model = loaded.model.to(args.device)
    name = Path(args.model).name
    passages = {
        file.name.split(".xz")[0]: partial(sequences, loaded.tokenizer, file, args.length, args.sequences)
        for file in args.text
    }
    if args.sampled:
        passages["sampled"] = partial(sampled, model, args.length, args.sequences, args.seed)
    asked = ("budgets", "policies", "length", "sequences", "sinks", "device")
    config = {"texts": list(passages)} | {key: getattr(args, key) for key in asked} | training(Path(args.model))
    rows: list[Row] = []
    result: Row = {}
    for text, draw in passages.items():
        for row in measure(model, draw().to(args.device), {"model": name, "text": text}, args):
            rows.append(row)
            tables = {
                "perplexity": [{k: v for k, v in row.items() if k != "losses"} for row in rows],
                "against_mass": against_mass(rows),
            }
            models = {"models": {name: config}}
            result = make_results("kv_policies", "OVA", tables, config=models, seed=args.seed, keys=KEYS)
            if path:
                write_results(path, together(old, result))
    return result


def together(old: Row | None, new: Row) -> Row:
    """Both results, with one row per policy for the page."""
    both = merge_results(old, new) if old else dict(new)
    models = dict(old["config"]["models"]) if old else {}
    for name, config in new["config"]["models"].items():
        # Texts and budgets that were measured before are still there.
        before = {k: v for k, v in models.get(name, {}).items() if k in config and isinstance(v, list)}
        models[name] = config | {k: [*v, *(x for x in config[k] if x not in v)] for k, v in before.items()}
    return both | {
        "config": {"models": models},
        "tables": both["tables"] | {"by_budget": by_budget(both["tables"]["perplexity"])},
    }


def training(folder: Path) -> Row:
    """The record of the model's training, if its folder has one."""
    for path in (folder / "training.json", folder / "run.json"):
        if path.exists():
            return {"training": json.loads(path.read_text(encoding="utf-8"))}
    return {}


def by_budget(rows: list[Row]) -> list[Row]:
    """Loss above the full cache's with the reach of its interval, a column for each budget."""
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    by_policy: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row["budget"]:
            key = (row["model"], row["text"], row["policy"])
            empty = dict(zip(("model", "text", "policy"), key, strict=True)) | {f"{n} keys": None for n in budgets}
            cell = f"{row['loss_over_full']:.3f} ± {row['plus_minus']:.3f}"
            by_policy.setdefault(key, empty)[f"{row['budget']} keys"] = cell
    return list(by_policy.values())


def measure(model: Any, ids: Tensor, named: Row, args: argparse.Namespace) -> Iterator[Row]:
    """One row per policy and budget, after one for the full cache; all policies keep the same first tokens."""
    full: list[float] = []
    policies = [
        None,
        *(KVPolicy(n, by=by, sinks=args.sinks, seed=args.seed) for n in args.budgets for by in args.policies),
    ]
    for policy in policies:
        start = time.perf_counter()
        losses = token_losses(model, ids, policy)
        each = losses.double().mean(1).tolist()
        sinks, recent, ranked = policy.split() if policy else (None, None, None)
        full = full or each
        over, reach = interval([mine - exact for mine, exact in zip(each, full, strict=True)])
        row = {
            **named,
            "policy": policy.by if policy else "full cache",
            "budget": policy.budget if policy else None,
            "sinks": sinks,
            "recent": recent,
            "ranked": ranked,
            "perplexity": math.exp(statistics.fmean(each)),
            "loss_over_full": over,
            "plus_minus": reach,
            "loss": statistics.fmean(each),
            "windows": len(each),
            "tokens": losses.numel(),
            "seconds": time.perf_counter() - start,
            "losses": each,
        }
        yield row
        if not args.json:
            print(
                f"{named['model']} {named['text']} {row['policy']} budget {row['budget']}: {row['perplexity']:.3f}, "
                f"loss over the full cache's {over:.4f} ± {reach:.4f}",
                flush=True,
            )


def against_mass(rows: list[Row]) -> list[Row]:
    """Each policy's loss less that of attention mass with the same budget, window by window."""
    mass = {(row["text"], row["budget"]): row["losses"] for row in rows if row["policy"] == "mass"}
    compared = []
    for row in rows:
        if (peer := mass.get((row["text"], row["budget"]))) and row["policy"] != "mass":
            gap, reach = interval([a - b for a, b in zip(row["losses"], peer, strict=True)])
            verdict = "better" if gap + reach < 0 else "worse" if gap - reach > 0 else "no difference"
            compared.append(
                {name: row[name] for name in ("model", "text", "policy", "budget", "windows")}
                | {"loss_over_mass": gap, "plus_minus": reach, "verdict": verdict}
            )
    return compared


def interval(differences: list[float]) -> tuple[float, float]:
    """The mean, and how far its 95 % interval reaches to either side: Student's t over the windows."""
    n = len(differences)
    if n < 2:
        return statistics.fmean(differences), math.inf
    # Cornish-Fisher's expansion of t's quantile, good to 1 % from 4 degrees of freedom on.
    z, f = 1.959964, n - 1
    t = z + (z**3 + z) / (4 * f) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
    return statistics.fmean(differences), t * statistics.stdev(differences) / math.sqrt(n)


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
    first = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    if path.is_dir():
        tokens = load_store(path).tokens
        size = length - len(first)
        if len(tokens) < count * size:
            raise ValueError(f"{path} has {len(tokens)} tokens, too few for {count} passages of {length}")
        places = [i * (len(tokens) - size) // max(1, count - 1) for i in range(count)]
        return torch.tensor([first + tokens[place : place + size].tolist() for place in places])
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="utf-8") as file:
        text = file.read()
    places = [i * len(text) // count for i in range(count)]
    passages = []
    for place in places:
        ids = tokenizer(text[place : place + 12 * length], add_special_tokens=False)["input_ids"]
        passages.append((first + ids)[:length])
    if any(len(ids) < length for ids in passages):
        raise ValueError(f"{path} is too short for {count} passages of {length} tokens")
    return torch.tensor(passages)


if __name__ == "__main__":
    main()
