from __future__ import annotations

import pytest

from attnlab.experiments.compare import table_lines


@pytest.mark.parametrize(("name", "value", "warned"), [("perplexity", 2592.0, True), ("perplexity", 30.0, False)])
def test_a_text_that_the_model_cannot_read_is_told(name: str, value: float, warned: bool) -> None:
    quality = {"name": name, "value": value, "exact": value, "loss": 1.0, "predicted": 3}
    numbers = dict.fromkeys(("output_error", "score_error", "time_ratio", "memory_ratio"), 0.0)
    lines = table_lines({"rows": [{"mechanism": "softmax", "refused": None, "quality": quality, **numbers}]})
    assert any("2592: the model was made for other text" in line for line in lines) == warned
