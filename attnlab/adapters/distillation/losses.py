"""The loss of each stage, as sums and counts over a batch, so that several processes make one mean of them.

The teacher runs once for a batch, without gradients. ``heads`` compares attention outputs on the teacher's own calls;
``hidden`` each layer's output, where the student reads its own inputs: then errors that add up over layers are seen,
and no layer is run twice; ``logits`` the predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from attnlab.adapters.contexts import record
from attnlab.adapters.distillation.student import body_of, layers_of
from attnlab.adapters.protocol import Conversion, adapter_of
from attnlab.attention import AttentionCall
from attnlab.loss import IGNORED, Divergence, Head, Loss, divergence
from attnlab.trace import Kind, LayerTrace, Trace

__all__ = ["Part", "Predictions", "StageLoss", "layer_error"]

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A loss term of the training loop: one entry of what ``StageLoss`` returns."""

    name: str
    share: float = 1.0

    def weight(self, step: int) -> float:
        """The term's weight in the loss."""
        return self.share

    def __call__(self, model: nn.Module, output: Mapping[str, Loss], batch: Batch, step: int) -> Loss:
        return output[self.name]


class StageLoss:
    """The loss of one stage of ``student``, which learns from ``teacher``; ``parts`` are its terms."""

    def __init__(self, teacher: nn.Module, student: nn.Module, stage: str, *, hard: float = 0.0) -> None:
        self.teacher, self.stage, self.hard = teacher, stage, hard
        self.mechanisms = {
            (conversion.kind, conversion.layer): _attending(conversion)
            for conversion in adapter_of(student).conversions()
        }
        self.predictions = Predictions(teacher, student) if stage == "logits" else None
        self.forward: Callable[[nn.Module, Batch], dict[str, Loss]] = getattr(self, f"_{stage}")
        self.parts = [Part(stage)]
        if stage == "heads":
            # The size of a layer's output is its own, so that each layer is a mean of its own.
            self.parts = [Part(_name(place), 1 / len(self.mechanisms)) for place in self.mechanisms]

    def mean(self, student: nn.Module, batch: Batch) -> Tensor:
        """The stage's loss of a batch."""
        losses = self.forward(student, batch)
        return torch.stack([part.share * _mean(losses[part.name]) for part in self.parts]).sum()

    def _heads(self, student: nn.Module, batch: Batch) -> dict[str, Loss]:
        """|(W - W^) v|^2 of every converted layer on the teacher's own calls, over |W v|^2."""
        with torch.no_grad(), record(self.teacher) as trace:
            body_of(self.teacher)(**model_inputs(self.teacher, batch))
        return {_name(place): _output_error(trace[place], mech) for place, mech in self.mechanisms.items()}

    def _hidden(self, student: nn.Module, batch: Batch) -> dict[str, Loss]:
        """|h - h^|^2 / |h|^2 of each token, the mean over layers; some tokens' states are a thousand times larger."""
        inputs = model_inputs(self.teacher, batch)
        with torch.no_grad(), _outputs(self.teacher) as expected:
            body_of(self.teacher)(**inputs)
        with _outputs(student) as actual:
            body_of(student)(**inputs)
        total = torch.zeros((), device=expected[0].device)
        for h, own in zip(expected, actual, strict=True):
            error = (own.float() - h.float()).square().sum(-1) / h.float().square().sum(-1).clamp(min=1e-12)
            mask = _mask_for(batch, h)
            total = total + (error.sum() if mask is None else (error * mask).sum()) / len(expected)
        mask = _mask_for(batch, expected[0])
        tokens = _number(expected[0].shape[:-1].numel(), total) if mask is None else mask.sum()
        return {self.stage: Loss(total, tokens)}

    def _logits(self, student: nn.Module, batch: Batch) -> dict[str, Loss]:
        """KL(teacher || student), mixed with the text's own next tokens, over the tokens that are learned."""
        assert self.predictions is not None
        result, targets = self.predictions(batch, hard=self.hard)
        return {self.stage: Loss(result.loss, _number(len(targets), targets))}


