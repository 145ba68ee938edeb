"""The kernels of stacked LSTMs against the same in torch; without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from papers.ktiw.models import recurrence as plain

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
S, N, B, M = 3, 2, 5, 7


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def test_a_step_and_its_gradient() -> None:
    from papers.ktiw.models.lstm_kernels import cell_back_step, cell_step

    gates, recurrent, cells, hidden = random(S, N, B, 4 * M), random(S, B, 4 * M), *random(2, S, N + 1, B, M)
    grad_h, grad_c, dh, dc = *random(2, S, N, B, M), *random(2, S, B, M)
    results = []
    for step, back in ((plain._cell, plain._cell_back), (cell_step, cell_back_step)):
        c, h, active, dgates, d = (
            *(t.clone() for t in (cells, hidden)),
            *torch.zeros_like(gates).repeat(2, 1, 1, 1, 1),
            dc.clone(),
        )
        step(gates[:, 1], recurrent, c[:, 1], active[:, 1], c[:, 2], h[:, 2])
        back(grad_h[:, 1], dh, grad_c[:, 1], d, active[:, 1], c[:, 1], c[:, 2], dgates[:, 1])
        results.append((c, h, active, dgates, d))
    for plain_result, kernel_result in zip(*results, strict=True):
        torch.testing.assert_close(plain_result, kernel_result, atol=1e-6, rtol=1e-5)


# Neither size is a multiple of a tile; one product is smaller than it.
@pytest.mark.parametrize(("m", "k", "n"), [(70, 33, 130), (5, 3, 2)])
def test_products(m: int, k: int, n: int) -> None:
    from papers.ktiw.models.lstm_kernels import multiply

    a, b = random(S, m, k), random(S, k, n)
    torch.testing.assert_close(multiply(a, b).double(), a.double() @ b.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(multiply(b.mT, a.mT), multiply(a, b).mT, atol=1e-4, rtol=1e-5)
    assert torch.equal(multiply(a[1:2], b[1:2]), multiply(a, b)[1:2])
    with pytest.raises(ValueError, match=r"of float32, got torch.float64"):
        multiply(a.double(), b)
