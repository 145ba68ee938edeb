"""Several models trained side by side in one process: on a GPU each update is one captured graph, replayed.

Small models wait for the launches of their kernels more than for the kernels. A captured update is one launch, and
models on different streams fill the gaps of each other. The same code runs update by update where there is no GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.training.feed import Source
from attnlab.training.settings import Recipe, Schedule, parameter_groups
from attnlab.training.terms import Term

__all__ = ["Feed", "Fitted", "Learner", "fit", "lanes"]

# Updates of a shape before its graph is captured: libraries choose their kernels in them.
WARMUP = 2
# The host may run ahead of the device by this many updates.
AHEAD = 24


@dataclass(frozen=True)
class Fitted:
    """How far a training came, what it took, and each model's loss at the updates ``noted``."""

    steps: int
    seconds: float
    noted: list[int]
    losses: dict[str, list[float]]


class Learner:
    """A model, its optimiser, and one captured update for each shape of batch."""

    warmup = WARMUP

    def __init__(
        self,
        model: nn.Module,
        term: Term,
        recipe: Recipe,
        *,
        stream: Any = None,
        pool: Any = None,
        half: bool = True,
    ) -> None:
        self.model, self.term, self.recipe = model, term, recipe
        self.half = half
        self.device = next(model.parameters()).device
        self.cuda = self.device.type == "cuda"
        self.stream, self.pool = stream, pool
        self.lr = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, recipe), lr=self.lr if self.cuda else 1.0, betas=recipe.betas, eps=recipe.eps,
            fused=self.cuda, capturable=self.cuda,
        )  # fmt: skip
        self.loss = torch.zeros((), device=self.device)
        self.graphs: dict[tuple[Any, ...], tuple[Any, dict[str, Tensor]]] = {}
        self.seen: dict[tuple[Any, ...], int] = {}
        model.train()

    def update(self, batch: Mapping[str, Tensor], lr: float) -> None:
        """One update on a batch that lies on the host, pinned if there is a GPU."""
        if not self.cuda:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self._step(dict(batch))
            return
        shape = tuple((name, tuple(t.shape)) for name, t in batch.items())
        with torch.cuda.stream(self.stream):
            self.lr.fill_(lr)
            if shape not in self.graphs:
                self.seen[shape] = self.seen.get(shape, 0) + 1
                if self.seen[shape] <= self.warmup:
                    self._step({name: t.to(self.device, non_blocking=True) for name, t in batch.items()})
                    return
                self.graphs[shape] = self._capture(batch)
            graph, inputs = self.graphs[shape]
            for name, t in batch.items():
                inputs[name].copy_(t, non_blocking=True)
            graph.replay()

    def _capture(self, batch: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        inputs = {name: t.to(self.device) for name, t in batch.items()}
        torch.cuda.synchronize()
        # What the updates before it left in the stream's own pool: the graph has another.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a prefetcher) may go on talking to the device meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, pool=self.pool, capture_error_mode="thread_local"):
            self._step(inputs)
        return graph, inputs

    def _step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # A cached cast of a weight would outlive the graph that made it.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda and self.half, cache_enabled=False):
            output = self.model(**{name: t for name, t in batch.items() if name != "labels"})
            loss = self._loss(output, batch)
        loss.backward(torch.ones_like(loss))
        if self.recipe.clip is not None:
            self._clip(self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.copy_(loss.detach())

    def _clip(self, most: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), most, foreach=True)

    def _loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        """What an update descends; a kind of learner of its own may add to it, and note more in its tensors."""
        return self.mean(self.term, output, batch)

    def mean(self, term: Term, output: Any, batch: dict[str, Tensor]) -> Tensor:
        """A term over what it counts, without asking the device how many that are."""
        total, count = term(self.model, output, batch, 0)
        return total / torch.as_tensor(count, device=self.device).clamp(min=1)


class Feed:
    """Batches on their way to the learners: pinned, and kept until the device has read them."""

    def __init__(self, learners: Iterable[Learner]) -> None:
        self.streams = list({id(x.stream): x.stream for x in learners if x.stream is not None}.values())
        self.waiting = deque[Any]()

    def pinned(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch as learners take it."""
        return {name: t.pin_memory() for name, t in batch.items()} if self.streams else batch

    def sent(self, *batches: dict[str, Tensor]) -> None:
        """The learners have been given them; where the host is too far ahead it waits."""
        if not self.streams:
            return
        self.waiting.append((batches, [stream.record_event() for stream in self.streams]))
        if len(self.waiting) > AHEAD:
            for event in self.waiting.popleft()[1]:
                event.synchronize()


def lanes(count: int) -> list[tuple[Any, Any]]:
    """Streams with the memory of their graphs; graphs of one stream never run at once, so they share it.

    Beside other processes (NVIDIA's MPS) a process has few queues to the device, in which streams wait for each other,
    unless CUDA_DEVICE_MAX_CONNECTIONS says more.
    """
    if not torch.cuda.is_available():
        return [(None, None)] * count
    return [(torch.cuda.Stream(), torch.cuda.graph_pool_handle()) for _ in range(count)]


def fit(
    models: Mapping[str, nn.Module],
    source: Source | Mapping[str, Source],
    *,
    term: Term,
    recipe: Recipe,
    schedule: Schedule,
    steps: int | None = None,
    seconds: float | None = None,
    streams: int = 1,
    half: bool = True,
    every: int = 100,
    then: Callable[[int], None] | None = None,
    kind: type[Learner] = Learner,
) -> Fitted:
    """Train every model on the same batches, or on those of its own source, for ``steps`` updates or for ``seconds``.

    On a GPU products are of bfloat16, unless ``half`` is false: casts are kernels too, and small models have so many of
    them that float32 is faster.

    The schedule ends at ``steps``, or before, where the speed so far says that the time will be over. After each
    ``every`` updates, and at the end, ``then(updates)`` is called with the device idle. ``kind``: of learners.
    """
    if steps is None and seconds is None:
        raise ValueError("say how long to train: steps, seconds or both")
    cuda = next(next(iter(models.values())).parameters()).is_cuda
    tracks = lanes(streams) if cuda else [(None, None)] * streams
    learners = {
        name: kind(model, term, recipe, stream=tracks[i % streams][0], pool=tracks[i % streams][1], half=half)
        for i, (name, model) in enumerate(models.items())
    }
    _synchronise(cuda)
    sources = {name: source[name] if isinstance(source, Mapping) else source for name in models}
    clock, feed, step = _Clock(steps, seconds), Feed(learners.values()), 0
    noted: list[int] = []
    losses: dict[str, list[float]] = {name: [] for name in models}
    while not clock.over(step):
        # Models that share a source share its batches.
        batches = {id(each): each for each in sources.values()}
        pinned = {key: feed.pinned(each.batch(step)) for key, each in batches.items()}
        step += 1
        lr = recipe.lr * schedule.factor(step, steps=clock.steps)
        for name, learner in learners.items():
            learner.update(pinned[id(sources[name])], lr)
        feed.sent(*pinned.values())
        if step % every == 0 or clock.over(step):
            _synchronise(cuda)
            clock.plan(step)
            noted.append(step)
            for name, learner in learners.items():
                losses[name].append(float(learner.loss.mean()))
            if then is not None:
                then(step)
    for learner in learners.values():
        learner.model.eval()
        learner.graphs.clear()
    return Fitted(step, clock.elapsed(), noted, losses)


class _Clock:
    """How many updates there will be: what was asked for, or what the time allows at the speed measured so far."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self.wanted, self.seconds, self.started = steps, seconds, time.monotonic()
        self.steps = steps or 1 << 30
        self.first: tuple[int, float] | None = None

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def over(self, step: int) -> bool:
        return step >= self.steps or (self.seconds is not None and self.elapsed() > self.seconds)

    def plan(self, step: int) -> None:
        if self.seconds is None:
            return
        now = self.elapsed()
        if self.first is None:
            # The time before was spent on choosing kernels and capturing graphs.
            self.first = step, now
        elif now > self.first[1]:
            rate = (step - self.first[0]) / (now - self.first[1])
            most = self.wanted if self.wanted is not None else 1 << 30
            self.steps = min(most, max(step, round(step + rate * (self.seconds - now))))


def _synchronise(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
