"""``distill``: what a converted model must relearn, taught by the model it was made from, in minutes.

First the new parameters alone, layer by layer: on the teacher's own q, k, v and x the new attention W^ is to give the
teacher's output, so |(W - W^) v|^2 falls (the value-aware objective of Gupta and Berant, 2021). Every layer learns at
once, as none waits for another. Then the whole model, end to end: its predictions are to be the teacher's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from attnlab.adapters.contexts import record
from attnlab.adapters.convert import is_converted
from attnlab.adapters.protocol import Conversion, adapter_of
from attnlab.attention import AttentionCall
from attnlab.loss import IGNORED
from attnlab.trace import Kind, Trace

__all__ = ["Distillation", "Lesson", "distill", "layer_error"]


@runtime_checkable
class Batches(Protocol):
    """Batches by step: ``input_ids``; ``attention_mask``, ``decoder_input_ids`` and ``labels`` where there are any."""

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step."""
        ...


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
    # A lesson is told after this many steps, and at the end of a stage.
    every: int = 50

    def __post_init__(self) -> None:
        if min(self.layer_steps, self.model_steps) < 0 or self.layer_steps + self.model_steps < 1:
            raise ValueError(
                f"steps must be at least 0 and one stage must have some, got {self.layer_steps}, {self.model_steps}"
            )
        if not 0 <= self.masked < 1:
            raise ValueError(f"masked must lie in [0, 1), got {self.masked}")


@dataclass(frozen=True)
class Lesson:
    """Where a distillation stands: its ``stage`` is "layers" or "model"; seconds are without what ``then`` took."""

    stage: str
    step: int
    loss: float
    seconds: float


def distill(
    model: nn.Module,
    converted: nn.Module,
    texts: Sequence[str] | Batches,
    *,
    tokenizer: Any = None,
    settings: Distillation | None = None,
    then: Callable[[Lesson], bool | None] | None = None,
) -> list[Lesson]:
    """Teach ``converted``, in place, what ``model`` does; both are Hugging Face models on one device.

    ``texts`` are strings, which need ``tokenizer``, or an object with ``batch(step)``, as an encoder-decoder needs. A
    batch with labels is learned where it has any, one without at all its tokens. ``then`` is told each lesson; where it
    returns True the stage ends. The stages' losses are the mean over layers of |(W - W^) v|^2 / |W v|^2, and the
    teacher's KL divergence per token.
    """
    settings = settings or Distillation()
    if not is_converted(converted) or is_converted(model):
        raise ValueError(
            "distill(model, converted, ...) wants the model as it was and its al.convert(model, copy=True)"
        )
    source = texts if isinstance(texts, Batches) else _Rows(texts, tokenizer, settings, model)
    teaching = _Teaching(model, converted, source, settings, then)
    lessons = []
    with _still(model, converted):
        new = _new_parameters(converted)
        if new and settings.layer_steps:
            with _only(converted, new):
                lessons += teaching.stage("layers", new, teaching.layers, settings.layer_steps, settings.layer_lr)
        if settings.model_steps:
            trained = [p for p in converted.parameters() if p.requires_grad]
            lessons += teaching.stage("model", trained, teaching.predictions, settings.model_steps, settings.model_lr)
    return lessons


def layer_error(trace: Trace, mechanisms: Mapping[tuple[Kind, int], Callable[[AttentionCall], Tensor]]) -> Tensor:
    """The mean over these layers of |(W - W^) v|^2 / |W v|^2, W^ by the mechanisms on the recorded calls."""
    errors = []
    for (kind, layer), mech in mechanisms.items():
        taught = trace[kind, layer]
        difference = (mech(taught.call) - taught.output).float()
        weight = _query_weight(taught.call, kind)
        size = (taught.output.float().square() * weight).sum()
        errors.append((difference.square() * weight).sum() / size.clamp(min=1e-12))
    return torch.stack(errors).mean()


class _Teaching:
    def __init__(
        self,
        model: nn.Module,
        converted: nn.Module,
        source: Batches,
        settings: Distillation,
        then: Callable[[Lesson], bool | None] | None,
    ) -> None:
        self.model, self.converted, self.source, self.settings, self.then = model, converted, source, settings, then
        self.device = next(converted.parameters()).device
        self.mechanisms = {
            (conversion.kind, conversion.layer): _attending(conversion)
            for conversion in adapter_of(converted).conversions()
        }
        # Batches of the second stage are others than the first's.
        self.at = 0

    def stage(
        self,
        name: str,
        parameters: list[nn.Parameter],
        loss_of: Callable[[dict[str, Tensor]], Tensor],
        steps: int,
        lr: float,
    ) -> list[Lesson]:
        """One stage: AdamW, linear warm-up and decay."""
        s = self.settings
        optimizer = torch.optim.AdamW(
            parameters, lr=lr, betas=(0.9, 0.98), weight_decay=s.weight_decay, fused=self.device.type == "cuda" or None
        )
        warmup = max(1, round(s.warmup * steps))
        lessons: list[Lesson] = []
        spent, started = 0.0, time.perf_counter()
        self.converted.train(name == "model")
        for step in range(1, steps + 1):
            batch = {k: t.to(self.device, non_blocking=True) for k, t in self.source.batch(self.at).items()}
            self.at += 1
            with self._autocast():
                loss = loss_of(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, s.clip)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(step / warmup, (steps - step + 1) / max(1, steps - warmup))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % s.every == 0 or step == steps:
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise ValueError(f"the {name} stage diverged at step {step}: its loss is {value}; lower its lr")
                now = time.perf_counter()
                spent += now - started
                lessons.append(Lesson(name, step, value, spent))
                enough = self.then is not None and self.then(lessons[-1])
                started = time.perf_counter()
                self.converted.train(name == "model")
                if enough:
                    break
        return lessons

    def layers(self, batch: dict[str, Tensor]) -> Tensor:
        """The value-aware error of every converted layer on the teacher's own calls."""
        with torch.no_grad(), record(self.model) as trace:
            self.model(**self._inputs(batch))
        return layer_error(trace, self.mechanisms)

    def predictions(self, batch: dict[str, Tensor]) -> Tensor:
        """KL(teacher || student), the mean over the tokens that are learned."""
        with torch.no_grad():
            wanted = self.model(**self._inputs(batch)).logits
        given = self.converted(**self._inputs(batch)).logits
        chosen = _learned(batch, wanted)
        p, q = (log_softmax(t[chosen].float(), -1) for t in (wanted, given))
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

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


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
    """Which positions of the logits are learned: those with a label, or all that are no padding."""
    labels = batch.get("labels")
    # Labels that stand everywhere are a causal model's next tokens: every position predicts.
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
        self.settings = settings
        masked_lm = type(model).__name__.endswith("ForMaskedLM")
        self.mask = tokenizer.mask_token_id if masked_lm and settings.masked else None
        end = next((i for i in (tokenizer.sep_token_id, tokenizer.eos_token_id) if i is not None), None)
        first = next((i for i in (tokenizer.cls_token_id, tokenizer.bos_token_id) if i is not None), None)
        stream: list[int] = []
        for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]:
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
        # A batch without one hidden token would teach nothing.
        hidden[0, -1] = True
        return {"input_ids": ids.masked_fill(hidden, self.mask), "labels": ids.masked_fill(~hidden, IGNORED)}


@contextmanager
def _still(model: nn.Module, converted: nn.Module) -> Iterator[None]:
    """The teacher teaches without dropout; both models come back in the mode they were in."""
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
