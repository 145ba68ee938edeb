"""Which reading predicts what hiding a key changes, for any model folder and text file of one text a line.

python benchmarks/faithfulness.py --model FOLDER [--model FOLDER ...] --texts FILE [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from storing import make_results, write_results

from attnlab.reading.faithfulness import AGAINST, faithfulness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", required=True, help="a folder that transformers can load; repeat it"
    )
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20, help="texts")
    parser.add_argument(
        "--keys", type=int, default=24, help="keys hidden per text and layer for the prediction's change"
    )
    parser.add_argument("--length", type=int, default=96, help="tokens kept of a text")
    parser.add_argument(
        "--reading", action="append", metavar="NAME", help="a reading by name or ./file.py:function (default: all)"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [line.strip() for line in args.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    tables: dict[str, Any] = {}
    for folder in args.model:
        name = Path(folder).name
        model, texts = _load(folder, lines[: args.limit], args.length)
        tables[name] = faithfulness(model, texts, readings=args.reading, keys=args.keys).rows()
        _print_means(name, tables[name])
    if args.out:
        config = {"limit": args.limit, "keys": args.keys, "length": args.length, "texts": args.texts.name}
        tables["summary"] = summary(tables)
        write_results(args.out, make_results("faithfulness", "effective", tables, config=config))


def summary(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per model and truth: the mean rank correlation over layers of each reading."""
    means = []
    for model, rows in tables.items():
        for against in dict.fromkeys(row["against"] for row in rows):
            readings = dict.fromkeys(row["reading"] for row in rows)
            by_name = {name.replace(" ", "_"): _mean_over_layers(rows, against, name) for name in readings}
            means.append({"model": model, "against": against, **by_name})
    return means


def _print_means(model: str, rows: list[dict[str, Any]]) -> None:
    for against in AGAINST:
        print(f"{model}, {against}: mean Spearman over layers")
        for reading in dict.fromkeys(row["reading"] for row in rows):
            print(f"   {reading:16s} {_mean_over_layers(rows, against, reading) or 0:.3f}")


def _mean_over_layers(rows: list[dict[str, Any]], against: str, reading: str) -> float | None:
    chosen = [row["spearman"] for row in rows if (row["against"], row["reading"]) == (against, reading)]
    known = [value for value in chosen if value is not None]
    return sum(known) / len(known) if known else None


def _load(folder: str, lines: list[str], length: int) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    kinds = AutoConfig.from_pretrained(folder).architectures or [""]
    loader = (
        AutoModelForCausalLM if "Causal" in kinds[0] else AutoModelForMaskedLM if "Masked" in kinds[0] else AutoModel
    )
    model = loader.from_pretrained(folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer(line, return_tensors="pt", truncation=True, max_length=length) for line in lines]
    return model, [{"input_ids": t["input_ids"], "attention_mask": t["attention_mask"]} for t in texts]


if __name__ == "__main__":
    main()
