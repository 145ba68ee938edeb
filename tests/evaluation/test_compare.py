"""What a comparison says beside its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlab.adapters import LoadedModel, load_model
from attnlab.evaluation.compare import CompareConfig, compare
from attnlab.evaluation.compare_lines import table_lines
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
