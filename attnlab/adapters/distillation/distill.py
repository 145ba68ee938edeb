"""``distill``: a converted model learns from the model it was made from, its teacher, in minutes.

First only the new parameters are trained, layer by layer: on the teacher's own q, k, v and x the new attention W^ is to
give the teacher's output, so |(W - W^) v|^2 falls (the value-aware objective of Gupta and Berant, 2021). All layers are
trained at once, since none needs another's output. Then the whole model is trained on the teacher's predictions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from tqdm import tqdm

from attnlab.adapters.contexts import record
from attnlab.adapters.convert import is_converted
from attnlab.adapters.load import as_loaded
from attnlab.adapters.protocol import Conversion, adapter_of
from attnlab.attention import AttentionCall
from attnlab.fields import check_fields
from attnlab.loss import IGNORED
from attnlab.trace import Kind, Trace
from attnlab.training.feed import Source
from attnlab.training.settings import Recipe, Schedule
from attnlab.training.side_by_side import Clock, Learner, train_learners

__all__ = ["Distillation", "Progress", "StageLearner", "distill", "layer_error", "run_stage"]


@dataclass(frozen=True)
class Distillation:
    """How long and how fast. ``batch`` rows of ``length`` tokens a step where ``texts`` are strings."""

    layer_steps: int = 100
    model_steps: int = 1000
    layer_lr: float = 1e-2
    model_lr: float = 5e-4
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    # Share of tokens hidden from a masked language model and its teacher.
    masked: float = 0.15
    batch: int = 16
    length: int = 128
    seed: int = 0
    # Progress is reported after this many steps, and at the end of a stage.
    every: int = 50

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.layer_steps, self.model_steps) < 0 or self.layer_steps + self.model_steps < 1:
            raise ValueError(
                f"steps must be at least 0 and one stage must have some, got {self.layer_steps}, {self.model_steps}"
            )
        if not 0 <= self.masked < 1:
            raise ValueError(f"masked must lie in [0, 1), got {self.masked}")


@dataclass(frozen=True)
class Progress:
    """How far a stage, "layers" or "model", has come; the seconds do not include those spent in ``on_progress``."""

    stage: str
    step: int
    loss: float
    seconds: float


def distill(
    model: nn.Module,
    converted: nn.Module,
    texts: Sequence[str] | Source,
    *,
    tokenizer: Any = None,
    settings: Distillation | None = None,
    on_progress: Callable[[Progress], bool | None] | None = None,
) -> list[Progress]:
    """Teach ``converted``, in place, what ``model`` does; both are on one device.

    ``texts`` are strings, which need ``tokenizer``, or an object with ``batch(step)``, as an encoder-decoder needs: its
    batches have ``input_ids``, and ``attention_mask``, ``decoder_input_ids`` or ``labels`` where they apply. Positions
    with a label are learned; in a batch without labels, all tokens. ``on_progress`` is called every ``settings.every``
    steps and at a stage's end; where it returns True the stage ends. The stages' losses are the mean over layers of
    |(W - W^) v|^2 / |W v|^2, and the teacher's KL divergence per token.
    """
    settings = settings or Distillation()
    if not is_converted(converted) or is_converted(model):
        raise ValueError(
            "distill(model, converted, ...) wants the model as it was and its al.convert(model, copy=True)"
        )
    source = texts if isinstance(texts, Source) else _Rows(texts, tokenizer, settings, model)
    losses = _Losses(model, converted)
    history: list[Progress] = []
    with teacher_eval(model, converted):
        new = _new_parameters(converted)
        steps = settings.layer_steps
        if new and steps:
            with _only(converted, new):
                learner = StageLearner(
                    converted, settings, losses.layers, steps=steps, lr=settings.layer_lr, train_mode=False
                )
                history += run_stage("layers", learner, source, steps, every=settings.every, on_progress=on_progress)
        # The second stage continues with the batches after the first's.
        first, steps = history[-1].step if history else 0, settings.model_steps
        if steps:
            learner = StageLearner(converted, settings, losses.predictions, steps=steps, lr=settings.model_lr)
            history += run_stage(
                "model", learner, source, steps, every=settings.every, first=first, on_progress=on_progress
            )
    return history


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
        recipe = Recipe(lr=lr, betas=(0.9, 0.98), weight_decay=settings.weight_decay, clip=settings.clip)
        schedule = Schedule("linear", warmup=max(1, round(settings.warmup * steps)))
        # A teacher that is recorded runs Python at every call, which a captured update would skip.
        super().__init__(student, None, recipe, schedule=schedule, capture=False)

    def parameter_groups(self) -> list[dict[str, Any]]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return [{"params": trained, "weight_decay": self.recipe.weight_decay}]

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss_of(batch)


def run_stage(
    name: str,
    learner: StageLearner,
    source: Source,
    steps: int,
    *,
    every: int,
    first: int = 0,
    on_progress: Callable[[Progress], bool | None] | None = None,
) -> list[Progress]:
    """``steps`` updates on the source's batches from number ``first`` on; progress is reported after each ``every``."""
    history: list[Progress] = []
    spent, started = 0.0, time.perf_counter()

    def report(step: int) -> bool:
        nonlocal spent, started
        loss = float(learner.loss)
        if not math.isfinite(loss):
            raise ValueError(f"the {name} stage diverged at step {step}: its loss is {loss}; lower its lr")
        spent += time.perf_counter() - started
        history.append(Progress(name, step, loss, spent))
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
    bar: Any

    def batch(self, step: int) -> dict[str, Tensor]:
        self.bar.update()
        return self.source.batch(self.first + step)


