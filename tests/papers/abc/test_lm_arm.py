"""``abc-lm-arm``: one row of Table 2 alone; it goes on after a kill, and loses no other arm's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.training import read_result
from papers.__main__ import main
from papers.abc import lm_arm
from papers.abc.lm_config import CONFIGS, tables_of
from tests.papers.abc.test_language import corpus, saved
from tests.papers.glue_files import write_mnli

__all__ = ["corpus"]

SMALL = ["width=8", "heads=1", "layers=1", "deep_layers=1", "batch=2", "deep_context=5", "contexts=[0,11]", "length=17"]
# Six updates of two rows of 17 tokens.
TOKENS = "204"


def arm(model: str, corpus: Path, folder: Path, *more: str, status: int = 0) -> dict[str, list[dict[str, Any]]]:
    places = ["--corpus", str(corpus), "--work", str(folder / "work"), "--out", str(folder / "r.json")]
    words = ["abc-lm-arm", "--model", model, "--tokens", TOKENS, *places, *more, "--set", *SMALL]
    assert main(words) == status
    return json.loads((folder / "r.json").read_text())["tables"] if status == 0 else {}


def test_arms_are_added_one_by_one_and_scored_for_every_table_that_has_them(corpus: Path, tmp_path: Path) -> None:
    arm("BASE-None", corpus, tmp_path)
    arm("Linformer-64", corpus, tmp_path)
    arm("BASE-None", corpus, tmp_path, "--seed", "1")
    tables = arm("T2R-pretrained-64", corpus, tmp_path)
    assert {(r["model"], r["seed"], r["context"]) for r in tables["table_2a"]} == {
        (m, s, c) for m, s in (("BASE", 0), ("BASE", 1), ("Linformer", 0)) for c in (0, 11)
    }
    assert [(r["model"], r["seed"]) for r in tables["table_2b"]] == [("BASE", 0), ("BASE", 1), ("T2R-pretrained", 0)]
    assert {r["tokens"] for r in tables["training"]} == {204}
    steps = [r["step"] for r in tables["curves"] if (r["setting"], r["model"], r["seed"]) == ("table_2a", "BASE", 0)]
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    # A second time nothing is trained or scored, and nothing changes.
    assert arm("BASE-None", corpus, tmp_path) == tables


def test_an_arm_that_was_killed_goes_on(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(RuntimeError):
        pass

    losses = lm_arm.held_out_loss

    def killed(*some: Any) -> Any:
        killed.calls += 1  # type: ignore[attr-defined]
        if killed.calls == 4:  # type: ignore[attr-defined]
            raise KilledError("killed")
        return losses(*some)

    killed.calls = 0  # type: ignore[attr-defined]
    whole = arm("ABC_MLP-32", corpus, tmp_path / "whole")
    monkeypatch.setattr(lm_arm, "held_out_loss", killed)
    with pytest.raises(KilledError):
        arm("ABC_MLP-32", corpus, tmp_path / "halves")
    run = tmp_path / "halves" / "work" / "runs" / "ABC_MLP-32-seed0"
    assert read_result(run) is None
    monkeypatch.setattr(lm_arm, "held_out_loss", losses)
    resumed = arm("ABC_MLP-32", corpus, tmp_path / "halves")
    assert resumed["table_2a"] == whole["table_2a"]
    assert resumed["curves"] == whole["curves"]


def test_arms_of_other_sizes_are_refused(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm("BASE-None", corpus, tmp_path)
    wider = [*SMALL[1:], "width=16"]
    places = ["--corpus", str(corpus), "--out", str(tmp_path / "r.json")]
    words = ["abc-lm-arm", "--model", "Linformer-64", "--tokens", TOKENS, *places]
    for work in ("work", "other"):
        assert main([*words, "--work", str(tmp_path / work), "--set", *wider]) == 2
        assert "width=8, this one has width=16" in capsys.readouterr().err
    assert main([*words, "--work", str(tmp_path / "other"), "--replace", "--set", *wider]) == 0
    tables = json.loads((tmp_path / "r.json").read_text())["tables"]
    assert {r["model"] for r in tables["table_2a"]} == {"Linformer"}


def test_a_row_of_table_4_alone(corpus: Path, tmp_path: Path) -> None:
    glue, out = tmp_path / "glue", tmp_path / "r.json"
    write_mnli(glue, [("a b c", "d e")] * 12)
    bert = saved("bert", corpus, tmp_path / "bert")
    # Speed is measured elsewhere; a training of other settings is put aside.
    earlier = {"table_4": [{"model": "old"}], "speed": [{"model": "ABC_MLP", "n": 64}]}
    out.write_text(json.dumps({"name": "abc-mlm", "config": {"length": 512}, "tables": earlier}))
    settings = ["length=29", "batch=2", "tune_length=13", "tune_batch=4", 'tasks=["MNLI"]', "seeds=[0]"]
    places = ["--corpus", corpus, "--glue", glue, "--model", bert, "--work", tmp_path / "work", "--out", out]
    words = [*map(str, places), "--tokens", "174", "--set", *settings, 'epochs={"MNLI":1}']
    assert main(["abc-mlm-arm", "--row", "ABC_MLP-64", *words]) == 2
    assert main(["abc-mlm-arm", "--row", "ABC_MLP-64", "--replace", *words]) == 0
    assert main(["abc-mlm-arm", "--row", "ABC_MLP-64", "--as-converted", *words]) == 0
    tables = json.loads(out.read_text())["tables"]
    assert [(r["model"], r["n"], r["continued"]) for r in tables["table_4"]] == [
        ("ABC_MLP", 64, True), ("ABC_MLP", 64, False),
    ]  # fmt: skip
    assert tables["speed"] == earlier["speed"]
    assert {r["part"] for r in tables["training"]} == {
        "continued ABC_MLP-64", "MNLI ABC_MLP-64", "MNLI ABC_MLP-64-as-converted",
    }  # fmt: skip
    assert [r["step"] for r in tables["curves"]] == [0, 1, 2, 3]
    assert main(["abc-mlm-arm", "--row", "ABC_MLP-64", *words]) == 0
    assert json.loads(out.read_text())["tables"]["table_4"] == tables["table_4"]


def test_what_starts_from_a_trained_model_needs_it(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm("T2R-pretrained-64", corpus, tmp_path, status=2)
    assert "first run this command with --model BASE-None" in capsys.readouterr().err
    arm("Transformer-1", corpus, tmp_path, status=2)
    assert "Table 2 has no row 'Transformer-1'" in capsys.readouterr().err


def test_a_training_serves_both_tables() -> None:
    assert list(tables_of("ABC_MLP-64")) == ["table_2a", "table_2b"]
    config = CONFIGS["arm"]
    assert (config.layers, config.layer_dropout) == (config.deep_layers, 0.0)
    whole = lm_arm.LmArm("BASE-None", config)
    assert whole.steps == round(300e6 / (64 * 512))
    assert config.width // config.heads == 128
