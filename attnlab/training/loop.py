"""The loop that trains every model here: any module, any source of batches, any loss terms, through Accelerate."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attnlab.training.callbacks import Callback, Moment
from attnlab.training.checkpoints import load_model, sweep
from attnlab.training.engine import Engine, Evaluation
from attnlab.training.feed import Feed, Source
from attnlab.training.launch import flat_settings, interrupts, make_accelerator
from attnlab.training.progress import Progress
from attnlab.training.runs import RunFolder, say
from attnlab.training.settings import Settings
from attnlab.training.state import seed_everything
from attnlab.training.terms import Batch, Term

__all__ = ["Interrupted", "Outcome", "train"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last evaluation, its best checkpoint, and how the time was spent."""

    step: int
    metrics: dict[str, float]
    best_step: int | None
    best_value: float | None
    stopped_early: bool
    timing: dict[str, float]
    run_dir: Path


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a termination signal, after a checkpoint was saved."""


def train(
    model: nn.Module,
    source: Source,
    *,
    terms: Sequence[Term],
    settings: Settings,
    run_dir: Path | str,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    evaluations: Mapping[str, Evaluation] | None = None,
    callbacks: Sequence[Callback] = (),
    forward: Callable[[nn.Module, Batch], Any] | None = None,
    resume: bool = False,
    track: str | None = None,
) -> Outcome:
    """Train ``model`` in place on ``source`` and leave a run folder behind.

    The loss is the sum over terms of weight(step) * total / count, with counts taken over the whole global batch. The
    model is called with the entries of the batch that its ``forward`` names (not labels), or through ``forward(model,
    batch)``. ``resume=True`` goes on from the newest good checkpoint, and starts afresh where there is none; a finished
    run is not run again. ``track`` names an Accelerate tracker, such as tensorboard.
    """
    run_dir = Path(run_dir)
    accelerator = make_accelerator(settings, run_dir=run_dir, track=track)
    main = accelerator.is_main_process
    folder = RunFolder(run_dir)
    name = name or run_dir.name
    with folder.hold() if main else nullcontext():
        if main:
            folder.describe(
                name=name,
                seed=settings.seed,
                config={**(config or {}), "training": settings.as_dict()},
                processes=accelerator.num_processes,
                resume=resume,
            )
            sweep(run_dir)
        accelerator.wait_for_everyone()
        if folder.result is not None:
            return _finished(model, folder)
        seed_everything(settings.seed + accelerator.process_index)

        engine = Engine(accelerator, model, terms, settings, folder, forward, callbacks, dict(evaluations or {}))
        if resume:
            engine.restore()
        at = engine.at
        if main:
            folder.start_metrics(engine.metrics_bytes)
        if track:
            accelerator.init_trackers(name, config=flat_settings(settings.as_dict()))

        evaluate_at = frozenset(settings.evaluate_at)
        steps = range(at.step, at.step if at.stopped else settings.steps)
        progress = engine.progress = Progress(settings.steps, start=at.step, quiet=not main)
        ranks = {"rank": accelerator.process_index, "world": accelerator.num_processes}
        feed = Feed(
            source,
            steps,
            device=accelerator.device,
            accumulate=settings.accumulate,
            ahead=settings.prefetch,
            **ranks,
        )
        started = time.perf_counter()
        try:
            with feed, interrupts() as interrupted:
                if at.step == 0 and 0 in evaluate_at and not at.evaluated and engine.evaluate():
                    engine.checkpoint()
                for parts in feed:
                    engine.update(parts)
                    at.step += 1
                    for callback in callbacks:
                        callback.on_step(Moment(at.step, model, run_dir, {}))
                    logging = at.step % settings.log_every == 0 or at.step == settings.steps
                    if logging:
                        engine.log()
                    engine.flush(wait=False)
                    improved = at.step in evaluate_at and engine.evaluate()
                    interrupt = engine.agree(interrupted.is_set(), now=logging)
                    due = settings.checkpoint_every and at.step % settings.checkpoint_every == 0
                    if due or improved or interrupt or at.stopped or at.step == settings.steps:
                        engine.checkpoint()
                    progress.step(at.step)
                    if interrupt:
                        raise _interruption(engine)
                    if at.stopped:
                        break
        finally:
            progress.close()
        engine.synchronise()
        elapsed = time.perf_counter() - started
        done = at.step - steps.start
        timing = {
            "seconds": round(engine.seconds(), 3),
            "steps_per_second": done / elapsed if done else 0.0,
            "waiting_share": feed.waited / elapsed if done else 0.0,
        }
        for tracker in accelerator.trackers:
            tracker.finish()
        metrics = {key: value for key, value in at.evaluated.items() if math.isfinite(value)}
        outcome = Outcome(at.step, metrics, at.best_step, at.best_value, at.stopped, timing, run_dir)
        if main:
            folder.finish({"name": name, **{k: v for k, v in vars(outcome).items() if k != "run_dir"}})
        accelerator.wait_for_everyone()
    return outcome


def _finished(model: nn.Module, folder: RunFolder) -> Outcome:
    result = folder.result
    assert result is not None
    say(f"{folder.path} is finished (step {result['step']}); nothing to do")
    load_model(model, folder.path)
    known = {f.name for f in dataclasses.fields(Outcome)}
    return Outcome(run_dir=folder.path, **{k: v for k, v in result.items() if k in known})


def _interruption(engine: Engine) -> Interrupted:
    path = engine.folder.path
    if engine.accelerator.is_main_process:
        say(f"interrupted at step {engine.at.step}; a checkpoint is saved; go on with --resume {path} (resume=True)")
    return Interrupted(f"interrupted at step {engine.at.step}; resume {path}")
