"""The kernels of statistics against blocks of rows in PyTorch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import attnlab as al
from attnlab.linalg import removed_share
from attnlab.linalg.streaming import CallStatistics, Measures, Text, stream_rows
from attnlab.linalg.streaming_gpu import kernel_serves, stream_by_kernel

pytest.importorskip("triton")
statistics = pytest.importorskip("attnlab.kernels.statistics")
statistics_tiles = pytest.importorskip("attnlab.kernels.statistics_tiles")
largest = pytest.importorskip("attnlab.kernels.statistics_largest")
removed = pytest.importorskip("attnlab.kernels.removed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes long for each of the largest.
MEASURES = Measures(largest=2, sinks=3, recent=20, block=64)
# Small tiles, so that short texts have several.
SMALL = statistics_tiles.Tile(32, 32, 4, 1)
TILES = ("ROW_TILE", "RANKED_ROW_TILE", "MASKED_ROW_TILE", "COLUMN_TILE", "SMALL_COLUMN_TILE")


def use(monkeypatch: pytest.MonkeyPatch, name: str, tile: Any) -> None:
    """One tile for heads of all widths."""
    tiles = getattr(statistics_tiles, name)
    for width in tuple(tiles):
        monkeypatch.setitem(tiles, width, tile)


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        for name in TILES:
            use(monkeypatch, name, SMALL)


def made(
    n_q: int, n_k: int, *, dtype: torch.dtype = torch.float32, sizes: tuple[int, int, int] = (1, 2, 1), d: int = 16,
    e: int = 16, members: int = 0, **how: Any,
) -> tuple[al.AttentionCall, Text]:  # fmt: skip
    b, h, g = sizes
    q, k, v = (torch.randn(b, n, n_h, w, device=DEVICE, dtype=dtype).transpose(1, 2)
               for n, n_h, w in ((n_q, h, d), (n_k, g, d), (n_k, g, e)))  # fmt: skip
    how = {name: t.to(DEVICE) if isinstance(t, Tensor) else t for name, t in how.items()}
    sets = torch.rand(b, n_k, members, device=DEVICE) > 0.5
    return al.AttentionCall(q * 2, k, v, **how), Text(sets, own_keys=how.get("causal", False) or n_q == n_k)


def assert_same(actual: CallStatistics, expected: CallStatistics, atol: float) -> None:
    for field in dataclasses.fields(CallStatistics):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        assert (one is None) == (other is None), field.name
        if one is None or field.name in ("places", "norm_places"):
            continue
        assert one.shape == other.shape, field.name
        if not one.numel():
            continue
        scale = max(1.0, float(other.abs().max()))
        off = float((one - other).abs().max()) / scale
        assert off <= (max(atol, 1e-4) if field.name == "removed" else atol), f"{field.name} is off by {off:.1e}"
    for name in ("places", "norm_places"):
        # Of nearly equal weights either may come first.
        values, at, wanted = (
            getattr(t, n) for t, n in ((expected, name.replace("places", "largest")), (actual, name), (expected, name))
        )
        differ = at != wanted
        apart = values.diff(dim=-1).abs().amin(-1, keepdim=True).expand_as(values)
        assert not bool((differ & (apart > 10 * atol)).any()), name


CASES = {
    "causal": {"n_q": 131, "n_k": 131, "causal": True},
    "whole tiles": {"n_q": 128, "n_k": 128, "causal": True, "d": 32, "e": 32},
    "encoder": {"n_q": 71, "n_k": 71},
    "cross": {"n_q": 37, "n_k": 71},
    "sets": {"n_q": 71, "n_k": 71, "causal": True, "members": 3},
    "other widths": {"n_q": 71, "n_k": 71, "causal": True, "d": 11, "e": 24},
    "step": {"n_q": 5, "n_k": 131, "causal": True, "offset": 126},
    "ahead of the keys": {"n_q": 67, "n_k": 40, "causal": True},
    "one": {"n_q": 1, "n_k": 1},
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_kernels_are_the_rows(name: str) -> None:
    call, text = made(**CASES[name])
    check(call, text)


@pytest.mark.parametrize("causal", [False, True])
def test_padding(causal: bool) -> None:
    seen = torch.rand(2, 71) > 0.3
    seen[0, :9] = False
    # The second text is padding only.
    seen[1] = False
    call, text = made(71, 71, sizes=(2, 2, 1), causal=causal, key_visible=seen)
    call.v.transpose(1, 2)[0, 2] = torch.nan
    check(call, text)


@pytest.mark.parametrize("heads", [1, 2])
def test_windows_and_biases(heads: int) -> None:
    window = torch.ones(71, 71, dtype=torch.bool).tril().triu(-20).expand(1, heads, -1, -1)
    bias = torch.randn(1, heads, 71, 71)
    for how in ({"mask": window, "causal": True}, {"bias": bias}, {"mask": window, "bias": bias}):
        call, text = made(71, 71, **how)
        check(call, text)


def check(call: al.AttentionCall, text: Text, atol: float = 1e-5) -> None:
    actual, output = stream_by_kernel(call, MEASURES, text)
    expected, wanted = stream_rows(call, al.Softmax(), MEASURES, text, softmax=True)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-5)
    assert_same(actual, expected, atol)


def test_what_is_not_asked_for_is_not_computed() -> None:
    call, text = made(40, 40, causal=True)
    bare = Measures(norm=False, removed=False, received=False)
    actual, output = stream_by_kernel(call, bare, text)
    expected, _ = stream_rows(call, al.Softmax(), bare, text, softmax=True)
    assert output.dtype == call.q.dtype
    for name in ("norm", "norm_largest", "removed", "received", "block_mass"):
        assert getattr(actual, name) is getattr(expected, name) is None
    assert float((actual.entropy - expected.entropy).abs().max()) <= 1e-5


def test_sums_of_squares_only_where_they_are_asked_for() -> None:
    call, text = made(40, 40, causal=True)
    how = {"largest": 2, "sinks": 3, "recent": 20, "places": None, "near": True, "norm_largest": False}
    how |= {"members": text.members, "wide_output": True}
    with_squares, without = (statistics.row_statistics(call, squares=asked, **how) for asked in (True, False))
    assert with_squares.sum_of_squares is not None
    assert without.sum_of_squares is None
    assert torch.equal(with_squares.entropy, without.entropy)


# What makes the host wait for a GPU.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")


class NoWaiting(TorchDispatchMode):
    """Counts what is asked of torch, and refuses what makes the host wait."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING, name
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [False, True])
def test_the_host_waits_for_nothing_before_the_last_pass_is_launched(
    monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    how = {"key_visible": torch.arange(71)[None] > 40} if padded else {}
    call, text = made(71, 71, dtype=torch.float16, causal=True, members=2, **how)
    monkeypatch.setattr(removed_share, "_kernel_serves", lambda *_: True)
    pending: list[Any] = []
    # The shares are taken when all is launched, which is where the host waits.
    monkeypatch.setattr(removed_share.RemovedShares, "result", lambda shares: pending.append(shares))
    # Triton's interpreter itself asks torch for numbers.
    for module in (statistics, largest, removed):
        monkeypatch.setattr(module, "launch", lambda *_: None)
    with NoWaiting() as mode:
        stream_by_kernel(call, MEASURES, text)
    assert [shares.known is not None for shares in pending] == [True]
    assert mode.calls <= (150 if padded else 110)


def test_squares_of_a_text_that_goes_on() -> None:
    call, text = made(100, 292, causal=True, offset=192)
    measures = dataclasses.replace(MEASURES, block=128)
    text = dataclasses.replace(text, first=192)
    actual, _ = stream_by_kernel(call, measures, text)
    expected, _ = stream_rows(call, al.Softmax(), measures, text, softmax=True)
    assert actual.block_mass.shape == (1, 2, 2, 3)
    assert float((actual.block_mass - expected.block_mass).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("hidden", "fold", "span"),
    [
        ("nothing", 1, 1), ("nothing", 4, 1), ("nothing", 4, 2), ("padding", 4, 2), ("window", 4, 1),
        ("not even later keys", 4, 2), ("padding", 8, 2),
    ],
)  # fmt: skip
def test_half_precision_is_close(hidden: str, fold: int, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        for name in TILES:
            use(monkeypatch, name, SMALL._replace(fold=fold, span=span))
    how: dict[str, Any] = {}
    if hidden == "padding":
        how["key_visible"] = torch.arange(71)[None] > 40
    if hidden == "window":
        how["mask"] = torch.ones(1, 1, 71, 71, dtype=torch.bool).tril().triu(-20)
    # The interpreter has no bfloat16.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    call, text = made(71, 71, dtype=dtype, causal="later" not in hidden, members=2, **how)
    actual, _ = stream_by_kernel(call, MEASURES, text)
    expected, _ = stream_rows(call, al.Softmax(), MEASURES, text, softmax=True)
    assert_same(actual, expected, 1e-3)


@pytest.mark.parametrize("rising", [False, True])
def test_scores_that_climb_by_hundreds(rising: bool) -> None:
    # Tiles come from the last key to the first, so that maxima move in each tile or in none.
    call, text = made(131, 131, dtype=torch.float16, causal=True)
    ramp = torch.linspace(0, 40, 131, device=DEVICE, dtype=torch.float16)
    call.q[..., 0] = 40
    call.k[..., 0] = ramp if rising else ramp.flip(0)
    actual, _ = stream_by_kernel(call, MEASURES, text)
    wide = dataclasses.replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    expected, _ = stream_rows(wide, al.Softmax(), MEASURES, text, softmax=True)
    # A key's place in its tile is weighed in float16, so a short distance is off by some thousandths of a key.
    assert_same(actual, expected, 5e-3)


def test_calls_for_which_it_is_not_made() -> None:
    call, text = made(70, 70)
    assert kernel_serves(call, MEASURES, text) == (DEVICE == "cuda")
    assert not kernel_serves(call, dataclasses.replace(MEASURES, largest=9), text)
    assert not kernel_serves(*made(5, 70, causal=True, offset=65)[:1], MEASURES, text)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [64, 128])
def test_long_texts_on_a_gpu(dtype: torch.dtype, d: int) -> None:
    call, text = made(4096, 4096, dtype=dtype, sizes=(1, 9, 3), d=d, e=d, causal=True, members=3)
    measures = Measures(block=64)
    assert kernel_serves(call, measures, text)
    actual, output = stream_by_kernel(call, measures, text)
    wide = dataclasses.replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    expected, _ = stream_rows(wide, al.Softmax(), measures, text, softmax=True)
    assert_same(actual, expected, 1e-3 if dtype == torch.bfloat16 else 1e-5)
    exact = scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output.to(dtype), exact, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.gpu
def test_a_watched_model_on_a_gpu() -> None:
    from tests.adapters.zoo import build, inputs

    model = build("llama").cuda()
    ids = inputs(model, length=60)["input_ids"].cuda().repeat(1, 1)
    ids = torch.cat([ids, ids], 1)[:, :64]
    with torch.no_grad(), al.watch(model) as by_kernel:
        model(ids, position_ids=torch.arange(64, device="cuda")[None])
    with torch.no_grad(), al.watch(model.cpu()) as by_rows:
        model(ids.cpu(), position_ids=torch.arange(64)[None])
    for one, other in zip(by_kernel, by_rows, strict=True):
        assert one.entropy.device.type == "cpu"
        assert float((one.entropy - other.entropy).abs().max()) <= 1e-3
        assert float((one.received - other.received).abs().max()) <= 1e-2
