import numpy as np
import pytest

from attnlab.data import Buckets, Order
from attnlab.data.batching import permuted


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 63, 100, 1009, 65537])
def test_permuted_is_a_permutation(n):
    assert sorted(permuted(np.arange(n), n=n, seed=3).tolist()) == list(range(n))


def test_permuted_is_one_of_all_permutations_evenly():
    counts = np.zeros((5, 5))
    seen = set()
    for seed in range(2000):
        where = permuted(np.arange(5), n=5, seed=seed)
        counts[np.arange(5), where] += 1
        seen.add(tuple(where.tolist()))
    assert len(seen) == 120
    assert np.abs(counts - 400).max() < 5 * np.sqrt(400)


def test_permuted_needs_only_the_indices_asked_for():
    whole = permuted(np.arange(1009), n=1009, seed=1, epoch=2)
    assert permuted(np.array([700, 3]), n=1009, seed=1, epoch=2).tolist() == [whole[700], whole[3]]
    assert permuted(np.array([10**11]), n=10**12, seed=1)[0] < 10**12


def test_order_sees_every_example_once_an_epoch_and_each_epoch_in_another_order():
    order = Order(n=23, batch_size=5, seed=1)
    seen = np.concatenate([order.indices(step) for step in range(23)])
    epochs = seen.reshape(5, 23)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(23))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    assert order.steps_per_epoch == 5


def test_order_is_a_function_of_seed_and_step():
    assert (
        Order(n=23, batch_size=5, seed=1).indices(1000).tolist()
        == Order(n=23, batch_size=5, seed=1).indices(1000).tolist()
    )
    assert (
        Order(n=23, batch_size=5, seed=1).indices(0).tolist() != Order(n=23, batch_size=5, seed=2).indices(0).tolist()
    )


def test_a_batch_larger_than_the_corpus():
    batch = Order(n=3, batch_size=7).indices(0)
    assert sorted(batch[:3].tolist()) == [0, 1, 2]
    assert len(batch) == 7


def test_unshuffled_is_one_pass():
    order = Order(n=7, batch_size=3, shuffle=False)
    assert [order.indices(step).tolist() for step in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    with pytest.raises(IndexError, match="step 3 of a single pass of 3 steps"):
        order.indices(3)
    with pytest.raises(ValueError, match="at least one example"):
        Order(n=0, batch_size=3)


LENGTHS = np.random.default_rng(0).integers(1, 60, size=1009)


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"max_tokens": 300}])
def test_buckets_see_every_example_once_an_epoch(settings):
    buckets = Buckets(LENGTHS, **settings, seed=1)
    step = 0
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < len(LENGTHS):
            seen += buckets.indices(step).tolist()
            step += 1
        assert sorted(seen) == list(range(len(LENGTHS)))
    assert buckets.steps_per_epoch == pytest.approx(step / 3, rel=0.02)


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"max_tokens": 300}])
def test_buckets_are_a_function_of_seed_and_step_asked_in_any_order(settings):
    forward = Buckets(LENGTHS, **settings, seed=1)
    batches = [forward.indices(step).tolist() for step in range(400)]
    for step in (399, 0, 200, 7):
        assert Buckets(LENGTHS, **settings, seed=1).indices(step).tolist() == batches[step]
        assert forward.indices(step).tolist() == batches[step]
    assert Buckets(LENGTHS, **settings, seed=2).indices(0).tolist() != batches[0]


def test_buckets_waste_little_on_padding():
    def waste(batches):
        padded = sum(LENGTHS[b].max() * len(b) for b in batches)
        return padded / LENGTHS.sum() - 1

    bucketed = Buckets(LENGTHS, batch_size=16)
    plain = Order(n=len(LENGTHS), batch_size=16)
    steps = range(len(LENGTHS) // 16)
    assert waste([bucketed.indices(s) for s in steps]) < 0.05
    assert waste([plain.indices(s) for s in steps]) > 0.5


def test_max_tokens_is_kept():
    buckets = Buckets(LENGTHS, max_tokens=300)
    sizes = [LENGTHS[b].max() * len(b) for b in (buckets.indices(s) for s in range(buckets.steps_per_epoch))]
    assert max(sizes) <= 300
    assert np.mean(sizes) > 240


def test_unshuffled_buckets_go_from_short_to_long_once():
    buckets = Buckets(np.array([5, 1, 3, 2]), batch_size=3, shuffle=False)
    assert [buckets.indices(s).tolist() for s in range(2)] == [[1, 3, 2], [0]]
    with pytest.raises(IndexError, match="step 2 of a pass of 2 steps"):
        buckets.indices(2)


def test_bucket_errors():
    with pytest.raises(ValueError, match="the longest example has 59 tokens, more than max_tokens=40"):
        Buckets(LENGTHS, max_tokens=40)
    with pytest.raises(ValueError, match="give batch_size or max_tokens, got None and None"):
        Buckets(LENGTHS)
    with pytest.raises(ValueError, match="at least one example"):
        Buckets(np.array([], int), batch_size=2)
