"""What a comparison says beside its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnlab as al
from attnlab.adapters import LoadedModel, load_model
from attnlab.data import bundled_text
from attnlab.evaluation.compare import CompareConfig, compare
from attnlab.evaluation.compare_lines import comparison_lines, table_lines
from attnlab.pages import compare_page
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


def test_untrained_mechanisms_and_a_models_own_attention_are_named() -> None:
    """In the lines and on the page, for whoever compares a mechanism that learns, or a model that has learned one."""
    loaded = al.shipped_model()
    al.convert(loaded.model, "kernel:elu")
    config = CompareConfig(mechanisms=("softmax", "abc-mlp:slots=3", "rfa"), tokens=40, length=24, repeats=1)
    result = compare(loaded, bundled_text(), config=config, model_name="m", text_name="t")
    learned, own = result["warnings"]
    assert learned.startswith("abc-mlp:slots=3 has parameters of its own, which no training has touched here")
    assert own.startswith("this model's own attention is kernel in 6 of 6 layers, with which its MLM error")
    assert "kernel in 6 of 6" in "\n".join(comparison_lines(result))
    assert "no training has touched here" in compare_page(result)
