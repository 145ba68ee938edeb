"""Many small translators as one: their parameters stacked, their recurrences stepped together.

A model of this size leaves a GPU waiting for launches; twenty of them in one matrix product do not. torch.func's vmap
has no rule for nn.LSTM, so the cell is written out. Each member computes what it would compute alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from attnlab.models.lstm import Translator
from attnlab.shapes import Float, Int

__all__ = ["StackedTranslator", "stack_translators"]


def stack_translators(models: Sequence[Translator]) -> StackedTranslator:
    """The models as one; they must share a config of one layer, in one direction and without dropout.

    >>> from attnlab.models.lstm_config import TranslatorConfig
    >>> config = TranslatorConfig(vocab=5, width=4, layers=1, bidirectional=False)
    >>> tokens = torch.tensor([[[1, 2, 3]], [[4, 2, 3]]])
    >>> stack_translators([Translator(config), Translator(config)])(tokens, decoder_input_ids=tokens).shape
    torch.Size([2, 1, 3, 5])
    """
    return StackedTranslator(models)


class StackedTranslator(nn.Module):
    """Parameters with a leading axis of members; ``state_of(i)`` is member i's state dict."""

    def __init__(self, models: Sequence[Translator]) -> None:
        super().__init__()
        if not models:
            raise ValueError("there is nothing to stack; give at least one model")
        config = models[0].config
        if any(model.config != config for model in models):
            raise ValueError("stacked models must share one config; stack those of each config apart")
        if config.layers != 1 or config.bidirectional or config.output != "network" or config.literal:
            raise ValueError(f"only one layer in one direction with the default output can be stacked, got {config}")
        if config.attention not in ("softmax", "uniform"):
            raise ValueError(f"stacked attention is softmax or uniform, got {config.attention!r}")
        self.config, self.members = config, len(models)
        # Register under names without dots; the order is that of the members' own parameters.
        self.names = [name for name, _ in models[0].named_parameters()]
        for name in self.names:
            stacked = torch.stack([model.get_parameter(name).detach() for model in models])
            setattr(self, name.replace(".", "_"), nn.Parameter(stacked))

    def state_of(self, member: int) -> dict[str, Tensor]:
        """The state dict of one member, for a ``Translator`` of its own."""
        return {name: self._get(name)[member].detach().clone() for name in self.names}

    def forward(self, input_ids: Int[Tensor, "s b k"], *, decoder_input_ids: Int[Tensor, "s b q"]) -> Tensor:
        """Logits (s, b, q, v); rows are of one length, without padding."""
        zero = self._get("tokens.weight").new_zeros(self.members, input_ids.shape[1], self.config.width)
        h, last_h, last_c = self._lstm("encoder", input_ids, zero, zero)
        s, _, _ = self._lstm("decoder", decoder_input_ids, last_h, last_c)
        # (s, b, length, m)
        h, s = (t.permute(1, 2, 0, 3) for t in (h, s))
        context = self._linear("context", self._attend(s, h))
        hidden = torch.relu(self._linear("hidden", torch.cat([context, s], -1)))
        return self._linear("output", hidden)

    def _attend(self, s: Float[Tensor, "s b q m"], h: Float[Tensor, "s b k m"]) -> Float[Tensor, "s b q m"]:
        share = self.config.head_share
        if self.config.attention == "uniform":
            return share * self.config.heads * h.mean(2, keepdim=True).expand_as(s)
        query = self._linear("attention.query", s).unflatten(-1, (self.config.heads, -1)).transpose(2, 3)
        weights = (query @ h.unsqueeze(2).mT).softmax(-1)
        return share * weights.sum(2) @ h

    def _linear(self, name: str, x: Float[Tensor, "s b n i"]) -> Float[Tensor, "s b n o"]:
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        flat = torch.baddbmm(bias.unsqueeze(1), x.flatten(1, 2), weight.mT)
        return flat.unflatten(1, x.shape[1:3])

    def _lstm(
        self, name: str, ids: Int[Tensor, "s b n"], h: Float[Tensor, "s b m"], c: Float[Tensor, "s b m"]
    ) -> tuple[Float[Tensor, "n s b m"], Tensor, Tensor]:
        # What a word adds to the gates depends on the word alone: a table of the vocabulary, looked up.
        bias = self._get(f"{name}.bias_ih_l0") + self._get(f"{name}.bias_hh_l0")
        table = torch.baddbmm(bias.unsqueeze(1), self._get("tokens.weight"), self._get(f"{name}.weight_ih_l0").mT)
        first = torch.arange(self.members, device=ids.device).view(-1, 1) * self.config.vocab
        gates = embedding(ids.permute(2, 0, 1) + first, table.flatten(0, 1))
        return _Recurrence.apply(gates, self._get(f"{name}.weight_hh_l0").mT.contiguous(), h, c)

    def _get(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "_"))


class _Recurrence(torch.autograd.Function):
    """The recurrent part of stacked LSTMs; its backward pass makes W's gradient in one product over all steps."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cell, _ = _pointwise(gates.device.type)
        hidden = [h]
        cells, active = [c], []
        for inputs in gates.unbind():
            acted, c, h = cell(torch.baddbmm(inputs, hidden[-1], weight), c)
            active.append(acted)
            cells.append(c)
            hidden.append(h)
        all_hidden, all_cells, all_active = (torch.stack(t) for t in (hidden, cells, active))
        ctx.save_for_backward(weight, all_hidden, all_cells, all_active)
        return all_hidden[1:], h, c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_hidden, dh, dc = grads
        weight, hidden, cells, active = ctx.saved_tensors
        _, cell_back = _pointwise(weight.device.type)
        back = weight.mT
        found = []
        for t in reversed(range(len(active))):
            dgates, dc = cell_back(grad_hidden[t] + dh, dc, active[t], cells[t], cells[t + 1])
            dh = torch.bmm(dgates, back)
            found.append(dgates)
        dgates = torch.stack(found[::-1])
        # (s, m, n b) @ (s, n b, 4 m)
        before = hidden[:-1].permute(1, 3, 0, 2).flatten(2)
        dweight = torch.bmm(before, dgates.transpose(0, 1).flatten(1, 2))
        return dgates, dweight, dh, dc


def _cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the four gates after their nonlinearities, c', h') in torch's order: input, forget, cell, output."""
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return torch.cat([i, f, g, o], -1), c, o * c.tanh()


def _cell_back(dh: Tensor, dc: Tensor, active: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the gates and of the earlier cell."""
    i, f, g, o = active.chunk(4, -1)
    squashed = after.tanh()
    dc = dc + dh * o * (1 - squashed * squashed)
    di, df = dc * g * i * (1 - i), dc * before * f * (1 - f)
    dg, do = dc * i * (1 - g * g), dh * squashed * o * (1 - o)
    return torch.cat([di, df, dg, do], -1), dc * f


@cache
def _pointwise(device: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The cell and its gradient; on a GPU each compiled into one kernel."""
    if device != "cuda":
        return _cell, _cell_back
    return torch.compile(_cell, dynamic=False), torch.compile(_cell_back, dynamic=False)
