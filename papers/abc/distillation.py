"""``python -m papers abc-distill``: how much of what conversion costs comes back per minute, taught or continued.

A pretrained model is converted; then it is continued on its own objective, or taught by ``distill`` with and without
its first stage. What counts is the share of the gap in held-out loss, between the converted model as it stands and
the model it was made from, that is closed after so many seconds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnlab.adapters import convert
from attnlab.adapters.distill import Distillation, Lesson, distill
from attnlab.data import IGNORED, Blocks, MlmSource
from papers.abc.dense_attention import dense_attention
from papers.abc.distillation_tables import derived
from papers.common.row_store import Part
from papers.common.wiki_corpus import WikiCorpus

__all__ = [
    "KEYS",
    "METHODS",
    "NAME",
    "NOTES",
    "AbcDistillConfig",
    "Subject",
    "derived",
    "masked_subject",
    "measure_rates",
    "run_subject",
    "sampled_subject",
]

NAME = "abc-distill"
KEYS = {
    "curve": ["subject", "method", "seed", "stage", "step"],
    "summary": ["subject", "method", "seed"],
    "ends": ["subject", "seed"],
    "rates": ["subject", "stage"],
}
NOTES = {
    "curve": "Held-out loss after so many seconds of training, evaluation not counted; gap_closed is (loss as "
    "converted - loss now) / (loss as converted - loss of the teacher).",
    "summary": "The last row of each method; seconds are of a shared GPU, h200_seconds what the same steps take alone.",
    "rates": "Milliseconds of a step alone on the GPU.",
}


@dataclass(frozen=True)
class AbcDistillConfig:
    """Seconds for each method, of which ``layer_share`` are the first stage's."""

    seconds: float = 40.0
    layer_share: float = 0.2
    points: int = 8
    # Steps in which a method's speed is found, at a learning rate of nearly nothing.
    probe: int = 8
    settings: Distillation = field(default_factory=lambda: Distillation(layer_lr=1e-2, model_lr=5e-4))
    # None: all.
    methods: tuple[str, ...] | None = None
    # Of the new parameters, the order of the texts, and dropout.
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Subject:
    """A teacher, the attention it is converted to, what it learns from, and its held-out batches."""

    name: str
    model: nn.Module
    spec: str
    source: Any
    held_out: list[dict[str, Tensor]]
    causal: bool


def masked_subject(
    model: nn.Module, spec: str, corpus: Path, *, batch: int = 64, length: int = 256, seed: int = 0
) -> Subject:
    """A masked language model on the enwik8 articles of ``corpus``."""
    stores = WikiCorpus(corpus)
    tokeniser, device = stores.tokeniser(), next(model.parameters()).device
    train = Blocks(stores.store("train"), tokeniser.specials, length=length, seed=1 + seed)
    valid = Blocks(stores.store("valid"), tokeniser.specials, length=length, seed=None)
    source = MlmSource(train, batch, vocab_size=tokeniser.vocab_size, seed=1 + seed)
    held = MlmSource(valid, min(batch, len(valid)), vocab_size=tokeniser.vocab_size, seed=7, shuffle=False)
    batches = [{n: t.to(device) for n, t in held.batch(i).items()} for i in range(min(4, held.steps_per_epoch))]
    name = "masked LM" if device.type == "cuda" else f"masked LM, {_cores()}"
    return Subject(name, model, _seeded(spec, seed), source, batches, causal=False)


@torch.no_grad()
def sampled_subject(
    model: Any, spec: str, *, name: str, rows: int = 12288, length: int = 256, batch: int = 64, seed: int = 0
) -> Subject:
    """A causal model on texts that it wrote itself, drawn at temperature 1: what it learned from is not at hand."""
    device, held_out = next(model.parameters()).device, min(128, 2 * batch)
    written: list[Tensor] = []
    # Many rows at once: a step's time is that of its launches.
    first = torch.full((min(8192, rows + held_out), 1), model.config.bos_token_id, device=device)
    torch.manual_seed(0)
    while sum(len(part) for part in written) < rows + held_out:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            written.append(
                model.generate(
                    first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                    max_length=length, min_length=length, eos_token_id=None, pad_token_id=0,
                )
            )  # fmt: skip
    texts = torch.cat(written).cpu()
    held = [{"input_ids": part.to(device), "labels": part.to(device)} for part in texts[:held_out].split(batch)]
    return Subject(name, model, _seeded(spec, seed), _Drawn(texts[held_out:], batch, seed), held, causal=True)


def _cores() -> str:
    count = torch.get_num_threads()
    return "one CPU core" if count == 1 else f"{count} CPU cores"


