"""Seeds of one translator as one model: every parameter has a leading axis, and ``torch.func.vmap`` runs along it.

A small model spends its time on launching kernels. Seeds of one architecture need the same launches, so one launch does
the work of all. What is computed for a seed is what that seed computes alone, but for the masks of dropout. Where
torch's own rules for vmap launch several kernels, ours launch one: such a rule sees whole tensors, with the axis of the
models, and autograd differentiates what the rule does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, dropout, embedding, linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attnlab.data.masking import IGNORED
from attnlab.loss import Loss
from attnlab.mechanisms._bounded.slots import lengths_unchecked
from attnlab.mechanisms._device import without_kernels
from attnlab.models import Transformer
from attnlab.shapes import Float
from attnlab.training import Source
from attnlab.training.side_by_side import Learner

__all__ = ["Stacked", "StackedLearner", "StackedSource", "StackedTranslation", "few_launches"]


class Stacked(nn.Module):
    """Translators that differ in their weights alone; inputs and logits have the leading axis too.

    All weights are one parameter, so that casts, clipping and updates are few launches. While it is trained the model
    computes in ``dtype``.
    """

    def __init__(self, models: Sequence[Transformer], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.size, self.dtype = len(models), dtype
        self.shapes = {name: p.shape for name, p in models[0].named_parameters()}
        self.weights = nn.Parameter(
            torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
        )
        one = _Logits(copy.deepcopy(models[0]))
        # Parameters and modules may be shared. Each place is filled once, or torch cannot restore the model.
        names = {id(p): name for name, p in one.model.named_parameters()}
        self.places = {
            f"{at}.{name}": names[id(p)]
            for at, module in one.named_modules()
            for name, p in module.named_parameters(recurse=False)
        }
        # In a tuple, so that it is no submodule: it has no weights of its own.
        self._one = (one.to("meta"),)

    def train(self, mode: bool = True) -> Stacked:
        """Switch dropout on or off."""
        self._one[0].train(mode)
        return super().train(mode)

    def forward(self, **inputs: Tensor) -> Float[Tensor, "s b q v"]:
        """The logits of all models, each for its own batch."""
        one = self._one[0]

        def call(weights: Tensor, batch: dict[str, Tensor]) -> Tensor:
            mine = self.named(weights)
            filled = {place: mine[name] for place, name in self.places.items()}
            return functional_call(one, filled, kwargs=batch, tie_weights=False)

        with few_launches():
            weights = self.weights.to(self.dtype if self.training else torch.float32)
            return vmap(call, randomness="different")(weights, inputs)

    def snapshot(self) -> dict[str, Tensor]:
        """The parameters now, by the names that they have in one model; the leading axis is that of the models."""
        return self.named(self.weights.detach().clone())

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """Views of the parameter, or of something of its shape, with its leading axis or without."""
        parts = weights.split([shape.numel() for shape in self.shapes.values()], -1)
        return {name: part.unflatten(-1, shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class _Logits(nn.Module):
    """Makes the logits while ``functional_call`` has the parameters in place; an ``Output`` would make them later."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits


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
    """A learner for a stack: each model has its own loss, and its gradient is clipped by its own length."""

    model: Stacked
    # An update under vmap takes a tenth of a second before it is captured, so there is only one.
    warmup = 1

    def __init__(self, model: Stacked, *rest: Any, half: bool = False, **options: Any) -> None:
        # Autocast would cast each weight by itself; a stack casts all of them at once.
        super().__init__(model, *rest, half=False, **options)
        vectors = [name for name, shape in model.shapes.items() if len(shape) < 2]
        if vectors and self.recipe.weight_decay:
            raise ValueError(
                f"all parameters of a stack decay alike, but vectors should not: {', '.join(vectors)}; train without "
                "weight decay, or without biases and gains (affine=False)"
            )
        model.dtype = torch.bfloat16 if half and self.cuda else torch.float32
        self.loss = torch.zeros(model.size, device=self.device)

    def prepare_gradients(self) -> None:
        gradient, most = self.model.weights.grad, self.recipe.clip
        assert gradient is not None
        if most is not None:
            lengths = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((most / (lengths + 1e-6)).clamp(max=1))


@dataclass(frozen=True, eq=False)
class StackedSource:
    """A batch of each source, stacked; their widths agree at every step."""

    sources: Sequence[Source]

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batches of a step."""
        made = [source.batch(step) for source in self.sources]
        return {name: torch.stack([batch[name] for batch in made]) for name in made[0]}


@contextmanager
def few_launches() -> Iterator[None]:
    """Inside, calls under vmap take our rules; attention runs no kernels and reads no lengths, which have no rules."""
    with without_kernels(), lengths_unchecked(), _Rules():
        yield


class _Rules(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is linear:
            x, weight, bias = args
            product = (x.flatten(0, -2) @ weight.mT).unflatten(0, x.shape[:-1])
            return product if bias is None else product + bias
        if func is embedding:
            return _Rows.apply(*reversed(args[:2]))
        if func is dropout:
            return _Dropout.apply(*args, options["p"]) if options["training"] and options["p"] else args[0]
        if func is scaled_dot_product_attention:
            assert not options.pop("enable_gqa", False)
            return _Attention.apply(*args, options.pop("attn_mask"), tuple(options.items()))
        return func(*args, **options)


class _Rows(torch.autograd.Function):
    """Rows of a matrix. Its gradient is summed by ``index_add_``; torch's own sorts the tokens first."""

    @staticmethod
    def forward(weight: Tensor, ids: Tensor) -> Tensor:
        return weight[ids]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, ids = inputs
        ctx.save_for_backward(ids)
        ctx.like = weight.shape, weight.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,), (shape, dtype) = ctx.saved_tensors, ctx.like
        total = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, ids.flatten(), grad.flatten(0, -2).float()).to(dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, weight: Tensor, ids: Tensor) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            return _Rows.apply(weight, ids), in_dims[1]
        weight, ids = (_leading(t, dim, info.batch_size) for t, dim in zip((weight, ids), in_dims, strict=True))
        first = weight.shape[1] * torch.arange(len(weight), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
        return _Rows.apply(weight.flatten(0, 1), ids + first), 0


class _Dropout(torch.autograd.Function):
    """Dropout in one kernel instead of three."""

    @staticmethod
    def forward(x: Tensor, p: float) -> Tensor:
        return dropout(x, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, p: float) -> tuple[Tensor, int]:
        return dropout(x, p), in_dims[0]


class _Attention(torch.autograd.Function):
    """SDPA with the models as rows; torch's rule for its fused form has gradients that are not aligned."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Any) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, **dict(options))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        *tensors, options = args
        rows: list[Any] = [
            None if t is None else _leading(t, dim, info.batch_size).flatten(0, 1)
            for t, dim in zip(tensors, in_dims, strict=False)
        ]
        out = scaled_dot_product_attention(rows[0], rows[1], rows[2], attn_mask=rows[3], **dict(options))
        return out.unflatten(0, (info.batch_size, -1)), 0


def _leading(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
