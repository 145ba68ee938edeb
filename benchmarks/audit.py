"""Does ``attnlab audit`` find one faulty head, and stay silent where only the text is another?

    python benchmarks/audit.py smollm2 --text moby-dick.txt.xz graham.txt.xz train.jsonl.xz --write benchmarks/results
    python benchmarks/audit.py --tiny                                  # a dry run on a model made here

The baseline is the audit of the first piece of the first text. Every rerun audits the same model on another piece.
Every plant changes one random head that has no such finding yet, and audits on another piece too. A plant is found if
the audit names the head, and its fault as a new finding. Rows that are in the results already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from storing import make_results, read_results, write_results

import attnlab as al
from attnlab.data import bundled_text, texts
from attnlab.evaluation.audit_statistics import STATISTICS
from attnlab.mechanisms.per_head import per_head

# A fault, and the findings by which an audit may name it.
FAULTS = {"zeroed": ("dead",), "copied": ("duplicate",), "frozen": ("sinks only", "collapsed")}
TABLE = "audits"
# The head and the head that is copied over it; the name of a text and the text; the fault.
Job = tuple[dict[str, Any], tuple[str, str], str]
# Characters of a text that pieces are taken from.
MOST = 3_000_000


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--text", type=Path, nargs="+", help="plain texts or jsonl; by default what attnlab comes with")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--plants", type=int, default=20)
    parser.add_argument("--reruns", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a dry run on a small model with random weights")
    parser.add_argument("--write", type=Path, help="a folder: write audit.json there")
    args = parser.parse_args(argv)
    if args.tiny:
        args.model, args.windows, args.length, args.plants, args.reruns = "tiny", 8, 32, 3, 2
    loaded = tiny_model() if args.tiny else al.load_model(args.model)
    setting = {"windows": args.windows, "length": args.length}
    pieces = pieces_of(args.text, count=1 + args.plants + args.reruns, size=7 * args.windows * args.length)
    name, text = pieces[0]
    baseline = al.audit(loaded, text, text_name=name, **setting)
    config = {"model": args.model, "baseline": name, **setting}
    file = None if args.write is None else args.write / "audit.json"
    rows: list[dict[str, Any]] = []
    for place, (name, text), fault in alternating(jobs(baseline, pieces[1:], args.reruns), args.reruns):
        labels = {"model": args.model, **setting, "baseline": pieces[0][0], "text": name, **place, "fault": fault}
        done = [] if file is None else (read_results(file) or {}).get("tables", {}).get(TABLE, [])
        if any(labels.items() <= row.items() for row in done):
            continue
        with planted(loaded.model, fault, place["layer"], place["head"], place["source"]):
            result = al.audit(loaded, text, baseline=baseline, text_name=name, **setting)
        rows.append(labels | judged(result, baseline, place, fault))
        print(rows[-1], flush=True)
        if file is not None:
            tables = {TABLE: rows[-1:], **summaries([*done, rows[-1]])}
            keys = {TABLE: list(labels), "summary": ["model", "audit_of"], "differences": ["model", "statistic"]}
            write_results(
                file, make_results("audit", None, tables, config=config, keys=keys), before=read_results(file)
            )
    print(summary(rows))
    return rows


def judged(result: dict[str, Any], baseline: dict[str, Any], place: dict[str, Any], fault: str) -> dict[str, Any]:
    """How many changes there are in how many heads, and whether the fault is named at its head; without a fault also
    the largest difference of log-odds of each statistic in any head."""
    changes = result["changes"]
    here = [row for row in changes if (row["layer"], row["head"]) == (place["layer"], place["head"])]
    named = sorted({finding for row in here for finding in row["new_findings"]})
    found = any(finding in named for finding in FAULTS[fault]) if fault else not changes
    heads = len({(row["layer"], row["head"]) for row in changes})
    row = {"changes": len(changes), "heads": heads, "named": ", ".join(named), "right": found}
    return row | ({} if fault else {"differences": differences(result, baseline)})


def differences(result: dict[str, Any], baseline: dict[str, Any]) -> dict[str, float]:
    """The largest difference of log-odds in any head, by statistic."""
    return {
        name: max(abs(now["odds_mean"] - before["odds_mean"]) for now, before in pairs)
        for name in STATISTICS
        if (
            pairs := [
                (one["statistics"][name], other["statistics"][name])
                for one, other in zip(result["heads"], baseline["heads"], strict=True)
                if one["statistics"][name] is not None
            ]
        )
    }


def summaries(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of all audits: how many ended as they should, by fault; and the largest differences without one."""
    model = rows[0]["model"]
    names = {"zeroed": "a zeroed head", "copied": "a copied head", "frozen": "a frozen head", "": "another text alone"}
    summary = []
    for fault, name in names.items():
        of = [row for row in rows if row["fault"] == fault]
        if of:
            expected = "no change" if not fault else "its head and fault named"
            right = sum(row["right"] for row in of)
            summary.append(
                {"model": model, "audit_of": name, "expected": expected, "audits": len(of), "as_expected": right}
            )
    seen = [row["differences"] for row in rows if not row["fault"]]
    largest = [
        {
            "model": model,
            "statistic": name,
            "largest_difference": round(max(one[name] for one in seen), 2),
            "floor": floor,
        }
        for name, floor in ((name, statistic.floor) for name, statistic in STATISTICS.items())
        if all(name in one for one in seen)
    ]
    return {"summary": summary, "differences": largest if seen else []}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line: plants found and silent reruns, of how many."""
    plants, reruns = ([row for row in rows if bool(row["fault"]) == planted] for planted in (True, False))
    right = [sum(row["right"] for row in some) for some in (plants, reruns)]
    return f"{right[0]} of {len(plants)} plants found, {right[1]} of {len(reruns)} reruns without a change"


def alternating(all_jobs: Sequence[Job], reruns: int) -> list[Job]:
    """Reruns and plants by turns, so that a run that is stopped has made some of both."""
    pairs = itertools.zip_longest(all_jobs[:reruns], all_jobs[reruns:])
    return [job for pair in pairs for job in pair if job is not None]


def jobs(baseline: dict[str, Any], pieces: Sequence[tuple[str, str]], reruns: int) -> list[Job]:
    """(the head and the head that is copied over it, the text, the fault); first those without a fault."""
    nowhere = {"layer": None, "head": None, "source": None}
    made: list[Job] = [(nowhere, piece, "") for piece in pieces[:reruns]]
    draw = random.Random(0)
    for piece, fault in zip(pieces[reruns:], itertools.cycle(FAULTS), strict=False):
        sound = [head for head in baseline["heads"] if not {one["name"] for one in head["findings"]} & {*FAULTS[fault]}]
        chosen = draw.choice(sound)
        place = {"layer": chosen["layer"], "head": chosen["head"], "source": None}
        if fault == "copied":
            place["source"] = draw.choice(
                [
                    head["head"]
                    for head in baseline["heads"]
                    if (head["layer"], head["key_value_head"]) == (chosen["layer"], chosen["key_value_head"])
                    and head["head"] != chosen["head"]
                ]
            )
        made.append((place, piece, fault))
    return made


@contextmanager
def planted(model: Any, fault: str, layer: int | None, head: int | None, source: int | None = None) -> Iterator[None]:
    """Inside, one head of a Llama is faulty; ``source`` is copied over it, and shares its key/value head.

    zeroed: its columns of W_O are zero. frozen: all its weight is on the first token.
    """
    if not fault:
        yield
        return
    attention = model.model.layers[layer].self_attn
    heads = model.config.num_attention_heads
    if fault == "frozen":
        specs = ["position:at=0" if i == head else "softmax" for i in range(heads)]
        with al.swap(model, per_head(specs), layers=[layer]):
            yield
        return
    weights = [attention.q_proj.weight, attention.o_proj.weight]
    before = [weight.detach().clone() for weight in weights]
    # (h, d, m), both: rows of W_Q, columns of W_O.
    rows, columns = weights[0].data.unflatten(0, (heads, -1)), weights[1].data.unflatten(1, (heads, -1))
    try:
        if fault == "zeroed":
            columns[:, head] = 0
        else:
            rows[head], columns[:, head] = rows[source].clone(), columns[:, source].clone()
        yield
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.data.copy_(old)


def pieces_of(files: Sequence[Path] | None, *, count: int, size: int) -> list[tuple[str, str]]:
    """``count`` pieces of ``size`` characters, the texts taking turns, from places spread over each text."""
    whole = {"shipped": bundled_text()} if files is None else {path.name: beginning(path) for path in files}
    each = -(-count // len(whole))
    pieces = []
    for number, (name, text) in itertools.product(range(each), whole.items()):
        start = (len(text) - size) * (2 * number + 1) // (2 * each)
        pieces.append((f"{name} at {start}", text[start : start + size]))
    return pieces[:count]


def beginning(path: Path) -> str:
    """The first characters of a text, its documents under each other."""
    documents, length = [], 0
    for document in texts(path, unit="paragraph"):
        documents.append(document)
        length += len(document)
        if length > MOST:
            break
    return "\n\n".join(documents)


def tiny_model() -> al.LoadedModel:
    """A Llama with random weights, large enough that its heads differ, and the tokenizer that attnlab comes with."""
    import transformers

    tokenizer = al.shipped_model().tokenizer
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, initializer_range=0.2)
    return al.LoadedModel(transformers.LlamaForCausalLM(config).eval(), tokenizer, "causal")


if __name__ == "__main__":
    main()
