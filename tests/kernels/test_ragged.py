"""New tokens over keys without padding by the kernel, against softmax over each head's keys in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnlab.caches.ragged import attend_by_segment
from attnlab.kernels.ragged import Tiles, append, ragged_attention, serves, tiles_for
from attnlab.measure import captured
from tests.kernels.bounds import BOUND, DEVICE


@dataclass(frozen=True)
class Case:
    """A call: the keys of each segment, two rows of ``heads`` query heads, and how many keys a program reads."""

    counts: tuple[int, ...] = (37, 1, 16, 70)
    heads: int = 6
    # The last keys of every segment are theirs; each sees columns of its own where ``each``.
    queries: int = 1
    each: bool = True
    d: int = 32
    e: int = 32
    span: int = 16
    dtype: torch.dtype = torch.float32
    biased: bool = False
    # Whether the query of a row sees some columns only, and whether keys have columns of their own.
    masked: bool = False
    columns: bool = False
    views: bool = False


# Triton's interpreter cannot multiply matrices of bfloat16: on a GPU ``LARGE`` does.
# Segments of many parts, of one, of none; tiles filled and not; more parts than are combined at once.
CASES = (
    Case(),
    Case(d=48, e=80, dtype=torch.float16),
    Case(d=80, e=48, dtype=torch.float16, heads=2, views=True),
    Case(counts=(33, 0, 5, 17), biased=True, views=True),
    Case(counts=(5, 16, 1, 9), span=32),
    Case(counts=(0, 16, 1, 9), span=32, biased=True, dtype=torch.float16),
    Case(counts=(16 * 35 + 3, 40), heads=3, d=16, e=16),
    Case(counts=(40, 7), heads=17, d=256, e=256),
    Case(counts=(33, 2, 5, 17), masked=True),
    Case(counts=(33, 2, 0, 17), masked=True, columns=True, views=True, biased=True),
    Case(counts=(9, 50), heads=9, d=64, e=64, dtype=torch.float16, span=32),
    # Several queries: of one program and of several, in parts and whole; a part that the first queries see none of.
    Case(counts=(37, 7, 16, 70), queries=7),
    Case(counts=(37, 19, 29, 70), queries=19, heads=10, span=80, views=True),
    Case(counts=(37, 19, 29, 70), queries=13, heads=2, d=48, e=80, dtype=torch.float16, span=32),
    Case(counts=(16 * 35 + 3, 40), queries=3, heads=3, d=16, e=16),
    Case(counts=(33, 5, 11, 17), queries=5, biased=True),
    Case(counts=(33, 5, 11, 17), queries=5, masked=True, columns=True, views=True),
    Case(counts=(33, 5, 11, 17), queries=5, masked=True, each=False, columns=True, dtype=torch.float16),
    Case(counts=(33, 9, 11, 47), queries=9, masked=True, biased=True, span=32, columns=True),
)
LARGE = tuple(
    Case(
        counts=tuple(range(5, 9000, 600))[:12],
        heads=heads,
        d=d,
        e=d,
        span=span,
        dtype=dtype,
        biased=biased,
        masked=biased,
        columns=d < 128,
    )
    for heads, d in ((18, 64), (24, 128), (6, 48), (6, 80), (12, 256))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for span, biased in ((0, False), (256, True))
)
LARGE += tuple(
    replace(case, counts=tuple(count + 300 for count in case.counts), queries=queries)
    for case in LARGE
    for queries in (2, 300)
)


def made(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, keys, values, starts, counts, bias; places between segments hold NaN."""
    torch.manual_seed(3)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    starts = (counts + 3).cumsum(0, dtype=torch.int32) - counts - 3
    size = int(counts.sum()) + 3 * len(counts)
    q = torch.randn(2, case.queries, 2 * case.heads, case.d).transpose(1, 2)
    q = q[:, :: 2 if case.views else 1][:, : case.heads]
    keys, values, bias = (
        torch.full((size, case.d), torch.nan),
        torch.full((size, case.e), torch.nan),
        torch.full((size,), torch.nan),
    )
    for start, count in zip(starts.tolist(), case.counts, strict=True):
        keys[start : start + count] = torch.randn(count, case.d)
        values[start : start + count] = torch.randn(count, case.e)
        bias[start : start + count] = torch.randn(count)
    if case.biased:
        # Every third key is hidden, and all of the second segment; what is hidden may be anything.
        hidden = torch.arange(size) % 3 == 0
        hidden[starts[1] : starts[1] + counts[1]] = True
        bias[hidden] = -torch.inf
        keys[hidden] = values[hidden] = torch.nan
    halves = [t.to(DEVICE, case.dtype) for t in (q, keys, values)]
    return *halves, starts.to(DEVICE), counts.to(DEVICE), bias.to(DEVICE) if case.biased else None


