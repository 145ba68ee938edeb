"""What a notebook shows of traces, readings and results: short, escaped, without scripts and without colours of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.caches.compact_fit import Certificate
from attnlab.pages.notebook import MOST, Result, notebook_view
from attnlab.reading.faithfulness import Faithfulness

from .examples import NASTY, a_comparison, a_judgement, an_audit, an_evaluation
from .parsing import Node, parse


@pytest.fixture(scope="module")
def trace() -> al.Trace:
    model = al.shipped_model().model
    with torch.no_grad(), al.record(model) as recorded:
        model(torch.arange(2 * 11).reshape(2, 11) + 5)
    return recorded


@pytest.fixture(scope="module")
def statistics() -> al.AttentionStatistics:
    model = al.shipped_model().model
    with torch.no_grad(), al.watch(model) as watched:
        model(torch.arange(11)[None] + 5)
    return watched


def certificate() -> Certificate:
    numbers = torch.arange(6.0).reshape(2, 3) / 10
    numbers[0, 0] = torch.nan
    return Certificate(torch.full((2, 3), 7), numbers, numbers, numbers, numbers)


def faithfulness() -> Faithfulness:
    row = {"kind": "encoder", "layer": 0, "against": "head output", "reading": NASTY, "spearman": 0.5, "inputs": 3}
    return Faithfulness([{**row, "spearman_low": 0.4, "spearman_high": 0.6}])


def planned() -> al.Plan:
    report = {"measured": [{"name": "softmax", "bytes": 4096, "loss": 3.25}]}
    return al.Plan({0: "top-r:r=16", ("cross", 1): "kernel:elu"}, al.PlannedFor(30, 3, 64), report)


def compaction() -> al.Compaction:
    q, k, v = torch.randn(3, 1, 2, 23, 4)
    call = al.AttentionCall(q, k, v, causal=True)
    layer = al.LayerTrace(call, al.Softmax(), al.Softmax()(call), None, "decoder", 0, "layer")
    trace = al.Trace()
    trace.add(layer)
    return al.compact(trace, keys=7)


# By name: the object that a notebook shows, from (a trace, statistics), and rows of its table.
SHOWN: dict[str, tuple[Callable[[al.Trace, al.AttentionStatistics], Any], int]] = {
    "trace": (lambda trace, _: trace, 6),
    "empty trace": (lambda *_: al.Trace(), 0),
    "layer": (lambda trace, _: trace[0], 6),
    "effective": (lambda trace, _: al.effective_attention(trace[0]), 8),
    "alternative": (lambda trace, _: al.alternative_attention(trace[0]), 8),
    "errors": (lambda trace, _: al.approximation_error(trace, "top-r:r=2"), 6),
    "errors of a layer": (lambda trace, _: al.approximation_error(trace, "top-r:r=2").layers[0], 8),
    "reading": (lambda trace, _: al.read(trace, "effective"), 6),
    "faithfulness": (lambda *_: faithfulness(), 1),
    "statistics": (lambda _, statistics: statistics, 6),
    "statistics of a layer": (lambda _, statistics: statistics[0], 8),
    "check": (lambda *_: al.check("uniform", laws=["hidden_keys_get_no_weight"]), 1),
    "plan": (lambda *_: planned(), 2),
    "certificate": (lambda *_: certificate(), 6),
    "compaction": (lambda *_: compaction(), 1),
    "comparison": (lambda *_: Result(a_comparison(NASTY) | {"name": "compare"}), 9),
    "evaluation": (lambda *_: Result(an_evaluation()), 3),
    "judgement": (lambda *_: Result(a_judgement()), 18),
    "audit": (lambda *_: Result(an_audit()), 2),
}


def assert_plain(view: Node) -> None:
    """Nothing runs, nothing is loaded, and no colour is set that a dark notebook would make unreadable."""
    for node in view._walk():
        assert node.tag in {"div", "p", "span", "strong", "wbr", "table", "thead", "tbody", "tr", "th", "td"}, node.tag
        assert not [name for name in node.attributes if name.startswith("on") or name in ("src", "href")]
        assert "color" not in (node.attributes.get("style") or "")
        assert "background" not in (node.attributes.get("style") or "")


@pytest.mark.parametrize("name", SHOWN)
def test_a_view_is_a_short_plain_table(name: str, trace: al.Trace, statistics: al.AttentionStatistics) -> None:
    make, rows = SHOWN[name]
    html = make(trace, statistics)._repr_html_()
    view = parse(html)
    assert_plain(view)
    assert len(html) < 20_000
    assert view.all("strong")[0].text
    assert len([row for body in view.all("tbody") for row in body.all("tr")]) == rows


def test_numbers_are_those_of_the_object(trace: al.Trace) -> None:
    effective = al.effective_attention(trace[0])
    cells = parse(effective._repr_html_()).one("tbody").all("tr")[3].all("td")
    assert float(cells[0].attributes["data-value"] or "") == pytest.approx(float(effective.removed[:, 3].mean()))
    assert "On held-out text: softmax 4,096 bytes, loss 3.250." in parse(planned()._repr_html_()).text


def test_text_is_escaped_and_long_tables_are_cut() -> None:
    view = parse(notebook_view(NASTY, [{"head": i, "name": NASTY} for i in range(1234)], about=NASTY))
    assert_plain(view)
    assert view.text.count(NASTY) == 2 + MOST
    assert len(view.one("tbody").all("tr")) == MOST
    assert f"The first {MOST} of 1,234 rows." in view.text


def test_a_result_is_the_dictionary_that_its_file_holds() -> None:
    plain = an_audit()
    result = Result(plain)
    assert result == plain
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(plain))
    assert repr(result) == repr(plain)
