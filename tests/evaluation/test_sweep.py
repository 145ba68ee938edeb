"""The sweep over r: at the ends it is what one knows, and what is left out is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlab import record
from attnlab.adapters import LoadedModel, swap
from attnlab.evaluation.compare_lines import sweep_lines
from attnlab.evaluation.quality import Windows, quality
from attnlab.evaluation.sweep import powers_of_two, sweep, sweep_r
from attnlab.pages import compare_page
from tests.adapters import zoo as hf_zoo


@pytest.fixture(scope="module")
def setting() -> tuple[LoadedModel, Windows, Any]:
    """A random GPT-2 with heads of width 6 on windows of 11 tokens."""
    model = hf_zoo.build("gpt2")
    ids = torch.randint(3, hf_zoo.VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(5))
    windows = Windows(ids, torch.ones_like(ids), ids, ids.numel())
    with torch.no_grad(), swap(model, "softmax"), record(model) as trace:
        model(ids[:2])
    return LoadedModel(model, None, "causal"), windows, trace


def test_every_family_ends_at_the_exact_model(setting: Any) -> None:
    loaded, windows, trace = setting
    sweeps, notes = sweep_r(loaded, windows, trace, batch=2, patience=3600.0)
    exact = quality(loaded, windows, batch=2)
    assert exact is not None
    assert [row["r"] for row in sweeps["top-r"]] == [1, 2, 4, 7, 8, 11]
    assert [row["r"] for row in sweeps["window"]] == [1, 2, 4, 7, 8, 11]
    # With d + 1 = 7 keys chosen by their values the output is exact, and no larger r is needed.
    assert [row["r"] for row in sweeps["value-aware"]] == [1, 2, 4, 7]
    for family in ("top-r", "window", "value-aware"):
        last = sweeps[family][-1]
        assert last["quality"] == pytest.approx(exact["value"], rel=1e-4)
        assert last["output_error"] == pytest.approx(0, abs=1e-4)
        assert sweeps[family][0]["output_error"] > 0.05
    errors = [row["output_error"] for row in sweeps["value-aware"]]
    assert errors == sorted(errors, reverse=True)
    for aware, oblivious in zip(sweeps["value-aware"], sweeps["top-r"], strict=False):
        assert aware["output_error"] <= oblivious["output_error"] + 1e-6
    assert all(note.startswith("lsh: not possible here with r = 1") for note in notes)


def test_a_search_that_takes_too_long_is_left_out_and_told(setting: Any) -> None:
    loaded, windows, trace = setting
    sweeps, notes = sweep_r(loaded, windows, trace, batch=2, patience=0.0)
    assert [row["r"] for row in sweeps["value-aware"]] == [1, 7]
    assert notes[0].startswith("value-aware: r = 2, 4 left out")
    result = {
        "rows": [{"mechanism": "softmax", "quality": {"name": "perplexity", "value": 9.0, "exact": 9.0}}],
        "sweeps": sweeps,
        "sweep_notes": notes,
    }
    lines = sweep_lines(result)
    assert lines[0].startswith("perplexity")
    assert lines[1].split() == ["r", "top-r", "error", "value-aware", "error", "window", "error", "lsh", "error"]
    assert lines[3].split()[3:5] == ["-", "-"]
    assert notes[0] in lines
    page = compare_page(result)
    assert "How many keys are enough" in page
    assert "left out" in page


def test_without_a_head_over_the_vocabulary_only_the_error_is_swept(setting: Any) -> None:
    loaded, windows, trace = setting
    sweeps, _ = sweep_r(loaded._replace(task="encoder"), windows, trace, batch=2, patience=0.0)
    assert {row["quality"] for row in sweeps["top-r"]} == {None}
    assert sweep_lines({"rows": [], "sweeps": sweeps, "sweep_notes": []})[2].split()[1] == "-"


def test_a_sweep_ends_at_the_exact_output_and_leaves_out_what_refuses(setting: Any) -> None:
    _, _, trace = setting
    found = sweep(trace, r=powers_of_two(11), quality=lambda mech: None, families=("top-r", "value-aware", "lsh"))
    assert [row["r"] for row in found["top-r"]] == [1, 2, 4, 8, 11]
    # Chunks of r / 2 keys: no odd r.
    assert [row["r"] for row in found["lsh"]] == [2, 4, 8]
    for oblivious, aware in zip(found["top-r"], found["value-aware"], strict=True):
        assert aware["output_error"] <= oblivious["output_error"] + 1e-6
    assert found["top-r"][-1]["output_error"] < 1e-6
    # Heads of 6: from seven keys on nothing is lost.
    assert found["value-aware"][3]["output_error"] < 1e-6 < found["top-r"][3]["output_error"]
