"""``initialise_control``: memories of a converted model that start from the model's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from attnlab.adapters.contexts import record, swap
from attnlab.adapters.model_files import check_ids
from attnlab.adapters.protocol import adapter_of
from attnlab.attention import AttentionCall, Mechanism, grouped, query_chunks, scores
from attnlab.fields import check_int
from attnlab.mechanisms._bounded.continued import first_exact, numbered_keys
from attnlab.mechanisms.abc_cluster import cluster
from attnlab.mechanisms.abc_hybrid import AbcHybrid
from attnlab.mechanisms.abc_select import AbcSelect
from attnlab.mechanisms.per_group import PerGroup, call_of_run
from attnlab.mechanisms.softmax import softmax
from attnlab.shapes import Bool, Float, Int
from attnlab.trace import Kind

__all__ = ["ControlStart", "initialise_control", "learned_parts"]

Model = TypeVar("Model", bound=nn.Module)

# The share of x's variance that ridge regression adds to it: of logits of slots, and of what keys receive.
RIDGE, SCORE_RIDGE = 1e-3, 0.05
# Rounds of k-means.
ROUNDS = 10


def initialise_control(
    model: Model, texts: Sequence[str], *, tokenizer: Any, tokens: int = 8192, length: int = 512, rounds: int = ROUNDS,
    seed: int = 0,
) -> Model:  # fmt: skip
    """Set the controls of ``model``, converted to ``abc-hybrid`` or ``abc-select``, from about ``tokens`` tokens.

    The model reads windows of ``length`` tokens of the texts by its softmax attention. For ``abc-hybrid``, in each
    layer and key/value head ``rounds`` of k-means find a centre c_s for each slot, with a share pi_s of the keys and
    their variance sigma^2 around their centres. A key is then shared out as a mixture of normal distributions does it:

        u_s = (<c_s, k> - |c_s|^2 / 2) / sigma^2 + log pi_s.

    With control="x" these logits are predicted from x by ridge regression.

    The scores of ``abc-select`` are a ridge regression from x_j, too: on sqrt(m_j |v_j|), m_j the mean weight that key
    j gets from the queries whose window it has left.
    """
    for name, value, least in (("tokens", tokens, 1), ("length", length, 1), ("rounds", rounds, 1), ("seed", seed, 0)):
        check_int(name, value, least=least)
    mechanisms = _converted(model)
    windows = _windows(texts, tokenizer, tokens, length)
    check_ids(model, torch.cat(windows, 1))
    start = ControlStart()
    training = model.training
    model.eval()
    try:
        for ids in windows:
            device = next(model.parameters()).device
            with torch.no_grad(), swap(model, "softmax"), record(model) as trace:
                model(input_ids=ids.to(device))
            for site, mech in mechanisms:
                start.observe(mech, trace[site].call)
    finally:
        model.train(training)
    start.begin(rounds=rounds, seed=seed)
    return model


class _Observed(NamedTuple):
    """What a control begins from: of each key of a window the key itself or what it receives, and its input."""

    of_keys: Float[Tensor, "g n w"]
    x: Float[Tensor, "n m"] | None


class LearnedPart(NamedTuple):
    """A mechanism with a control, and that of the whole layer, of which it may have some key/value heads."""

    mechanism: AbcHybrid | AbcSelect
    of_layer: Mechanism

    def observe(self, call: AttentionCall) -> _Observed:
        """What is read from the first row of a call of the layer."""
        if isinstance(self.of_layer, PerGroup):
            runs = self.of_layer.runs(call.k.shape[1])
            call = next(call_of_run(call, run) for run in runs if run.part is self.mechanism)
        if call.x is None:
            raise ValueError(
                "what a layer's keys were made from is not known, as where it attends more than once in a forward "
                f"pass, so {self.mechanism!r} has nothing to begin from; take a model whose layers attend once"
            )
        x = call.x[0].float()
        if isinstance(self.mechanism, AbcSelect):
            received, enough = _received(self.mechanism, call)
            return _Observed(received[:, enough], x[enough])
        return _Observed(call.k[0].float(), x if self.mechanism.control == "x" else None)

    def begin(self, seen: Sequence[_Observed], *, rounds: int = ROUNDS, seed: int = 0) -> None:
        """Set the control."""
        of_keys = torch.cat([part.of_keys for part in seen], 1)
        inputs = [part.x for part in seen if part.x is not None]
        x = torch.cat(inputs) if inputs else None
        if isinstance(self.mechanism, AbcSelect):
            assert x is not None
            _set_scores(self.mechanism, of_keys, x)
        else:
            _set_control(self.mechanism, of_keys, x, rounds=rounds, seed=seed)


def learned_parts(mech: Mechanism) -> list[LearnedPart]:
    """The parts of a layer's mechanism whose control may begin from the model's own attention."""
    parts = dict.fromkeys(mech.parts) if isinstance(mech, PerGroup) else [mech]
    return [
        LearnedPart(part, mech)
        for part in parts
        if isinstance(part, AbcSelect) or (isinstance(part, AbcHybrid) and part.slots)
    ]


class ControlStart:
    """Controls of several mechanisms that begin from the same calls of a model."""

    def __init__(self) -> None:
        self.seen: dict[LearnedPart, list[_Observed]] = {}

    def observe(self, mech: Mechanism, call: AttentionCall) -> None:
        """Take in a call of the layer that ``mech`` is for."""
        for part in learned_parts(mech):
            if part not in self.seen:
                _make_parameters(mech, call)
            self.seen.setdefault(part, []).append(part.observe(call))

    def begin(self, *, rounds: int = ROUNDS, seed: int = 0) -> None:
        """Set all controls."""
        for part, seen in self.seen.items():
            part.begin(seen, rounds=rounds, seed=seed)


def _make_parameters(mech: Mechanism, call: AttentionCall) -> None:
    """Let the mechanism make its parameters, which a first call does."""
    x = None if call.x is None else call.x[:1, :1]
    mech(AttentionCall(call.q[:1, :, :1], call.k[:1, :, :1], call.v[:1, :, :1], x=x, causal=True))


def _received(mech: AbcSelect, call: AttentionCall) -> tuple[Float[Tensor, "g n 1"], Bool[Tensor, " n"]]:
    """sqrt(m_j |v_j|) of each key of the first row, and which keys enough queries could read out of their window."""
    call = AttentionCall(
        call.q[:1], call.k[:1], call.v[:1], x=call.x, causal=call.causal, offset=call.offset, scale=call.scale
    )
    n = call.k.shape[2]
    total, readers = call.k.new_zeros(call.k.shape[1], n, dtype=torch.float32), call.k.new_zeros(n, dtype=torch.long)
    for part in query_chunks(call):
        places, newest = numbered_keys(part)
        left = places[0] < first_exact(newest[0, :, None], mech.rules(part, n))
        weights = softmax(scores(part))[0].float().masked_fill(~left, 0)
        total += grouped(weights[None], call.groups)[0].sum((1, 2))
        readers += left.sum(0)
    received = (total / readers.clamp(min=1) * call.v[0].float().norm(dim=-1)).sqrt()
    # The mean over few queries says little; a short text has only such.
    places = torch.arange(n, device=readers.device)
    enough = (readers >= max(1, n // 4)) & (places >= mech.sinks)
    if not enough.any():
        enough = readers > 0
    return received.unsqueeze(-1), enough if enough.any() else torch.ones_like(enough)


@torch.no_grad()
def _set_scores(mech: AbcSelect, received: Float[Tensor, "g n 1"], x: Float[Tensor, "n m"]) -> None:
    """Scores of standard deviation 1 that follow what keys receive."""
    assert mech.weight is not None
    assert mech.recency is not None
    spread = x.std(0).clamp(min=1e-6) if len(x) > 1 else torch.ones_like(x[0])
    slope, _ = _regression(x / spread, received, ridge=SCORE_RIDGE)
    slope = slope.squeeze(1).to(x.dtype) / spread
    size = (x @ slope.mT).std(0) if len(x) > 1 else slope.norm(dim=-1)
    mech.weight.copy_(slope / size.clamp(min=1e-6)[:, None] * max(1, x.shape[-1]) ** 0.5)
    mech.recency.zero_()


def _converted(model: nn.Module) -> list[tuple[tuple[Kind, int], Mechanism]]:
    """The converted layers with memories to begin with, each with a control of its own."""
    layers = [((c.kind, c.layer), c.mechanism) for c in adapter_of(model).conversions() if learned_parts(c.mechanism)]
    if not layers:
        raise ValueError(
            "no layer of this model attends by abc-select, or by abc-hybrid with slots; convert it first: "
            'al.convert(model, "abc-select:slots=64")'
        )
    if len({id(mech) for _, mech in layers}) < len(layers):
        raise ValueError(
            "the layers of this model share one control, but each layer has keys of its own; convert with tied=false"
        )
    if any(kind == "cross" for (kind, _), _ in layers):
        raise ValueError("the keys of cross-attention come from pairs of texts; convert kinds=('causal',) alone")
    return layers


def _windows(texts: Sequence[str], tokenizer: Any, tokens: int, length: int) -> list[Int[Tensor, "1 n"]]:
    """Rows of ``length`` tokens, at most ``tokens`` in all; the texts follow one another."""
    if isinstance(texts, str):
        raise ValueError("texts must be several strings, got one; pass [text]")
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(stream) >= tokens:
            break
    if len(stream) < 2:
        raise ValueError(f"the texts hold {len(stream)} tokens, too few to find clusters of keys in")
    ids = torch.tensor(stream[: max(tokens, 2)])
    return [row[None] for row in ids.split(min(length, len(ids)))]


@torch.no_grad()
def _set_control(
    mech: AbcHybrid, k: Float[Tensor, "g n d"], x: Float[Tensor, "n m"] | None, *, rounds: int, seed: int
) -> None:
    """The control of one layer from its keys, and from their inputs where it reads only those."""
    n = k.shape[1]
    if n < mech.slots:
        raise ValueError(f"{n} tokens cannot make {mech.slots} clusters; give longer texts, or more tokens")
    # Centres start at keys that lie evenly in the sequence: shuffled, those are any.
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).to(k.device)
    k = k[:, order]
    seen = torch.ones(1, n, dtype=torch.bool, device=k.device)
    nearest = cluster(k[None], seen, mech.slots, rounds=rounds)[0]
    member = torch.nn.functional.one_hot(nearest, mech.slots).to(k.dtype)
    size = member.sum(1)
    centres = member.mT @ k / size.clamp(min=1).unsqueeze(-1)
    off = k - centres.gather(1, nearest.unsqueeze(-1).expand_as(k))
    variance = off.square().mean((1, 2)).clamp(min=1e-6)[:, None]
    weight = centres / variance.unsqueeze(-1)
    # A cluster that lost its last key gets next to none.
    bias = -centres.square().sum(-1) / (2 * variance) + (size.clamp(min=1e-3) / n).log()
    assert mech.bias is not None
    if x is not None:
        assert mech.weight is not None
        logits = k @ weight.mT + bias.unsqueeze(1)
        fitted, constant = _regression(x[order], logits - logits.mean(-1, keepdim=True))
        mech.weight.copy_(fitted)
        mech.bias.copy_(constant)
        return
    assert mech.key_weight is not None
    mech.key_weight.copy_(weight)
    mech.bias.copy_(bias)


def _regression(
    x: Float[Tensor, "n m"], y: Float[Tensor, "g n s"], *, ridge: float = RIDGE
) -> tuple[Float[Tensor, "g s m"], Tensor]:
    """W and b of the ridge regression y = W x + b, in float64."""
    mean_x, mean_y = x.double().mean(0), y.double().mean(1)
    centred = x.double() - mean_x
    covariance = centred.mT @ centred
    covariance.diagonal().add_(ridge * covariance.diagonal().mean().clamp(min=1e-12))
    slope = torch.linalg.solve(covariance, centred.mT @ (y.double() - mean_y.unsqueeze(1))).mT
    return slope, mean_y - slope @ mean_x
