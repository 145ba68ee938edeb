from types import SimpleNamespace

import pytest
import torch

from attnlab.training.pending_metrics import Reading, Window, first_bad

ALONE = SimpleNamespace(device=torch.device("cpu"), num_processes=1)


def window_of_two():
    window = Window(ALONE, columns=4)
    weights, counts = torch.tensor([1.0, 0.5]), torch.tensor([2.0, 4.0])
    for scale in (1.0, 3.0):
        totals = scale * torch.tensor([6.0, 8.0])
        window.add(weights=weights, totals=totals, counts=counts, norm=torch.tensor(scale))
    return window


def test_a_row_is_the_weighted_loss_the_means_and_the_norm():
    # 6 / 2 = 3 and 8 / 4 = 2, so the loss is 3 + 0.5 * 2.
    assert window_of_two().table().tolist() == [[4.0, 3.0, 2.0, 1.0], [12.0, 9.0, 6.0, 3.0]]


def test_restored_rows_come_first_and_clearing_leaves_none():
    window = window_of_two()
    rows = window.table().tolist()
    window.restore(rows)
    window.add(weights=torch.ones(2), totals=torch.ones(2), counts=torch.ones(2), norm=torch.tensor(0.0))
    assert window.table().tolist() == [*rows, [2.0, 1.0, 1.0, 0.0]]
    window.restore([])
    assert window.table().shape == (0, 4)


@pytest.mark.parametrize(
    ("row", "bad", "found"),
    [
        (1, {0: float("nan"), 2: float("nan")}, (10, 2)),
        (0, {0: float("inf")}, (9, 0)),
        (2, {3: float("-inf")}, (11, 3)),
    ],
)
def test_the_first_bad_step_and_its_term(row, bad, found):
    table = torch.zeros(3, 4)
    for column, value in bad.items():
        table[row, column] = value
    assert first_bad(table, last=11) == found
    assert first_bad(torch.zeros(3, 4), last=11) is None
    assert first_bad(torch.zeros(0, 4), last=11) is None


def test_a_reading_on_the_cpu_is_there_at_once():
    reading = Reading(torch.ones(2, 4), step=7, seconds=1.5)
    assert reading.ready
    assert reading.table().sum() == 8
