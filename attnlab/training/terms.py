"""Loss terms: callables that return a sum and the count to divide it by, so that a mean is over the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnlab.loss import IGNORED, Loss
from attnlab.shapes import Float

__all__ = ["CrossEntropy", "Loss", "Objective", "Term", "term_weight"]

Batch = Mapping[str, Any]


class Term(Protocol):
    """A loss term. It may also have ``weight(step) -> float`` (1 without it), and ``count(batch, step)``.

    ``count`` is the number that the term's sum will be divided by, known without running the model. With gradient
    accumulation the loop needs it before the first part; for a term without it the loop runs the model once more,
    without gradients.
    """

    @property
    def name(self) -> str:
        """What the term is called in metrics and errors."""

    def __call__(self, model: nn.Module, output: Any, batch: Batch, step: int) -> Loss:
        """The term for this batch, given the model's output for it."""


@dataclass(frozen=True)
class CrossEntropy:
    """The sum of -log p(label) over labels other than ``ignore``; ``shift`` predicts the next token from each."""

    name: str = "cross_entropy"
    labels: str = "labels"
    ignore: int = IGNORED
    shift: bool = False

    def __call__(self, model: nn.Module, output: Any, batch: Batch, step: int) -> Loss:
        logits, labels = logits_of(output), self._targets(batch)
        if self.shift:
            logits = logits[:, :-1]
        flat = logits.reshape(-1, logits.shape[-1]).float()
        total = cross_entropy(flat, labels.reshape(-1), ignore_index=self.ignore, reduction="sum")
        return Loss(total, (labels != self.ignore).sum())

    def count(self, batch: Batch, step: int) -> Tensor:
        """The number of labels that are predicted."""
        return (self._targets(batch) != self.ignore).sum()

    def _targets(self, batch: Batch) -> Tensor:
        if self.labels not in batch:
            raise ValueError(f"{self.name} needs batch[{self.labels!r}], the batch has {', '.join(batch)}")
        labels = batch[self.labels]
        return labels[:, 1:] if self.shift else labels


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: its ``logits``, its entry of that name, or the output itself."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if logits is None:
        raise ValueError(f"a model's output must be a tensor or have logits, got {type(output).__name__}")
    return logits


def term_weight(term: Term, step: int) -> float:
    """The term's weight at this step; 1 where it names none."""
    weight = getattr(term, "weight", None)
    return 1.0 if weight is None else float(weight(step))


class Objective(nn.Module):
    """The model and its loss terms as one module, so that DDP, FSDP and torch.compile treat them as one.

    Compiled together, the logits of a large vocabulary are reduced to their loss without being written out in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        terms: Sequence[Term],
        forward: Callable[[nn.Module, Batch], Any] | None = None,
    ) -> None:
        super().__init__()
        names = [term.name for term in terms]
        if not names or len(set(names)) < len(names) or "loss" in names:
            raise ValueError(
                f"loss terms need distinct names other than 'loss' (that is their weighted sum), got {names}"
            )
        self.model = model
        self.terms = tuple(terms)
        self._call = forward
        self._inputs = None if forward else _input_names(model)
        self._tied = _tied_names(model)
        # Accelerate reads these attributes of a model that FSDP shards.
        for name in ("_no_split_modules", "get_input_embeddings", "get_output_embeddings"):
            if hasattr(model, name):
                object.__setattr__(self, name, getattr(model, name))

    def forward(self, batch: Batch, step: int) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
        """(totals, counts), one entry for each term."""
        if self._call is not None:
            output = self._call(self.model, batch)
        else:
            assert self._inputs is not None
            output = self.model(**{name: value for name, value in batch.items() if name in self._inputs})
        losses = [term(self.model, output, batch, step) for term in self.terms]
        totals = torch.stack([loss.total.float() for loss in losses])
        counts = torch.stack([torch.as_tensor(loss.count, device=totals.device).float() for loss in losses])
        return totals, counts.detach()

    def tie_weights(self) -> None:
        """Tie the parameters that were tied in the model at first; FSDP's preparation separates them."""
        for first, *others in self._tied:
            for name in others:
                path, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(path), last, self.model.get_parameter(first))

    def counts(self, batch: Batch, step: int) -> Float[Tensor, " t"] | None:
        """The count of each term, if every term has ``count``."""
        if not all(hasattr(term, "count") for term in self.terms):
            return None
        return torch.stack([torch.as_tensor(term.count(batch, step)).float() for term in self.terms])  # type: ignore[attr-defined]


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Names of one parameter, for each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _input_names(model: nn.Module) -> frozenset[str]:
    """The batch entries that ``model.forward`` takes, without labels, or the loss would be computed twice."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in kinds) - {"labels"}
