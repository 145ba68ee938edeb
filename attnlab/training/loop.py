"""The training loop: any module, any source of batches, any loss terms, through Accelerate."""

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
from attnlab.training.checkpoints import load_weights, sweep
from attnlab.training.engine import Engine, Evaluation, RunState
from attnlab.training.feed import Prefetcher, Source
from attnlab.training.launch import flat_settings, interrupts, make_accelerator
from attnlab.training.progress import ProgressLine
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
    batch)``. ``resume=True`` goes on from the newest good checkpoint, or from the start if there is none; a finished
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
        if main:
            folder.start_metrics(engine.metrics_bytes)
        if track:
            accelerator.init_trackers(name, config=flat_settings(settings.as_dict()))
        timing = _run(engine, source)
        for tracker in accelerator.trackers:
            tracker.finish()
        outcome = _outcome(engine.state, timing, run_dir)
        if main:
            folder.finish({"name": name, **{k: v for k, v in vars(outcome).items() if k != "run_dir"}})
        accelerator.wait_for_everyone()
    return outcome


def _run(engine: Engine, source: Source) -> dict[str, float]:
    """Make the updates that are left, with what is due between them; returns how the time was spent."""
    accelerator, settings, state = engine.accelerator, engine.settings, engine.state
    steps = range(state.step, state.step if state.stopped else settings.steps)
    engine.progress = ProgressLine(settings.steps, start=state.step, quiet=not accelerator.is_main_process)
    batches = Prefetcher(
        source,
        steps,
        device=accelerator.device,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        accumulate=settings.accumulate,
        ahead=settings.prefetch,
    )
    started = time.perf_counter()
    try:
        with batches, interrupts() as interrupted:
            if state.step == 0 and 0 in settings.evaluate_at and not state.evaluated and engine.evaluate():
                engine.checkpoint()
            for parts in batches:
                engine.update(parts)
                state.step += 1
                for callback in engine.callbacks:
                    callback.on_step(Moment(state.step, engine.model, engine.folder.path, {}))
                _between_updates(engine, interrupted.is_set())
                if state.stopped:
                    break
    finally:
        engine.progress.close()
    engine.synchronise()
    elapsed, done = time.perf_counter() - started, state.step - steps.start
    return {
        "seconds": round(engine.seconds(), 3),
        "steps_per_second": done / elapsed if done else 0.0,
        "waiting_share": batches.waited / elapsed if done else 0.0,
    }


def _between_updates(engine: Engine, interrupted: bool) -> None:
    """Log, evaluate and save where that is due after this step; raise ``Interrupted`` if the run was interrupted."""
    settings, state = engine.settings, engine.state
    last = state.step == settings.steps
    logging = last or state.step % settings.log_every == 0
    if logging:
        engine.log()
    engine.flush(wait=False)
    improved = state.step in settings.evaluate_at and engine.evaluate()
    # Ranks exchange this only when a line is written, since an exchange makes them wait for each other.
    interrupted = engine.any_interrupted(interrupted, exchange=logging)
    due = settings.checkpoint_every and state.step % settings.checkpoint_every == 0
    if due or improved or interrupted or state.stopped or last:
        engine.checkpoint()
    engine.progress.step(state.step)
    if interrupted:
        raise _interruption(engine)


def _outcome(state: RunState, timing: dict[str, float], run_dir: Path) -> Outcome:
    metrics = {key: value for key, value in state.evaluated.items() if math.isfinite(value)}
    return Outcome(state.step, metrics, state.best_step, state.best_value, state.stopped, timing, run_dir)


def _finished(model: nn.Module, folder: RunFolder) -> Outcome:
    result = folder.result
    assert result is not None
    say(f"{folder.path} is finished (step {result['step']}); nothing to do")
    load_weights(model, folder.path)
    known = {f.name for f in dataclasses.fields(Outcome)}
    return Outcome(run_dir=folder.path, **{k: v for k, v in result.items() if k in known})


def _interruption(engine: Engine) -> Interrupted:
    path, step = engine.folder.path, engine.state.step
    if engine.accelerator.is_main_process:
        say(f"interrupted at step {step}; a checkpoint is saved; go on with --resume {path} (resume=True)")
    return Interrupted(f"interrupted at step {step}; resume {path}")
