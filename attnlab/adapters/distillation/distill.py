"""``distill``: a converted model learns from the model it was made from, its teacher, in minutes.

First only the new parameters are trained, layer by layer: on the teacher's own q, k, v and x the new attention W^ is to
give the teacher's output, so |(W - W^) v|^2 falls (the value-aware objective of Gupta and Berant, 2021). All layers are
trained at once, since none needs another's output. Then the whole model may learn the teacher's hidden states, and at
last it learns the teacher's predictions.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from attnlab.adapters.convert import is_converted
from attnlab.adapters.distillation.losses import Predictions, StageLoss
from attnlab.adapters.distillation.rows import DrawnRows
from attnlab.adapters.distillation.settings import STAGES, Distillation, StageProgress, near_rate
from attnlab.adapters.distillation.student import (
    fast_layers,
    low_rank,
    new_parameters,
    only,
    projections,
    trained_parameters,
)
from attnlab.adapters.protocol import adapter_of
from attnlab.loss import IGNORED
from attnlab.training.callbacks import Callback, Moment
from attnlab.training.feed import Source
from attnlab.training.settings import Recipe, Schedule, Settings, every
from attnlab.training.side_by_side import Clock, Learner, train_learners

__all__ = ["HeldOut", "StageLearner", "distill", "half_precision", "run_stage", "teach"]

BETAS = (0.9, 0.98)
# What a stage's best student is chosen by, among the values of an evaluation.
KL = "held-out/kl"


def distill(
    model: nn.Module,
    converted: nn.Module,
    texts: Sequence[str] | Source,
    *,
    tokenizer: Any = None,
    settings: Distillation | None = None,
    on_progress: Callable[[StageProgress], bool | None] | None = None,
    run_dir: Path | str | None = None,
    held_out: Sequence[Mapping[str, Tensor]] = (),
) -> list[StageProgress]:
    """Teach ``converted``, in place, what ``model`` does; both are on one device.

    ``texts`` are strings, which need ``tokenizer``, or an object with ``batch(step)``, as an encoder-decoder needs: its
    batches have ``input_ids``, and ``attention_mask``, ``decoder_input_ids`` or ``labels`` where they apply. Positions
    with a label are learned; in a batch without labels, all tokens. ``on_progress`` is called every ``settings.every``
    steps and at a stage's end; where it returns True the stage ends. The stages' losses are the mean over layers of
    |(W - W^) v|^2 / |W v|^2, the mean over layers of |h - h^|^2 / |h|^2, and the teacher's KL divergence per token.

    With ``run_dir`` each stage is a run folder in it, evaluated on the batches of ``held_out``, and the same call goes
    on where it was killed. With ``held_out`` a stage ends with the student of its evaluations, that before the first
    step included, whose predictions are nearest to the teacher's, so that no stage leaves it worse than it began.
    """
    settings = settings or Distillation()
    if not is_converted(converted) or is_converted(model):
        raise ValueError(
            "distill(model, converted, ...) wants the model as it was and its al.convert(model, copy=True)"
        )
    if run_dir is None and held_out:
        raise ValueError("held_out is evaluated in a run folder: pass run_dir=, or evaluate in on_progress")
    if run_dir is not None and on_progress is not None:
        raise ValueError("a run folder keeps its progress in metrics.jsonl; leave on_progress= or run_dir= out")
    if isinstance(texts, Source):
        if settings.lengths:
            raise ValueError("lengths are of rows that are drawn from strings; a source makes rows of its own")
        source = texts
    else:
        source = DrawnRows(texts, tokenizer, settings, model)
    return teach(model, converted, source, settings, on_progress=on_progress, run_dir=run_dir, held_out=held_out)


def teach(
    model: nn.Module,
    student: nn.Module,
    source: Source,
    settings: Distillation,
    *,
    on_progress: Callable[[StageProgress], bool | None] | None = None,
    run_dir: Path | str | None = None,
    held_out: Sequence[Mapping[str, Tensor]] = (),
) -> list[StageProgress]:
    """The stages of ``distill``, for any student of the same shape, also one that was not converted."""
    if settings.lora:
        projections(student, settings.lora)
    if settings.checkpointing and any(c.mechanism.reads_memory for c in adapter_of(student).conversions()):
        raise ValueError("layers that hand their memory to the next cannot be recomputed; leave checkpointing out")
    teacher = half_precision(model, settings)
    history: list[StageProgress] = []
    first, adapters = 0, None
    with ExitStack() as stack:
        stack.enter_context(teacher_eval(teacher, student))
        stack.enter_context(fast_layers(teacher, compile=settings.compile))
        stack.enter_context(fast_layers(student, compile=settings.compile, checkpointing=settings.checkpointing))
        for number, stage in enumerate(STAGES, 1):
            steps = settings.steps_of(stage)
            if steps == 0 or (stage == "heads" and not new_parameters(student)):
                # The next stage sees the batches that it sees after a first one.
                first += steps
                continue
            if stage != "heads" and adapters is None:
                adapters = stack.enter_context(low_rank(student, settings.lora, seed=settings.seed))
            loss = StageLoss(teacher, student, stage, hard=settings.hard)
            trained = trained_parameters(student, stage, train=settings.train, adapters=adapters or ())
            with only(student, trained):
                if run_dir is None:
                    objective = partial(loss.mean, student)
                    learner = StageLearner(
                        student, settings, objective, steps=steps, lr=settings.lr_of(stage), train_mode=stage != "heads"
                    )
                    done = run_stage(
                        stage, learner, source, steps, every=settings.every, first=first, on_progress=on_progress
                    )
                else:
                    folder = Path(run_dir) / f"{number}-{stage}"
                    watch = HeldOut(Predictions(teacher, student), held_out, settings)
                    done = _run_in_folder(folder, student, source, settings, loss, first=first, watch=watch)
            history += done
            # The next stage continues with the batches after this one's.
            first += done[-1].step
    return history


def _run_in_folder(
    folder: Path,
    student: nn.Module,
    source: Source,
    settings: Distillation,
    loss: StageLoss,
    *,
    first: int,
    watch: HeldOut,
) -> list[StageProgress]:
    """One stage through the training loop; where its folder holds a part of it, the rest."""
    from attnlab.training.checkpoints import load_weights
    from attnlab.training.loop import train
    from attnlab.training.runs import read_metrics, say

    stage = loss.stage
    steps = settings.steps_of(stage)
    tokens = source.batch(first)["input_ids"].numel()
    lr = _rate(folder, settings, stage, watch, tokens)
    on_cpu = next(student.parameters()).device.type == "cpu"
    training = Settings(
        steps=steps,
        recipe=Recipe(lr=lr, betas=BETAS, weight_decay=settings.weight_decay, clip=settings.clip),
        schedule=_schedule(settings, steps),
        seed=settings.seed,
        device="cpu" if on_cpu else "auto",
        precision=settings.precision,
        evaluate_at=every(max(1, steps // settings.evaluations), steps=steps) if watch.batches else (),
        log_every=min(settings.every, steps),
        checkpoint_every=settings.checkpoint_every,
        watch=KL if watch.batches else None,
        tokens=tokens,
    )
    if os.environ.get("RANK", "0") == "0":
        say(f"{folder.name}: {steps} steps of {tokens:,} tokens, learning rate up to {lr:.3g}")
    data = {"tokens": source.checksum()} if hasattr(source, "checksum") else None
    # When a checkpoint is written is part of the loop's settings, which may change.
    described = {name: value for name, value in asdict(settings).items() if name != "checkpoint_every"}
    train(
        student,
        _Later(source, first),
        terms=loss.parts,
        settings=training,
        run_dir=folder,
        name=f"distillation, {stage}",
        config={"distillation": described, "stage": stage},
        data=data,
        callbacks=[watch],
        forward=loss.forward,
        # Several processes must agree, and one of them may have begun to write the folder.
        resume=(folder / "run.json").exists() or int(os.environ.get("WORLD_SIZE", "1")) > 1,
    )
    if watch.batches:
        best = load_weights(student, folder, which="best")
        if best < steps and os.environ.get("RANK", "0") == "0":
            say(
                f"{folder.name}: the student of step {best} is the nearest to its teacher on held-out text, and is kept"
            )
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    return [StageProgress(stage, line["step"], line["values"]["loss"], line["seconds"]) for line in lines]


def _rate(folder: Path, settings: Distillation, stage: str, watch: HeldOut, tokens: int) -> float:
    """The highest rate of a stage; one that follows from the student's distance is the one the stage was begun with."""
    from attnlab.training.runs import read_run

    if stage == "heads" or not (settings.scales_lr and watch.batches):
        return settings.lr_of(stage)
    if (folder / "run.json").exists():
        return float(read_run(folder)["config"]["training"]["recipe"]["lr"])
    return near_rate(settings.lr_of(stage), watch.losses()[KL], tokens)


