"""A new reading is one file: read, explore, compare, faithfulness and the command line then know it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attnlab as al
from attnlab.adapters.load import SHIPPED
from attnlab.cli import main
from attnlab.reading import named_reading, reading, registry
from attnlab.reading.approximation import reading_error
from attnlab.reading.faithfulness import compared_readings

TEXT = "The old ferry stayed in the harbour."
FILE = '''
"""Half of everything."""

from attnlab.reading import reading


@reading("half", "Half of the weight.")
def half(layer):
    return layer.weights() / 2


def third(layer):
    """A third of the weight."""
    return layer.weights() / 3
'''


@pytest.fixture
def trace() -> al.Trace:
    model, tokenizer, _ = al.shipped_model()
    with torch.no_grad(), al.record(model) as trace:
        model(**tokenizer(TEXT, return_tensors="pt"))
    return trace


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    known = dict(registry._load())
    yield
    registry._readings.clear()
    registry._readings.update(known)
    registry._load.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with one file and an entry point, as ``pip install`` leaves it."""
    (tmp_path / "half_reading.py").write_text(FILE)
    info = tmp_path / "half_reading-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-reading\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[attnlab.readings]\nhalf = half_reading:half\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    registry._load.cache_clear()
    yield
    sys.modules.pop("half_reading", None)


def test_an_entry_point_is_known_everywhere(
    installed: None, trace: al.Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "half" in al.reading_names()
    half = al.read(trace, "half").maps["encoder", 3]
    torch.testing.assert_close(half, trace[3].weights() / 2)
    names = [one["name"] for one in al.explore(trace, readings=("standard", "half")).packed.meta["items"][0]["stacks"][0]["readings"]]  # fmt: skip
    assert names == ["standard", "half"]
    assert "half" in compared_readings()
    model, tokenizer, _ = al.shipped_model()
    inputs = {k: t for k, t in tokenizer(TEXT, return_tensors="pt").items() if k != "token_type_ids"}
    rows = al.faithfulness(model, [inputs], readings=["standard", "half"], keys=3, resamples=2).rows()
    assert {row["reading"] for row in rows} == {"standard", "half"}
    page = tmp_path / "page.html"
    assert main(["explore", str(SHIPPED), TEXT, "--reading", "half", "-o", str(page), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["shown"][0]["kinds"]["encoder"]["readings"]
    assert shown == ["standard", "half"]
    assert main(["explore", "--list-readings"]) == 0
    assert "half             Half of the weight." in capsys.readouterr().out


def test_compare_measures_the_error_of_a_new_reading_s_maps(
    installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(SHIPPED), "--tokens", "20", "--length", "16", "-m", "top-r:r=2", "--reading", "half"]
    assert main([*words, "-o", str(tmp_path / "p.html"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    # Half of the weights is as far off as the weights are.
    assert row["reading_errors"]["half"] == pytest.approx(row["score_error"], rel=1e-4)
    assert main([*words, "-o", str(tmp_path / "p.html")]) == 0
    assert "half map" in capsys.readouterr().out.splitlines()[0]


def test_a_function_in_a_file_is_a_reading(fresh_registry: None, trace: al.Trace, tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(FILE)
    third = al.read(trace, f"{file}:third")
    assert third.name == "my.py:third"
    torch.testing.assert_close(third.maps["encoder", 0], trace[0].weights() / 3)
    assert named_reading(f"{file}:third").summary == "A third of the weight."
    # A decorated function keeps the name that it registers.
    assert al.read(trace, f"{file}:half").name == "half"
    for wrong, said in ((f"{file}:nothing", "has no function 'nothing'"), ("./nowhere.py:half", "there is no file")):
        with pytest.raises(ValueError, match=said):
            al.read(trace, wrong)


def test_mistakes_are_sentences(fresh_registry: None) -> None:
    with pytest.raises(ValueError, match=r"did you mean 'rollout'\? the readings are standard, "):
        named_reading("rolout")
    with pytest.raises(ValueError, match="what a reading can need: values, all layers, gradients, noise"):
        reading("mine", "Mine.", needs=("keys",))
    with pytest.raises(ValueError, match="is taken by norm_based"):
        reading("norm", "Another.")(lambda layer: layer.weights())


def test_standard_comes_first_and_controls_are_not_shown_by_default() -> None:
    assert al.reading_names()[0] == "standard"
    assert al.reading_names(maps=True, controls=False) == ["standard", "effective", "norm", "rollout"]


def test_a_reading_s_error_is_that_of_its_maps(trace: al.Trace) -> None:
    measured = al.approximation_error(trace, "top-r:r=3").summary()
    assert reading_error(trace, "top-r:r=3", "standard") == pytest.approx(measured["scores"], rel=1e-4)
    assert reading_error(trace, "softmax", "rollout") == pytest.approx(0, abs=1e-6)
    assert reading_error(trace, "top-r:r=3", "entropy") > 0
    with pytest.raises(ValueError, match="explains one number"):
        reading_error(trace, "softmax", "gradient")
