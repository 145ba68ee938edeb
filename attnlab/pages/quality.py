"""A model's quality as pages write it: the measure's title, its values, and the unit of a chart's axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.pages.numbers import number, percent, with_interval

__all__ = [
    "QualityAxis",
    "quality_axis",
    "quality_of",
    "quality_title",
    "quality_with_interval",
    "show_quality",
]

TITLES = {"perplexity": "Perplexity", "mlm_error": "MLM error"}


@dataclass(frozen=True)
class QualityAxis:
    """The measure that a comparison's rows share; an axis shows ``factor`` times its values."""

    name: str
    exact: float | None

    @property
    def factor(self) -> int:
        """100 for what is shown in per cent."""
        return 100 if self.name == "mlm_error" else 1

    @property
    def label(self) -> str:
        """The axis' label with its unit."""
        return quality_title(self.name) + (" in %" if self.factor == 100 else "")

    @property
    def reference(self) -> tuple[str, float] | None:
        """The line of the model with exact attention, where its quality is known."""
        return None if self.exact is None else ("exact attention", self.exact * self.factor)

    def is_log(self, values: Sequence[float]) -> bool:
        """Whether these values, already multiplied by ``factor``, spread too far for a linear axis."""
        return bool(values) and self.factor == 1 and max(values) > 8 * min(values) > 0


def quality_axis(rows: Sequence[Mapping[str, Any]]) -> QualityAxis | None:
    """The axis for the quality in a comparison's rows; None where no row has any."""
    quality = next((row["quality"] for row in rows if row.get("quality")), None)
    return None if quality is None else QualityAxis(quality["name"], quality.get("exact"))


def quality_of(row: Mapping[str, Any]) -> Any:
    """A row's quality, or None."""
    return (row.get("quality") or {}).get("value")


def quality_title(name: str) -> str:
    """The name of a measure in a heading."""
    return TITLES.get(name, name)


def quality_with_interval(quality: Mapping[str, Any]) -> str:
    """A measured quality with its interval, in the digits that it can carry."""
    shares = quality["name"] == "mlm_error"
    bounds = (quality.get("low"), quality.get("high"))
    if None in bounds:
        return show_quality(quality["name"])(quality["value"])
    return with_interval(quality["value"], *bounds, scale=100 if shares else 1, unit=" %" if shares else "")


def show_quality(name: str | None) -> Callable[[Any], str]:
    """How values of a measure are written."""
    return percent if name == "mlm_error" else number
