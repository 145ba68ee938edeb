"""The bag-of-words proxy of KTIW (2.3), trained; and logistic regression, which it equals on two classes (A.10)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, softplus

from attnlab.shapes import Float, Int
from attnlab.summaries import short_repr
from attnlab.training.feed import to_device
from attnlab.training.settings import Recipe
from attnlab.training.side_by_side import Clock, Learner, train_learners

__all__ = ["BagOfWords", "LogisticProxy", "ProxyConfig", "TrainedProxy", "logistic_proxy", "train_proxy"]

# l2 coefficients over ten orders of magnitude, strongest first, so that each fit starts from a simpler one.
PENALTIES = tuple(10.0**power for power in range(4, -6, -1))


class BagOfWords(nn.Module):
    """p = softmax(W mean_l e_{x_l} + b) (Eq. 5); the probe of Eq. 6 leaves the bias out.

    >>> BagOfWords(7, 3, width=2)(torch.tensor([4, 5, 6]), torch.tensor([0, 2])).shape
    torch.Size([2, 3])
    """

    def __init__(self, words: int, outputs: int, *, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.output = nn.Linear(width, outputs)

    def forward(self, words: Int[Tensor, " n"], starts: Int[Tensor, " b"]) -> Float[Tensor, "b o"]:
        """Logits for rows of words laid end to end, each from its start."""
        return self.output(embedding_bag(words, self.embedding.weight, starts, mode="mean"))


@dataclass(frozen=True)
class ProxyConfig:
    """How the proxy is trained; the paper's rates: 1e-3 (translation), 5e-5 (long texts), 1.5e-4 (other texts)."""

    lr: float = 1e-3
    width: int = 256
    batch: int = 32
    epochs: int = 100
    # Epochs without a lower validation loss after which it stops.
    patience: int = 3
    seed: int = 0


@dataclass(frozen=True)
class TrainedProxy:
    """The proxy with the lowest validation loss, and that loss after each epoch, in nats a target."""

    model: BagOfWords
    losses: tuple[float, ...]


