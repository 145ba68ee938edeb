"""The audit: statistics that a reader can check, its laws on tiny models, and what it refuses."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.adapters import load_model
from attnlab.data import bundled_text
from attnlab.evaluation.audit_changes import check_baseline, read_baseline
from attnlab.evaluation.audit_lines import audit_lines
from attnlab.evaluation.audit_statistics import FINDINGS, STATISTICS, findings_of, head_statistics
from attnlab.evaluation.intervals import student_quantile
from attnlab.pages.audit import audit_page
from attnlab.trace import LayerTrace
from tests.adapters.test_load import save
from tests.pages.examples import NASTY
from tests.pages.parsing import parse

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SETTING: dict[str, Any] = {"windows": 6, "length": 32}
TEXT = bundled_text()
OTHER = TEXT[len(TEXT) // 2 :]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """benchmarks/audit.py, which plants the faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("audit_benchmark", BENCHMARKS / "audit.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def loaded(benchmark: ModuleType) -> al.LoadedModel:
    return benchmark.tiny_model()


@pytest.fixture(scope="module")
def baseline(loaded: al.LoadedModel) -> dict[str, Any]:
    return al.audit(loaded, TEXT, text_name="tiny", **SETTING)


def head(result: dict[str, Any], layer: int, number: int) -> dict[str, Any]:
    return next(row for row in result["heads"] if (row["layer"], row["head"]) == (layer, number))


def test_an_audit_against_itself_is_empty(loaded: al.LoadedModel, baseline: dict[str, Any]) -> None:
    again = al.audit(loaded, TEXT, baseline=json.loads(json.dumps(baseline)), **SETTING)
    assert again["changes"] == []
    assert again["baseline"]["same_text"]
    # Next tokens are hidden from 2 x 4 causal heads.
    assert again["baseline"]["comparisons"] == 8 * (len(STATISTICS) - 1)


def test_another_text_changes_nothing(loaded: al.LoadedModel, baseline: dict[str, Any]) -> None:
    other = al.audit(loaded, OTHER, baseline=baseline, **SETTING)
    assert other["changes"] == []
    assert not other["baseline"]["same_text"]


@pytest.mark.parametrize(("layer", "number"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("fault", ["zeroed", "copied", "frozen"])
def test_a_planted_fault_is_found_where_it_is(
    fault: str, layer: int, number: int, benchmark: ModuleType, loaded: al.LoadedModel, baseline: dict[str, Any]
) -> None:
    before = {name: weight.clone() for name, weight in loaded.model.state_dict().items()}
    # The other query head of the same key/value head.
    source = number ^ 1 if fault == "copied" else None
    with benchmark.planted(loaded.model, fault, layer, number, source):
        result = al.audit(loaded, OTHER, baseline=baseline, **SETTING)
    of_head = [row for row in result["changes"] if (row["layer"], row["head"]) == (layer, number)]
    assert {*benchmark.FAULTS[fault]} & {name for row in of_head for name in row["new_findings"]}
    if fault == "copied":
        assert head(result, layer, number)["nearest_head"] == source
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.model.state_dict().items())


@pytest.mark.slow
def test_the_benchmark_runs(benchmark: ModuleType, tmp_path: Path) -> None:
    rows = benchmark.main(["--tiny", "--write", str(tmp_path)])
    assert [row["right"] for row in rows] == [True] * 5
    # What is there is not made again.
    assert benchmark.main(["--tiny", "--write", str(tmp_path)]) == []


def layer_of(W: torch.Tensor, v: torch.Tensor, projection: torch.Tensor | None = None) -> LayerTrace:
    """A recorded layer whose weights are W (h, q, k)."""

    class Fixed(al.Mechanism):
        def reference(self, call: al.AttentionCall) -> torch.Tensor:
            return W[None]

    heads, n, _ = W.shape
    q = torch.zeros(1, heads, n, 2)
    call = al.AttentionCall(q, q, v[None], causal=True)
    return LayerTrace(call, Fixed(), W[None] @ v[None], projection, "decoder", 0, "layer")


def test_statistics_by_hand() -> None:
    """One head on the first token, one on the previous, one on all alike, and one that is the first again."""
    n = 24
    first = torch.zeros(n, n)
    first[:, 0] = 1
    previous = torch.diag(torch.ones(n - 1), -1)
    previous[0, 0] = 1
    even = torch.ones(n, n).tril()
    even = even / even.sum(-1, keepdim=True)
    # Values of length 3, 4, 0 and 3 at every key.
    v = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [3.0, 0.0]])[:, None].expand(4, n, 2)
    statistics = head_statistics(layer_of(torch.stack([first, previous, even, first]), v), torch.arange(n)[None])
    assert statistics["share"] == pytest.approx([3 / math.sqrt(34), 4 / math.sqrt(34), 0, 3 / math.sqrt(34)])
    assert statistics["entropy"] == pytest.approx([0, 0, 1, 0], abs=1e-5)
    # The token after the sinks still has one as its previous token, but sees fewer than 8 keys.
    assert statistics["sinks"][0] == statistics["sinks"][3] == 1
    assert statistics["sinks"][1] == 0
    assert statistics["first"][0] == pytest.approx(1)
    assert statistics["prev"][1] == pytest.approx(1)
    assert statistics["local"][:2] == [0, 1]
    assert statistics["next"] == [None] * 4
    assert statistics["nearest"][0] == statistics["nearest"][3] == pytest.approx(0, abs=1e-3)
    assert (statistics["nearest_head"][0], statistics["nearest_head"][3]) == (3, 0)
    # A head that adds nothing is like no other, whatever its weights are.
    assert statistics["nearest"][2] == pytest.approx(1)


