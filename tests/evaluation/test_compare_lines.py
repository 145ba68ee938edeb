from __future__ import annotations

from typing import Any

import pytest

from attnlab.evaluation.compare_lines import table_lines


def lines_of(name: str, value: float, best: float, **errors: float | None) -> list[str]:
    quality = {"name": name, "value": value, "exact": best, "loss": 1.0, "predicted": 3}
    numbers: dict[str, Any] = {
        "output_error": 0.5,
        "score_error": 0.25,
        "after_projection": 0.125,
        "effective_error": 0.75,
        "time_ratio": 2.0,
        "memory_ratio": 3.0,
    }
    quality |= {"low": value - 0.02, "high": value + 0.03, "exact_low": best - 0.02, "exact_high": best + 0.02}
    quality |= {"loss_above": 0.0213, "loss_above_low": 0.0132, "loss_above_high": 0.0291}
    row = {"mechanism": "top-r:r=4", "refused": None, "quality": quality, **numbers, **errors}
    refused = {"mechanism": "lsh:r=3", "refused": "r must be even\nand more", "quality": None}
    return list(table_lines({"rows": [row, refused], "ranking_differs": 0.61}))


@pytest.mark.parametrize(("name", "value", "warned"), [("perplexity", 2592.0, True), ("perplexity", 30.0, False)])
def test_a_text_that_the_model_cannot_read_has_a_warning(name: str, value: float, warned: bool) -> None:
    lines = lines_of(name, value, value)
    assert any("2,592.00 [2,591.98, 2,592.02]: the model was made for other text" in line for line in lines) == warned


def test_every_error_is_printed_beside_the_exact_quality() -> None:
    header, row, refused, exact, differs = lines_of("mlm_error", 0.5, 0.25)
    assert header.split("  ")[:1] == ["mechanism"]
    assert header.split()[-2:] == ["time", "memory"]
    assert row.split("  ")[0] == "top-r:r=4"
    # No digit that the interval cannot carry.
    assert "50% [48, 53]" in row
    assert "+0.021 [+0.013, +0.029]" in row
    assert row.split()[-8:] == ["0.5000", "0.2500", "0.1250", "0.7500", "2.00", "x", "3.00", "x"]
    assert refused == "lsh:r=3    refused: r must be even"
    assert exact == "with exact attention the MLM error on this text is 25% [23, 27]"
    assert differs == "the nearest value is not that of largest weight for 61% of the queries"


def test_an_error_that_was_not_measured_is_a_dash() -> None:
    assert lines_of("mlm_error", 0.5, 0.25, after_projection=None)[1].split()[-6] == "-"


def test_an_exact_row_shows_no_cost_and_is_called_exact() -> None:
    lines = lines_of("mlm_error", 0.5, 0.5, exact=True, time_ratio=None, memory_ratio=None)
    assert lines[1].split()[-2:] == ["exact", "exact"]
    assert "exact: top-r:r=4 gives softmax attention's own output here, by construction" in lines
