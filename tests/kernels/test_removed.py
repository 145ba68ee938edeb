"""The kernel of removed shares against blocks of prefixes in PyTorch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnlab.linalg import removed_share
from attnlab.linalg.removed_share import removed_share_of_rows

pytest.importorskip("triton")
kernel = pytest.importorskip("attnlab.kernels.removed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(n_q: int, n_k: int, *, offset: int = 0, e: int = 3, hidden: bool = False) -> tuple[tuple[Tensor, ...], dict]:
    """(outputs, |w|^2, values) of a causal map with four query heads on two key/value heads, and what hides keys."""
    v = torch.randn(1, 2, n_k, e, device=DEVICE)
    seen = torch.rand(1, n_k, device=DEVICE) > 0.3 if hidden else None
    show = torch.arange(n_k, device=DEVICE) <= torch.arange(n_q, device=DEVICE)[:, None] + offset
    show = show.expand(1, 4, -1, -1) if seen is None else show & seen[:, None, None]
    if seen is not None:
        v = v.masked_fill(~seen[:, None, :, None], 0)
    scores = torch.randn(1, 4, n_q, n_k, device=DEVICE, dtype=torch.float64)
    w = scores.masked_fill(~show, -torch.inf).softmax(-1).nan_to_num()
    output = (w @ v.double().repeat_interleave(2, 1)).float()
    return (output, w.square().sum(-1).float(), v), {"key_visible": seen, "causal": True, "offset": offset}


def by_kernel(arrays: tuple[Tensor, ...], how: dict) -> tuple[Tensor, Tensor]:
    output, squares, v = arrays
    of = removed_share._prefixes(v, output.shape[2], how["key_visible"], how["offset"])
    shares, doubtful = kernel.removed_shares(output, squares, of)
    return shares, doubtful > 0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in {"MOST_ROWS": 8, "FEWEST_ROWS": 8, "CAREFUL_ROWS": 4, "PIECE": 4}.items():
        monkeypatch.setattr(kernel, name, rows)


CASES = {
    "causal": {"n_q": 19, "n_k": 19},
    "padding": {"n_q": 19, "n_k": 19, "hidden": True},
    "a step": {"n_q": 3, "n_k": 13, "offset": 10},
    "after a prompt": {"n_q": 11, "n_k": 20, "offset": 9, "hidden": True},
    "ahead of the keys": {"n_q": 19, "n_k": 11},
    "before the keys": {"n_q": 19, "n_k": 11, "offset": -7},
    "few keys": {"n_q": 2, "n_k": 2},
    "a power of two": {"n_q": 24, "n_k": 24, "e": 16},
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_kernel_is_the_prefixes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arrays, how = made(**CASES[name])
    shares, doubtful = by_kernel(arrays, how)
    assert not bool(doubtful.any())
    monkeypatch.setattr(removed_share, "_kernel_serves", lambda *_: False)
    assert float((shares - removed_share_of_rows(*arrays, **how)).abs().max()) <= 1e-5


@pytest.mark.parametrize(("spread", "trace"), [(1.0, 8.0), (100.0, 8.0), (1.0, 0.0)])
def test_half_precision_takes_float64_where_it_must(
    monkeypatch: pytest.MonkeyPatch, spread: float, trace: float
) -> None:
    # With a trace of 0 float32 is never enough.
    monkeypatch.setattr(kernel, "SAFE_TRACE", trace)
    (output, squares, v), how = made(19, 19)
    # Values that grow along the text, so that the first prefixes are nothing like the whole.
    grow = torch.linspace(0, 1, 19, device=DEVICE)[:, None]
    output, v = torch.zeros_like(output), (v * spread**grow).half()
    scores = torch.randn(1, 4, 19, 19, device=DEVICE, dtype=torch.float64)
    w = scores.masked_fill(torch.ones(19, 19, device=DEVICE).triu(1) > 0, -torch.inf).softmax(-1)
    output, squares = (w @ v.double().repeat_interleave(2, 1)).float(), w.square().sum(-1).float()
    shares, doubtful = by_kernel((output, squares, v), how)
    assert not bool(doubtful.any())
    monkeypatch.setattr(removed_share, "_kernel_serves", lambda *_: False)
    assert float((shares - removed_share_of_rows(output, squares, v, **how)).abs().max()) <= 1e-4


@pytest.mark.parametrize("n_k", [1, 4, 19, 24])
def test_the_gram_matrix_of_a_text_is_the_sum_of_its_pieces(n_k: int) -> None:
    # Heads lie beside each other in memory, as projections leave them.
    v = torch.randn(2, n_k, 3, 5, device=DEVICE).transpose(1, 2)
    assert torch.allclose(kernel._whole_gram(v), v.double().mT @ v.double(), rtol=1e-6, atol=1e-6)


def test_steps_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    (output, squares, v), how = made(19, 19, hidden=True)
    expected = removed_share_of_rows(output, squares, v, **how)
    monkeypatch.setattr(removed_share, "_kernel_serves", lambda *_: True)
    steps = removed_share.RemovedShares(v, 19, **how)
    steps.start(output, squares)
    assert steps.known is not None
    assert float((steps.result() - expected).abs().max()) <= 1e-5


def test_outputs_that_are_too_wide_for_the_kernel_go_by_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    (output, squares, v), how = made(19, 19)
    expected = removed_share_of_rows(output, squares, v, **how)
    monkeypatch.setattr(removed_share, "_kernel_serves", lambda *_: True)
    assert float((removed_share_of_rows(output.double(), squares, v, **how) - expected).abs().max()) <= 1e-5


@pytest.mark.gpu
def test_a_stream_beside_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    v = torch.randn(1, 3, 4096, 64, device="cuda", dtype=torch.bfloat16)
    how = {"key_visible": None, "causal": True, "offset": 0}
    output, squares = torch.randn(1, 9, 4096, 64, device="cuda") * 0.02, torch.full((1, 9, 4096), 0.5, device="cuda")
    monkeypatch.setattr(removed_share, "SIDE_STREAM", False)
    expected = removed_share_of_rows(output, squares, v, **how)
    monkeypatch.setattr(removed_share, "SIDE_STREAM", True)
    for _ in range(5):
        steps = removed_share.RemovedShares(v, 4096, **how)
        # Memory that is let go meanwhile is taken again by others.
        busy = torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        steps.start(output.clone(), squares.clone())
        busy = busy @ busy
        assert torch.equal(steps.result(), expected)


@pytest.mark.parametrize("fault", ["first values repeat", "a column repeats", "a column is zero", "all are nearly one"])
def test_what_is_in_doubt_goes_by_prefixes(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    (output, squares, v), how = made(17, 17)
    if fault == "first values repeat":
        v[:, 0, 1] = v[:, 0, 0]
    elif fault == "a column repeats":
        v[:, 0, :, 1] = v[:, 0, :, 0]
    elif fault == "a column is zero":
        v[:, 0, :, 1] = 0
    else:
        v[:, 0] = 1 + 1e-6 * v[:, 0]
    assert by_kernel((output, squares, v), how)[1].tolist() == [[True, False]]
    expected = removed_share_of_rows(output, squares, v, **how)
    monkeypatch.setattr(removed_share, "_kernel_serves", lambda *_: True)
    actual = removed_share_of_rows(output, squares, v, **how)
    assert float((actual - expected).abs().max()) <= 1e-5