def _seeded(spec: str, seed: int) -> str:
    return f"{spec}{',' if ':' in spec else ':'}seed={seed}" if seed else spec


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Random rows of a table of texts."""

    texts: Tensor
    size: int
    seed: int

    def batch(self, step: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        rows = self.texts[torch.randint(0, len(self.texts), (self.size,), generator=draw)]
        return {"input_ids": rows, "labels": rows}


STAGES = {
    "continued": ("labels",),
    "continued, twice the rate": ("labels",),
    "distilled": ("layers", "model"),
    "distilled, twice the rate": ("layers", "model"),
    "layers, then continued": ("layers", "labels"),
    "predictions only": ("model",),
}
METHODS = tuple(STAGES)


def run_subject(subject: Subject, config: AbcDistillConfig, *, part: Part) -> None:
    """Every method for equally many seconds, from the same converted model; one that diverges is noted, and left."""
    start = convert(subject.model, subject.spec, copy=True)
    with dense_attention(start):
        ends = held_out_loss(subject.model, subject), held_out_loss(start, subject)
    part.row("ends", subject=subject.name, spec=subject.spec, seed=config.seed, teacher=ends[0], converted=ends[1])
    for method in config.methods or METHODS:
        if part.has("summary", subject=subject.name, method=method, seed=config.seed):
            continue
        torch.manual_seed(config.seed)
        student = copy.deepcopy(start)
        with dense_attention(student):
            try:
                _run_method(method, subject, student, config, part, ends)
            except ValueError as error:
                part.fact(f"failed: {subject.name}, {method}", str(error))


def _run_method(
    method: str, subject: Subject, student: nn.Module, config: AbcDistillConfig, part: Part, ends: tuple[float, float]
) -> None:
    teacher, converted = ends
    spent = 0.0
    row: dict[str, Any] = {}
    for stage in STAGES[method]:
        share = config.layer_share if stage == "layers" else 1 - config.layer_share * (len(STAGES[method]) - 1)
        steps = max(1, round(share * config.seconds / step_seconds(stage, subject, student, config)))
        rate = config.settings.model_lr * (2 if method.endswith("twice the rate") else 1)
        settings = replace(config.settings, every=max(1, steps // config.points), model_lr=rate)

        def note(lesson: Lesson, stage: str = stage, before: float = spent) -> None:
            loss = held_out_loss(student, subject)
            row.update(
                subject=subject.name, method=method, seed=config.seed, seconds=before + lesson.seconds, loss=loss,
                gap_closed=(converted - loss) / (converted - teacher),
            )  # fmt: skip
            part.row("curve", **row, stage=stage, step=lesson.step, training_loss=lesson.loss)

        spent += _run_stage(stage, subject, student, steps, settings, note)[-1].seconds
    part.row("summary", **row)


def step_seconds(stage: str, subject: Subject, student: nn.Module, config: AbcDistillConfig) -> float:
    """Seconds of a step of this stage, found on a copy of the student."""
    settings = replace(config.settings, every=config.probe)
    lessons = _run_stage(stage, subject, copy.deepcopy(student), 2 * config.probe, settings, None)
    return (lessons[-1].seconds - lessons[0].seconds) / config.probe


def measure_rates(subject: Subject, config: AbcDistillConfig, *, part: Part) -> None:
    """Table ``rates``; run it on a GPU that does nothing else."""
    student = convert(subject.model, subject.spec, copy=True)
    with dense_attention(student):
        for stage in ("labels", "layers", "model"):
            seconds = step_seconds(stage, subject, student, config)
            part.row("rates", subject=subject.name, stage=stage, milliseconds=1000 * seconds)


def _run_stage(
    stage: str,
    subject: Subject,
    student: nn.Module,
    steps: int,
    settings: Distillation,
    note: Callable[[Lesson], None] | None,
) -> list[Lesson]:
    if stage == "labels":
        return _continue(subject, student, steps, settings, note)
    counts = {"layer_steps": steps, "model_steps": 0} if stage == "layers" else {"layer_steps": 0, "model_steps": steps}
    return distill(subject.model, student, subject.source, settings=replace(settings, **counts), then=note)


def _continue(
    subject: Subject, student: nn.Module, steps: int, s: Distillation, note: Callable[[Lesson], None] | None
) -> list[Lesson]:
    """The model's own objective, with the optimiser and the schedule of distillation."""
    device = next(student.parameters()).device
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=s.model_lr, betas=(0.9, 0.98), weight_decay=s.weight_decay,
        fused=device.type == "cuda" or None,
    )  # fmt: skip
    warmup, lessons, spent, started = max(1, round(s.warmup * steps)), [], 0.0, time.perf_counter()
    student.train()
    for step in range(1, steps + 1):
        batch = {name: t.to(device, non_blocking=True) for name, t in subject.source.batch(step).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _label_loss(student, batch, causal=subject.causal)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), s.clip)
        for group in optimizer.param_groups:
            group["lr"] = s.model_lr * min(step / warmup, (steps - step + 1) / max(1, steps - warmup))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % s.every == 0 or step == steps:
            value = float(loss.detach())
            if not math.isfinite(value):
                raise ValueError(f"continuing diverged at step {step}: its loss is {value}; lower its lr")
            spent += time.perf_counter() - started
            lessons.append(Lesson("labels", step, value, spent))
            if note is not None:
                note(lessons[-1])
                student.train()
            started = time.perf_counter()
    return lessons


def _label_loss(model: nn.Module, batch: dict[str, Tensor], *, causal: bool) -> Tensor:
    logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    chosen = labels != IGNORED
    return cross_entropy(logits[chosen].float(), labels[chosen])


@torch.no_grad()
def held_out_loss(model: nn.Module, subject: Subject) -> float:
    """The mean over the held-out batches of the loss of a label."""
    model.eval()
    losses = [float(_label_loss(model, batch, causal=subject.causal)) for batch in subject.held_out]
    return sum(losses) / len(losses)
