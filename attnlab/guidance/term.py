"""Guidance as a loss term: inside ``guide`` the model's guided layers also give their heads' errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.protocol import Frame, ModelAdapter, adapter_of
from attnlab.attention import AttentionCall, Mechanism
from attnlab.fields import expect
from attnlab.guidance.attention import Groups, attend_guided, errors_only, guided_errors
from attnlab.guidance.inputs import watch_inputs
from attnlab.guidance.loss import (
    cells,
    chosen_kind,
    guided_numbers,
    heads_see_differently,
    layer_targets,
    refuse_hidden_pattern,
    refuse_missing,
    refuse_unguided,
)
from attnlab.guidance.settings import Guidance
from attnlab.loss import Loss
from attnlab.mechanisms.softmax import Softmax
from attnlab.patterns import SpecialTokens, Targets
from attnlab.shapes import Float
from attnlab.trace import Kind

__all__ = ["GuidanceTerm", "guide"]

Batch = Mapping[str, Any]


@dataclass(eq=False)
class GuidanceTerm:
    """L_AG of the model's last forward pass; its weight is alpha(t)."""

    guidance: Guidance
    kind: Kind
    tokens: SpecialTokens | None = None
    # The numbers of the guided layers.
    layers: tuple[int, ...] = (0,)
    name: str = "guidance"
    # Of the current or last forward pass: the model's inputs, the patterns over them, and each layer's errors and
    # groups.
    _batch: dict[str, Any] | None = field(default=None, repr=False)
    _targets: dict[tuple[object, ...], Targets] = field(default_factory=dict, repr=False)
    _groups: dict[tuple[object, ...], Groups] = field(default_factory=dict, repr=False)
    _errors: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _groups_of: dict[int, Groups] = field(default_factory=dict, repr=False)
    _running: bool = field(default=False, repr=False)
    # The patterns of each layer that has run.
    _patterns_of: dict[int, tuple[str, ...]] = field(default_factory=dict, repr=False)
    # The patterns that have been drawn once, and that the attention does not hide.
    _can_be_followed: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        # torch.compile would treat what is kept from layer to layer as constants.
        self.outside_of_graphs: Callable[..., Any] = torch.compiler.disable(lambda function, *args: function(*args))

    def __call__(self, model: nn.Module, output: Any, batch: Batch, step: int) -> Loss:
        """The sum over layers, pattern groups and rows, each group's divided by its heads, and its count."""
        return self.outside_of_graphs(self._loss, batch, step)

    def _loss(self, batch: Batch, step: int) -> Loss:
        return Loss(self.total(), self.count(batch, step))

    def weight(self, step: int) -> float:
        """alpha(t)."""
        return self.guidance.weight(step)

    def count(self, batch: Batch, step: int) -> Tensor:
        """What the term is averaged over, before the model has run."""
        texts = {"queries": None, "query_mask": None, **self._texts(batch)}
        return cells(self.guidance, **texts)

    def last_count(self) -> Tensor:
        """The count of the last forward pass."""
        assert self._batch is not None
        return self.count(self._batch, 0)

    def total(self) -> Tensor:
        """The last forward pass's summed errors."""
        if not self._errors:
            raise ValueError("no guided layer has run: call the model inside guide(...), then the term")
        errors = list(self._errors.values())
        if torch.is_grad_enabled() and not errors[0].requires_grad:
            raise ValueError(
                "the guided layers ran without gradients, so that guidance would have no effect; with gradient "
                'checkpointing pass {"use_reentrant": False}, and let the guided layers\' parameters be trained'
            )
        return torch.stack([e.sum() for e in errors]).sum()

    def by_head(self) -> dict[int, Float[Tensor, " s"]]:
        """{layer: each guided head's mean squared error over the rows that have a target}, of the last forward pass."""
        means = {}
        for layer, errors in self._errors.items():
            parts = []
            for heads, targets in self._groups_of[layer]:
                own = errors[:, heads.start : heads.stop].detach().sum((0, 2)) * len(heads)
                parts.append(own / targets.rows[:, 0].sum().clamp(min=1))
            means[layer] = torch.cat(parts)
        return means

    def begin(self, batch: dict[str, Any]) -> None:
        """A forward pass over these texts begins."""
        self._batch, self._running = batch, True
        self._targets, self._groups, self._errors, self._groups_of = {}, {}, {}, {}

    def end(self) -> None:
        """The forward pass is over."""
        self._running = False

    def guides(self, call: AttentionCall) -> bool:
        """Whether errors are wanted: not while a text is generated, token by token or by parts of the model.

        With gradients they always are: checkpointing runs layers again after the forward pass is over.
        """
        if torch.is_grad_enabled():
            return True
        if not self._running or self._batch is None or not isinstance(self._batch.get("input_ids"), Tensor):
            return False
        return self._texts(self._batch)["input_ids"].shape[1] == call.k.shape[2]

    def groups(self, layer: int, call: AttentionCall) -> Groups:
        """Each pattern's heads and targets in a layer; layers with the same masks and heads share them."""
        if self._batch is None or not isinstance(self._batch.get("input_ids"), Tensor):
            raise ValueError("the guided model was not called with input_ids, from which the patterns are drawn")
        heads = self.guidance.assign(call.q.shape[1], layer=self.layers.index(layer), n_layers=len(self.layers))
        self._note_patterns(layer, tuple(heads))
        seen = (call.causal, call.offset, id(call.mask), id(call.bias))
        key = (*seen, *heads.items())
        if key not in self._groups:
            drawn = {name: self._drawn(name, own, call, seen) for name, own in heads.items()}
            self._groups[key] = Groups(heads, drawn, masks=(call.mask, call.bias))
        self._groups_of[layer] = self._groups[key]
        return self._groups[key]

    def _drawn(self, name: str, heads: range, call: AttentionCall, seen: tuple[object, ...]) -> Targets:
        """The pattern's targets; heads share them unless each has a mask of its own."""
        key = (name, heads, *seen) if heads_see_differently(call) else (name, *seen)
        if key not in self._targets:
            assert self._batch is not None
            texts = {**self._texts(self._batch), "tokens": self.tokens}
            self._targets[key] = layer_targets(name, _as_heads_see(call, heads), **texts)
            if name not in self._can_be_followed:
                refuse_hidden_pattern(name, self._targets[key], **texts)
                self._can_be_followed.add(name)
        return self._targets[key]

    def _note_patterns(self, layer: int, names: tuple[str, ...]) -> None:
        """Once every layer has run: refuse patterns that are guided in none."""
        if layer not in self._patterns_of:
            self._patterns_of[layer] = names
            if len(self._patterns_of) == len(self.layers):
                refuse_unguided(self._patterns_of.values(), self.guidance)

    def note(self, layer: int, call: AttentionCall, mech: Mechanism) -> None:
        """Take the errors from the maps of a layer whose output was computed elsewhere."""
        if not self.guides(call):
            return
        groups = self.groups(layer, call)
        if isinstance(mech, Softmax):
            self._errors[layer] = errors_only(call, groups)
        else:
            self._errors[layer] = guided_errors(mech.weights(call)[:, : groups.guided], groups)

    def attend(self, layer: int, call: AttentionCall) -> Tensor:
        """A layer's output; its errors are kept."""
        if not self.guides(call):
            return Softmax()(call)
        out, self._errors[layer] = attend_guided(call, self.groups(layer, call))
        return out

    def _texts(self, batch: Batch) -> dict[str, Any]:
        """The ids and masks of keys and queries, from the batch's entries for this kind of attention."""
        prefix = "decoder_" if self.kind == "decoder" and batch.get("decoder_input_ids") is not None else ""
        texts = {
            "input_ids": batch[f"{prefix}input_ids"],
            "attention_mask": batch.get(f"{prefix}attention_mask"),
        }
        if self.kind == "cross":
            texts |= {"queries": batch["decoder_input_ids"], "query_mask": batch.get("decoder_attention_mask")}
        return texts