def layer_error(trace: Trace, mechanisms: Mapping[tuple[Kind, int], Callable[[AttentionCall], Tensor]]) -> Tensor:
    """The mean over these layers of |(W - W^) v|^2 / |W v|^2, W^ by the mechanisms on the recorded calls."""
    errors = []
    for (kind, layer), mech in mechanisms.items():
        teacher = trace[kind, layer]
        difference = (mech(teacher.call) - teacher.output).float()
        weight = _query_weight(teacher.call, kind)
        size = (teacher.output.float().square() * weight).sum()
        errors.append((difference.square() * weight).sum() / size.clamp(min=1e-12))
    return torch.stack(errors).mean()


class _Losses:
    """The losses of the two stages, of a batch on the models' device."""

    def __init__(self, model: nn.Module, converted: nn.Module) -> None:
        self.model, self.converted = model, converted
        self.mechanisms = {
            (conversion.kind, conversion.layer): _attending(conversion)
            for conversion in adapter_of(converted).conversions()
        }

    def layers(self, batch: dict[str, Tensor]) -> Tensor:
        """The value-aware error of every converted layer on the teacher's own calls."""
        with torch.no_grad(), record(self.model) as trace:
            self.model(**self._inputs(batch))
        return layer_error(trace, self.mechanisms)

    def predictions(self, batch: dict[str, Tensor]) -> Tensor:
        """KL(teacher || student), the mean over the tokens that are learned."""
        with torch.no_grad():
            teacher = self.model(**self._inputs(batch)).logits
        student = self.converted(**self._inputs(batch)).logits
        chosen = _learned(batch, teacher)
        p, q = (log_softmax(t[chosen].float(), -1) for t in (teacher, student))
        return (p.exp() * (p - q)).sum(-1).mean()

    def _inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch without its labels, from which an encoder-decoder's targets are made where it has none."""
        inputs = {name: t for name, t in batch.items() if name != "labels"}
        if getattr(self.model.config, "is_encoder_decoder", False) and "decoder_input_ids" not in inputs:
            if "labels" not in batch:
                raise ValueError("an encoder-decoder learns from pairs: its batches need labels or decoder_input_ids")
            model: Any = self.model
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return inputs


def _attending(conversion: Conversion) -> Callable[[AttentionCall], Tensor]:
    """The student's attention on a call of its teacher, without the bias that conversion may have dropped."""
    mech = conversion.mechanism
    return (lambda call: mech(replace(call, bias=None))) if conversion.drop_bias else mech


def _new_parameters(converted: nn.Module) -> list[nn.Parameter]:
    """The parameters of the converted layers' mechanisms, each once."""
    mechanisms = [conversion.mechanism for conversion in adapter_of(converted).conversions()]
    learned = nn.ModuleList(mech for mech in mechanisms if isinstance(mech, nn.Module))
    return [p for p in learned.parameters() if p.requires_grad]


def _learned(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Which positions of the logits are learned: those with a label, or all but padding."""
    labels = batch.get("labels")
    # A causal model's labels are its next tokens: every position is learned.
    if labels is not None and labels.shape == logits.shape[:2]:
        return labels != IGNORED
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if mask is None else mask.bool()


def _query_weight(call: AttentionCall, kind: Kind) -> Tensor:
    """1 at queries that are tokens; in self-attention those are the visible keys."""
    _, _, n_q, n_k = call.sizes
    if call.key_visible is None or kind == "cross" or n_q != n_k:
        return torch.ones((), device=call.q.device)
    return call.key_visible[:, None, :, None].float()


class _Rows:
    """Rows of tokens drawn from texts; for a masked language model some of them hidden."""

    def __init__(self, texts: Iterable[str], tokenizer: Any, settings: Distillation, model: nn.Module) -> None:
        if isinstance(texts, str):
            raise ValueError("texts must be several strings, got one; pass [text]")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError("an encoder-decoder learns from pairs, not from texts; pass an object with batch(step)")
        if tokenizer is None:
            raise ValueError("texts are strings, so tokenizer= is needed; or pass an object with batch(step)")
        texts = list(texts)
        if not texts:
            raise ValueError("texts is empty: there is nothing to learn from")
        self.settings = settings
        self.mask = tokenizer.mask_token_id if settings.masked and as_loaded(model, tokenizer).task == "mlm" else None
        end = next((i for i in (tokenizer.sep_token_id, tokenizer.eos_token_id) if i is not None), None)
        first = next((i for i in (tokenizer.cls_token_id, tokenizer.bos_token_id) if i is not None), None)
        stream: list[int] = []
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            stream += ids if end is None else [*ids, end]
        self.first = [] if first is None else [first]
        self.tokens = torch.tensor(stream, dtype=torch.long)
        self.special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        if len(self.tokens) < 2:
            raise ValueError(f"the texts hold {len(self.tokens)} tokens, too few to learn from")

    def batch(self, step: int) -> dict[str, Tensor]:
        """A pure function of (seed, step)."""
        s, draw = self.settings, torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)
        n = min(s.length - len(self.first), len(self.tokens))
        starts = torch.randint(0, len(self.tokens) - n + 1, (s.batch,), generator=draw)
        rows = self.tokens[starts[:, None] + torch.arange(n)]
        ids = torch.cat([torch.tensor(self.first).expand(s.batch, -1).long(), rows], 1)
        if self.mask is None:
            return {"input_ids": ids}
        hidden = (torch.rand(ids.shape, generator=draw) < s.masked) & ~torch.isin(ids, self.special)
        # A batch without a hidden token would have no loss.
        hidden[0, -1] = True
        return {"input_ids": ids.masked_fill(hidden, self.mask), "labels": ids.masked_fill(~hidden, IGNORED)}


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


@contextmanager
def _only(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients are made for these parameters alone."""
    wanted = {id(p) for p in parameters}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in wanted]
    for p in others:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in others:
            p.requires_grad_(True)
