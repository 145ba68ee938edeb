"""``python -m papers value-aware-lm``: the losses of windows, what is computed from them, and the claims on it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from papers.__main__ import main
from papers.common.claims import HELD, NOT_HELD, NOT_TESTABLE, judge
from papers.value_aware.claims_lm import CLAIMS
from papers.value_aware.config import RealLmConfig
from papers.value_aware.real_lm import mechanisms_of, searched_mechanisms
from papers.value_aware.real_lm_tables import derived
from tests.papers.value_aware.cases import write_language_model

WORDS = [f"w{i}" for i in range(23)]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("lm"), WORDS)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(WORDS[i * i % 23] for i in range(80)))
    return path


@pytest.fixture(scope="module")
def command(language_model: Path, text: Path) -> list[str]:
    sizes = ["--windows", "4", "--length", "19", "--search-windows", "3", "--search-length", "7", "--device", "cpu"]
    return ["value-aware-lm", "--model", str(language_model), "--text", str(text), *sizes]


@pytest.fixture(scope="module")
def run(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    assert main([*command, "--work", str(folder / "work"), "--out", str(folder / "r.json")]) == 0
    return folder


@pytest.fixture
def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "r.json").read_text())


def test_every_mechanism_scores_the_same_windows(result: dict[str, Any]) -> None:
    config, tables = RealLmConfig(), result["tables"]
    rows = {(row["length"], row["spec"]): row for row in tables["perplexity"]}
    assert {spec for length, spec in rows if length == 19} >= {one.spec for one in mechanisms_of(config, 4)}
    assert {spec for length, spec in rows if length == 7} == {one.spec for one in searched_mechanisms(config, 4)}
    assert {row["windows"] for (length, _), row in rows.items() if length == 7} == {3}
    for length in (7, 19):
        exact, aware = rows[length, "softmax"], rows[length, "value-aware:r=5"]
        assert exact["perplexity"] == pytest.approx(math.exp(exact["loss"]))
        assert aware["above"] == pytest.approx(0, abs=1e-5)
    # With all keys of a window the largest weights are exact attention.
    assert rows[19, "top-r:r=32"]["above"] == pytest.approx(0, abs=1e-5)


def test_losses_of_windows_are_those_of_the_model(result: dict[str, Any], language_model: Path, text: Path) -> None:
    from attnlab.adapters import load_model

    model, tokenizer, _ = load_model(language_model)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])[19:38]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:])
    row = next(r for r in result["tables"]["windows"] if (r["length"], r["spec"], r["window"]) == (19, "softmax", 0))
    assert row["losses"][1] == pytest.approx(float(loss), rel=1e-5)
    assert row["predicted"] == 18


def test_output_errors_are_smaller_with_values_in_sight(result: dict[str, Any]) -> None:
    errors = {row["spec"]: row["output"] for row in result["tables"]["output_error"]}
    assert errors["value-aware:r=1"] <= errors["top-r:r=1"]
    for r in (2, 4):
        assert errors[f"value-aware:r={r}"] < errors[f"top-r:r={r}"]
    assert errors["value-aware:r=5"] == pytest.approx(0, abs=1e-5)


def test_a_run_goes_on_where_it_ended_and_keeps_to_its_text(
    command: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    shutil.copytree(run / "work", tmp_path / "work")
    work = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "r.json")]
    assert main([*command, *work, "--seconds", "0"]) == 0
    both = [json.loads((folder / "r.json").read_text())["tables"] for folder in (run, tmp_path)]
    assert both[0] == both[1]
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + " w3")
    capsys.readouterr()
    assert main([*command, *work, "--text", str(other)]) == 2
    assert "name an empty folder" in capsys.readouterr().err


def test_too_short_a_text_and_another_kind_of_model_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from attnlab.adapters.load import SHIPPED

    work = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "r.json")]
    assert main([*command, *work, "--windows", "9"]) == 2
    assert "name a longer text or fewer windows" in capsys.readouterr().err
    assert main([*command, *work, "--model", str(SHIPPED)]) == 2
    assert "no causal language model" in capsys.readouterr().err


def _windows(spec: str, family: str, r: int | None, losses: list[float]) -> list[dict[str, Any]]:
    """Two rows, of the first window and of the others."""
    labels = {"length": 7, "family": family, "r": r, "spec": spec, "predicted": 6}
    return [{**labels, "window": 0, "losses": losses[:1]}, {**labels, "window": 1, "losses": losses[1:]}]


def test_differences_are_paired_over_the_windows_that_both_have() -> None:
    rows = _windows("softmax", "softmax", None, [1.0, 2.0, 3.0])
    rows += _windows("top-r:r=2", "top-r", 2, [2.0, 3.0, 4.5])
    rows += _windows("value-aware:r=2", "value-aware", 2, [1.5, 2.5])
    tables = derived({"windows": rows})
    (against,) = tables["against_top_r"]
    assert (against["windows"], against["saved"], against["low"], against["high"]) == (2, 0.5, 0.5, 0.5)
    above = {row["spec"]: row.get("above") for row in tables["perplexity"]}
    assert above == {"softmax": None, "top-r:r=2": pytest.approx(3.5 / 3), "value-aware:r=2": 0.5}


@pytest.mark.parametrize(
    ("aware", "state"),
    [([1.5, 2.5, 3.9], HELD), ([2.5, 3.4, 5.1], NOT_HELD), ([1.0, 4.0, 4.4], NOT_TESTABLE)],
)
def test_the_headline_is_judged_over_windows(aware: list[float], state: str) -> None:
    rows = _windows("softmax", "softmax", None, [1.0, 2.0, 3.0]) + _windows("top-r:r=2", "top-r", 2, [2.0, 3.0, 4.5])
    rows += _windows("value-aware:r=2", "value-aware", 2, aware)
    claim = next(claim for claim in CLAIMS if claim.name == "ova-lm-aware")
    assert judge(claim, {"value-aware-lm": {"tables": derived({"windows": rows})}}).state == state
