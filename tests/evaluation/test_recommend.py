"""Plans: what they swap in, how they are chosen, and that what is promised was measured."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab
from attnlab import AttentionCall, mechanism, record
from attnlab.adapters import LoadedModel, convert, swap
from attnlab.adapters.plan import Plan, swap_plan
from attnlab.cli import main
from attnlab.evaluation.compare import CompareConfig, compare
from attnlab.evaluation.compare_lines import recommend_lines
from attnlab.evaluation.plans import Unit, greedy, unbeaten, write_plans
from attnlab.evaluation.quality import IGNORED, Windows, quality
from attnlab.evaluation.recommend import RecommendConfig, choosing_and_held_out, recommend
from attnlab.evaluation.sweep import sweep_r
from attnlab.mechanisms.per_head import PerHead, per_head
from attnlab.pages import compare_page
from tests.adapters import zoo as hf_zoo
from tests.tolerance import assert_close
from tests.unchecked import unchecked

LENGTH = 13
SHIPPED = Path(attnlab.__file__).parent / "shipped" / "mlm"


@pytest.fixture(scope="module")
def setting() -> tuple[LoadedModel, Windows, Any]:
    """A random BERT, text of random tokens of which some are to be guessed, and its trace."""
    model = hf_zoo.build("bert")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, hf_zoo.VOCABULARY, (5, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > 0.4, IGNORED)
    windows = Windows(ids, torch.ones_like(ids), labels, ids.numel())
    with torch.no_grad(), record(model) as trace:
        model(ids[:2])
    return LoadedModel(model, None, "mlm"), windows, trace


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**hf_zoo.inputs(model)).logits


def test_a_plan_of_softmax_changes_nothing_and_one_of_others_is_nested_swaps() -> None:
    model = hf_zoo.build("bert")
    own = logits(model)
    with swap_plan(model, Plan({0: "softmax", 1: "softmax", ("encoder", 2): "softmax"})):
        assert_close(logits(model), own)
    with swap_plan(model, Plan({0: "top-r:r=2", ("encoder", 2): "window:r=3"})):
        planned = logits(model)
    with swap(model, "top-r:r=2", layers=0), swap(model, "window:r=3", layers=2):
        assert torch.equal(planned, logits(model))
    assert (planned - own).abs().max() > 1e-3
    assert torch.equal(logits(model), own)


def test_swap_and_convert_take_a_plan() -> None:
    model = hf_zoo.build("bert")
    plan = Plan({0: "top-r:r=2", ("encoder", 2): "per-head:heads=softmax/softmax/window:r=3/top-r:r=1"})
    with swap_plan(model, plan):
        planned = logits(model)
    with swap(model, plan):
        assert torch.equal(logits(model), planned)
    with pytest.raises(ValueError, match="a plan names its layers"), swap(model, plan, layers=[0]):
        pass
    with pytest.raises(ValueError, match="a plan names its layers"):
        convert(model, plan, layers=[0])
    with pytest.raises(ValueError, match="names no layer"):
        convert(model, Plan({}), copy=True)
    assert_close(logits(convert(model, plan, copy=True)), planned)


def test_a_plan_is_undone_after_an_error() -> None:
    model = hf_zoo.build("bert")
    own = logits(model)
    with pytest.raises(ValueError, match="no layer"), swap_plan(model, Plan({0: "top-r:r=1", 9: "softmax"})):
        pass
    assert torch.equal(logits(model), own)


def test_plans_are_saved_and_read(tmp_path: Path) -> None:
    plan = Plan({1: "top-r:r=3", ("cross", 0): "per-head:heads=softmax/lsh:r=4;rounds=2"})
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    (tmp_path / "bad.json").write_text('{"layers": {"one": "softmax"}}')
    with pytest.raises(ValueError, match=r'bad.json: not a plan .*"3" or "cross 3", got \'one\''):
        Plan.load(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="a plan is"):
        Plan.load(tmp_path / "list.json")
    for wrong, message in (
        ({0: "top-q"}, "no mechanism named"),
        ({"0": "softmax"}, "a layer is"),
        ({0: 3}, "spec str"),
    ):
        with pytest.raises(ValueError, match=message):
            unchecked(Plan, layers=wrong)


def test_each_head_attends_as_its_own_mechanism_would() -> None:
    specs = ["softmax", "top-r:r=2", "kernel:poly,degree=2", "top-r:r=2"]
    mixed = mechanism(per_head(specs))
    q, k, v = (torch.randn(2, h, n, w, dtype=torch.float64) for h, n, w in ((4, 5, 11), (2, 7, 11), (2, 7, 3)))
    call = AttentionCall(q, k, v, mask=torch.rand(2, 4, 5, 7) > 0.3, bias=None)
    plain = AttentionCall(q, k, v)
    for i, spec in enumerate(specs):
        assert_close(mixed(plain)[:, i], mechanism(spec)(plain)[:, i])
        assert_close(mixed.weights(plain)[:, i], mechanism(spec).weights(plain)[:, i])
    masked = mechanism(per_head(["softmax", "top-r:r=2"] * 2))
    assert_close(masked(call)[:, 3], mechanism("top-r:r=2")(call)[:, 3])
    assert_close(masked(call), mechanism(per_head(["softmax", "top-r:r=2"]))(call))


def test_per_head_refuses_what_it_cannot_share_out() -> None:
    call = AttentionCall(*(torch.zeros(1, 4, 3, 2) for _ in range(3)))
    with pytest.raises(ValueError, match="3 specs cannot be shared out among 4 heads"):
        PerHead("softmax/softmax/softmax")(call)
    with pytest.raises(ValueError, match="no mechanism named 'nothing'"):
        PerHead("softmax/nothing")
    with pytest.raises(ValueError, match="without parameters or heads of its own"):
        PerHead("softmax/per-head")
    assert per_head(["top-r:r=2"] * 5) == "top-r:r=2"


def test_greedy_by_hand() -> None:
    a, b = Unit("encoder", 0, 2), Unit("encoder", 1, 2)
    increase = {(a, "cheap"): 0.3, (a, "dear"): 0.0, (b, "cheap"): 0.5, (b, "dear"): 0.1}
    wanted = ["cheap", "dear"]
    assert greedy(increase, wanted=wanted, allowance=0.0) == [(a, "dear")]
    # Both on the dear one cost 0.1; then moving a on costs 0.3 more.
    assert greedy(increase, wanted=wanted, allowance=0.4) == [(a, "dear"), (b, "dear"), (a, "cheap")]
    assert dict(greedy(increase, wanted=wanted, allowance=0.8)) == {a: "cheap", b: "cheap"}
    assert greedy(increase, wanted=["cheap"], allowance=0.3) == [(a, "cheap")]
    assert greedy({}, wanted=wanted, allowance=1.0) == []


@pytest.mark.parametrize("by", ["layers", "heads"])
def test_plans_keep_their_budget_and_the_exact_mechanism_goes_everywhere(
    setting: Any, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, windows, trace = setting

    def in_order(jobs: dict[str, Any], **_: Any) -> dict[str, float]:
        """Softmax is first and fastest: a busy machine decides nothing."""
        for job in jobs.values():
            job()
        return {name: 1.0 + place for place, name in enumerate(jobs)}

    monkeypatch.setattr("attnlab.evaluation.plan_meter.median_seconds", in_order)
    config = RecommendConfig(
        mechanisms=("top-r:r=1", "value-aware:r=d+1", "softmax"), budgets=(0.0, 0.02, 3.0), by=by, repeats=1
    )
    recommendation = recommend(loaded, windows, trace, config=config)
    units = 3 if by == "layers" else 12
    assert recommendation["candidates"] == ["top-r:r=1", "value-aware:r=d+1"]
    assert len(recommendation["sensitivity"]) == 2 * units
    rows = {(row["budget"], row["mechanism"]): row for row in recommendation["rows"]}
    left_out = {(row["budget"], row["mechanism"]): row for row in recommendation["left_out"]}
    assert len(rows) + len(left_out) == 1 + 3 * 3
    with swap(loaded.model, "softmax"):
        exact = quality(loaded, windows, batch=8)
    assert exact is not None
    assert rows[None, "softmax"]["quality"]["loss"] == pytest.approx(exact["loss"], rel=1e-9)
    for (budget, _), row in rows.items():
        with swap_plan(loaded.model, Plan.from_json(row["plan"])):
            again = quality(loaded, windows, batch=8)
        assert again is not None
        assert row["quality"]["loss"] == pytest.approx(again["loss"], rel=1e-6)
        assert row["loss_increase"] == pytest.approx(again["loss"] / exact["loss"] - 1, abs=1e-6)
        assert row["loss_increase"] <= (budget or 0.0) + 2e-5
        assert row["time_ratio"] > 0
        assert 0 < row["attention_bytes"] <= 1
    # What is exact goes everywhere within no budget at all, and reads as much as softmax: it does not pay.
    assert left_out[0.0, "value-aware:r=d+1"]["replaced"] == units
    assert "softmax" in left_out[0.0, "value-aware:r=d+1"]["why"]
    # With three times the loss to spend, the most wanted mechanism is everywhere.
    assert rows[3.0, "mix"]["plan"]["layers"] == {f"encoder {i}": "top-r:r=1" for i in range(3)}
    assert left_out[3.0, "top-r:r=1"]["why"] == "the same plan as mix within +300 %"


def test_held_out_windows_are_measured_and_have_no_part_in_the_choice(setting: Any) -> None:
    loaded, windows, trace = setting
    seen, unseen = choosing_and_held_out(windows)
    assert unseen is not None
    assert torch.equal(seen.input_ids, windows.input_ids[[0, 2, 4]])
    assert torch.equal(unseen.labels, windows.labels[[1, 3]])
    assert choosing_and_held_out(unseen)[0].tokens == LENGTH
    assert choosing_and_held_out(choosing_and_held_out(unseen)[0])[1] is None
    config = RecommendConfig(mechanisms=("top-r:r=1",), budgets=(3.0,), repeats=1)
    alone = recommend(loaded, seen, trace, config=config)["rows"][1]
    row = recommend(loaded, seen, trace, config=config, held_out=unseen)["rows"][1]
    assert alone["held_out_increase"] is None
    assert row["quality"] == alone["quality"]
    with swap(loaded.model, "softmax"):
        exact = quality(loaded, unseen, batch=8)
    with swap_plan(loaded.model, Plan.from_json(row["plan"])):
        planned = quality(loaded, unseen, batch=8)
    assert exact is not None
    assert planned is not None
    assert row["held_out_increase"] == pytest.approx(planned["loss"] / exact["loss"] - 1, abs=1e-6)


def test_a_refused_mechanism_has_its_reason_and_is_not_proposed(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, windows, trace = setting
    monkeypatch.setattr(attnlab.Window, "refuse", lambda self, call: (_ for _ in ()).throw(ValueError("no window")))
    config = RecommendConfig(mechanisms=("window:r=3",), budgets=(1.0,), repeats=1)
    recommendation = recommend(loaded, windows, trace, config=config)
    assert all("no window" in row["refused"] for row in recommendation["sensitivity"])
    assert [row["mechanism"] for row in recommendation["rows"]] == ["softmax"]
    assert recommendation["recommended"] is None
    assert recommendation["sentence"].startswith("keep softmax: ")


def plan_row(budget: float | None, loss: float, share: float, time: float, *, layers: int = 1) -> dict[str, Any]:
    plan = {"layers": {} if budget is None else {str(i): f"window:r={round(100 * share)}" for i in range(layers)}}
    name = "softmax" if budget is None else "mix"
    quality = {"name": "perplexity", "value": 9.0, "loss": loss}
    costs = {"attention_bytes": share, "time_ratio": time, "loss_increase": loss - 1, "held_out_increase": None}
    return {
        "budget": budget,
        "mechanism": name,
        "quality": quality,
        "replaced": len(plan["layers"]),
        "plan": plan,
        **costs,
    }


def test_plans_that_do_not_pay_are_left_out() -> None:
    rows = [
        plan_row(None, 1.0, 1.0, 1.0),
        # No layer bears it: softmax under another name.
        plan_row(0.0, 1.0, 1.0, 0.9, layers=0),
        plan_row(0.1, 1.1, 0.4, 1.2),
        # Worse, and larger than the one before.
        plan_row(0.2, 1.2, 0.5, 1.2),
        # Worse and slower than softmax, and no smaller.
        plan_row(0.3, 1.3, 1.0, 1.5),
        # Worse, but faster than all others.
        plan_row(0.4, 1.4, 0.9, 0.5),
    ]
    kept, left_out = unbeaten(rows)
    assert [row["budget"] for row in kept] == [None, 0.1, 0.4]
    assert [row["why"] for row in left_out] == [
        "the same plan as softmax",
        "mix within +10 % is as good, as small and as fast",
        "softmax is as good, as small and as fast",
    ]


@pytest.mark.parametrize("by", ["layers", "heads"])
def test_a_large_model_has_its_sensitivity_estimated_and_few_passes(
    setting: Any, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, windows, trace = setting
    passes = []
    monkeypatch.setattr(loaded.model, "forward", counting(loaded.model.forward, passes))
    parameters = sum(p.numel() for p in loaded.model.parameters())
    config = RecommendConfig(
        mechanisms=("top-r:r=1", "top-r:r=5"), budgets=(0.0, 3.0), by=by, repeats=1, work=50.0 * LENGTH * parameters
    )
    partial: list[dict[str, Any]] = []
    recommendation = recommend(loaded, windows, trace, config=config, on_result=lambda r: partial.append(deepcopy(r)))
    assert recommendation["sensitivity_is"] == "estimated"
    assert recommendation["tokens"]["chosen_on"] == LENGTH
    assert sum(passes) <= 50 + 4 * len(recommendation["rows"])
    assert len(partial) == 2 + 1
    assert all(row["time_ratio"] is None for row in partial[0]["rows"])
    # More keys change the output less.
    by_mechanism = {spec: [row["increase"] for row in recommendation["sensitivity"] if row["mechanism"] == spec]
                    for spec in recommendation["candidates"]}  # fmt: skip
    assert sum(by_mechanism["top-r:r=5"]) < sum(by_mechanism["top-r:r=1"])
    assert recommendation["rows"][-1]["replaced"] == (3 if by == "layers" else 12)
    assert all(sum(row["placed"].values()) == row["replaced"] for row in recommendation["rows"])
    counts = [int(n) for line in recommend_lines(recommendation) for n in re.findall(r" in (\d+) heads", line)]
    # Heads of a layer that agree have one spec, and are as many as they are.
    assert sum(counts) == (0 if by == "layers" else sum(row["replaced"] for row in recommendation["rows"]))


def counting(forward: Any, passes: list[int]) -> Any:
    def counted(*inputs: Any, **options: Any) -> Any:
        passes.append(1)
        return forward(*inputs, **options)

    return counted


def test_the_recommendation_is_one_sentence_and_its_plan_can_be_swapped_in(setting: Any) -> None:
    loaded, windows, trace = setting
    config = RecommendConfig(mechanisms=(f"top-r:r={LENGTH - 1}", "top-r:r=1"), budgets=(0.02,), repeats=1)
    recommendation = recommend(loaded, windows, trace, config=config)
    sentence = recommendation["sentence"]
    assert re.match(r"use top-r:r=\d+ in encoder layers? [\d, -]+.*: loss .*attention bytes 0\.\d+, time ", sentence)
    assert recommend_lines(recommendation)[-1] == sentence
    with swap_plan(loaded.model, Plan.from_json(recommendation["recommended"])):
        assert quality(loaded, windows, batch=8) is not None


def test_bad_settings_are_errors() -> None:
    with pytest.raises(ValueError, match="other than softmax"):
        RecommendConfig(mechanisms=("softmax",))
    with pytest.raises(ValueError, match="budgets are shares"):
        RecommendConfig(budgets=(-0.1,))
    with pytest.raises(ValueError, match="'layers' or 'heads'"):
        RecommendConfig(by="rows")
    loaded = LoadedModel(torch.nn.Identity(), None, "seq2seq")
    with pytest.raises(ValueError, match="masked or a causal language model"):
        compare(loaded, "", config=CompareConfig(recommend="layers"), model_name="", text_name="")


def test_it_is_printed_shown_and_written(setting: Any, tmp_path: Path) -> None:
    loaded, windows, trace = setting
    config = RecommendConfig(mechanisms=("top-r:r=1", "top-r:r=7"), budgets=(0.05, 3.0), by="heads", repeats=1)
    recommendation = recommend(loaded, windows, trace, config=config)
    lines = recommend_lines(recommendation)
    header = "plan heads MLM error loss held out attention bytes time"
    assert lines[0].split() == header.split()
    assert lines[1].split()[:2] == ["softmax", "0/12"]
    assert any(re.match(r"mix within \+300 %\s+12/12", line) for line in lines)
    # A plan of three layers in which all heads agree is written by layers, and counted by heads.
    assert any(line.startswith("mix within +300 %: top-r:r=1 in ") for line in lines)
    paths = write_plans(tmp_path, recommendation)
    assert tmp_path / "300-percent-mix.json" in paths
    assert Plan.load(tmp_path / "300-percent-mix.json").layers == {("encoder", i): "top-r:r=1" for i in range(3)}
    page = compare_page({"rows": [], "recommendation": recommendation})
    assert "What each part of the model can bear" in page
    assert "12 of 12" in page
    assert "top-r:r=7" in page


def test_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No search for supports between 1 and d + 1, which takes most of the time.
    monkeypatch.setattr("attnlab.evaluation.compare.sweep_r", partial(sweep_r, patience=0.0))
    words = [
        "compare",
        str(SHIPPED),
        "--tokens",
        "20",
        "--length",
        "16",
        "-m",
        "top-r:r=2",
        "-o",
        str(tmp_path / "p.html"),
    ]
    assert main([*words, "--sweep", "r", "--recommend", "--plans", str(tmp_path / "plans"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["r"] for row in result["sweeps"]["top-r"]] == [1, 2, 4, 8, 16]
    recommendation = result["recommendation"]
    rows = recommendation["rows"]
    assert len(rows) + len(recommendation["left_out"]) == 1 + 5
    written = tmp_path / "p.plan.json"
    assert written.exists() == (recommendation["recommended"] is not None)
    if written.exists():
        assert Plan.load(written).to_json() == recommendation["recommended"]
    assert len(list((tmp_path / "plans").iterdir())) == sum(row["replaced"] > 0 for row in rows)
    page = (tmp_path / "p.html").read_text()
    assert "How many keys are enough" in page
    assert "What each part of the model can bear" in page
    assert main([*words, "--plans", str(tmp_path / "more")]) == 2
    assert "--recommend" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()
