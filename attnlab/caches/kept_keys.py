"""Which keys of one layer are left, and what its policy has gathered to rank them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlab.attention import AttentionCall, repeat_groups, visible
from attnlab.caches.contract import Gathered, Moment, Place, Refit, take_keys
from attnlab.caches.kv_policy import KVPolicy, keep_masks
from attnlab.shapes import Bool, Float, Int

__all__ = ["KeptKeys", "LayerPool"]

# The name under which what is added to a key's scores is gathered.
BIAS = "bias"


class KeptKeys:
    """The bookkeeping of one layer: the column of the text that each key was made from, and what its policy gathered.

    Heads and rows may hold different numbers of keys. Tensors of keys are as wide as the most that a head holds; where
    a head holds fewer, its row begins with places whose column is -1.
    """

    def __init__(self, policy: KVPolicy, layer: int, pool: LayerPool | None = None) -> None:
        self.policy, self.layer = policy, layer
        # The layers that it shares its budget with.
        self.pool = pool if policy.shares_layers else None
        self.columns: Int[Tensor, "b g k"] | None = None
        # Columns of the text that the model was given, and in each row the tokens among them.
        self.length = 0
        self.tokens: tuple[int, ...] = ()
        # Whether some heads or rows hold fewer keys than others.
        self.ragged = False
        self.gathered = Gathered()
        # What the policy puts in the place of the keys that the last cut left, and how good that is.
        self.refit: Refit | None = None
        self.certificate: Any = None
        self.compressed = False
        # Whether the prompt was read, and must be read once more before keys are dropped.
        self.waits = False

    def extend(self, count: int) -> None:
        """Count in the keys of new columns."""
        if self.columns is not None:
            new = torch.arange(self.length, self.length + count, device=self.columns.device, dtype=torch.int32)
            self.columns = torch.cat([self.columns, new.expand(*self.columns.shape[:2], -1)], -1)
        self.length += count

    def mask(self, new: AttentionCall) -> Bool[Tensor, "b h q k"] | None:
        """The places that hold a key, those of the call's new tokens last, which were counted in; None where all do."""
        there = self.columns >= 0 if self.columns is not None and self.ragged else None
        b, h, n_q = new.q.shape[:3]
        if new.key_visible is not None:
            keys = self.length if self.columns is None else self.columns.shape[-1]
            there = new.key_visible.new_ones(b, 1, keys) if there is None else there
            there[..., there.shape[-1] - n_q :] &= new.key_visible[:, None]
        if there is None or bool(there.all()):
            return None
        return repeat_groups(there, h // there.shape[1]).unsqueeze(2).expand(-1, -1, n_q, -1)

    def bias(self, q: Float[Tensor, "b h q d"]) -> Float[Tensor, "b h q k"] | None:
        """What is added to the scores of queries with each key, 0 for keys that came after the cut; None: nothing."""
        bias = self.gathered.per_key.get(BIAS)
        if bias is None or self.columns is None:
            return None
        bias = pad(bias.to(q), (0, self.columns.shape[-1] - bias.shape[-1]))
        return repeat_groups(bias, q.shape[1] // bias.shape[1]).unsqueeze(2).expand(-1, -1, q.shape[2], -1)

    def take(self, k: Tensor, v: Tensor, at: Int[Tensor, "b g n"]) -> tuple[Tensor, Tensor]:
        """The keys and values that a cut left at these places, or what its policy put there."""
        refit, self.refit = self.refit, None
        left = (k, v) if refit is None else (refit.k.to(k), refit.v.to(v))
        return take_keys(left[0], at), take_keys(left[1], at)

    @torch.no_grad()
    def cut(self, call: AttentionCall, place: Place | None = None) -> Int[Tensor, "b g n"] | None:
        """The places of the keys to keep after this call, whose new columns were counted in; None where all stay.

        ``columns`` says afterwards which of them hold a key.
        """
        real, before = _real_tokens(call), self.tokens or (0,) * call.k.shape[0]
        new = [call.q.shape[2]] * len(before) if real is None else real.sum(-1).tolist()
        self.tokens = tuple(old + more for old, more in zip(before, new, strict=True))
        held = self._held(call, real)
        asks = self.policy.schedule == "step" or not self.compressed
        self.compressed = True
        if asks:
            _refuse(self.policy, call, held, real)
        if asks and self.policy.score.reads_twice:
            self.waits = True
            return None
        keep = self._choose(call, held, real, before, place or Place(self.layer)) if asks else held
        if keep is None:
            return None
        return None if real is None and torch.equal(keep, held) else self._leave(keep)

    @torch.no_grad()
    def cut_after_rereading(self, call: AttentionCall, place: Place) -> Int[Tensor, "b g n"]:
        """The places of the keys to keep after a call that read the whole prompt again, whose own keys are dropped."""
        again = call.q.shape[2]
        self.waits, self.length = False, self.length - again
        held = torch.ones(call.k.shape[:3], dtype=torch.bool, device=call.k.device)
        prompt = call.k.shape[2] - again
        keep = self._choose(call, held, None, self.tokens, place, prompt=prompt)
        return self._leave(held[..., :prompt] if keep is None else keep)

    def refuse_waiting(self) -> None:
        """Raise a ValueError if a token comes where the prompt should be read again."""
        if self.waits:
            raise ValueError(
                f"the cache policy {self.policy.by!r} must read the prompt twice; call the model itself, not a part of "
                "it, with past_key_values=cache by that name"
            )

    def _held(self, call: AttentionCall, real: Bool[Tensor, "b q"] | None) -> Bool[Tensor, "b g k"]:
        shape = call.k.shape[:3]
        held = torch.ones(shape, dtype=torch.bool, device=call.k.device) if self.columns is None else self.columns >= 0
        if real is not None:
            held = held.clone()
            held[:, :, shape[2] - real.shape[1] :] &= real[:, None]
        return held

    def _choose(
        self,
        call: AttentionCall,
        held: Bool[Tensor, "b g k"],
        real: Bool[Tensor, "b q"] | None,
        before: tuple[int, ...],
        place: Place,
        prompt: int | None = None,
    ) -> Bool[Tensor, "b g n"] | None:
        """The keys to keep; with ``prompt``, of the first so many, the others being there to rank them.

        None where it waits for the other layers of its pool.
        """
        policy = self.policy
        budgets = policy.budgets(self.tokens, layer=place.layer, layers=place.layers)
        splits = [policy.split(budget) for budget in budgets]
        whole = real is None and not self.ragged
        moment = Moment(
            call=_plain_numbers(call, None if whole else held),
            held=held,
            real=real,
            read_before=before,
            column=self.length - call.q.shape[2],
            budgets=budgets,
            sinks=tuple(sinks for sinks, _, _ in splits),
            recent=tuple(recent for _, recent, _ in splits),
            gathered=self.gathered,
            place=place,
            seed=policy.seed,
            once=policy.schedule == "prefill",
        )
        score = policy.score.score(moment)
        if prompt is not None:
            score, moment = score[..., :prompt], replace(moment, held=held[..., :prompt])
        if score.shape[-1] <= min(budgets):
            return moment.held
        if self.pool is not None:
            self.pool.waiting.append((self, moment, score))
            return None
        (keep,) = keep_masks(policy, [moment], [score])
        self._refit(moment, keep)
        return keep

    def _refit(self, moment: Moment, keep: Bool[Tensor, "b g k"]) -> None:
        """Let the policy put something in the place of the keys that stay."""
        self.refit = self.policy.score.refit(moment, keep)
        if self.refit is not None:
            self.gathered.per_key[BIAS] = self.refit.bias
            self.certificate = self.refit.certificate

    def cut_with_pool(self, moment: Moment, keep: Bool[Tensor, "b g k"]) -> Int[Tensor, "b g n"]:
        """The places of the keys to keep, which were chosen together with those of other layers."""
        self._refit(moment, keep)
        return self._leave(keep)

    def _leave(self, keep: Bool[Tensor, "b g k"]) -> Int[Tensor, "b g n"]:
        most = int(keep.sum(-1).max())
        # What is dropped first, then the keys that stay in their order: the last places are theirs.
        at = keep.to(torch.int8).argsort(dim=-1, stable=True)[..., keep.shape[-1] - most :]
        columns = self.columns
        if columns is None:
            columns = torch.arange(keep.shape[-1], device=keep.device, dtype=torch.int32).expand_as(keep)
        there = keep.gather(-1, at)
        self.columns = columns.gather(-1, at).masked_fill(~there, -1)
        self.ragged = not bool(there.all())
        self.gathered.keep(at, there, keep.shape[-1])
        return at

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Make row i of the batch what row ``rows[i]`` was."""
        self.gathered.select(rows)
        self.tokens = tuple(self.tokens[row] for row in rows.tolist()) if self.tokens else ()
        if self.columns is not None:
            self.columns = self.columns[rows.to(self.columns.device)]

    def counts(self, like: Tensor) -> Int[Tensor, "b g"]:
        """How many keys each head of each row holds; ``like`` is the tensor of keys."""
        if self.columns is None:
            return torch.full(like.shape[:2], like.shape[2], device=like.device)
        return (self.columns >= 0).sum(-1)


class LayerPool:
    """The layers of a model that share their budgets: they wait until all have read the prompt, and are cut together.

    ``layers`` have ``kept``, their KeptKeys, and ``leave``, which keeps the keys at some places.
    """

    def __init__(self, layers: Sequence[Any] = ()) -> None:
        self.layers = layers
        self.waiting: list[tuple[KeptKeys, Moment, Tensor]] = []

    @torch.no_grad()
    def cut(self) -> None:
        """Cut the layers that wait."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        by_kept = {layer.kept: layer for layer in self.layers}
        layers, moments, scores = zip(*waiting, strict=True)
        for kept, moment, keep in zip(layers, moments, keep_masks(layers[0].policy, moments, scores), strict=True):
            by_kept[kept].leave(kept.cut_with_pool(moment, keep))


def _real_tokens(call: AttentionCall) -> Bool[Tensor, "b q"] | None:
    """Which new columns are tokens and not padding, which nothing sees; None where all are."""
    b, h, n_q, n_k = call.sizes
    seen = None if call.key_visible is None and call.mask is None and call.bias is None else visible(call)
    if seen is None:
        return None
    new = seen[..., n_k - n_q :].expand(b, h, n_q, n_q)
    real = new.diagonal(dim1=-2, dim2=-1).any(1)
    if bool(real.all()):
        return None
    if bool((new.any(2).any(1) & ~real).any()):
        raise ValueError(
            "a mask hides a token from itself but not from later ones; a cache that evicts takes masks in which every "
            "token sees itself, and padding that nothing sees"
        )
    return real


def _plain_numbers(call: AttentionCall, held: Bool[Tensor, "b g k"] | None) -> AttentionCall:
    """The call in float32 or wider, where places without a key and padding hold zeros; None: there are none."""
    kind = torch.promote_types(call.q.dtype, torch.float32)
    if kind == call.q.dtype and held is None:
        return call
    k, v = call.k.to(kind), call.v.to(kind)
    if held is not None:
        k, v = (t.masked_fill(~held.unsqueeze(-1), 0) for t in (k, v))
    bias = None if call.bias is None else call.bias.to(kind)
    memory = None if call.memory is None else call.memory.to(kind)
    return replace(call, q=call.q.to(kind), k=k, v=v, x=None, bias=bias, memory=memory)


def _hides_keys(call: AttentionCall, held: Bool[Tensor, "b g k"], real: Bool[Tensor, "b q"] | None) -> bool:
    """Whether a key that is held is hidden from a later token, as by a sliding window."""
    seen = visible(call)
    if seen is None or call.mask is None:
        return False
    n_q, n_k = call.sizes[2:]
    later = torch.ones(n_q, n_k, dtype=torch.bool, device=seen.device).tril(n_k - n_q)
    expected = later & repeat_groups(held, call.groups).unsqueeze(2)
    if real is not None:
        expected = expected & real[:, None, :, None]
    return bool((expected & ~seen).any())


def _refuse(
    policy: KVPolicy, call: AttentionCall, held: Bool[Tensor, "b g k"], real: Bool[Tensor, "b q"] | None
) -> None:
    """Raise a ValueError if the policy cannot honour this call."""
    cannot = policy.score.cannot()
    asked = {
        "padding": real is not None,
        "bias": call.bias is not None,
        "mask": "mask" in cannot and _hides_keys(call, held, real),
    }
    for what, why in cannot.items():
        if asked.get(what):
            raise ValueError(f"the cache policy {policy.by!r} cannot take this call ({what}): {why}")
