from types import SimpleNamespace

import pytest
import torch

from attnlab.training.pending_metrics import PendingMetrics, TableTransfer, first_not_finite

ALONE = SimpleNamespace(device=torch.device("cpu"), num_processes=1)


def two_updates():
    pending = PendingMetrics(ALONE, columns=4)
    weights, counts = torch.tensor([1.0, 0.5]), torch.tensor([2.0, 4.0])
    for scale in (1.0, 3.0):
        totals = scale * torch.tensor([6.0, 8.0])
        pending.add(weights=weights, totals=totals, counts=counts, norm=torch.tensor(scale))
    return pending


def test_a_row_is_the_weighted_loss_the_means_and_the_norm():
    # 6 / 2 = 3 and 8 / 4 = 2, so the loss is 3 + 0.5 * 2.
    assert two_updates().table().tolist() == [[4.0, 3.0, 2.0, 1.0], [12.0, 9.0, 6.0, 3.0]]


def test_restored_rows_come_first_and_clearing_leaves_none():
    pending = two_updates()
    rows = pending.table().tolist()
    pending.restore(rows)
    pending.add(weights=torch.ones(2), totals=torch.ones(2), counts=torch.ones(2), norm=torch.tensor(0.0))
    assert pending.table().tolist() == [*rows, [2.0, 1.0, 1.0, 0.0]]
    pending.restore([])
    assert pending.table().shape == (0, 4)


@pytest.mark.parametrize(
    ("row", "bad", "expected"),
    [
        (1, {0: float("nan"), 2: float("nan")}, (10, 2)),
        (0, {0: float("inf")}, (9, 0)),
        (2, {3: float("-inf")}, (11, 3)),
    ],
)
def test_the_first_step_that_is_not_finite_and_its_term(row, bad, expected):
    table = torch.zeros(3, 4)
    for column, value in bad.items():
        table[row, column] = value
    assert first_not_finite(table, last=11) == expected
    assert first_not_finite(torch.zeros(3, 4), last=11) is None
    assert first_not_finite(torch.zeros(0, 4), last=11) is None


def test_a_table_on_the_cpu_needs_no_waiting():
    transfer = TableTransfer(torch.ones(2, 4), step=7, seconds=1.5)
    assert transfer.ready
    assert transfer.table().sum() == 8