class HeldOut(Callback):
    """Beside each evaluation: the student's loss on held-out text, the teacher's, and how far above it that is."""

    def __init__(
        self,
        predictions: Predictions,
        batches: Sequence[Mapping[str, Tensor]],
        settings: Distillation | None = None,
    ) -> None:
        self.predictions, self.batches = predictions, batches
        self.settings = settings or Distillation()

    def on_evaluation(self, moment: Moment) -> Mapping[str, float]:
        return self.losses() if self.batches else {}

    @torch.no_grad()
    def losses(self) -> dict[str, float]:
        """Means over the predicted tokens of all batches, of which each process reads some: all have the same means."""
        learner = self.predictions.student
        device, training = next(learner.parameters()).device, learner.training
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
        sums = torch.zeros(4, dtype=torch.float64)
        learner.eval()
        for batch in self.batches[rank::world]:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.half_on(device)):
                result, targets = self.predictions({name: t.to(device) for name, t in batch.items()})
            sums += torch.stack([result.student, result.teacher, result.kl, (targets != IGNORED).sum()]).double().cpu()
        learner.train(training)
        if together:
            everywhere = sums.to(device)
            torch.distributed.all_reduce(everywhere)
            sums = everywhere.cpu()
        student, teacher, kl = (sums[:3] / sums[3].clamp(min=1)).tolist()
        return {
            "held-out/loss": student,
            "held-out/teacher": teacher,
            "held-out/above teacher": student - teacher,
            KL: kl,
        }


