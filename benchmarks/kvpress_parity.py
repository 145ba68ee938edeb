"""Which keys our cache policies keep, and which keep kvpress' own presses: the same model, prompts and budget.

    python -m venv ENV && ENV/bin/pip install kvpress
    python benchmarks/kvpress_parity.py --kvpress ENV/bin/python [--model smollm2] [--write benchmarks/results]

kvpress wants a version of transformers of its own, so its half (kvpress_peer.py) runs in its environment; the two
exchange token ids and kept positions through JSON files. A prompt is read once, and keys are dropped after it. A row of
the table has the share of our kept keys that kvpress keeps too, over all prompts, layers and heads, and in the layer
where it is least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from storing import make_results, read_results, write_results

import attnlab as al
from attnlab.data import bundled_text

TABLE, SUMMARY = "kept_keys", "by_policy"
KEYS = ["model", "policy", "tokens", "budget"]
MUST = 0.99
SNAP = {"window_size": 32, "kernel_size": 5}
# Our policy, its common settings, and the press with its settings; the ratio goes to the innermost one.
PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("streaming-llm", {}, {"press": "StreamingLLMPress", "settings": {"n_sink": 4}}),
    ("key-norm", {}, {"press": "KnormPress"}),
    ("keydiff", {}, {"press": "KeyDiffPress"}),
    ("tova", {}, {"press": "TOVAPress"}),
    ("h2o:average=true", {"recent": 0}, {"press": "ObservedAttentionPress", "eager": True}),
    ("snapkv:window=32,kernel=5", {}, {"press": "SnapKVPress", "settings": SNAP}),
    ("pyramidkv:window=32,kernel=5", {}, {"press": "PyramidKVPress", "settings": SNAP}),
    ("expected-attention:future=512", {}, {"press": "ExpectedAttentionPress", "settings": {"n_future_positions": 512}}),
    (
        "snapkv:window=32,kernel=5",
        {"heads": "shared"},
        {"press": "AdaKVPress", "inner": {"press": "SnapKVPress", "settings": SNAP}},
    ),
    (
        "criticalkv:window=32,kernel=5",
        {},
        {"press": "CriticalKVPress", "inner": {"press": "SnapKVPress", "settings": SNAP}},
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvpress", required=True, type=Path, help="the Python of an environment with kvpress")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75], help="shares of keys that are dropped")
    parser.add_argument("--write", type=Path, help="a folder: write kvpress_parity.json there")
    args = parser.parse_args()
    loaded = al.load_model(args.model)
    ids = loaded.tokenizer(bundled_text(), add_special_tokens=False)["input_ids"]
    prompts = [ids[i * args.tokens : (i + 1) * args.tokens] for i in range(args.prompts)]
    if len(prompts[-1]) < args.tokens:
        parser.error(f"the text has {len(ids)} tokens, too few for {args.prompts} prompts of {args.tokens}")
    cases = [
        (policy_of(by, settings, ratio, args.tokens), with_ratio(press, ratio))
        for ratio in args.ratios
        for by, settings, press in PAIRS
    ]
    theirs = kept_by_kvpress(args.kvpress, loaded.model, prompts, [press for _, press in cases])
    rows = []
    for (policy, press), peer in zip(cases, theirs["kept"], strict=True):
        labels = {"model": Path(args.model).name, "policy": policy.by, "tokens": args.tokens, "budget": policy.budget}
        labels["policy"] += ",heads=shared" if policy.heads == "shared" else ""
        row = labels | compared([kept_by_us(loaded.model, policy, prompt) for prompt in prompts], peer)
        rows.append(row | {"press": press["press"], "prompts": args.prompts})
        print(f"{row['policy']}, {row['budget']} of {args.tokens} keys: {row['equal']:.4f}, least {row['least']:.4f}")
    if args.write:
        config = {"text": "bundled", "kvpress": theirs["versions"], "must": MUST}
        write(args.write / "kvpress_parity.json", rows, config)
    if any(row["equal"] < MUST for row in rows):
        raise SystemExit(f"a policy keeps other keys than kvpress in more than {1 - MUST:.0%} of places")


def write(path: Path, rows: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """The results file, rows of other models kept, with one row for each policy for the page."""
    before = read_results(path)
    old = [row for row in (before or {"tables": {TABLE: []}})["tables"][TABLE] if row["model"] != rows[0]["model"]]
    tables = {TABLE: rows, SUMMARY: by_policy([*old, *rows])}
    keys = {TABLE: KEYS, SUMMARY: ["policy"]}
    write_results(path, make_results("kvpress_parity", None, tables, config=config, keys=keys), before=before)


def by_policy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The least share of each policy over budgets, a column for each model."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        summary = found.setdefault(row["policy"], {"policy": row["policy"], "press": row["press"]})
        summary[row["model"]] = min(row["equal"], summary.get(row["model"], 1.0))
    return list(found.values())


def policy_of(by: str, settings: dict[str, Any], ratio: float, tokens: int) -> al.KVPolicy:
    """Ours; kvpress rounds the number of keys that stay down."""
    return al.KVPolicy(max(1, int(tokens * (1 - ratio))), by=by, when="prefill", **settings)


def with_ratio(press: dict[str, Any], ratio: float) -> dict[str, Any]:
    """The press with the share of keys that it drops."""
    if "inner" in press:
        return press | {"inner": with_ratio(press["inner"], ratio)}
    return press | {"settings": press.get("settings", {}) | {"compression_ratio": ratio}}


def kept_by_kvpress(python: Path, model: Any, prompts: list[list[int]], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """{"kept": by case, prompt, layer and head, "versions"}, from the other environment."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "model")
        task, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        asked = {"model": str(Path(folder) / "model"), "prompts": prompts, "cases": cases}
        task.write_text(json.dumps(asked), encoding="utf-8")
        peer = Path(__file__).with_name("kvpress_peer.py")
        # An environment of its own: no path of this one.
        subprocess.run([python, "-I", peer, task, answer], check=True, env=os.environ | {"TQDM_DISABLE": "1"})
        return json.loads(answer.read_text(encoding="utf-8"))


@torch.no_grad()
def kept_by_us(model: Any, policy: al.KVPolicy, prompt: list[int]) -> list[list[list[int]]]:
    """For each layer and head, the kept positions in order."""
    with al.evicting(model, policy) as cache:
        model(torch.tensor([prompt]), past_key_values=cache)
    return [
        [[column for column in head if column >= 0] for head in layer.kept.columns[0].tolist()]
        for layer in cache.layers
    ]


def compared(ours: list[Any], theirs: list[Any]) -> dict[str, float]:
    """The share of kept keys that both keep, of all and in the layer where it is least; and layers of other sizes."""
    shares, same, total, other = [], 0, 0, 0
    for mine, peer in zip(ours, theirs, strict=True):
        for my_layer, peer_layer in zip(mine, peer, strict=True):
            pairs = list(zip(my_layer, peer_layer, strict=True))
            equal = sum(len(set(a) & set(b)) for a, b in pairs)
            number = sum(max(len(a), len(b)) for a, b in pairs)
            shares.append(equal / number)
            same, total = same + equal, total + number
            other += sum(len(a) for a, _ in pairs) != sum(len(b) for _, b in pairs)
    return {"equal": same / total, "least": min(shares), "layers of another size": other}


if __name__ == "__main__":
    main()
