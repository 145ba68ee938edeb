"""The sweep over r: exact at its end, and with a note about every r that is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from attnlab import record
from attnlab.adapters import LoadedModel, swap
from attnlab.evaluation.compare_lines import sweep_lines
from attnlab.evaluation.quality import Windows, quality
from attnlab.evaluation.sweep import sweep, sweep_r
from attnlab.pages import compare_page


@pytest.fixture(scope="module")
def setting() -> tuple[LoadedModel, Windows, Any]:
    """A random GPT-2 of one layer and two heads of width 6, on windows of 8 tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, initializer_range=0.5)).eval()
    ids = torch.randint(3, 53, (2, 8), generator=torch.Generator().manual_seed(5))
    windows = Windows(ids, torch.ones_like(ids), ids, ids.numel())
    with torch.no_grad(), swap(model, "softmax"), record(model) as trace:
        model(ids[:1])
    return LoadedModel(model, None, "causal"), windows, trace


def test_every_family_ends_at_the_exact_model(setting: Any) -> None:
    loaded, windows, trace = setting
    sweeps, notes = sweep_r(loaded, windows, trace, batch=2, patience=3600.0)
    exact = quality(loaded, windows, batch=2)
    assert exact is not None
    assert [row["r"] for row in sweeps["top-r"]] == [1, 2, 4, 7, 8]
    assert [row["r"] for row in sweeps["window"]] == [1, 2, 4, 7, 8]
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


def test_a_search_that_takes_too_long_is_left_out_with_a_note(setting: Any) -> None:
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
    sweeps = sweep(trace, r=(1, 2, 7, 8), quality=lambda mech: None, families=("top-r", "lsh"))
    sweeps |= sweep(trace, r=(7,), quality=lambda mech: None, families=("value-aware",))
    assert [row["r"] for row in sweeps["top-r"]] == [1, 2, 7, 8]
    # Chunks of r / 2 keys: no odd r.
    assert [row["r"] for row in sweeps["lsh"]] == [2, 8]
    assert sweeps["top-r"][-1]["output_error"] < 1e-6
    # Heads of 6: seven keys are enough if they are chosen by their values.
    assert sweeps["value-aware"][0]["output_error"] < 1e-6 < sweeps["top-r"][2]["output_error"]
