"""Which examples make up step t: pure functions of (seed, t), so a resumed run needs no saved state of a loader."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from attnlab.summaries import short_repr

__all__ = ["Buckets", "Order", "generator", "permuted"]


def generator(seed: int, *keys: int) -> np.random.Generator:
    """A random stream of its own for each (seed, *keys), the same on every platform."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *keys])))


def permuted(indices: np.ndarray, *, n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Where a random permutation of range(n) sends ``indices``, without storing the permutation.

    A Feistel network permutes the next power of four; an index that lands outside range(n) is permuted again.

    >>> sorted(permuted(np.arange(7), n=7, seed=0).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    keys = generator(seed, epoch).integers(0, 1 << 63, size=8, dtype=np.uint64)
    x = np.asarray(indices, dtype=np.uint64)
    outside = np.ones(x.shape, bool)
    while outside.any():
        left, right = x[outside] >> np.uint64(half), x[outside] & low
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & low)
        x = x.copy()
        x[outside] = (left << np.uint64(half)) | right
        outside = x >= n
    return x.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """n examples in batches of one size, each epoch in its own order; unshuffled: one pass, its last batch short.

    >>> Order(n=5, batch_size=2, shuffle=False).indices(2)
    array([4])
    """

    n: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.n < 1 or self.batch_size < 1:
            raise ValueError(f"need at least one example and one per batch, got n={self.n}, {self.batch_size} a batch")

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every example has been seen."""
        return -(-self.n // self.batch_size)

    def indices(self, step: int) -> np.ndarray:
        """The examples of this step; a shuffled batch may reach over the end of an epoch into the next."""
        position = step * self.batch_size + np.arange(self.batch_size)
        if not self.shuffle:
            if not 0 <= step < self.steps_per_epoch:
                raise IndexError(f"step {step} of a single pass of {self.steps_per_epoch} steps")
            return position[position < self.n]
        epochs = position // self.n
        parts = [
            permuted(position[epochs == e] % self.n, n=self.n, seed=self.seed, epoch=int(e)) for e in np.unique(epochs)
        ]
        return np.concatenate(parts)


@dataclass(eq=False)
class Buckets:
    """Batches of examples of like length, so that little is padding.

    Each epoch's examples are shuffled, sorted by length within pools of 100 batches, cut into batches of
    ``batch_size`` examples or of at most ``max_tokens`` (longest times number), and the batches shuffled.
    """

    lengths: np.ndarray
    batch_size: int | None = None
    max_tokens: int | None = None
    seed: int = 0
    shuffle: bool = True
    # The first step of each epoch, and the batches of the last two epochs used: caches of functions of (seed, epoch).
    _starts: list[int] = field(init=False, default_factory=lambda: [0], repr=False)
    _recent: dict[int, list[np.ndarray]] = field(init=False, default_factory=dict, repr=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if len(self.lengths) == 0:
            raise ValueError("need at least one example, got none")
        if (self.batch_size is None) == (self.max_tokens is None):
            raise ValueError(f"give batch_size or max_tokens, got {self.batch_size} and {self.max_tokens}")
        if self.max_tokens is not None and (longest := int(self.lengths.max())) > self.max_tokens:
            raise ValueError(f"the longest example has {longest} tokens, more than max_tokens={self.max_tokens}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch; with ``max_tokens`` later ones may differ by a few."""
        return len(self._epoch(0))

    def indices(self, step: int) -> np.ndarray:
        """The examples of this step."""
        if step < 0 or (not self.shuffle and step >= self.steps_per_epoch):
            raise IndexError(f"step {step} of a pass of {self.steps_per_epoch} steps")
        starts = self._starts
        while starts[-1] <= step:
            # With a batch_size every epoch has as many batches as the first, so no epoch is built just to count them.
            epoch = 0 if self.batch_size else len(starts) - 1
            starts.append(starts[-1] + len(self._epoch(epoch)))
        epoch = int(np.searchsorted(starts, step, side="right")) - 1
        return self._epoch(epoch)[step - starts[epoch]]

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._recent:
            while len(self._recent) > 1:
                self._recent.pop(next(iter(self._recent)))
            self._recent[epoch] = self._make_epoch(epoch)
        return self._recent[epoch]

    def _make_epoch(self, epoch: int) -> list[np.ndarray]:
        n = len(self.lengths)
        if not self.shuffle:
            return self._cut(np.argsort(self.lengths, kind="stable"))
        rng = generator(self.seed, epoch)
        order = rng.permutation(n)
        mean = max(1.0, float(self.lengths.mean()))
        pool = 100 * (self.batch_size or max(1, int((self.max_tokens or 0) / mean)))
        batches = []
        for at in range(0, n, pool):
            part = order[at : at + pool]
            batches += self._cut(part[np.argsort(self.lengths[part], kind="stable")])
        return [batches[i] for i in rng.permutation(len(batches))]

    def _cut(self, ordered: np.ndarray) -> list[np.ndarray]:
        if self.batch_size is not None:
            return [ordered[at : at + self.batch_size] for at in range(0, len(ordered), self.batch_size)]
        assert self.max_tokens is not None
        batches, start = [], 0
        for end in range(1, len(ordered) + 1):
            # Sorted, so the next example is the longest so far.
            if end == len(ordered) or (end + 1 - start) * max(1, self.lengths[ordered[end]]) > self.max_tokens:
                batches.append(ordered[start:end])
                start = end
        return batches
