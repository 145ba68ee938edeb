"""How numbers are written and where an axis puts its ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MISSING", "TIMES", "Scale", "number", "percent", "scale_over", "short", "times", "with_interval"]

# An en dash and a multiplication sign, escaped since an editor shows them like other characters.
MISSING = "\u2013"
TIMES = "\u00d7"
# From here on digits are not written out.
HUGE = 10**15


def number(value: object) -> str:
    r"""A number for a table: three significant digits below a thousand, a dash where there is none.

    >>> number(1234567), number(43.512), number(0.0), number(0.000012), number(None), number(True)
    ('1,234,567', '43.5', '0', '1.2e-5', '\u2013', 'yes')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if abs(value) >= HUGE:
        return _power_of_ten(value, digits=2) if abs(value) < 1e300 else ("over 1e300" if value > 0 else "below -1e300")
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value and abs(value) < 1e-4:
        return _power_of_ten(value, digits=1)
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None, *, places: int = 1) -> str:
    """A share in per cent.

    >>> percent(0.4123), percent(0.4123, places=0)
    ('41.2 %', '41 %')
    """
    return MISSING if value is None else f"{100 * value:.{places}f} %"


def with_interval(
    value: float, low: float | None, high: float | None, *, scale: float = 1, unit: str = "", sign: bool = False
) -> str:
    """A number and its interval, with the digits that the interval can carry: one that is uncertain.

    >>> with_interval(0.3831, 0.3578, 0.4105, scale=100, unit="%"), with_interval(21.23, 20.93, 21.61)
    ('38% [36, 41]', '21.2 [20.9, 21.6]')
    >>> with_interval(0.0213, 0.0132, 0.0291, sign=True), with_interval(2592.4, 2300.0, 2810.0)
    ('+0.021 [+0.013, +0.029]', '2,600 [2,300, 2,800]')
    >>> with_interval(0.5, None, None), with_interval(0.0, 0.0, 0.0, sign=True)
    ('0.5', '0')
    """
    if low is None or high is None or not high > low:
        return number(value * scale) + unit
    places = -math.floor(math.log10((high - low) / 2 * scale))

    def written(x: float) -> str:
        # Adding zero turns the -0.0 that rounding may leave into 0.0.
        rounded = round(x * scale, places) + 0.0
        return f"{rounded:{'+' if sign else ''},.{max(0, places)}f}"

    return f"{written(value)}{unit} [{written(low)}, {written(high)}]"


def times(value: float | None) -> str:
    """A ratio with its multiplication sign."""
    return MISSING if value is None else f"{number(value)} {TIMES}"


def short(value: float) -> str:
    """A number for an axis.

    >>> short(25000), short(1.5e6), short(0.25), short(0.0001)
    ('25k', '1.5M', '0.25', '1e-4')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    if value and abs(value) < 1e-3:
        return _power_of_ten(value, digits=3)
    return f"{value:.6g}"


@dataclass(frozen=True)
class Scale:
    """From data (low to high, perhaps in logarithms) to a stretch of the picture (start to end)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._place(self.low), self._place(self.high)
        return self.start + (self._place(value) - low) / ((high - low) or 1.0) * (self.end - self.start)

    def shows(self, value: float | None) -> bool:
        """Whether the value has a place: it is a finite number, and positive on a logarithmic scale."""
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range, about ``count`` of them."""
        return _log_ticks(self.low, self.high, count) if self.log else _ticks(self.low, self.high, count)

    def _place(self, value: float) -> float:
        return math.log10(value) if self.log else value


def scale_over(
    values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False, pad: float = 0.0
) -> Scale:
    """A scale that holds all values, from zero on request, with room of ``pad`` of the range at either end."""
    finite = [v for v in values if math.isfinite(v) and (not log or v > 0)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    if log:
        ratio = max((high / low) ** pad, 1.15 if high == low else 1.0)
        return Scale(low / ratio, high * ratio, start, end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * pad or (abs(high) * 0.1 or 1.0) * (high == low)
    return Scale(low if zero and low == 0 else low - room, high + room, start, end)


def _power_of_ten(value: float, *, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / count
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        rounds = [m * 10.0**p for p in range(first, last + 1) for m in steps]
        inside = [tick for tick in rounds if low * 0.999999 <= tick <= high * 1.000001]
        if len(inside) >= 3:
            every = -(-len(inside) // (count + 2))
            return inside[::every]
    return inside or _ticks(low, high, count)
