"""Several models trained side by side in one process, without run folders; one model alone is the simplest case.

Small models spend more time on launching kernels than on computing. On a GPU an update is captured as a CUDA graph, so
that it is one launch, and models on different streams overlap. On a CPU the same code runs update by update.

``fit`` trains models by one term and one schedule. ``train_learners`` is the loop under it, for learners of any kind: a
subclass of ``Learner`` may compute its loss, group its parameters or treat its gradients in its own way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.measure import captured
from attnlab.training.feed import Source, to_device
from attnlab.training.settings import Recipe, Schedule, make_optimizer, parameter_groups
from attnlab.training.terms import Term

__all__ = ["Clock", "Fitted", "Learner", "PinnedBatches", "UpdateLog", "fit", "lanes", "train_learners"]

# Updates of a shape before its graph is captured: libraries choose their kernels in them.
WARMUP = 2
# The host may run ahead of the device by this many updates.
AHEAD = 24
# The number of updates where only the time is limited.
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Fitted:
    """How many updates were made, in which time, and each model's loss at the updates ``logged_at``."""

    steps: int
    seconds: float
    logged_at: list[int]
    losses: dict[str, list[float]]


class Learner:
    """A model, its optimiser, and one captured update for each shape of batch.

    Without ``capture`` every update is run as it is written, on a GPU too. Products on a GPU are of bfloat16 if
    ``half``. Subclasses override the methods from ``advance`` on.
    """

    warmup = WARMUP
    # Whether the model is in training mode while it is trained.
    train_mode = True

    def __init__(
        self,
        model: nn.Module,
        term: Term | None,
        recipe: Recipe,
        *,
        schedule: Schedule | None = None,
        stream: Any = None,
        pool: Any = None,
        half: bool = True,
        capture: bool = True,
    ) -> None:
        self.model, self.term, self.recipe = model, term, recipe
        self.schedule = schedule or Schedule("constant")
        self.device = next(model.parameters()).device
        self.cuda = self.device.type == "cuda"
        self.half = half and self.cuda
        self.capture = capture and self.cuda
        self.stream, self.pool = stream, pool
        # A captured update reads its learning rate here.
        self.lr = torch.zeros((), device=self.device)
        self.optimizer = make_optimizer(
            self.parameter_groups(),
            recipe,
            lr=self.lr if self.capture else None,
            fused=self.cuda,
            capturable=self.capture,
        )
        self.loss = torch.zeros((), device=self.device)
        self.graphs: dict[tuple[Any, ...], tuple[Callable[[], None], dict[str, Tensor]]] = {}
        self.uncaptured: dict[tuple[Any, ...], int] = {}
        model.train(self.train_mode)

    def update(self, batch: Mapping[str, Tensor], lr: float) -> None:
        """One update on a batch that lies on the host, pinned if there is a GPU."""
        if not self.cuda:
            self.set_rate(lr)
            self._step(to_device(dict(batch), self.device))
            return
        with torch.cuda.stream(self.stream):
            self.set_rate(lr)
            shape = tuple((name, tuple(t.shape)) for name, t in batch.items())
            if not self.capture or (shape not in self.graphs and self._warming_up(shape)):
                self._step(to_device(dict(batch), self.device))
                return
            if shape not in self.graphs:
                inputs = to_device(dict(batch), self.device)
                step = captured(lambda: self._step(inputs), warmup=0, pool=self.pool, stream=self.stream)
                self.graphs[shape] = step, inputs
            step, inputs = self.graphs[shape]
            for name, t in batch.items():
                inputs[name].copy_(t, non_blocking=True)
            step()

    def _warming_up(self, shape: tuple[Any, ...]) -> bool:
        self.uncaptured[shape] = self.uncaptured.get(shape, 0) + 1
        return self.uncaptured[shape] <= self.warmup

    def _step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # A cached cast of a weight would outlive the graph that made it.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            loss = self.objective(batch)
        loss.backward(torch.ones_like(loss))
        self.prepare_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.copy_(loss.detach())

    def mean(self, term: Term, output: Any, batch: dict[str, Tensor]) -> Tensor:
        """A term over what it counts; the host does not wait to learn the count."""
        total, count = term(self.model, output, batch, 0)
        return total / torch.as_tensor(count, device=self.device).clamp(min=1)

    def advance(self, batch: Mapping[str, Tensor], *, step: int, steps: int) -> None:
        """Update number ``step``, counted from 0, of ``steps``: by default at the schedule's learning rate."""
        self.update(batch, self.recipe.lr * self.schedule.factor(step + 1, steps=steps))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimiser: by default matrices, which decay, and the rest."""
        return parameter_groups(self.model, self.recipe)

    def set_rate(self, lr: float) -> None:
        """Give the optimiser its learning rate for the next update."""
        if self.capture:
            self.lr.fill_(lr)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch, or several, of which the sum is minimised; by default of the model's output."""
        output = self.model(**{name: t for name, t in batch.items() if name != "labels"})
        return self.output_loss(output, batch)

    def output_loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        """The loss of the model's output: by default the term's mean."""
        assert self.term is not None
        return self.mean(self.term, output, batch)

    def prepare_gradients(self) -> None:
        """Called between the backward pass and the optimiser's step: clips gradients if the recipe says so."""
        if self.recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)


