"""One training of ``python -m papers value-aware``, whose steps are planned together with the other trainings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.provenance import write_json
from attnlab.training import Callback, Moment, Recipe, Schedule, Settings, Source, every, train
from papers.common.row_store import Part
from papers.common.wiki_corpus import WikiCorpus
from papers.value_aware.config import ValueAwareConfig

__all__ = ["PartRun", "Rendezvous", "fit", "on_device", "plan_steps", "uncompiled"]

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Rendezvous:
    """Processes that train at once agree on how long, through files in a folder; ``name`` is group-member."""

    folder: Path
    name: str

    def ready(self) -> None:
        """Wait until every part can start to measure its speed."""
        (self.folder / f"{self.name}.ready").touch()
        _wait_for(self.folder / "go")

    def steps(self, rate: float) -> int:
        """Note this part's speed while all run; returns the number of steps planned from the speeds of all."""
        write_json(self.folder / f"{self.name}.rate", rate)
        _wait_for(self.folder / "steps.json")
        planned = self.planned()
        assert planned is not None
        return planned

    def planned(self) -> int | None:
        """The number of steps, if it was planned before."""
        path = self.folder / "steps.json"
        return json.loads(path.read_text())[self.name.partition("-")[0]] if path.exists() else None


@dataclass(frozen=True)
class PartRun:
    """What every part gets: the settings, its texts, its rows, the rendezvous, and the folder of its training."""

    config: ValueAwareConfig
    corpus: WikiCorpus
    part: Part
    rendezvous: Rendezvous
    folder: Path


def plan_steps(rates: Mapping[str, float], *, seconds: float, share: Mapping[str, float]) -> dict[str, int]:
    """Steps for each group (the name before the dash) so that all of it takes ``seconds`` on one device.

    n processes at once have 1/n of the device each, so a step of part i costs 1 / (n rate_i) seconds of it.

    >>> plan_steps({"lm-exp": 2.0, "lm-elu": 1.0, "mlm-long": 1.0}, seconds=90, share={"lm": 0.5, "mlm": 0.5})
    {'lm': 90, 'mlm': 135}
    """
    groups = {name.partition("-")[0] for name in rates}
    total = sum(share[group] for group in groups)
    planned = {}
    for group in sorted(groups):
        cost = sum(1 / (len(rates) * rate) for name, rate in rates.items() if name.partition("-")[0] == group)
        planned[group] = max(1, round(seconds * share[group] / total / cost))
    return planned


def fit(
    model: nn.Module,
    source: Source,
    *,
    term: Any,
    recipe: Recipe,
    schedule: Callable[[int], Schedule],
    steps: int | None,
    blocks: nn.ModuleList,
    curve: Callable[[int, nn.Module], Mapping[str, float]],
    run: PartRun,
    forward: Forward | None = None,
) -> dict[str, Any]:
    """Train for ``steps``, or for as many as the rendezvous plans; ``curve`` makes the metrics of an evaluation."""
    config = run.config
    if config.compile:
        _compile(blocks)
    rate = None
    steps = run.rendezvous.planned() if steps is None else steps
    if steps is None:
        start = {name: t.detach().clone() for name, t in model.state_dict().items()}
        rate = _measure(model, source, term, recipe, run, forward)
        steps = run.rendezvous.steps(rate)
        model.load_state_dict(start)
    settings = Settings(
        steps=steps,
        recipe=recipe,
        schedule=schedule(steps),
        seed=config.seed,
        evaluate_at=every(max(1, steps // config.curve_points), steps=steps),
        checkpoint_every=max(1, steps // config.curve_points),
    )
    outcome = train(
        model,
        source,
        terms=[term],
        settings=settings,
        run_dir=run.folder,
        callbacks=[_Curve(curve)],
        forward=forward,
        resume=True,
    )
    model.eval()
    return {"steps": steps, "probe_rate": rate, **outcome.timing}


class _Curve(Callback):
    def __init__(self, curve: Callable[[int, nn.Module], Mapping[str, float]]) -> None:
        self.curve = curve

    def on_evaluation(self, moment: Moment) -> Mapping[str, float]:
        # The compiled graphs are of training's batch and dropout.
        with uncompiled(), torch.no_grad():
            return self.curve(moment.step, moment.model)


class _EnoughError(Exception):
    pass


class _Speed(Callback):
    """Steps per second over ``seconds``, after a warm-up and once every part is ready."""

    def __init__(self, rendezvous: Rendezvous, seconds: float, warmup: int = 6) -> None:
        self.rendezvous, self.seconds, self.warmup = rendezvous, seconds, warmup
        self.started, self.rate = 0.0, 0.0

    def on_step(self, moment: Moment) -> None:
        if moment.step == self.warmup:
            _synchronise()
            self.rendezvous.ready()
            self.started = time.perf_counter()
        elif moment.step > self.warmup and time.perf_counter() - self.started > self.seconds:
            _synchronise()
            self.rate = (moment.step - self.warmup) / (time.perf_counter() - self.started)
            raise _EnoughError


def _measure(
    model: nn.Module,
    source: Source,
    term: Any,
    recipe: Recipe,
    run: PartRun,
    forward: Forward | None,
) -> float:
    """Steps per second of a short training in a folder of its own, at a rate that hardly changes the model."""
    speed = _Speed(run.rendezvous, run.config.probe_seconds)
    settings = Settings(steps=1_000_000, recipe=replace(recipe, lr=1e-8), seed=run.config.seed)
    probe = run.folder.parent / f"{run.folder.name}-probe"
    try:
        train(model, source, terms=[term], settings=settings, run_dir=probe, callbacks=[speed], forward=forward)
    except _EnoughError:
        return speed.rate
    raise AssertionError("the probe ends only by being stopped")


def _compile(blocks: nn.ModuleList) -> None:
    """Compile each layer; all layers have the same graph, which is compiled once."""
    from torch._dynamo import config

    # A layer that cannot be compiled runs as it is written, more slowly.
    config.suppress_errors = True
    for block in blocks:
        block.compile()


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled layers run as they were written."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


def on_device(batches: Iterator[dict[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """The batches, moved once."""
    return [{name: t.to(device) for name, t in batch.items()} for batch in batches]


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
