"""Many small LSTM models as one: their parameters stacked, their recurrences stepped together.

A model of this size leaves a GPU waiting for launches; twenty of them in one matrix product do not. torch.func's vmap
has no rule for nn.LSTM, so the cell is written out. Each member computes what it would compute alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding

from attnlab.shapes import Bool, Float, Int
from papers.ktiw.models.lstm import Classifier, Translator
from papers.ktiw.models.products import invariant_product
from papers.ktiw.models.recurrence import Product, recurrence

__all__ = ["StackedClassifier", "StackedTranslator", "stack_classifiers", "stack_translators"]


def stack_translators(models: Sequence[Translator], *, invariant: bool = False) -> StackedTranslator:
    """The models as one; their configs may differ in whether attention is softmax or uniform.

    ``invariant`` makes a member's numbers the same, to the last bit, whatever is stacked with it.

    >>> from papers.ktiw.models.lstm_config import TranslatorConfig
    >>> config = TranslatorConfig(vocab=5, width=4, layers=1, bidirectional=False)
    >>> tokens = torch.tensor([[[1, 2, 3]], [[4, 2, 3]]])
    >>> stack_translators([Translator(config), Translator(config)])(tokens, decoder_input_ids=tokens).shape
    torch.Size([2, 1, 3, 5])
    """
    return StackedTranslator(models, invariant=invariant)


def stack_classifiers(models: Sequence[Classifier]) -> StackedClassifier:
    """The models as one; their configs may differ in whether attention is softmax or uniform.

    >>> from papers.ktiw.models.lstm_config import ClassifierConfig
    >>> config = ClassifierConfig(vocab=5, embedding=3, width=4)
    >>> tokens = torch.tensor([[[1, 2, 3]], [[4, 2, 3]]])
    >>> stack_classifiers([Classifier(config), Classifier(config)])(tokens).shape
    torch.Size([2, 1])
    """
    return StackedClassifier(models)


class _Stacked(nn.Module):
    """Parameters with a leading axis of members; ``state_of(i)`` are member i's."""

    learned: Tensor | None

    def __init__(self, models: Sequence[Translator] | Sequence[Classifier], *, invariant: bool = False) -> None:
        super().__init__()
        self.invariant = invariant
        self.product: Product = invariant_product if invariant else torch.bmm
        if not models:
            raise ValueError("there is nothing to stack; give at least one model")
        first: Any = models[0].config
        if any(replace(m.config, attention=first.attention) != first for m in models):
            raise ValueError("stacked models must share one config; stack those of each config apart")
        unknown = {m.config.attention for m in models} - {"softmax", "uniform"}
        if unknown:
            raise ValueError(f"stacked attention is softmax or uniform, got {unknown.pop()!r}")
        self.config, self.members = first, len(models)
        # Logits times 0 are uniform attention. None where no member needs it.
        learned = torch.tensor([float(m.config.attention == "softmax") for m in models])
        self.register_buffer("learned", None if learned.all() else learned, persistent=False)
        # Register under names without dots; the order is that of the members' own parameters.
        self.names = [name for name, _ in models[0].named_parameters()]
        for name in self.names:
            kept = [model.get_parameter(name) for model in models]
            stacked = torch.stack([p.detach() for p in kept])
            setattr(self, name.replace(".", "_"), nn.Parameter(stacked, requires_grad=kept[0].requires_grad))

    def state_of(self, member: int) -> dict[str, Tensor]:
        """The parameters of one member by their names."""
        return {name: self.stacked(name)[member].detach().clone() for name in self.names}

    @torch.no_grad()
    def copy_member(self, member: int, model: nn.Module) -> None:
        """Put the parameters of one member into a model of its own."""
        for name, p in model.named_parameters():
            p.copy_(self.stacked(name)[member])

    def stacked(self, name: str) -> nn.Parameter:
        """The members' parameters of this name, one after another."""
        return getattr(self, name.replace(".", "_"))

    def _weights(self, logits: Tensor, visible: Bool[Tensor, ...] | None, *, axis: int) -> Tensor:
        """Attention weights of the members from (s, ...) logits."""
        if self.learned is not None:
            logits = logits * self.learned.view(-1, *[1] * (logits.ndim - 1))
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        return logits.softmax(axis)

    def _linear(self, name: str, x: Float[Tensor, "s a n i"]) -> Float[Tensor, "s a n o"]:
        weight, rows = self.stacked(f"{name}.weight").mT, x.flatten(1, 2)
        if f"{name}.bias" in self.names:
            product = self._affine(rows, weight, self.stacked(f"{name}.bias").unsqueeze(1))
        else:
            product = self.product(rows, weight)
        return product.unflatten(1, x.shape[1:3])

    def _affine(
        self, x: Float[Tensor, "s n i"], weight: Float[Tensor, "s i o"], bias: Float[Tensor, "s 1 o"]
    ) -> Tensor:
        if not self.invariant:
            return torch.baddbmm(bias, x, weight)
        # The bias as a product too: so the sum that is its gradient has the same order.
        return self.product(x, weight) + self.product(x.new_ones(*x.shape[:2], 1), bias)

    def _embed(self, ids: Int[Tensor, "s n b"], table: Float[Tensor, "s v m"]) -> Float[Tensor, "s n b m"]:
        if self.invariant:
            # So that the gradient of a word is a sum in one order, too.
            words = torch.arange(table.shape[1], device=ids.device)
            chosen = (ids.flatten(1).unsqueeze(2) == words).to(table.dtype)
            return self.product(chosen, table).unflatten(1, ids.shape[1:])
        first = torch.arange(self.members, device=ids.device).view(-1, 1, 1) * table.shape[1]
        return embedding(ids + first, table.flatten(0, 1))

    def _first_gates(self, name: str, ids: Int[Tensor, "s n b"], turned: Tensor | None) -> Tensor:
        """What words add to the first layer's gates: a table of the vocabulary, looked up, if that is less work."""
        words = self.stacked("tokens.weight")
        weight, bias = self._inputs(name, 0)
        if words.shape[1] < ids[0].numel():
            table = self._affine(words.repeat(len(weight) // len(words), 1, 1), weight, bias)
            tables = table.chunk(len(weight) // len(words))
            gates = torch.cat([self._embed(ids, one) for one in tables])
            return gates if turned is None else _turn(gates, turned, second_half=True)
        return self._gates(name, 0, self._embed(ids, words), turned)

    def _gates(self, name: str, layer: int, x: Float[Tensor, "s n b i"], turned: Tensor | None) -> Tensor:
        weight, bias = self._inputs(name, layer)
        both = x if turned is None else torch.cat([x, _turn(x, turned)])
        return self._affine(both.flatten(1, 2), weight, bias).unflatten(1, x.shape[1:3])

    def _inputs(self, name: str, layer: int) -> tuple[Tensor, Tensor]:
        """Input weights (s, i, 4 m) and the sum of both biases (s, 1, 4 m), one direction after the other."""
        weight, one, two = (self._both(name, part, layer) for part in ("weight_ih", "bias_ih", "bias_hh"))
        return weight.mT, (one + two).unsqueeze(1)

    def _both(self, name: str, part: str, layer: int) -> Tensor:
        found = self.stacked(f"{name}.{part}_l{layer}")
        backward = f"{name}.{part}_l{layer}_reverse"
        return torch.cat([found, self.stacked(backward)]) if backward in self.names else found

    def _lstm(
        self,
        name: str,
        ids: Int[Tensor, "s n b"],
        *,
        layers: int = 1,
        state: tuple[Tensor, Tensor] | None = None,
        lengths: Int[Tensor, "s b"] | None = None,
        turned: Int[Tensor, "s n b"] | None = None,
        share_dropped: float = 0.0,
    ) -> tuple[Float[Tensor, "s n b e"], tuple[Tensor, Tensor]]:
        """The last layer's states, and (h, c) of each layer (l, s, b, m) after each row's own length.

        ``turned`` are the places of a row's words from the last to the first: the backward direction reads them so, as
        members of their own, and its states are turned back. Both directions' last states are averaged.
        """
        x, ends = None, []
        for layer in range(layers):
            gates = self._first_gates(name, ids, turned) if x is None else self._gates(name, layer, x, turned)
            weight = self._both(name, "weight_hh", layer).mT.contiguous()
            zero = gates.new_zeros(len(weight), ids.shape[2], weight.shape[1])
            start = (zero, zero) if state is None else (state[0][layer], state[1][layer])
            hidden, cells = recurrence(gates, weight, *start, product=self.product)
            ends.append([_at_end(t, lengths) for t in (hidden, cells)])
            x = hidden
            if turned is not None:
                ahead, back = hidden.chunk(2)
                x = torch.cat([ahead, _turn(back, turned)], -1)
            if layer + 1 < layers and share_dropped:
                x = dropout(x, share_dropped, self.training)
        assert x is not None
        h, c = (torch.stack(parts) for parts in zip(*ends, strict=True))
        if turned is not None:
            h, c = (t.unflatten(1, (2, -1)).mean(1) for t in (h, c))
        return x, (h, c)


class StackedTranslator(_Stacked):
    """Translators as one; see ``stack_translators``."""

    def forward(
        self,
        input_ids: Int[Tensor, "s b k"],
        *,
        decoder_input_ids: Int[Tensor, "s b q"],
        lengths: Int[Tensor, "s b"] | None = None,
    ) -> Float[Tensor, "s b q v"]:
        """Logits; rows are padded on the right beyond ``lengths`` (None: there is no padding)."""
        how: dict[str, Any] = {"layers": self.config.layers, "share_dropped": self.config.dropout}
        ids, given = (t.transpose(1, 2) for t in (input_ids, decoder_input_ids))
        turned = _turned(ids, lengths) if self.config.bidirectional else None
        h, state = self._lstm("encoder", ids, lengths=lengths, turned=turned, **how)
        s, _ = self._lstm("decoder", given, state=state, **how)
        # (s, b, length, m)
        h, s = h.transpose(1, 2), s.transpose(1, 2)
        context = self._attend(s, h, lengths)
        if not self.config.literal:
            context = self._linear("context", context)
        if self.config.output == "linear":
            return self._linear("output", context + s)
        return self._linear("output", torch.relu(self._linear("hidden", torch.cat([context, s], -1))))

    def _attend(
        self, s: Float[Tensor, "s b q m"], h: Float[Tensor, "s b k e"], lengths: Int[Tensor, "s b"] | None
    ) -> Float[Tensor, "s b q e"]:
        query = self._linear("attention.query", s).unflatten(-1, (self.config.heads, -1)).transpose(2, 3)
        visible = None if lengths is None else _visible(lengths, h.shape[2]).unsqueeze(2).unsqueeze(2)
        states = h.flatten(0, 1)
        # (s b, heads q, e) @ (s b, e, k)
        logits = self.product(query.flatten(2, 3).flatten(0, 1), states.mT).view(*query.shape[:4], -1)
        weights = self._weights(logits, visible, axis=-1).sum(2)
        return self.config.head_share * self.product(weights.flatten(0, 1), states).view(*s.shape[:3], -1)


class StackedClassifier(_Stacked):
    """Classifiers as one; see ``stack_classifiers``."""

    def forward(self, input_ids: Int[Tensor, "s b k"], *, lengths: Int[Tensor, "s b"] | None = None) -> Tensor:
        """The log-odds (s, b) of class 1; rows are padded on the right beyond ``lengths`` (None: no padding)."""
        ids = input_ids.transpose(1, 2)
        turned = _turned(ids, lengths) if self.config.bidirectional else None
        h, _ = self._lstm("encoder", ids, lengths=lengths, turned=turned)
        # The bias of the score moves all logits alike.
        keys = torch.relu(self._linear("attention.key", h)).flatten(1, 2)
        logits = (keys @ self.stacked("attention.score.weight").mT).unflatten(1, h.shape[1:3]).squeeze(3)
        visible = None if lengths is None else _visible(lengths, h.shape[1]).transpose(1, 2)
        weights = self._weights(logits, visible, axis=1)
        context = (weights.unsqueeze(3) * h).sum(1, keepdim=True)
        return self._linear("output", context).squeeze(3).squeeze(1)


def _visible(lengths: Int[Tensor, "s b"], n: int) -> Bool[Tensor, "s b n"]:
    return torch.arange(n, device=lengths.device) < lengths.unsqueeze(2)


def _turned(ids: Int[Tensor, "s n b"], lengths: Int[Tensor, "s b"] | None) -> Int[Tensor, "s n b"]:
    """For each place of a row the one that mirrors it within the row's length; padding stays where it is."""
    place = torch.arange(ids.shape[1], device=ids.device).view(1, -1, 1)
    end = ids.shape[1] if lengths is None else lengths.unsqueeze(1)
    mirrored = end - 1 - place
    return torch.where(mirrored >= 0, mirrored, place).expand(ids.shape)


def _turn(x: Float[Tensor, "s n b m"], turned: Int[Tensor, "t n b"], *, second_half: bool = False) -> Tensor:
    if second_half:
        ahead, back = x.chunk(2)
        return torch.cat([ahead, _turn(back, turned)])
    return x.gather(1, turned.unsqueeze(3).expand_as(x))


def _at_end(states: Float[Tensor, "s n b m"], lengths: Int[Tensor, "t b"] | None) -> Float[Tensor, "s b m"]:
    """Each row's state after its last word; both directions of a member have its lengths."""
    if lengths is None:
        return states[:, -1]
    last = (lengths - 1).repeat(len(states) // len(lengths), 1)
    return states.gather(1, last.unsqueeze(1).unsqueeze(3).expand(-1, 1, -1, states.shape[3])).squeeze(1)
