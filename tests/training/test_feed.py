import time

import pytest
import torch

from attnlab.training.feed import Prefetcher, parts_of

CPU = torch.device("cpu")


class Counter:
    def __init__(self, *, delay=0.0, fail_at=None):
        self.delay, self.fail_at, self.asked = delay, fail_at, []

    def batch(self, step):
        self.asked.append(step)
        time.sleep(self.delay)
        if step == self.fail_at:
            raise FileNotFoundError("the corpus is gone")
        return {"x": torch.full((6, 2), step), "name": "a"}


def test_batches_come_in_order_from_the_step_a_run_resumes_at():
    with Prefetcher(Counter(), range(3, 8), device=CPU) as feed:
        assert [int(part["x"][0, 0]) for [part] in feed] == [3, 4, 5, 6, 7]


def test_ranks_and_accumulated_parts_share_out_every_row_once():
    batch = {"x": torch.arange(12), "scale": torch.tensor(2.0), "name": "a"}
    parts = [p for rank in range(2) for p in parts_of(batch, rank=rank, world=2, accumulate=3)]
    assert [p["x"].tolist() for p in parts] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert all(p["scale"] == 2 and p["name"] == "a" for p in parts)
    uneven = [p["x"].tolist() for p in parts_of({"x": torch.arange(5)}, rank=0, world=1, accumulate=2)]
    assert uneven == [[0, 1, 2], [3, 4]]


def test_batches_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="3 rows cannot be split over 2 processes x 2"):
        parts_of({"x": torch.zeros(3, 2)}, rank=0, world=2, accumulate=2)
    with pytest.raises(ValueError, match=r"first axis, got {'x': 4, 'mask': 7} rows"):
        parts_of({"x": torch.zeros(4), "mask": torch.zeros(7, 7)}, rank=0, world=2)


def test_an_error_of_the_source_is_raised_at_its_batch():
    seen = []
    with (
        pytest.raises(FileNotFoundError, match="the corpus is gone"),
        Prefetcher(Counter(fail_at=2), range(5), device=CPU) as f,
    ):
        seen.extend(parts for parts in f)
    assert len(seen) == 2


def test_no_more_than_ahead_are_prepared_and_none_after_the_end():
    source = Counter()
    with Prefetcher(source, range(1000), device=CPU, ahead=3) as feed:
        next(iter(feed))
        time.sleep(0.3)
    # One taken, at most three waiting.
    assert 3 <= len(source.asked) <= 4


def test_waiting_is_measured_and_the_first_batch_does_not_count():
    with Prefetcher(Counter(delay=0.05), range(4), device=CPU) as slow:
        assert len(list(slow)) == 4
    assert 0.1 < slow.waited < 1.0
    with Prefetcher(Counter(), range(4), device=CPU) as fast:
        for _ in fast:
            time.sleep(0.02)
    assert fast.waited < 0.02
