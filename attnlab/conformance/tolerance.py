"""One tolerance for each dtype, and a comparison that raises."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RELATIVE", "assert_close"]

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None, what: str = "") -> None:
    """Raise an AssertionError unless both agree to the tolerance of ``dtype`` (by default that of ``actual``)."""
    tolerance = RELATIVE[dtype or actual.dtype]

    def explained(text: str) -> str:
        if actual.shape != expected.shape:
            return f"{what}: {text}"
        # Beside a NaN, a number is as far off as can be.
        off = (actual.detach().double() - expected.detach().double()).abs().nan_to_num(torch.inf).max()
        return f"{what}: the two differ by {float(off):.1e}, where {tolerance:.0e} is allowed"

    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=explained)