@dataclass(frozen=True, eq=False)
class GuidedSoftmax(Softmax):
    """Softmax attention of one layer that gives its guided heads' errors to a term."""

    term: GuidanceTerm
    layer: int
    # Whether this mechanism computed the output that ``noted`` is called for next.
    _ran: list[bool] = field(default_factory=lambda: [False], repr=False)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """The output; the errors go to the term."""
        return self.term.outside_of_graphs(self._attend, call)

    def _attend(self, call: AttentionCall) -> Tensor:
        self._ran[0] = True
        return self.term.attend(self.layer, call)

    def noted(self, call: AttentionCall, mech: Mechanism) -> None:
        """After the layer has attended: compute the errors where another mechanism computed the output."""
        ran, self._ran[0] = self._ran[0], False
        if not ran:
            self.term.note(self.layer, call, mech)


@contextmanager
def guide(model: nn.Module, guidance: Guidance, *, tokens: SpecialTokens | None = None) -> Iterator[GuidanceTerm]:
    """Inside the context, a loss term for ``attnlab.training.train(..., terms=[..., term])``; after it, a plain model.

    Any model that ``swap`` supports, and any of ``attnlab.models``. Guided heads give their errors while they attend;
    the others, and the rest of the model, run as they would without guidance.
    """
    expect("guidance", guidance, Guidance, "a Guidance, such as Guidance(fraction=0.5)")
    with ExitStack() as undo:
        adapter = adapter_of(model)
        sites = adapter.sites()
        kind = chosen_kind([site.kind for site in sites], guidance)
        numbers = [site.layer for site in sites if site.kind == kind]
        refuse_missing(numbers, guidance, kind)
        term = GuidanceTerm(guidance, kind, tokens, guided_numbers(numbers, guidance))
        for remove in watch_inputs(model, term.begin, term.end):
            undo.callback(remove)
        undo.enter_context(adapter.attach(_frames(adapter, term)))
        yield term


def _frames(adapter: ModelAdapter, term: GuidanceTerm) -> dict[Any, Frame]:
    """For each guided site: our softmax in place of its own, or only an observer where another mechanism stands in."""
    frames = {}
    for site in adapter.sites():
        if site.kind != term.kind or site.layer not in term.layers:
            continue
        guided = GuidedSoftmax(term, site.layer)

        def note(site: Any, call: AttentionCall, mech: Mechanism, out: Tensor, guided: GuidedSoftmax = guided) -> None:
            term.outside_of_graphs(guided.noted, call, mech)

        replaces = type(adapter.mechanism_at(site)) is Softmax
        frames[site] = Frame(mechanism=guided if replaces else None, note=note)
    return frames


def _as_heads_see(call: AttentionCall, heads: range) -> AttentionCall:
    """The call as these heads see it, of which patterns read only the mask and the bias."""
    if not heads_see_differently(call):
        return call
    part = slice(heads.start, heads.stop)
    mask, bias = (t if t is None or t.shape[1] == 1 else t[:, part] for t in (call.mask, call.bias))
    return replace(call, q=call.q[:, part], k=call.k[:, :1], v=call.v[:, :1], mask=mask, bias=bias)
