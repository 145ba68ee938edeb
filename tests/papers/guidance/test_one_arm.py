"""``python -m papers guidance-arm``: every pattern is guided, an arm goes on, and arms are compared at their best rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlab.data import load_tokeniser, train_wordpiece, write_store
from papers.__main__ import main
from papers.common.claims import HELD, NOT_HELD, NOT_TESTABLE, judge
from papers.guidance.claims_arm import CLAIMS
from papers.guidance.electra_arm import LEFT
from papers.guidance.one_arm import PATTERNS, OneArm, guided_heads
from papers.guidance.one_arm_tables import derived
from tests.papers.common.test_smoke import write_glue

CLAIM = {claim.name: claim for claim in CLAIMS}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of letters with full stops."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = np.random.default_rng(0)
    texts = [" ".join(["".join(draw.choice(list("abcdefgh"), 2)) for _ in range(40)]) + " ." for _ in range(30)]
    train_wordpiece(texts, vocab_size=96).save(folder / "tokenizer")
    tokeniser = load_tokeniser(folder / "tokenizer")
    for name, some in (("train", texts[:24]), ("valid", texts[24:])):
        write_store(folder / name, some, tokeniser)
    return folder


@pytest.mark.parametrize(("heads", "layers"), [(4, 12), (8, 12), (4, 6), (12, 1)])
def test_all_five_patterns_are_guided_at_lambda_one_half(heads: int, layers: int) -> None:
    counts = guided_heads(OneArm(guided=True, lr=1e-3, heads=heads, layers=layers))
    assert sum(counts.values()) == layers * heads // 2
    assert all(counts[name] for name in PATTERNS), counts
    assert max(counts.values()) - min(counts.values()) <= layers


@pytest.mark.slow
def test_an_arm_is_trained_tuned_and_not_made_again(corpus: Path, tmp_path: Path) -> None:
    write_glue(tmp_path)
    small = ["--steps", "3", "--tokens", "512", "--width", "16", "--layers", "3", "--tune-epochs", "0.1"]
    places = ["--corpus", str(corpus), "--glue", str(tmp_path / "glue"), "--work", str(tmp_path / "work")]
    out = ["--out", str(tmp_path / "r.json")]
    assert main(["guidance-arm", "--guided", *small, *places, *out]) == 0
    assert main(["guidance-arm", *small, *places, *out]) == 0
    before = json.loads((tmp_path / "r.json").read_text())["tables"]
    assert {row["guided"] for row in before["convergence"]} == {True, False}
    assert [row["step"] for row in before["curves"] if row["guided"]] == [0, 1, 2, 3]
    assert all(row["fell_at_end"] is not None for row in before["convergence"])
    assert "delim" in next(row["guided_heads"] for row in before["arms"] if row["guided"])
    assert {row["task"] for row in before["finetuned"]} == {"SST-2", "MRPC", "RTE"}
    assert main(["guidance-arm", "--guided", *small, *places, *out]) == 0
    after = json.loads((tmp_path / "r.json").read_text())["tables"]
    assert after["finetuned_runs"] == before["finetuned_runs"]


def _arms(losses: dict[tuple[bool, float, int], list[float]]) -> dict[str, list[dict[str, Any]]]:
    """Arms with a held-out loss at every tenth of 100 updates."""
    arms, curves = [], []
    for (guided, lr, seed), curve in losses.items():
        labels = {"language": "english", "norm": "post", "guided": guided, "lr": lr, "seed": seed}
        arms.append({**labels, "steps": 100, "loss": curve[-1]})
        curves += [{**labels, "step": 10 * (i + 1), "loss": loss} for i, loss in enumerate(curve)]
    return {"arms": arms, "curves": curves}


FALLING, SLOW = [9.0, 7.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.05, 3.01, 3.0], [9.0, 8, 7, 6, 5, 4.2, 3.8, 3.4, 3.11, 3.1]


def test_each_arm_counts_at_its_best_rate_and_time_is_counted_to_the_unguided_loss() -> None:
    tables = _arms({(True, 1e-3, 0): FALLING, (True, 5e-4, 0): SLOW, (False, 1e-3, 0): SLOW})
    rows = {row["guided"]: row for row in derived(tables)["convergence"]}
    assert (rows[True]["lr"], rows[True]["steps"], rows[False]["steps"]) == (1e-3, 70, 100)
    assert rows[False]["fell_at_end"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("guided", "plain", "state"),
    [(FALLING, SLOW, HELD), (SLOW, FALLING, NOT_HELD), (FALLING, [*SLOW[:-2], 3.4, 3.1], NOT_TESTABLE)],
)
def test_a_curve_that_still_falls_decides_nothing(guided: list[float], plain: list[float], state: str) -> None:
    result = {"tables": derived(_arms({(True, 1e-3, 0): guided, (False, 1e-3, 0): plain}))}
    assert judge(CLAIM["ag-arm-lower-post"], {"guidance-arm": result}).state == state


def test_an_arm_of_little_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    for split in ("train", "dev"):
        texts = [" ".join("".join(draw.choice(list("abcdefgh"), 3)) for _ in range(60)) + " ." for _ in range(40)]
        (tmp_path / f"{split}.tsv").write_text("text\n" + "\n".join(texts) + "\n")
    small = ["--steps", "2", "--tokens", "512", "--width", "16", "--layers", "3", "--language", "oromo"]
    places = ["--corpus", str(tmp_path), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "r.json")]
    assert main(["guidance-arm", "--guided", *small, *places]) == 0
    assert main(["guidance-arm", *small, *places]) == 0
    tables = json.loads((tmp_path / "r.json").read_text())["tables"]
    assert {(row["language"], row["guided"]) for row in tables["convergence"]} == {("oromo", True), ("oromo", False)}
    assert (tmp_path / "work" / "runs" / "oromo-post-ag-lr0.001-seed0" / "result.json").exists()
    assert main(["guidance-arm", *small, *places, "--glue", str(tmp_path)]) == 2
    assert "GLUE's tasks are English" in capsys.readouterr().err


def test_an_electra_alone(corpus: Path, tmp_path: Path) -> None:
    small = ["--steps", "3", "--tokens", "512", "--width", "16", "--layers", "3"]
    places = ["--corpus", str(corpus), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "r.json")]
    assert main(["guidance-electra-arm", *small, *places]) == 0
    assert main(["guidance-electra-arm", "--guided", *small, *places]) == 0
    tables = json.loads((tmp_path / "r.json").read_text())["tables"]
    assert {(row["guided"], row["left_at"]) for row in tables["arms"]} == {(True, None), (False, None)}
    assert [row["step"] for row in tables["curves"] if row["guided"]] == [0, 1, 2, 3]
    # A detector of a few updates tells no tokens apart: its loss is no lower than the entropy of their share.
    assert all(row["loss"] > LEFT * row["plateau"] for row in tables["curves"])
    verdict = judge(CLAIM["ag-electra-sooner"], {"guidance-electra": {"tables": tables}})
    assert verdict.state == NOT_TESTABLE
    assert verdict.reason == "1 of 1 unguided detectors never left the plateau in 3 updates"
    assert main(["guidance-electra-arm", *small, *places]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["tables"] == tables