class UpdateLog:
    """A row of numbers for each update, written on the device, so that captured updates can write it too."""

    def __init__(self, updates: int, columns: int, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.rows = torch.zeros(updates, columns, device=device, dtype=dtype)
        self.written = torch.zeros(1, dtype=torch.long, device=device)

    def add(self, row: Tensor) -> None:
        """Write the next row."""
        self.rows.index_copy_(0, self.written, row.detach()[None].to(self.rows.dtype))
        self.written += 1

    def read(self) -> Tensor:
        """The rows so far."""
        return self.rows[: int(self.written)]


class PinnedBatches:
    """Host batches in pinned memory, kept until the device has copied them."""

    def __init__(self, learners: Iterable[Learner]) -> None:
        self.streams = list({id(x.stream): x.stream for x in learners if x.stream is not None}.values())
        self.in_flight = deque[Any]()

    def pin(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch as learners take it."""
        return {name: t.pin_memory() for name, t in batch.items()} if self.streams else batch

    def keep(self, batches: Collection[dict[str, Tensor]]) -> None:
        """Hold batches that learners were just given; the host waits if it is too far ahead of the device."""
        if not self.streams:
            return
        self.in_flight.append((batches, [stream.record_event() for stream in self.streams]))
        if len(self.in_flight) > AHEAD:
            for event in self.in_flight.popleft()[1]:
                event.synchronize()


class Clock:
    """How many updates there will be: ``steps``, or as many as the measured speed allows in ``seconds``."""

    def __init__(self, steps: int | None, seconds: float | None = None) -> None:
        self.requested, self.seconds, self.started = steps, seconds, time.monotonic()
        self.steps = steps if steps is not None else UNLIMITED
        self.first: tuple[int, float] | None = None

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def over(self, step: int) -> bool:
        """Whether ``step`` updates are all, or the time is up."""
        return step >= self.steps or (self.seconds is not None and self.elapsed() > self.seconds)

    def plan(self, step: int) -> None:
        """Set ``steps`` to what the speed since the first plan allows; schedules then end with the time."""
        if self.seconds is None:
            return
        now = self.elapsed()
        if self.first is None:
            # The time before was spent on choosing kernels and capturing graphs.
            self.first = step, now
        elif now > self.first[1]:
            rate = (step - self.first[0]) / (now - self.first[1])
            most = self.requested if self.requested is not None else UNLIMITED
            self.steps = min(most, max(step, round(step + rate * (self.seconds - now))))


def lanes(count: int) -> list[tuple[Any, Any]]:
    """Streams with the memory pool of their graphs; graphs of one stream never run at once, so they share it.

    Beside other processes (NVIDIA's MPS) a process has few queues to the device, in which streams wait for each other,
    unless CUDA_DEVICE_MAX_CONNECTIONS allows more.
    """
    if not torch.cuda.is_available():
        return [(None, None)] * count
    return [(torch.cuda.Stream(), torch.cuda.graph_pool_handle()) for _ in range(count)]


def train_learners(
    learners: Sequence[tuple[Learner, Source]],
    clock: Clock,
    *,
    pauses: Collection[int] = (),
    pause_at_end: bool = False,
    on_pause: Callable[[int], bool | None] | None = None,
) -> int:
    """Train each learner on the batches of its source until the clock is over; returns the number of updates.

    Learners of one source get the same batches. After the numbers of updates in ``pauses``, and at the end if
    ``pause_at_end``, the device is idle and ``on_pause(updates)`` is called; training ends where it returns True.
    Models are in evaluation mode afterwards.
    """
    every_learner = [learner for learner, _ in learners]
    sources = {id(source): source for _, source in learners}
    cuda = any(learner.cuda for learner in every_learner)
    batches, step = PinnedBatches(every_learner), 0
    _synchronise(cuda)
    while True:
        over = clock.over(step)
        if on_pause is not None and (step in pauses or (over and pause_at_end)):
            _synchronise(cuda)
            stopped = bool(on_pause(step))
            for learner in every_learner:
                learner.model.train(learner.train_mode)
            over = stopped or clock.over(step)
        if over:
            break
        pinned = {key: batches.pin(source.batch(step)) for key, source in sources.items()}
        for learner, source in learners:
            learner.advance(pinned[id(source)], step=step, steps=clock.steps)
        batches.keep(pinned.values())
        step += 1
    _synchronise(cuda)
    for learner in every_learner:
        learner.model.eval()
        learner.graphs.clear()
    return step


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
    on_pause: Callable[[int], None] | None = None,
    learner_class: type[Learner] = Learner,
) -> Fitted:
    """Train every model on the same batches, or on those of its own source, for ``steps`` updates or for ``seconds``.

    On a GPU products are of bfloat16, unless ``half`` is false: casts are kernels too, and small models have so many of
    them that float32 is faster.

    The schedule ends at ``steps``, or before, where the speed so far says that the time will be over. After each
    ``every`` updates, and at the end, losses are logged and ``on_pause(updates)`` is called with the device idle.
    """
    if steps is None and seconds is None:
        raise ValueError("say how long to train: steps, seconds or both")
    cuda = next(next(iter(models.values())).parameters()).is_cuda
    tracks = lanes(streams) if cuda else [(None, None)] * streams
    learners: dict[str, Learner] = {}
    for i, (name, model) in enumerate(models.items()):
        stream, pool = tracks[i % streams]
        learners[name] = learner_class(model, term, recipe, schedule=schedule, stream=stream, pool=pool, half=half)
    _synchronise(cuda)
    clock = Clock(steps, seconds)
    logged_at: list[int] = []
    losses: dict[str, list[float]] = {name: [] for name in models}

    def log(step: int) -> None:
        if step == 0:
            return
        clock.plan(step)
        logged_at.append(step)
        for name, learner in learners.items():
            losses[name].append(float(learner.loss.mean()))
        if on_pause is not None:
            on_pause(step)

    pairs = [(x, source[name] if isinstance(source, Mapping) else source) for name, x in learners.items()]
    made = train_learners(pairs, clock, pauses=range(every, UNLIMITED, every), pause_at_end=True, on_pause=log)
    return Fitted(made, clock.elapsed(), logged_at, losses)


def _synchronise(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
