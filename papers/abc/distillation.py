"""``python -m papers abc-distill``: how fast distillation and continued training undo the loss of conversion.

A pretrained model is converted; then its training is continued on its own objective, or ``distill`` trains it with and
without its first stage. The measure is the share of the gap in held-out loss, between the converted model before
training and the model it was made from, that is closed after so many seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnlab.adapters import convert
from attnlab.adapters.distillation import Distillation, StageLearner, StageProgress, distill, run_stage
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
    "DistillationCase",
    "derived",
    "masked_case",
    "measure_rates",
    "run_case",
    "sampled_case",
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
    # Steps in which a method's speed is measured.
    probe: int = 8
    settings: Distillation = field(default_factory=lambda: Distillation(heads_lr=1e-2, logits_lr=5e-4))
    # None: all.
    methods: tuple[str, ...] | None = None
    # Of the new parameters, the order of the texts, and dropout.
    seed: int = 0


@dataclass(frozen=True, eq=False)
class DistillationCase:
    """A teacher, the attention it is converted to, the student's training batches, and held-out batches."""

    name: str
    model: nn.Module
    spec: str
    source: Any
    held_out: list[dict[str, Tensor]]
    causal: bool


def masked_case(
    model: nn.Module, spec: str, corpus: Path, *, batch: int = 64, length: int = 256, seed: int = 0
) -> DistillationCase:
    """A masked language model on the enwik8 articles of ``corpus``."""
    stores = WikiCorpus(corpus)
    tokeniser, device = stores.tokeniser(), next(model.parameters()).device
    train = Blocks(stores.store("train"), tokeniser.specials, length=length, seed=1 + seed)
    valid = Blocks(stores.store("valid"), tokeniser.specials, length=length, seed=None)
    source = MlmSource(train, batch, vocab_size=tokeniser.vocab_size, seed=1 + seed)
    held = MlmSource(valid, min(batch, len(valid)), vocab_size=tokeniser.vocab_size, seed=7, shuffle=False)
    batches = [{n: t.to(device) for n, t in held.batch(i).items()} for i in range(min(4, held.steps_per_epoch))]
    name = "masked LM" if device.type == "cuda" else f"masked LM, {_cores()}"
    return DistillationCase(name, model, _seeded(spec, seed), source, batches, causal=False)


@torch.no_grad()
def sampled_case(
    model: Any, spec: str, *, name: str, rows: int = 12288, length: int = 256, batch: int = 64, seed: int = 0
) -> DistillationCase:
    """A causal model on texts that it wrote itself at temperature 1, since its training data is not available."""
    device, held_out = next(model.parameters()).device, min(128, 2 * batch)
    written: list[Tensor] = []
    # Many rows at once, since launches take most of a step's time.
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
    return DistillationCase(name, model, _seeded(spec, seed), _Drawn(texts[held_out:], batch, seed), held, causal=True)


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


def run_case(case: DistillationCase, config: AbcDistillConfig, *, part: Part) -> None:
    """Every method for equally many seconds, from the same converted model; one that diverges is recorded as failed."""
    start = convert(case.model, case.spec, copy=True)
    with dense_attention(start):
        ends = held_out_loss(case.model, case), held_out_loss(start, case)
    part.row("ends", subject=case.name, spec=case.spec, seed=config.seed, teacher=ends[0], converted=ends[1])
    for method in config.methods or METHODS:
        if part.has("summary", subject=case.name, method=method, seed=config.seed):
            continue
        torch.manual_seed(config.seed)
        student = copy.deepcopy(start)
        with dense_attention(student):
            try:
                _run_method(method, case, student, config, part, ends)
            except ValueError as error:
                part.fact(f"failed: {case.name}, {method}", str(error))


def _run_method(
    method: str,
    case: DistillationCase,
    student: nn.Module,
    config: AbcDistillConfig,
    part: Part,
    ends: tuple[float, float],
) -> None:
    teacher, converted = ends
    spent = 0.0
    row: dict[str, Any] = {}
    for stage in STAGES[method]:
        share = config.layer_share if stage == "layers" else 1 - config.layer_share * (len(STAGES[method]) - 1)
        steps = max(1, round(share * config.seconds / step_seconds(stage, case, student, config)))
        rate = config.settings.logits_lr * (2 if method.endswith("twice the rate") else 1)
        settings = replace(config.settings, every=max(1, steps // config.points), logits_lr=rate)

        def note(progress: StageProgress, stage: str = stage, before: float = spent) -> None:
            loss = held_out_loss(student, case)
            row.update(
                subject=case.name, method=method, seed=config.seed, seconds=before + progress.seconds, loss=loss,
                gap_closed=(converted - loss) / (converted - teacher),
            )  # fmt: skip
            part.row("curve", **row, stage=stage, step=progress.step, training_loss=progress.loss)

        spent += _run_stage(stage, case, student, steps, settings, note)[-1].seconds
    part.row("summary", **row)


def step_seconds(stage: str, case: DistillationCase, student: nn.Module, config: AbcDistillConfig) -> float:
    """Seconds of a step of this stage, measured on a copy of the student."""
    settings = replace(config.settings, every=config.probe)
    history = _run_stage(stage, case, copy.deepcopy(student), 2 * config.probe, settings, None)
    return (history[-1].seconds - history[0].seconds) / config.probe


def measure_rates(case: DistillationCase, config: AbcDistillConfig, *, part: Part) -> None:
    """Table ``rates``; run it on a GPU that does nothing else."""
    student = convert(case.model, case.spec, copy=True)
    with dense_attention(student):
        for stage in ("labels", "layers", "model"):
            seconds = step_seconds(stage, case, student, config)
            part.row("rates", subject=case.name, stage=stage, milliseconds=1000 * seconds)


def _run_stage(
    stage: str,
    case: DistillationCase,
    student: nn.Module,
    steps: int,
    settings: Distillation,
    note: Callable[[StageProgress], None] | None,
) -> list[StageProgress]:
    if stage == "labels":
        return _continue(case, student, steps, settings, note)
    heads = steps if stage == "layers" else 0
    settings = replace(settings, heads_steps=heads, logits_steps=steps - heads)
    return distill(case.model, student, case.source, settings=settings, on_progress=note)


def _continue(
    case: DistillationCase,
    student: nn.Module,
    steps: int,
    settings: Distillation,
    note: Callable[[StageProgress], None] | None,
) -> list[StageProgress]:
    """The model's own objective, with the optimiser and the schedule of distillation."""
    loss_of = partial(label_loss, student, causal=case.causal)
    learner = StageLearner(student, settings, loss_of, steps=steps, lr=settings.logits_lr)
    return run_stage("labels", learner, case.source, steps, every=settings.every, first=1, on_progress=note)


def label_loss(model: nn.Module, batch: dict[str, Tensor], *, causal: bool) -> Tensor:
    """The mean loss of a label of the batch; 0 where it has none."""
    logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    chosen = labels != IGNORED
    # A small batch may hide no token: it teaches nothing, and the mean of nothing would be NaN.
    total = cross_entropy(logits[chosen].float(), labels[chosen], reduction="sum")
    return total / chosen.sum().clamp_min(1)


@torch.no_grad()
def held_out_loss(model: nn.Module, case: DistillationCase) -> float:
    """The mean over the held-out batches, those with a label, of the loss of a label."""
    model.eval()
    labelled = [batch for batch in case.held_out if (batch["labels"] != IGNORED).any()]
    losses = [float(label_loss(model, batch, causal=case.causal)) for batch in labelled]
    return sum(losses) / len(losses)
