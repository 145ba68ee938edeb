"""Seeds of one translator as one model: every parameter has a leading axis, so that a launch does the work of all.

Small models wait for launches, and seeds of one architecture need the same ones. ``torch.func.vmap`` runs the model
along the axis; what it computes for a seed is what that seed computes alone, but for the masks of dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, dropout, linear
from torch.overrides import TorchFunctionMode

from attnlab.data import Source
from attnlab.data.masking import IGNORED
from attnlab.experiments.together import Learner
from attnlab.loss import Loss
from attnlab.models import Transformer
from attnlab.shapes import Float

__all__ = ["Stacked", "StackedLearner", "StackedSource", "StackedTranslation"]

# Fused attention has a rule for vmap on a GPU; on a CPU the plain form has.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Stacked(nn.Module):
    """Translators that differ in their weights alone; inputs and logits have the leading axis too."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        super().__init__()
        self.size = len(models)
        self.each = _Logits(copy.deepcopy(models[0]))
        ours, theirs = dict(self.each.model.named_parameters()), [dict(m.named_parameters()) for m in models]
        for name, p in ours.items():
            p.data = torch.stack([other[name].detach() for other in theirs])
        # Parameters may be shared, and modules too: each place is filled once, or torch does not find back.
        names = {id(p): name for name, p in self.each.named_parameters()}
        self.places = {
            f"{at}.{name}": names[id(p)]
            for at, module in self.each.named_modules()
            for name, p in module.named_parameters(recurse=False)
        }
        for module in self.each.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.Dropout):
                    setattr(module, name, _Dropout(child.p))

    def forward(self, **inputs: Tensor) -> Float[Tensor, "s b q v"]:
        """The logits of all models, each for its own batch."""

        def call(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
            return functional_call(
                self.each, {place: params[name] for place, name in self.places.items()}, kwargs=batch, tie_weights=False
            )

        with sdpa_kernel(ATTENTION), _Products():
            return vmap(call, randomness="different")(dict(self.each.named_parameters()), inputs)

    def snapshot(self) -> dict[str, Tensor]:
        """The parameters now, by the names that they have in one model; the leading axis is that of the models."""
        return {name: p.detach().clone() for name, p in self.each.model.named_parameters()}


class _Logits(nn.Module):
    """A call that has to happen while the parameters are in their places: logits are made when they are asked for."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits


class _Products(TorchFunctionMode):
    """A linear layer as a product and a sum: vmap takes both at once apart into twice as many kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = args
        found = (x.flatten(0, -2) @ weight.mT).unflatten(0, x.shape[:-1])
        return found if bias is None else found + bias


class _Dropout(nn.Module):
    """Dropout that is one kernel under vmap too, where torch's own is three."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return _FusedDropout.apply(x, self.p) if self.training and self.p else x


class _FusedDropout(torch.autograd.Function):
    """The rule for vmap sees the whole tensor, and autograd what the rule does."""

    @staticmethod
    def forward(x: Tensor, p: float) -> Tensor:
        return dropout(x, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, p: float) -> tuple[Tensor, int]:
        return dropout(x, p), in_dims[0]


@dataclass(frozen=True)
class StackedTranslation:
    """``Translation`` for each model by itself: totals and counts are vectors."""

    name: str = "translation"
    label_smoothing: float = 0.1

    def __call__(self, model: nn.Module, output: Tensor, batch: Mapping[str, Any], step: int) -> Loss:
        labels = batch["labels"]
        each = cross_entropy(
            output.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none",
            label_smoothing=self.label_smoothing,
        )  # fmt: skip
        return Loss(each.view(len(labels), -1).sum(1), self.count(batch, step))

    def count(self, batch: Mapping[str, Any], step: int) -> Tensor:
        """The number of predicted tokens of each."""
        return (batch["labels"] != IGNORED).flatten(1).sum(1)


class StackedLearner(Learner):
    """A learner whose models keep to themselves: each has a loss, and gradients of a length of its own."""

    model: Stacked

    def __init__(self, model: Stacked, *rest: Any, **options: Any) -> None:
        super().__init__(model, *rest, **options)
        self.loss = torch.zeros(model.size, device=self.device)

    def _groups(self) -> list[dict[str, Any]]:
        # What is a vector in one model is a matrix in several.
        matrices = [p for p in self.model.parameters() if p.dim() > 2]
        vectors = [p for p in self.model.parameters() if p.dim() <= 2]
        decay = self.recipe.weight_decay
        return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]

    def _clip(self, most: float) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for i in range(self.model.size):
            mine = [g[i] for g in gradients]
            length = torch.nn.utils.get_total_norm(mine, foreach=True)
            torch._foreach_mul_(mine, (most / (length + 1e-6)).clamp(max=1))


@dataclass(frozen=True, eq=False)
class StackedSource:
    """A batch of each source, one on the other; their widths agree at every step."""

    sources: Sequence[Source]

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batches of a step."""
        made = [source.batch(step) for source in self.sources]
        return {name: torch.stack([batch[name] for batch in made]) for name in made[0]}
