"""Laws over every architecture of transformers that can be made small; most of them are part of make test-all.

``python -m tests.adapters.test_architectures benchmarks/results/architectures.json`` writes the record from which the
tables of docs/architectures.md are made. The tests compare with it, where it is of the same release of transformers.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.adapters.architecture_laws import Verdict, judge
from tests.adapters.architectures import architectures

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"
OUTCOMES = ("works", "in part", "refused", "outside", "no attention", "not built")
# Those in make test: rotary positions, windows, narrow values, ALiBi, soft caps, sinks, a position bias, an encoder
# with windows, two sequences, an image beside a text, sound.
QUICK = (
    "bloom", "clip", "deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "modernbert", "t5", "wav2vec2",
    "whisper",
)  # fmt: skip


@functools.cache
def recorded_outcomes() -> dict[str, str]:
    """{architecture: outcome} of the record; empty if it is of another release."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    same = record["versions"]["transformers"] == transformers.__version__
    return {row["architecture"]: row["outcome"] for row in record["tables"]["architectures"]} if same else {}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in architectures()]
)
def test_an_architecture_works_or_refuses(name: str) -> None:
    verdict = judge(name)
    expected = recorded_outcomes().get(name, verdict.outcome)
    assert verdict.outcome == expected, f"the record says {expected}; now: {verdict.reason}"


def test_the_record_holds_enough() -> None:
    """What works, in part or whole, and what is refused with a reason: more than half of what transformers has."""
    outcomes = list(recorded_outcomes().values())
    if not outcomes:
        pytest.skip("the record is of another release of transformers")
    assert set(outcomes) <= set(OUTCOMES)
    assert outcomes.count("works") >= 250
    assert sum(outcome != "not built" for outcome in outcomes) >= 350


def reason_of(verdict: Verdict) -> str:
    """The reason in a few words, by which the tables group."""
    text = verdict.reason
    if verdict.outcome == "refused":
        uses = re.search(r"uses (.*?),", text)
        return uses[1] if uses else text
    if verdict.outcome == "in part":
        return text.split("only in part: ")[1].split(" (")[0]
    if verdict.outcome != "not built":
        return ""
    library = re.search(r"requires the (\w+) library", text)
    if library:
        return f"needs the library {library[1]}"
    for words, reason in (
        ("parameters after shrinking", "too large after shrinking"),
        ("no batch that it takes", "no input of the sweep fits it"),
        ("huggingface.co", "wants a file of the hub"),
    ):
        if words in text:
            return reason
    return "small sizes that do not fit one another, or parts that its config does not name"


def grouped(rows: list[dict[str, Any]], outcome: str, by: str) -> list[dict[str, Any]]:
    """Rows {by: ..., number: ..., architectures: their names} of an outcome."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] == outcome:
            groups.setdefault(row[by], []).append(row["architecture"])
    return [{by: key, "number": len(names), "architectures": ", ".join(names)} for key, names in sorted(groups.items())]


def write_record(path: Path) -> bool:
    """Judge every architecture and write the record; whether nothing was wrong."""
    from attnlab.progress import Progress
    from attnlab.provenance import provenance, write_json

    transformers.logging.set_verbosity_error()
    rows, right = [], True
    progress = Progress("architectures")
    progress.expect(len(architectures()))
    for name, (purpose, model) in architectures().items():
        progress.step()
        try:
            verdict = judge(name)
        except Exception as error:
            right = False
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        row = {"architecture": name, "purpose": purpose, "class": model, **vars(verdict), "why": reason_of(verdict)}
        rows.append(row)
    progress.close()
    purposes = sorted({row["purpose"] for row in rows})
    counts = [
        {"outcome": outcome, "architectures": len(of)}
        | {purpose: sum(row["purpose"] == purpose for row in of) for purpose in purposes}
        for outcome in OUTCOMES
        if (of := [row for row in rows if row["outcome"] == outcome])
    ]
    worked = [row for row in rows if row["outcome"] in ("works", "in part")]
    checks = [
        {"what": "layers swapped one by one", "number": sum(row["layers"] for row in worked)},
        {"what": "W compared with eager attention's", "number": sum(row["compared"] for row in worked)},
        {
            "what": "architectures that generated with and without a cache",
            "number": sum(row["generated"] for row in worked),
        },
    ]
    tables = {
        "counts": counts,
        "checks": checks,
        "works": grouped(rows, "works", "purpose"),
        **{outcome.replace(" ", "_"): grouped(rows, outcome, "why") for outcome in OUTCOMES[1:]},
        "architectures": rows,
    }
    made = {**provenance(), "command": f"python -m tests.adapters.test_architectures {path.name}"}
    write_json(path, {"name": "architectures", "config": {}, "seed": 7, **made, "tables": tables})
    return right


if __name__ == "__main__":
    sys.exit(not write_record(Path(sys.argv[1])))