def train_proxy(
    train: tuple[Sequence[Any], Sequence[Any]],
    valid: tuple[Sequence[Any], Sequence[Any]],
    *,
    words: int,
    outputs: int,
    config: ProxyConfig | None = None,
    device: torch.device | str = "cpu",
) -> TrainedProxy:
    """Fit Eq. 5 by Adam: ``train`` and ``valid`` are (rows of input ids, rows of output ids, or a class each)."""
    config = config or ProxyConfig()
    data, held_out = _Bags(*train, device=device), _Bags(*valid, device=device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = BagOfWords(words, outputs, width=config.width).to(device)
    recipe = Recipe(kind="adam", lr=config.lr, weight_decay=0.0, clip=None)
    learner = _ProxyLearner(model, data, recipe)
    source = _Epochs(data, batches=max(1, len(data) // config.batch), seed=config.seed)
    best, losses = copy.deepcopy(model.state_dict()), [held_out.loss(model)]

    def validate(step: int) -> bool:
        nonlocal best
        losses.append(held_out.loss(model))
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
            return False
        return len(losses) - 1 - int(np.argmin(losses)) >= config.patience

    steps = config.epochs * source.batches
    epoch_ends = range(source.batches, steps + 1, source.batches)
    train_learners([(learner, source)], Clock(steps), pauses=epoch_ends, on_pause=validate)
    model.load_state_dict(best)
    return TrainedProxy(model, tuple(losses))


class _ProxyLearner(Learner):
    """The mean over the batch's targets of -log p."""

    def __init__(self, model: BagOfWords, data: _Bags, recipe: Recipe) -> None:
        self.data = data
        # Every batch has its own shape, so a captured update would never be used again.
        super().__init__(model, None, recipe, half=False, capture=False)

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        return self.data.nll(self.model, batch).mean()


class _Epochs:
    """Batches of sentences, each epoch in a new order; steps must be asked for in turn."""

    def __init__(self, data: _Bags, *, batches: int, seed: int) -> None:
        self.data, self.batches, self.rng = data, batches, np.random.default_rng(seed)
        self.order: list[np.ndarray] = []

    def batch(self, step: int) -> dict[str, Tensor]:
        if step % self.batches == 0:
            self.order = np.array_split(self.rng.permutation(len(self.data)), self.batches)
        return self.data.batch(self.order[step % self.batches])


@dataclass(frozen=True)
class LogisticProxy:
    """beta_log: the weight of each word in the best of the sweep, and what each l2 coefficient reached."""

    weight: Float[Tensor, " words"]
    bias: float
    penalty: float
    accuracy: dict[float, float] = field(default_factory=dict)

    __repr__ = short_repr


def logistic_proxy(
    train: tuple[Sequence[Any], Sequence[int]],
    valid: tuple[Sequence[Any], Sequence[int]],
    *,
    words: int,
    penalties: Sequence[float] = PENALTIES,
    steps: int = 200,
    device: torch.device | str = "cpu",
) -> LogisticProxy:
    """Logistic regression on word counts divided by the length (Eq. 55), l2 chosen by validation accuracy (A.10).

    Minimises sum_m log(1 + exp(-+(w x_m + b))) + penalty |w|^2 / 2 by L-BFGS; ties go to the stronger penalty. L-BFGS
    calls its objective as often as its line search needs, so this is no loop over updates.
    """
    data, held_out = _Bags(*train, device=device), _Bags(*valid, device=device)
    for name, labels in (("training", train[1]), ("validation", valid[1])):
        if set(map(int, labels)) != {0, 1}:
            raise ValueError(f"the {name} labels must be 0 and 1, both of them, got {sorted(set(map(int, labels)))}")
    weight = torch.zeros(words, 1, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.float64, device=device, requires_grad=True)
    sign = 2 * data.targets.double() - 1
    accuracy: dict[float, float] = {}
    best: tuple[float, float, Tensor, float] | None = None
    for penalty in penalties:
        solver = torch.optim.LBFGS(
            [weight, bias], max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-7
        )

        def objective(penalty: float = penalty, solver: torch.optim.LBFGS = solver) -> Tensor:
            solver.zero_grad()
            loss = softplus(-sign * data.scores(weight, bias)).sum() + penalty / 2 * weight.square().sum()
            loss.backward()
            return loss

        solver.step(objective)
        with torch.no_grad():
            right = (held_out.scores(weight, bias) > 0) == (held_out.targets == 1)
        accuracy[penalty] = float(right.double().mean())
        if best is None or accuracy[penalty] > best[0]:
            best = (accuracy[penalty], penalty, weight.detach().squeeze(1).clone(), float(bias.detach()))
    if best is None:
        raise ValueError("penalties is empty; give at least one l2 coefficient")
    return LogisticProxy(best[2], best[3], best[1], accuracy)


class _Bags:
    """Sentences and their targets, end to end on a device; a batch is gathered by its row numbers."""

    def __init__(self, inputs: Sequence[Any], targets: Sequence[Any], *, device: torch.device | str) -> None:
        if len(inputs) != len(targets) or len(inputs) == 0:
            raise ValueError(
                f"inputs and targets must be as many, and at least one, got {len(inputs)} and {len(targets)}"
            )
        rows = [np.atleast_1d(np.asarray(row, np.int64)) for row in inputs]
        empty = next((i for i, row in enumerate(rows) if not row.size), None)
        if empty is not None:
            raise ValueError(f"sentence {empty} has no words, so its mean embedding is not defined; leave it out")
        target_rows = [np.atleast_1d(np.asarray(row, np.int64)) for row in targets]
        self.device = torch.device(device)
        self.words, self.lengths = self._flat(rows)
        self.targets, self.heights = self._flat(target_rows)
        self.word_at, self.target_at = (np.cumsum(n) - n for n in (self.lengths, self.heights))
        self.starts = torch.from_numpy(self.word_at).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: np.ndarray) -> dict[str, Tensor]:
        """Where the words and the targets of these sentences lie, as ``nll`` takes them."""
        words, starts = _positions(self.word_at[rows], self.lengths[rows])
        targets, _ = _positions(self.target_at[rows], self.heights[rows])
        sentences = np.repeat(np.arange(len(rows)), self.heights[rows])
        places = {"words": words, "starts": starts, "targets": targets, "sentences": sentences}
        return {name: torch.from_numpy(indices) for name, indices in places.items()}

    def nll(self, model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, " targets"]:
        """-log p of each target of a ``batch``."""
        at = to_device(batch, self.device)
        log_p = model(self.words[at["words"]], at["starts"]).log_softmax(1)
        return -log_p[at["sentences"], self.targets[at["targets"]]]

    @torch.no_grad()
    def loss(self, model: BagOfWords) -> float:
        """The mean over all targets."""
        parts = [self.nll(model, self.batch(rows)).sum() for rows in _chunks(len(self), 1024)]
        return float(torch.stack(parts).sum()) / max(1, len(self.targets))

    def scores(self, weight: Tensor, bias: Tensor) -> Float[Tensor, " b"]:
        """w x + b of every sentence."""
        return embedding_bag(self.words, weight, self.starts, mode="mean").squeeze(1) + bias

    def _flat(self, rows: list[np.ndarray]) -> tuple[Tensor, np.ndarray]:
        return torch.from_numpy(np.concatenate(rows)).to(self.device), np.array([len(row) for row in rows])


def _positions(at: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of rows that begin at ``at``, end to end, and where each row begins among them."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(at - starts, lengths), starts


def _chunks(n: int, size: int) -> Iterator[np.ndarray]:
    for start in range(0, n, size):
        yield np.arange(start, min(n, start + size))
