from __future__ import annotations

from typing import Any

import pytest

from attnlab.evaluation.compare_lines import table_lines


def lines_of(name: str, value: float, exact: float, **errors: float | None) -> list[str]:
    quality = {"name": name, "value": value, "exact": exact, "loss": 1.0, "predicted": 3}
    numbers: dict[str, Any] = {
        "output_error": 0.5,
        "score_error": 0.25,
        "after_projection": 0.125,
        "effective_error": 0.75,
        "time_ratio": 2.0,
        "memory_ratio": 3.0,
    }
    row = {"mechanism": "top-r:r=4", "refused": None, "quality": quality, **numbers, **errors}
    refused = {"mechanism": "lsh:r=3", "refused": "r must be even\nand more", "quality": None}
    return list(table_lines({"rows": [row, refused], "ranking_differs": 0.61}))


@pytest.mark.parametrize(("name", "value", "warned"), [("perplexity", 2592.0, True), ("perplexity", 30.0, False)])
def test_a_text_that_the_model_cannot_read_has_a_warning(name: str, value: float, warned: bool) -> None:
    lines = lines_of(name, value, value)
    assert any("2592: the model was made for other text" in line for line in lines) == warned


def test_every_error_is_printed_beside_the_exact_quality() -> None:
    header, row, refused, exact, differs = lines_of("mlm_error", 0.5, 0.25)
    assert header == "mechanism  MLM error  output error  score error  after W_O  effective    time  memory"
    assert row == "top-r:r=4      50.0%        0.5000       0.2500     0.1250     0.7500  2.00 x  3.00 x"
    assert refused == "lsh:r=3    refused: r must be even"
    assert exact == "with exact attention the MLM error on this text is 25.0%"
    assert differs == "the nearest value is not that of largest weight for 61% of the queries"


def test_an_error_that_was_not_measured_is_a_dash() -> None:
    assert lines_of("mlm_error", 0.5, 0.25, after_projection=None)[1].split()[4] == "-"
