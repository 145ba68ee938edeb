"""The toy models of KTIW: permutations, several heads, and the equations that they follow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from papers.__main__ import main
from papers.common.claims import NOT_TESTABLE, judge
from papers.common.row_store import Part, gather
from papers.common.scale import scale_of
from papers.ktiw import claims_heads, permutations
from papers.ktiw.assemble import write_toy_result
from papers.ktiw.config import LocalConfig, PermutationsConfig
from papers.ktiw.local import log_odds, run_figure_7
from papers.ktiw.models.lstm import Classifier
from papers.ktiw.models.lstm_config import ClassifierConfig
from papers.ktiw.permutations import run_figure_3, run_figure_6, run_section_6_2


def test_the_toy_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PermutationsConfig(
        seeds=2,
        length=4,
        batch=3,
        width=5,
        steps=20,
        head_steps=10,
        permute_steps=10,
        figure_6_steps=10,
        heads=2,
        candidates=4,
        pool=9,
    )
    rows = Part(tmp_path / "toys.json")
    tables = rows.content["tables"]
    run_figure_3(config, rows)
    run_section_6_2(config, rows)
    assert {(r["panel"], r["data"]) for r in tables["figure_3"]} == {
        (panel, data) for panel in ("permutations", "mixture") for data in ("hard", "control")
    }
    assert [r["step"] for r in tables["figure_3_curves"][:3]] == [0, 10, 20]
    assert {r["task"] for r in tables["section_6_2"]} == {"copy", "permute"}
    # After ten updates every head is bad, so the scenario that needs a good one is left out.
    run_figure_6(config, rows)
    assert {r["verdict"] for r in tables["heads"]} == {"bad"}
    assert {r["heads"] for r in tables["figure_6"]} == {"random", "all bad"}
    written = write_toy_result("ktiw-multihead", rows.path, tmp_path / "r.json", config=asdict(config))
    [claim] = [claim for claim in claims_heads.CLAIMS if claim.name == "ktiw-one-good-head"]
    verdict = judge(claim, {"ktiw-multihead": written})
    assert verdict.state == NOT_TESTABLE
    assert verdict.reason == "of 4 initialisations 0 learn alone and 4 fail alone: 1 must learn"
    # A base other than the first was chosen, which the scale says.
    assert scale_of(claim, written).endswith("updates of 3")
    written["config"]["base"] = 1
    assert scale_of(claim, written).endswith("updates of 3, base 1")
    # The mean accuracy of two evaluations, at the start and after ten updates.
    first, last = (row for row in tables["figure_6_curves"] if row["heads"] == "random" and row["contexts"] == "sum")
    area = next(row for row in written["tables"]["figure_6_area"] if (row["heads"], row["seed"]) == ("random", 1))
    assert area["area"] == pytest.approx((first["accuracy"][1] + last["accuracy"][1]) / 2, abs=1e-4)
    assert area["updates"] == 10
    # Computed anew, nothing changes.
    before = (tmp_path / "r.json").read_text()
    assert main(["ktiw-multihead", "--tables-only", "--out", str(tmp_path / "r.json")]) == 0
    assert (tmp_path / "r.json").read_text() == before
    monkeypatch.setattr(permutations, "LEARNED", -1.0)
    judged = Part(tmp_path / "judged.json")
    good, bad = permutations.judge_heads(config, judged)
    assert (good, bad) == ([0, 1, 2, 3], [])
    run_figure_7(LocalConfig(steps=2, count=9, evaluate_early=1, evaluate_every=1, embedding=3, width=3, seeds=1), rows)
    assert {r["encoder"] for r in tables["figure_7"]} == {"both ways", "left to right"}
    assert gather({"toys": tmp_path / "toys.json"}).tables == json.loads(json.dumps(tables))


def test_the_toy_model_is_equations_1_and_2(tmp_path: Path) -> None:
    """Issue 20, point 8: no bias in attention and no layer on the context, unless the projected model is asked for."""
    config = PermutationsConfig(length=4, width=5)
    task = permutations.figure_3_tasks(config)["permutations", "hard"]
    [model] = permutations.fresh_models(config.model(task), [0])
    names = {name for name, _ in model.named_parameters()}
    assert "attention.query.weight" in names
    assert not {name for name in names if name.startswith("context") or name == "attention.query.bias"}
    x = task.batch(0)
    with torch.no_grad():
        out = model(x["input_ids"], decoder_input_ids=x["decoder_input_ids"])
        h, s = out.source.hidden, out.states
        alpha = (s @ model.attention.query.weight.T @ h.mT).softmax(-1)
        assert model.hidden is not None
        expected = model.output(torch.relu(model.hidden(torch.cat([alpha @ h, s], -1))))
    torch.testing.assert_close(out.logits, expected)


@pytest.mark.parametrize("name", ["ktiw-permutations", "ktiw-multihead", "ktiw-permute-function"])
def test_commands_of_the_toy_models_run_the_literal_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[dict[str, Any]] = []

    def recorded(experiment: str, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
        ran.append(changes)
        out.write_text('{"tables": {}}')
        return {}

    monkeypatch.setattr("papers.ktiw.assemble.run_toy", recorded)
    for model in ([], ["--model", "projected"]):
        assert main([name, "--out", str(tmp_path / f"{name}.json"), *model]) == 0
    assert ran == [{"literal": True}, {"literal": False}]


@pytest.mark.parametrize("literal", [True, False])
def test_a_head_has_the_same_weights_alone_and_among_others(literal: bool) -> None:
    config = PermutationsConfig(length=4, width=5, literal=literal)
    task = permutations.figure_3_tasks(config)["permutations", "hard"]
    both = permutations.with_heads(config, task, [7, 9])
    alone = permutations.with_heads(config, task, [9])
    assert torch.equal(both.attention.query.weight[5:], alone.attention.query.weight)
    assert torch.equal(both.hidden.weight, alone.hidden.weight)  # type: ignore[union-attr]


def test_log_odds_by_hand() -> None:
    model = Classifier(ClassifierConfig(vocab=5, embedding=3, width=2, attention="uniform"))
    batch = {
        "input_ids": torch.tensor([[2, 1, 3], [2, 3, 1], [2, 3, 3]]),
        "labels": torch.tensor([1, 1, 0]),
        "position": torch.tensor([1, 2, -1]),
    }
    gamma = model.output(model(batch["input_ids"]).source.hidden).squeeze(2)
    by_place = log_odds(model, batch)
    # The second has nothing after its keyword, the third has none.
    assert by_place["keyword"] == round(float(gamma[0, 1].detach()), 4)
    assert by_place["after"] == by_place["last"] == round(float(gamma[0, 2].detach()), 4)
