"""Which keys abc-select's kernels list for each segment of queries, against sorting all keys before every window."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnlab.kernels.select import attention
from attnlab.mechanisms._bounded.selected import Selection, Tokens, merits
from tests.kernels.abc.cases import poisoned
from tests.kernels.bounds import DEVICE

# Scores by the place of their token.
SCORES = {
    "random": lambda t: torch.randn(1, 2, t),
    "ties": lambda t: torch.randn(1, 2, t).round(),
    "equal": lambda t: torch.zeros(1, 2, t) * torch.randn(1, 2, t).sign(),
    "rising": lambda t: torch.randn(1, 2, t) + torch.arange(t),
    "falling": lambda t: torch.randn(1, 2, t) - torch.arange(t),
    "odd": lambda t: torch.randn(1, 2, t).round().masked_fill(torch.rand(1, 2, t) < 0.1, torch.nan) * torch.inf,
    "close": lambda t: 1 + torch.randint(0, 9, (1, 2, t)) * 2.0**-23,
}


@dataclass(frozen=True)
class Choice:
    """How many tokens there are, and how keys are selected of them."""

    length: int = 300
    slots: int = 5
    spare: int = 2
    window: int = 16
    block: int = 16
    sinks: int = 3


CHOICES = (
    Choice(),
    Choice(length=385, spare=0),
    # The last chunk is one token, or none.
    Choice(length=16 + 3 * 64 + 1, sinks=0),
    Choice(length=3 * 64, window=32),
    # Fewer tokens than are selected, for some segments and for all.
    Choice(slots=50, spare=13, length=200),
    Choice(slots=300, spare=75, length=250),
    Choice(block=3, window=6, length=157, slots=7),
    Choice(block=1, window=1, sinks=1, length=131, slots=2, spare=1),
    Choice(block=70, window=70, length=300, slots=20, spare=5),
    Choice(block=128, window=128, length=500, slots=4, spare=1),
    Choice(sinks=40, length=90),
)


def listed(choice: Choice, score: Tensor) -> tuple[attention._Launches, tuple[Tensor, ...]]:
    """The launches of a call, and what they have written."""
    q = torch.zeros(*score.shape, 16, device=DEVICE)
    how = choice.slots, choice.window, choice.block, choice.sinks, 1.0, choice.spare, 3.0
    call = attention._Launches(q, q, q, how)
    with poisoned():
        results = call.results(q)
        call.choose(score, results)
    return call, results


def wanted(choice: Choice, score: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each key is selected before each window, and whether it is selected or counted, (b, g, windows, keys)."""
    t = score.shape[-1]
    rules = Selection(choice.slots, choice.window, choice.block, choice.sinks, 1.0)
    place = torch.arange(t, device=score.device)
    nothing = torch.zeros(*score.shape, 1, device=score.device)
    merit = merits(Tokens(nothing, nothing, score, place.expand(score.shape)), rules)
    before = place < torch.arange(0, t, choice.block, device=score.device)[:, None]
    merit = merit.unsqueeze(2).masked_fill(~before, -1)
    rank = merit.argsort(-1, descending=True).argsort(-1)
    free, sink = merit >= 0, before & (place < choice.sinks)
    return free & (rank < choice.slots) | sink, free & (rank < choice.slots + choice.spare)


def check(choice: Choice, score: Tensor) -> None:
    call, (_, _, _, lives, keys, counts, middle) = listed(choice, score)
    selected, counted = wanted(choice, score)
    until, segments = [], []
    for segment in range(call.segments):
        first, last = (
            max(p // choice.block * choice.block - (choice.window - choice.block), 0) // choice.block
            for p in (segment * attention.SEGMENT, min((segment + 1) * attention.SEGMENT, choice.length) - 1)
        )
        numbers = torch.arange(first, last + 1, device=score.device)[:, None]
        # The last window of the segment before which each key is read, or counted.
        y, z = (
            torch.where(seen[:, :, first : last + 1], numbers * choice.block, -1).amax(2)
            for seen in (selected, counted)
        )
        until.append((y, z))
        segments.append((y >= 0, z >= 0))
    for b in range(score.shape[0]):
        for g in range(score.shape[1]):
            for segment, (y, z) in enumerate(until):
                read = (y[b, g] >= 0).nonzero().flatten()
                more = ((z[b, g] >= 0) & (y[b, g] < 0)).nonzero().flatten() if choice.spare else read[:0]
                expected = torch.cat([read, more])
                row = keys[b, g, segment][:, : len(expected)]
                assert counts[b, g, segment, 0] == len(read)
                assert not choice.spare or counts[b, g, segment, 1] == len(expected)
                assert torch.equal(row[0], expected.int())
                assert torch.equal(row[1], y[b, g, expected].int())
                assert not choice.spare or torch.equal(row[2], z[b, g, expected].int())
    for which in range(1 + (choice.spare > 0)):
        number = sum(pair[which].int() for pair in segments)[..., : call.left]
        assert torch.equal(lives[:, :, which], number.int())
    if choice.spare:
        torch.testing.assert_close(middle, middles(choice, score, call.windows), rtol=0, atol=0, equal_nan=True)


def middles(choice: Choice, score: Tensor, windows: int) -> Tensor:
    """The mean of the lowest score that is selected and the next, before each window."""
    score, result = score.masked_fill(score.isnan(), torch.nan), []
    for window in range(windows):
        old = score[..., choice.sinks : max(choice.sinks, window * choice.block)]
        best = old.sort(descending=True, dim=-1).values
        n = choice.slots
        if best.shape[-1] > n:
            result.append((best[..., n - 1] + best[..., n]) / 2)
        else:
            result.append(torch.full_like(score[..., 0], -torch.inf))
    return torch.stack(result, -1)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and segments of few tokens."""
    sizes = {"CHUNK": 64, "MOST_BEST": 32, "SEGMENT": 64}
    for name, size in sizes.items():
        monkeypatch.setattr(attention, name, size)
    # Constants of other calls are kept.
    monkeypatch.setattr(attention, "_options", attention._options.__wrapped__)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("kind", SCORES)
def test_lists_of_any_scores(kind: str) -> None:
    torch.manual_seed(0)
    check(Choice(), SCORES[kind](300).to(DEVICE))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_lists_of_many_chunks(choice: Choice) -> None:
    torch.manual_seed(0)
    check(choice, SCORES["ties"](choice.length).to(DEVICE))


def test_lists_of_chunks_as_they_are() -> None:
    """More than two chunks, the last of them short."""
    torch.manual_seed(0)
    choice = Choice(length=2 * attention.CHUNK + 300, window=64, sinks=4)
    check(choice, torch.randn(1, 1, choice.length, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SCORES)
def test_lists_of_a_long_text_on_a_gpu(kind: str) -> None:
    torch.manual_seed(0)
    choice = Choice(length=5000, slots=56, spare=14, window=64, sinks=4)
    check(choice, SCORES[kind](choice.length)[:1, :1].to(DEVICE).contiguous())
