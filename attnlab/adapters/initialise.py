"""``initialise_control``: slots of a converted model that start as clusters of the model's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from attnlab.adapters.contexts import record, swap
from attnlab.adapters.protocol import adapter_of
from attnlab.attention import AttentionCall, Mechanism
from attnlab.fields import check_int
from attnlab.mechanisms.abc_cluster import cluster
from attnlab.mechanisms.abc_hybrid import AbcHybrid
from attnlab.mechanisms.per_group import PerGroup
from attnlab.shapes import Float, Int
from attnlab.trace import Kind

__all__ = ["HybridPart", "hybrid_parts", "initialise_control", "set_control"]

Model = TypeVar("Model", bound=nn.Module)

# The share of x's variance that ridge regression adds to it.
RIDGE = 1e-3


def initialise_control(
    model: Model, texts: Sequence[str], *, tokenizer: Any, tokens: int = 8192, length: int = 512, rounds: int = 10,
    seed: int = 0,
) -> Model:  # fmt: skip
    """Set the controls of ``model``, converted to ``abc-hybrid``, in place, from the keys of about ``tokens`` tokens.

    The model reads windows of ``length`` tokens of the texts by its softmax attention. In each layer and key/value head
    ``rounds`` of k-means find a centre c_s for each slot, with a share pi_s of the keys and their variance sigma^2
    around their centres. A key is then shared out as a mixture of normal distributions does it:

        u_s = (<c_s, k> - |c_s|^2 / 2) / sigma^2 + log pi_s.

    With control="x" these logits are predicted from x by ridge regression; with "both", x starts without influence.
    """
    for name, value, least in (("tokens", tokens, 1), ("length", length, 1), ("rounds", rounds, 1), ("seed", seed, 0)):
        check_int(name, value, least=least)
    parts = _converted_parts(model)
    windows = _windows(texts, tokenizer, tokens, length)
    keys: list[list[Tensor]] = [[] for _ in parts]
    inputs: list[list[Tensor]] = [[] for _ in parts]
    training = model.training
    model.eval()
    try:
        for ids in windows:
            device = next(model.parameters()).device
            with torch.no_grad(), swap(model, "softmax"), record(model) as trace:
                model(input_ids=ids.to(device))
            for i, (site, part) in enumerate(parts):
                call = trace[site].call
                assert call.x is not None
                keys[i].append(part.keys(call))
                if part.mechanism.control == "x":
                    inputs[i].append(call.x[0].float())
    finally:
        model.train(training)
    for (_, part), of_part, read in zip(parts, keys, inputs, strict=True):
        x = torch.cat(read) if read else None
        set_control(part.mechanism, torch.cat(of_part, 1), x, rounds=rounds, seed=seed)
    return model


class HybridPart(NamedTuple):
    """A mechanism with slots, and that of the whole layer, of which it may have some key/value heads."""

    mechanism: AbcHybrid
    of_layer: Mechanism

    def keys(self, call: AttentionCall) -> Float[Tensor, "g n d"]:
        """The keys of its heads in the first row of a call of the layer."""
        k = call.k[0].float()
        if not isinstance(self.of_layer, PerGroup):
            return k
        return torch.cat([k[run.lo : run.hi] for run in self.of_layer.runs(len(k)) if run.part is self.mechanism])


def hybrid_parts(mech: Mechanism) -> list[HybridPart]:
    """The parts of a layer's mechanism whose slots may begin as clusters of keys."""
    parts = dict.fromkeys(mech.parts) if isinstance(mech, PerGroup) else [mech]
    return [HybridPart(part, mech) for part in parts if isinstance(part, AbcHybrid) and part.slots]


def _converted_parts(model: nn.Module) -> list[tuple[tuple[Kind, int], HybridPart]]:
    """The converted layers with slots to begin with, each with a control of its own."""
    parts = [((c.kind, c.layer), part) for c in adapter_of(model).conversions() for part in hybrid_parts(c.mechanism)]
    if not parts:
        raise ValueError(
            "no layer of this model attends by abc-hybrid with slots; convert it first: "
            'al.convert(model, "abc-hybrid:slots=64")'
        )
    if len({id(part.mechanism) for _, part in parts}) < len(parts):
        raise ValueError(
            "the layers of this model share one control, but each layer has keys of its own; convert with tied=false"
        )
    if any(kind == "cross" for (kind, _), _ in parts):
        raise ValueError("the keys of cross-attention come from pairs of texts; convert kinds=('causal',) alone")
    return parts


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
def set_control(
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
    if mech.weight is not None:
        mech.weight.zero_()


def _regression(x: Float[Tensor, "n m"], y: Float[Tensor, "g n s"]) -> tuple[Float[Tensor, "g s m"], Tensor]:
    """W and b of the ridge regression y = W x + b, in float64."""
    mean_x, mean_y = x.double().mean(0), y.double().mean(1)
    centred = x.double() - mean_x
    covariance = centred.mT @ centred
    ridge = RIDGE * covariance.diagonal().mean().clamp(min=1e-12)
    covariance.diagonal().add_(ridge)
    slope = torch.linalg.solve(covariance, centred.mT @ (y.double() - mean_y.unsqueeze(1))).mT
    return slope, mean_y - slope @ mean_x
