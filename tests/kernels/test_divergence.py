"""The kernel that compares logits against PyTorch: through Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attnlab.kernels.divergence import compare_rows
from attnlab.loss import IGNORED, _compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hard", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("v", [1, 31, 64, 67])
def test_the_kernel_equals_pytorch(v: int, hard: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, expected = (3 * torch.randn(5, v, device=DEVICE).to(dtype) for _ in range(2))
    targets = torch.tensor([0, v - 1, IGNORED, v // 2, IGNORED], device=DEVICE)
    if v > 2:
        expected[1, 1] = -torch.inf
    sums, gradient = _compare(logits, expected, targets, hard, True)
    own = logits.clone()
    same = compare_rows(own, expected, targets, hard=hard, gradient=False, block=32)
    assert torch.equal(own, logits)
    rows = compare_rows(own, expected, targets, hard=hard, gradient=True, block=32)
    assert torch.equal(rows, same)
    torch.testing.assert_close(rows.sum(0), sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, gradient, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_no_token_is_no_launch() -> None:
    nothing = torch.empty(0, 7, device=DEVICE)
    assert compare_rows(nothing, nothing, nothing[:, 0].long(), hard=0.0, gradient=True).shape == (0, 3)