def test_a_head_is_weighed_after_the_output_projection() -> None:
    n = 5
    W = torch.eye(n).expand(2, n, n)
    v = torch.ones(2, n, 2)
    projection = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    statistics = head_statistics(layer_of(W, v, projection), torch.arange(n)[None])
    assert statistics["share"] == [1.0, 0.0]


def test_numbers_that_are_not_finite_are_refused() -> None:
    layer = layer_of(torch.eye(5).expand(2, 5, 5), torch.full((2, 5, 2), torch.nan))
    with pytest.raises(ValueError, match="decoder layer 0: its attention is NaN or infinite on this text"):
        head_statistics(layer, torch.arange(5)[None])


def test_every_finding_has_both_sides() -> None:
    for name, finding in FINDINGS.items():
        beyond, short = (1.0, 0.0) if finding.above else (0.0, 1.0)
        assert name in findings_of({finding.statistic: beyond})
        assert name not in findings_of({finding.statistic: short})


def test_query_heads_name_their_key_value_head(baseline: dict[str, Any]) -> None:
    assert [row["key_value_head"] for row in baseline["heads"]] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_every_kind_of_model_has_statistics(name: str, tmp_path: Path) -> None:
    loaded = load_model(save(name, tmp_path))
    result = al.audit(loaded, "a b b a . a b " * 60, windows=6, length=24)
    assert al.audit(loaded, "a b b a . a b " * 60, windows=6, length=24, baseline=result)["changes"] == []
    for row in result["heads"]:
        known = {key for key, one in row["statistics"].items() if one is not None}
        assert {"share", "entropy", "sinks", "nearest"} <= known
        assert ("prev" in known) == (row["kind"] != "cross")
        assert ("next" in known) == (row["kind"] == "encoder")
        for one in row["statistics"].values():
            assert one is None or 0 <= one["low"] <= one["mean"] <= one["high"]


def test_a_baseline_of_another_subject_is_refused(
    loaded: al.LoadedModel, baseline: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="windows of 32 tokens, and this audit reads 16"):
        al.audit(loaded, TEXT, baseline=baseline, windows=8, length=16)
    other = load_model(save("llama", tmp_path))
    with pytest.raises(ValueError, match="another tokenizer"):
        al.audit(other, "a b " * 200, baseline=baseline, **SETTING)
    shape = {**baseline["shape"], "layers": [*baseline["shape"]["layers"], ["decoder", 2, 4, 2, 8]]}
    with pytest.raises(ValueError, match="with 3 attention layers of 4 heads; this model is LlamaForCausalLM"):
        al.audit(loaded, TEXT, baseline={**baseline, "shape": shape}, **SETTING)


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: result.pop("name"),
        lambda result: result.update(format=2),
        lambda result: result.update(heads=[]),
        lambda result: result.update(heads=3),
        lambda result: result.update(shape=None),
        lambda result: result["text"].update(windows="8"),
        lambda result: result["heads"][0].pop("layer"),
        lambda result: result["heads"][0].update(statistics={}),
        lambda result: result["heads"][0]["statistics"]["share"].update(odds_mean=math.nan),
        lambda result: result["heads"][0]["statistics"]["share"].update(odds_sd=-1),
        lambda result: result["heads"][0]["statistics"].update(share="x"),
    ],
    ids=range(11),
)
def test_a_damaged_baseline_is_refused(damage: Any, baseline: dict[str, Any]) -> None:
    damaged = copy.deepcopy(baseline)
    damage(damaged)
    with pytest.raises(ValueError, match=r"^the baseline is .*make the baseline anew"):
        check_baseline(damaged)


def test_a_file_names_itself(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json is no audit"):
        read_baseline(tmp_path / "b.json")


def test_too_little_text_is_refused(loaded: al.LoadedModel) -> None:
    with pytest.raises(ValueError, match="windows must be an int of at least 6, got 5"):
        al.audit(loaded, TEXT, windows=5)
    with pytest.raises(ValueError, match="tokens, and an audit needs 6 windows of 64; give a longer text"):
        al.audit(loaded, TEXT[:400], length=64)


def test_lines_and_page_say_what_changed(
    loaded: al.LoadedModel, baseline: dict[str, Any], benchmark: ModuleType
) -> None:
    with benchmark.planted(loaded.model, "copied", 1, 2, 3):
        result = al.audit(loaded, OTHER, baseline=baseline, model_name=NASTY, text_name=NASTY, **SETTING)
    lines = audit_lines(result)
    assert lines[1] == f"changes against the baseline, in 64 comparisons: {len(result['changes'])}"
    assert any(line.startswith("decoder 1.2 (kv 1)") and line.endswith("duplicate") for line in lines)
    page = parse(audit_page(result))
    assert "Heads that changed since the baseline: 2 of 8." in page.text
    assert "like head 3" in page.text
    assert "Length of the head's output after W_O," in page.text
    assert "against the baseline" not in "".join(audit_lines(baseline))


@pytest.mark.parametrize(
    ("freedom", "tail", "value"), [(1, 0.025, 12.7062), (7, 1e-5, 10.1027), (14, 1e-5, 6.2865), (100, 0.025, 1.98397)]
)
def test_quantiles_of_student(freedom: int, tail: float, value: float) -> None:
    assert student_quantile(freedom, tail=tail) == pytest.approx(value, rel=1e-4)