class Predictions:
    """The predictions of two models beside each other, without all their logits at once where one layer makes them."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        self.teacher, self.student = teacher, student
        self.heads = _head_of(teacher), _head_of(student)
        self.causal = not any(site.kind == "encoder" for site in adapter_of(teacher).sites())

    def __call__(self, batch: Batch, *, hard: float = 0.0) -> tuple[Divergence, Tensor]:
        """The divergence, summed over the tokens that are learned, and the tokens that they predict."""
        inputs, (head, own_head) = model_inputs(self.teacher, batch), self.heads
        if head is None or own_head is None:
            return self._from_logits(batch, inputs, hard)
        with torch.no_grad(), _without_head(head):
            expected = self.teacher(**inputs).logits
        with _without_head(own_head):
            states = self.student(**inputs).logits
        states, expected, targets = self._chosen(batch, states, expected)
        student = Head(states, own_head.weight, own_head.bias)
        return divergence(student, Head(expected, head.weight, head.bias), targets, hard=hard), targets

    def _from_logits(self, batch: Batch, inputs: dict[str, Any], hard: float) -> tuple[Divergence, Tensor]:
        """The same for models that make their logits in another way than by one layer."""
        with torch.no_grad():
            expected = self.teacher(**inputs).logits
        logits, expected, targets = self._chosen(batch, self.student(**inputs).logits, expected)
        p, q = (log_softmax(t.float(), -1) for t in (expected, logits))
        kl = (p.exp() * (p - q)).sum()
        own, other = (
            cross_entropy(t.float(), targets, ignore_index=IGNORED, reduction="sum") for t in (logits, expected)
        )
        loss = (1 - hard) * kl + hard * own if hard else kl
        return Divergence(loss, kl.detach(), own.detach(), other), targets

    def _chosen(self, batch: Batch, states: Tensor, expected: Tensor) -> list[Tensor]:
        """States or logits of both at the positions that are learned, and the tokens they predict."""
        learned, targets = _learned(batch, states), _targets(batch, states, causal=self.causal)
        return [t.flatten(0, 1) if learned is None else t[learned] for t in (states, expected, targets)]


def _head_of(model: nn.Module) -> nn.Linear | None:
    """The linear layer over the vocabulary, if what it returns are the model's logits; None for all other models.

    Some models scale, cap or shift the logits after it, which a run on two tokens tells.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        return None
    made: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, args, output: made.append(output))
    tokens = torch.tensor([[0, 1]], device=head.weight.device)
    decoder = {"decoder_input_ids": tokens} if getattr(model.config, "is_encoder_decoder", False) else {}
    training = model.training
    try:
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens, **decoder).logits
    finally:
        hook.remove()
        model.train(training)
    return head if len(made) == 1 and made[0] is logits else None


@contextmanager
def _without_head(head: nn.Linear) -> Iterator[None]:
    """Inside, the layer over the vocabulary returns its input."""
    head.forward = lambda states: states  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.__dict__["forward"]


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the hidden states that each layer returns are appended to the list."""
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    layers = layers_of(model)
    if not layers:
        raise ValueError(f"the layers of this {type(model).__name__} cannot be told apart; leave the hidden stage out")
    hooks = [layer.register_forward_hook(keep) for layer in layers.values()]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def layer_error(trace: Trace, mechanisms: Mapping[tuple[Kind, int], Callable[[AttentionCall], Tensor]]) -> Tensor:
    """The mean over these layers of |(W - W^) v|^2 / |W v|^2, W^ by the mechanisms on the recorded calls."""
    return torch.stack([_mean(_output_error(trace[place], mech)) for place, mech in mechanisms.items()]).mean()


def _output_error(teacher: LayerTrace, mech: Callable[[AttentionCall], Tensor]) -> Loss:
    """|(W - W^) v|^2 and |W v|^2 of one layer."""
    difference = (mech(teacher.call) - teacher.output).float()
    weight = _query_weight(teacher.call, teacher.kind)
    size = (teacher.output.float().square() * weight).sum()
    return Loss((difference.square() * weight).sum(), size)


def _number(value: int, beside: Tensor) -> Tensor:
    """A number on a tensor's device, made there: to copy it would make the host wait for the device."""
    return torch.full((), float(value), device=beside.device)


def _mean(loss: Loss) -> Tensor:
    return loss.total / torch.as_tensor(loss.count, device=loss.total.device).clamp(min=1e-12)


def _name(place: tuple[str, int]) -> str:
    return f"{place[0]}-{place[1]}"


def _attending(conversion: Conversion) -> Callable[[AttentionCall], Tensor]:
    """The student's attention on a call of its teacher, without the bias that conversion may have dropped."""
    mech = conversion.mechanism
    return (lambda call: mech(replace(call, bias=None))) if conversion.drop_bias else mech


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The batch without its labels, from which an encoder-decoder's targets are made where it has none."""
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" not in inputs:
        if "labels" not in batch:
            raise ValueError("an encoder-decoder learns from pairs: its batches need labels or decoder_input_ids")
        prepare: Any = model.prepare_decoder_input_ids_from_labels
        inputs["decoder_input_ids"] = prepare(labels=batch["labels"])
    return inputs


def _learned(batch: Batch, states: Tensor) -> Tensor | None:
    """Which positions of the predictions are learned: those with a label, or all but padding; None: all of them."""
    labels = batch.get("labels")
    # A causal model's labels are its next tokens: every position is learned.
    if labels is not None and labels.shape == states.shape[:2]:
        return labels != IGNORED
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return None if mask is None else mask.bool()


def _targets(batch: Batch, states: Tensor, *, causal: bool) -> Tensor:
    """The token that each position predicts: the next one of a causal model, else its label."""
    labels = batch.get("labels")
    targets = torch.full(states.shape[:2], IGNORED, device=states.device)
    if causal:
        ids = batch["input_ids"] if labels is None else labels
        mask = batch.get("attention_mask")
        targets[:, :-1] = ids[:, 1:] if mask is None else ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
    elif labels is not None and labels.shape == targets.shape:
        targets = labels
    return targets


def _mask_for(batch: Batch, states: Tensor) -> Tensor | None:
    """1 at the positions of these hidden states that are tokens; None where all are."""
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if mask is not None and mask.shape == states.shape[:2]:
            return mask.float()
    return None


def _query_weight(call: AttentionCall, kind: Kind) -> Tensor:
    """1 at queries that are tokens; in self-attention those are the visible keys."""
    _, _, n_q, n_k = call.sizes
    if call.key_visible is None or kind == "cross" or n_q != n_k:
        return torch.ones((), device=call.q.device)
    return call.key_visible[:, None, :, None].float()
