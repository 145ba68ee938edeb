"""What a comparison says beside its numbers."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.adapters import LoadedModel, load_model
from attnlab.cli import main
from attnlab.data import bundled_text
from attnlab.evaluation.compare import CompareConfig, _Bench, compare
from attnlab.evaluation.compare_lines import comparison_lines, table_lines
from attnlab.evaluation.quality import default_tokens
from attnlab.evaluation.recommend import RecommendConfig
from attnlab.mechanisms import value_aware
from attnlab.pages import compare_page
from attnlab.progress import Progress
from tests.adapters.test_load import save


@pytest.mark.parametrize(("name", "causal"), [("llama", True), ("bert", False)])
def test_a_mechanism_that_looks_ahead_is_warned_of_in_causal_models(name: str, causal: bool, tmp_path: Path) -> None:
    # The bare encoder of a BERT, since the tokenizer has no mask token.
    loaded = load_model(save(name, tmp_path))
    loaded = loaded if causal else LoadedModel(loaded.model.base_model, loaded.tokenizer, "encoder")
    specs = ("softmax", "lsh:r=4", "per-head:heads=softmax/softmax/softmax/lsh:r=4", "top-r:r=2")
    config = CompareConfig(mechanisms=specs, length=8, tokens=16, traced=1, repeats=1)
    result = compare(loaded, "a b " * 20, config=config, model_name=name, text_name="letters")
    warned = [warning.split(": its outputs depend on later tokens")[0] for warning in result["warnings"]]
    assert warned == ([specs[1], specs[2]] if causal else [])
    assert sum(line.startswith("warning: ") for line in table_lines(result)) == len(warned)


SMALL = CompareConfig(mechanisms=("softmax", "value-aware:r=d+1", "top-r:r=2"), length=16, tokens=200, repeats=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the comparison of a small causal model, what there was each time that a mechanism was finished)."""
    loaded = load_model(save("llama", tmp_path_factory.mktemp("llama")))
    partial: list[dict[str, Any]] = []
    text = " ".join(random.Random(3).choices("abcd", k=160))
    names = {"model_name": "small", "text_name": "letters"}
    result = compare(loaded, text, config=SMALL, on_result=lambda r: partial.append(deepcopy(r)), **names)
    return result, partial


def test_exact_rows_are_called_exact_and_have_no_cost(small: Any) -> None:
    softmax, aware, top = small[0]["rows"]
    assert [row["exact"] for row in (softmax, aware, top)] == [True, True, False]
    assert {softmax[cost] for cost in ("time_ratio", "attention_time_ratio", "memory_ratio")} == {1.0}
    assert {aware[cost] for cost in ("time_ratio", "attention_time_ratio", "memory_ratio")} == {None}
    assert top["time_ratio"] > 0
    assert softmax["quality"]["loss_above"] == softmax["quality"]["loss_above_high"] == 0


def test_every_score_has_an_interval(small: Any) -> None:
    for row in small[0]["rows"]:
        quality = row["quality"]
        assert quality["low"] < quality["value"] < quality["high"]
        assert quality["loss_above_low"] <= quality["loss_above"] <= quality["loss_above_high"]


def test_what_is_finished_is_kept_as_it_comes(small: Any) -> None:
    result, partial = small
    assert [len(one["rows"]) for one in partial] == [1, 2, 3, 3]
    assert [one["complete"] for one in partial] == [False, False, False, True]
    assert partial[-1] == result
    assert any(line == "stopped early: 1 of 3 mechanisms" for line in table_lines(partial[0]))
    assert "Stopped early: 1 of 3 mechanisms." in compare_page(partial[0])
    assert "Stopped early" not in compare_page(result)


def test_the_text_says_how_much_of_it_was_read_and_why(small: Any) -> None:
    text = small[0]["text"]
    assert text["tokens"] < 200
    assert text["why"] == "the whole text; up to 200 tokens would have been read"
    assert any(f"{text['tokens']} tokens" in line and text["why"] in line for line in table_lines(small[0]))


def test_no_head_of_a_causal_model_is_said_to_follow_next(small: Any) -> None:
    assert not any("next" in line for line in table_lines(small[0]))