class StageLearner(Learner):
    """The student in one stage: AdamW that decays all trained parameters, linear warm-up and decay of its rate."""

    def __init__(
        self,
        student: nn.Module,
        settings: Distillation,
        loss_of: Callable[[dict[str, Tensor]], Tensor],
        *,
        steps: int,
        lr: float,
        train_mode: bool = True,
    ) -> None:
        self.loss_of, self.train_mode = loss_of, train_mode
        recipe = Recipe(lr=lr, betas=BETAS, weight_decay=settings.weight_decay, clip=settings.clip)
        # A teacher that is recorded runs Python at every call, which a captured update would skip.
        super().__init__(student, None, recipe, schedule=_schedule(settings, steps), capture=False)
        self.half = settings.half_on(self.device)

    def parameter_groups(self) -> list[dict[str, Any]]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return [{"params": trained, "weight_decay": self.recipe.weight_decay}]

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss_of(batch)


def _schedule(settings: Distillation, steps: int) -> Schedule:
    return Schedule("linear", warmup=max(1, round(settings.warmup * steps)))


def run_stage(
    name: str,
    learner: StageLearner,
    source: Source,
    steps: int,
    *,
    every: int,
    first: int = 0,
    on_progress: Callable[[StageProgress], bool | None] | None = None,
) -> list[StageProgress]:
    """``steps`` updates on the source's batches from number ``first`` on; progress is reported after each ``every``."""
    history: list[StageProgress] = []
    spent, started = 0.0, time.perf_counter()

    def report(step: int) -> bool:
        nonlocal spent, started
        loss = float(learner.loss)
        if not math.isfinite(loss):
            raise ValueError(f"the {name} stage diverged at step {step}: its loss is {loss}; lower its lr")
        spent += time.perf_counter() - started
        history.append(StageProgress(name, step, loss, spent))
        ended = on_progress is not None and bool(on_progress(history[-1]))
        started = time.perf_counter()
        return ended

    pauses = range(every, steps + 1, every)
    with tqdm(total=steps, desc=f"distilling, {name}", unit="step", disable=None) as bar:
        later = _Later(source, first, bar)
        train_learners([(learner, later)], Clock(steps), pauses=pauses, pause_at_end=True, on_pause=report)
    return history


@dataclass(frozen=True)
class _Later:
    """A source without its first batches; each batch that is drawn moves the bar."""

    source: Source
    first: int
    bar: Any = None

    def batch(self, step: int) -> dict[str, Tensor]:
        if self.bar is not None:
            self.bar.update()
        return self.source.batch(self.first + step)


def half_precision(model: nn.Module, settings: Distillation) -> nn.Module:
    """A teacher with its parameters in bfloat16 where products are of it, a copy if they are float32; else as it is.

    Only parameters: rotary frequencies are buffers, and in bfloat16 they would misplace tokens.
    """
    parameters = list(model.parameters())
    if not parameters or parameters[0].dtype != torch.float32 or not settings.half_on(parameters[0].device):
        return model
    teacher = copy.deepcopy(model)
    for p in teacher.parameters():
        p.data = p.data.to(torch.bfloat16)
    return teacher


@contextmanager
def teacher_eval(model: nn.Module, converted: nn.Module) -> Iterator[None]:
    """Inside, the teacher is in evaluation mode, without dropout; afterwards both models have their old modes."""
    before = model.training, converted.training
    model.eval()
    try:
        yield
    finally:
        model.train(before[0])
        converted.train(before[1])