def seen_columns(case: Case, starts: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What the queries of each row see, and the column of each key."""
    if not case.masked:
        return None, None
    length = 3 * max(case.counts)
    rows = case.queries if case.each else 1
    visible = torch.rand(2, rows, 2 * length)[..., ::2] < 0.6 if case.views else torch.rand(2, rows, length) < 0.6
    columns = torch.full((int(starts[-1]) + case.counts[-1] + 3,), -7, dtype=torch.int32)
    for start, count in zip(starts.tolist(), case.counts, strict=True):
        columns[start : start + count] = torch.randperm(length)[:count].sort().values
    return visible.to(DEVICE), columns.to(DEVICE) if case.columns else None


def check(case: Case) -> None:
    q, keys, values, starts, counts, bias = made(case)
    assert serves(q, keys, values)
    tiles = Tiles(16, case.span) if case.span else None
    sizes = {"longest": max(case.counts), "total": sum(case.counts)}
    visible, columns = seen_columns(case, starts)
    if visible is not None:
        # What no query of a row sees may be anything.
        for segment, (start, count) in enumerate(zip(starts.tolist(), case.counts, strict=True)):
            own = torch.arange(count) if columns is None else columns[start : start + count].long()
            unseen = ~visible[segment * 2 // len(case.counts)].any(0)[own]
            keys[start : start + count][unseen] = values[start : start + count][unseen] = torch.nan
    settings = {"scale": 0.3, "visible": visible, "columns": columns}
    out = ragged_attention(q, keys, values, starts, counts, bias=bias, tiles=tiles, **sizes, **settings)
    wide = [t.double() for t in (q, keys, values)]
    expected = attend_by_segment(*wide, starts, counts, bias=None if bias is None else bias.double(), **settings)
    assert out.dtype == case.dtype
    assert float((out.double() - expected).norm() / expected.norm()) < BOUND[case.dtype]
    empty = expected.abs().sum(3) == 0
    assert not out[empty].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_equals_softmax_over_the_keys_of_each_head(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_a_large_step_equals_softmax_over_the_keys_of_each_head(case: Case) -> None:
    check(case)


@pytest.mark.gpu
def test_a_step_can_be_captured() -> None:
    q, keys, values, starts, counts, _ = made(Case(counts=(3000, 17), heads=4, d=64, e=64, dtype=torch.bfloat16))

    def step() -> Tensor:
        return ragged_attention(q, keys, values, starts, counts, scale=0.1, longest=3000, total=3017)

    torch.testing.assert_close(captured(step)(), step())


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("d", [32, 48, 64, 80, 128, 256])
def test_tiles_fit_into_a_multiprocessor(d: int, itemsize: int) -> None:
    for total, rows in itertools.product((1, 3000, 10**6, 10**8), (1, 2, 17, 3000)):
        tiles = tiles_for(d, d, itemsize, total, rows)
        padded = 1 << (d - 1).bit_length()
        assert tiles.keys >= 16
        assert tiles.span % tiles.keys == 0
        # Queries, and keys and values of every stage, in the shared memory of an H100.
        assert (2 * tiles.stages * tiles.keys + tiles.rows) * padded * itemsize <= 160 * 1024


def test_other_numbers_are_left_to_pytorch() -> None:
    q, keys = torch.zeros(1, 2, 1, 8), torch.zeros(5, 8)
    assert serves(q, keys, keys)
    assert not serves(q.double(), keys.double(), keys.double())
    assert not serves(q, keys, torch.zeros(5, 257))
    assert not serves(q, keys.bfloat16(), keys.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_token_is_written_behind_the_last_and_counted(dtype: torch.dtype) -> None:
    b, g, room, d, e = 2, 3, 5, 6, 10
    keys, values = (torch.randn(b, g, room, n, device=DEVICE, dtype=dtype) for n in (d, e))
    counts = torch.full((b * g,), 3, dtype=torch.int32, device=DEVICE)
    # Views of all heads' keys, as a layer has them.
    k, v = (torch.randn(b, 1, g + 2, n, device=DEVICE, dtype=dtype).transpose(1, 2)[:, 1:-1] for n in (d, e))
    expected = keys.clone().index_copy_(2, torch.tensor([3], device=DEVICE), k), values.clone()
    expected[1][:, :, 3:4] = v
    append(k, v, keys, values, counts)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    assert counts.tolist() == [4] * (b * g)


def test_without_room_nothing_is_written_over_and_all_that_is_read_is_nan() -> None:
    keys, values = torch.zeros(1, 2, 3, 4, device=DEVICE), torch.zeros(1, 2, 3, 4, device=DEVICE)
    counts = torch.tensor([3, 2], dtype=torch.int32, device=DEVICE)
    one = torch.ones(1, 2, 1, 4, device=DEVICE)
    append(one, one, keys, values, counts)
    assert counts.tolist() == [3, 3]
    assert keys[0, 0, 0].isnan().all()
    assert not keys[0, 0, 1:].any()
    assert torch.equal(keys[0, 1, 2], torch.ones(4, device=DEVICE))
    starts = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    out = ragged_attention(
        one, keys.flatten(0, 2), values.flatten(0, 2), starts, counts, scale=1.0, longest=3, total=6
    )  # fmt: skip
    assert out[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()