def test_a_large_model_reads_fewer_tokens() -> None:
    def of(parameters: int) -> int:
        model = torch.nn.Linear(1, parameters, bias=False, device="meta")
        return default_tokens(LoadedModel(model, None, "causal"))

    assert [of(n) for n in (7_000_000, 135_000_000, 10**10)] == [8192, 1481, 1024]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_from_the_first_second(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = Progress("comparing", plain=True)
    progress.stage("reading the model")
    # Without a terminal a line comes with the first part that is finished, so that an error at once is one line.
    assert ("reading the model" in capsys.readouterr().err) == terminal
    progress.expect(4)
    progress.step(2)
    progress.stage("softmax")
    progress.finished("softmax (1 of 2)")
    progress.close()
    shown = capsys.readouterr().err
    assert ("50%" in shown) == terminal
    assert ("comparing: softmax (1 of 2)\n" in shown) != terminal


def test_an_interrupt_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = save("llama", tmp_path), tmp_path / "page.html"
    measure = _Bench.measure

    def stopped(self: Any, spec: str, mech: Any) -> Any:
        if spec == "kernel:elu":
            raise KeyboardInterrupt
        return measure(self, spec, mech)

    monkeypatch.setattr(_Bench, "measure", stopped)
    words = ["compare", str(folder), "--length", "16", "--tokens", "64", "-m", "top-r:r=2", "-m", "kernel:elu"]
    assert main([*words, "-o", str(page)]) == 130
    shown = capsys.readouterr()
    assert "stopped early: 1 of 2 mechanisms" in shown.out
    assert "stopped; what was finished is kept" in shown.err
    assert "comparing: top-r:r=2 (1 of 2)" in shown.err
    assert "top-r:r=2" in page.read_text()


class _Counted:
    """Forward passes of a model, by their tokens, and the queries whose value-aware keys were searched for."""

    def __init__(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens, self.searched = 0, 0
        loaded.model.register_forward_pre_hook(self._forward, with_kwargs=True)
        search = value_aware.caratheodory

        def counted(w: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.searched += w.shape[0] * w.shape[1]
            return search(w, values)

        monkeypatch.setattr(value_aware, "caratheodory", counted)

    def _forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.tokens += kwargs["input_ids"].numel()


@pytest.mark.parametrize("recommended", [None, "heads"])
def test_the_work_of_a_large_model_is_bounded(
    recommended: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass costs parameters times tokens: this model plays one so large that a pass over one window is long."""
    loaded = load_model(save("llama", tmp_path))
    parameters = sum(p.numel() for p in loaded.model.parameters())
    monkeypatch.setattr("attnlab.evaluation.compare.WORK", 16 * parameters)
    monkeypatch.setattr("attnlab.evaluation.compare.SEARCH", 1.0)
    recommend = partial(RecommendConfig, work=4000 * parameters)
    monkeypatch.setattr("attnlab.evaluation.compare.RecommendConfig", recommend)
    counted = _Counted(loaded, monkeypatch)
    specs = ("softmax", "value-aware:r=d+1", "window:r=2", "top-r:r=2")
    config = CompareConfig(mechanisms=specs, length=16, tokens=96, recommend=recommended)
    text = " ".join(random.Random(3).choices("abcd", k=160))
    result = compare(loaded, text, config=config, model_name="large", text_name="letters")
    # Each mechanism reads the text once and a window for the clock, thrice at most, beside softmax.
    most = 4 * 96 + 2 * 16 + 2 * 2 * 3 * 16
    # Six plans at most are timed, thrice and once before, on the three windows that they are chosen on.
    assert counted.tokens <= most + (4000 + 6 * 4 * 48 if recommended else 0)
    # 16 queries of the one window, in each of 3 layers of 4 heads.
    assert 0 < counted.searched <= 16 * 3 * 4
    assert result["errors_over"]["windows"] == 1


def test_untrained_mechanisms_and_a_models_own_attention_are_named() -> None:
    """In the lines and on the page, for whoever compares a mechanism that learns, or a model that has learned one."""
    loaded = al.shipped_model()
    al.convert(loaded.model, "kernel:elu")
    config = CompareConfig(mechanisms=("softmax", "abc-mlp:slots=3", "rfa"), tokens=40, length=24, repeats=1)
    result = compare(loaded, bundled_text(), config=config, model_name="m", text_name="t")
    own, learned = result["warnings"]
    assert learned.startswith("abc-mlp:slots=3 has parameters of its own, which no training has touched here")
    assert own.startswith("this model's own attention is kernel in 6 of 6 layers, with which its MLM error")
    assert "kernel in 6 of 6" in "\n".join(comparison_lines(result))
    assert "no training has touched here" in compare_page(result)
