"""The keys of one layer that are left, and what its policy has gathered to rank them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, repeat_groups
from attnlab.caches.calls import plain_numbers, real_tokens, refuse
from attnlab.caches.contract import Gathered, Moment, Place, with_zeros
from attnlab.caches.kv_policy import KVPolicy, keep_masks
from attnlab.caches.layers import LayerPool
from attnlab.caches.ragged import RaggedKeys
from attnlab.caches.shared_scores import SharedScores
from attnlab.shapes import Bool, Float, Int

__all__ = ["KeptKeys"]

# What a policy gathered for each key lies beside the keys under its name with this before it.
GATHERED = "gathered "
# What is added to the scores of a key that stands for others lies under this name, which ``RaggedKeys.attend`` knows.
BIAS = "bias"


@dataclass(eq=False)
class _Pending:
    """The keys of the call under way, old and new, before the policy has chosen among them."""

    keys: Float[Tensor, "b g k d"]
    values: Float[Tensor, "b g k e"]
    # The column of each, -1 where a head holds fewer; None where no key was dropped yet.
    columns: Int[Tensor, "b g k"] | None
    # What is added to the scores of every query with each; None where nothing is.
    bias: Float[Tensor, "b g k"] | None
    # Whether the new ones are in the store already.
    stored: bool


class KeptKeys:
    """The cache of one layer: keys and values, the column of the text of each, and what the policy gathered of it.

    Heads and rows may hold different numbers of keys, and between calls no more than these is held (``store``). The
    tensors of a call are as wide as the most that a head holds; where one holds fewer, its row begins with places whose
    column is -1. A call is ``extend``, attention, ``cut``; or ``append`` and ``attend`` where nothing is to be cut.
    """

    def __init__(self, policy: KVPolicy, layer: int, pool: LayerPool | None = None) -> None:
        self.policy, self.layer = policy, layer
        # The layers that it shares its budget with.
        self.pool = pool if policy.shares_layers else None
        self.store: RaggedKeys | None = None
        self.pending: _Pending | None = None
        # Columns of the text that the model was given, and in each row the tokens among them.
        self.length = 0
        self.tokens: tuple[int, ...] = ()
        # Whether every column has its key.
        self.whole = True
        self.gathered = Gathered()
        # How good what the policy put in the place of the keys is; None where it put nothing.
        self.certificate: Any = None
        self.compressed = False
        # What policies of other budgets computed of the same prompt; None where there are none.
        self.shared: SharedScores | None = None
        # Whether the prompt was read, and must be read once more before keys are dropped.
        self.waits = False

    @property
    def ragged(self) -> bool:
        """Whether some heads or rows hold fewer keys than others."""
        return self.store is not None and not self.store.even

    @property
    def columns(self) -> Int[Tensor, "b g k"] | None:
        """The column of each key, -1 where a head holds fewer; None where every column has its key."""
        if self.pending is not None:
            return self.pending.columns
        return None if self.store is None or self.whole else self.store.padded("columns", -1)

    @property
    def longest(self) -> int:
        """The most keys that a head holds."""
        if self.pending is not None:
            return self.pending.keys.shape[2]
        return 0 if self.store is None else self.store.longest

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores of some keys, so that they are no keys for other caches."""
        return self.store is not None and BIAS in self.store.buffers

    def extend(
        self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"]
    ) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k e"]]:
        """Keys and values with those of new columns behind them, for attention and then ``cut``."""
        self._keep_pending()
        store, n = self.store, k.shape[2]
        if store is not None and store.rows != k.shape[0]:
            raise ValueError(
                f"the cache holds {store.rows} rows, and this call brings {k.shape[0]}; begin with an empty cache "
                "(cache.reset()), or repeat its rows first (cache.batch_repeat_interleave)"
            )
        if store is not None and n <= store.room and store.takes(k):
            self._add(k, v)
            return self.as_call()
        columns, bias = None if self.whole else self._columns_of(k), None
        if store is not None:
            k, v = (torch.cat([store.padded(name), t], 2) for name, t in (("keys", k), ("values", v)))
            columns = None if columns is None else torch.cat([store.padded("columns", -1), columns], 2)
            bias = with_zeros(store.padded(BIAS, 0), k.shape[2]) if self.biased else None
        self.length += n
        self.pending = _Pending(k, v, columns, bias, stored=False)
        return k, v

    def _columns_of(self, new: Float[Tensor, "b g n d"]) -> Int[Tensor, "b g n"]:
        columns = torch.arange(self.length, self.length + new.shape[2], device=new.device, dtype=torch.int32)
        return columns.expand(*new.shape[:2], -1)

    def _add(self, k: Tensor, v: Tensor) -> None:
        assert self.store is not None
        # Without columns in the store they are not looked at.
        self.store.append(k, v, self.length if k.shape[2] == 1 else self._columns_of(k))
        self.length += k.shape[2]

    def steps(self, k: Float[Tensor, "b g n d"]) -> bool:
        """Whether ``append`` and ``attend`` take this call: tokens after which no policy is asked."""
        store = self.store
        if store is None or self.waits or not self.compressed or self.policy.schedule == "step":
            return False
        return self.pending is None and store.takes(k) and (not k.is_cuda or store.served(k))

    def append(self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"]) -> None:
        """Add the keys of new columns, where ``steps`` says so."""
        assert self.store is not None
        if self.store.room < k.shape[2]:
            self.store.grow(k.shape[2])
        self._add(k, v)

    def attend(
        self, q: Float[Tensor, "b h n d"], *, scale: float, visible: Bool[Tensor, "b m c"] | None = None
    ) -> Float[Tensor, "b h n e"]:
        """The outputs of the tokens whose keys were appended, which see these columns of the text; None: all so far."""
        assert self.store is not None
        self.tokens = tuple(read + q.shape[2] for read in self.tokens)
        return self.store.attend(q, scale=scale, visible=visible)

    def as_call(self) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k e"]]:
        """Keys and values after ``append`` for a call that ``attend`` does not take; ``cut`` ends it."""
        assert self.store is not None
        columns = None if self.whole else self.store.padded("columns", -1)
        bias = self.store.padded(BIAS, 0) if self.biased else None
        self.pending = _Pending(self.store.padded("keys"), self.store.padded("values"), columns, bias, stored=True)
        return self.pending.keys, self.pending.values

    def mask(self, new: AttentionCall) -> Bool[Tensor, "b h q k"] | None:
        """The places that hold a key, those of the call's new tokens last, which were counted in; None where all do."""
        columns = self.columns
        there = columns >= 0 if columns is not None and self.ragged else None
        b, h, n_q = new.q.shape[:3]
        if new.key_visible is not None:
            there = new.key_visible.new_ones(b, 1, self.longest) if there is None else there
            there[..., there.shape[-1] - n_q :] &= new.key_visible[:, None]
        if there is None or bool(there.all()):
            return None
        return repeat_groups(there, h // there.shape[1]).unsqueeze(2).expand(-1, -1, n_q, -1)

    def bias(self, q: Float[Tensor, "b h q d"]) -> Float[Tensor, "b h q k"] | None:
        """What is added to the scores of queries with each key of the call under way; None: nothing."""
        bias = None if self.pending is None else self.pending.bias
        if bias is None:
            return None
        return repeat_groups(bias.to(q), q.shape[1] // bias.shape[1]).unsqueeze(2).expand(-1, -1, q.shape[2], -1)

    def cut(self, call: AttentionCall, place: Place | None = None) -> None:
        """Keep of the call's keys what the policy chooses, or what it puts in their place.

        Layers that share one budget keep all until the last of them has read the prompt.
        """
        place = place or Place(self.layer)
        with torch.no_grad():
            keep = self._chosen(call, place)
        self._end_call(keep, place)

    def _end_call(self, keep: Bool[Tensor, "b g k"] | None, place: Place) -> None:
        if self.pool is None or self not in self.pool.waiting:
            self._keep(keep)
        elif place.layer == place.layers - 1:
            self.pool.cut()

    def _chosen(self, call: AttentionCall, place: Place) -> Bool[Tensor, "b g k"] | None:
        """The keys to keep after this call; None where all stay."""
        real, before = real_tokens(call), self.tokens or (0,) * call.k.shape[0]
        new = [call.q.shape[2]] * len(before) if real is None else real.sum(-1).tolist()
        self.tokens = tuple(old + more for old, more in zip(before, new, strict=True))
        held = self._held(call, real)
        asks = self.policy.schedule == "step" or not self.compressed
        self.compressed = True
        if asks:
            refuse(self.policy, call, held, real)
        if asks and self.policy.score.reads_twice:
            self.waits = True
            return None
        keep = self._choose(call, held, real, before, place) if asks else held
        return None if real is None and torch.equal(keep, held) else keep

    def cut_after_rereading(self, call: AttentionCall, place: Place) -> None:
        """Keep what the policy chooses after a call that read the whole prompt again, whose own keys are dropped."""
        again = call.q.shape[2]
        self.waits, self.length = False, self.length - again
        with torch.no_grad():
            held = torch.ones(call.k.shape[:3], dtype=torch.bool, device=call.k.device)
            keep = self._choose(call, held, None, self.tokens, place, prompt=call.k.shape[2] - again)
        self._end_call(keep, place)

    def cut_with_pool(self, moment: Moment, keep: Bool[Tensor, "b g k"]) -> None:
        """Keep what was chosen together with the keys of other layers."""
        with torch.no_grad():
            self._refit(moment, keep)
        self._keep(keep)

    def _keep(self, keep: Bool[Tensor, "b g k"] | None) -> None:
        """Store these keys of the call under way, None: all, with what was gathered; it ends the call.

        ``keep`` may leave out the last keys, which are dropped.
        """
        call, self.pending = self.pending, None
        assert call is not None
        gathered = {GATHERED + name: t for name, t in self.gathered.per_key.items()}
        self.gathered.per_key = {}
        if self.policy.schedule == "prefill":
            # The policy is not asked again.
            self.gathered, gathered = Gathered(), {}
        if keep is None and call.stored and self.store is not None:
            for name, t in gathered.items():
                self.store.put(name, t)
            return
        columns = call.columns
        if columns is None:
            count = call.keys.shape[2]
            columns = torch.arange(count, device=call.keys.device, dtype=torch.int32).expand(*call.keys.shape[:3])
        # A key that stands for others is not that of its column.
        self.whole = self.whole and keep is None and call.bias is None
        tensors = {"keys": call.keys, "values": call.values, **gathered}
        if call.bias is not None:
            tensors[BIAS] = call.bias
        if not self.whole:
            tensors["columns"] = columns
        keep = columns >= 0 if keep is None else with_zeros(keep, columns.shape[2])
        if self.store is None:
            self.store = RaggedKeys(keep, tensors)
        else:
            self.store.replace(keep, tensors)

    def _keep_pending(self) -> None:
        """Store the keys of a call that was never cut: of a layer whose attention is not ours, or that failed."""
        if self.pool is not None and self in self.pool.waiting:
            self.pool.cut()
        if self.pending is None:
            return
        self._gather()
        per_key, width = self.gathered.per_key, self.pending.keys.shape[2]
        per_key.update({name: with_zeros(t, width) for name, t in per_key.items()})
        self._keep(None)

    def refuse_waiting(self) -> None:
        """Raise a ValueError if a token comes where the prompt should be read again."""
        if self.waits:
            raise ValueError(
                f"the cache policy {self.policy.by!r} must read the prompt twice; call the model itself, not a part of "
                "it, with past_key_values=cache by that name"
            )

    def _held(self, call: AttentionCall, real: Bool[Tensor, "b q"] | None) -> Bool[Tensor, "b g k"]:
        shape = call.k.shape[:3]
        columns = self.columns
        held = torch.ones(shape, dtype=torch.bool, device=call.k.device) if columns is None else columns >= 0
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
    ) -> Bool[Tensor, "b g n"]:
        """The keys to keep; with ``prompt``, of the first so many, the others being there to rank them.

        All where it waits for the other layers of its pool.
        """
        policy = self.policy
        self._gather()
        budgets = policy.budgets(self.tokens, layer=place.layer, layers=place.layers)
        splits = [policy.split(budget) for budget in budgets]
        whole = real is None and not self.ragged
        moment = Moment(
            call=plain_numbers(call, None if whole else held),
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
        score = policy.score.score(moment) if self.shared is None else self.shared.of(policy.score, moment)
        if prompt is not None:
            score, moment = score[..., :prompt], replace(moment, held=held[..., :prompt])
        if score.shape[-1] <= min(budgets):
            return moment.held
        if self.pool is not None:
            self.pool.waiting[self] = moment, score
            return moment.held
        (keep,) = keep_masks(policy, [moment], [score])
        self._refit(moment, keep)
        return keep

    def _refit(self, moment: Moment, keep: Bool[Tensor, "b g k"]) -> None:
        """Let the policy put something in the place of the keys that stay."""
        refit, call = self.policy.score.refit(moment, keep), self.pending
        if refit is None:
            return
        assert call is not None
        k, v, bias = (with_zeros(t, call.keys.shape[2]) for t in (refit.k, refit.v, refit.bias))
        self.pending = _Pending(k.to(call.keys), v.to(call.values), call.columns, bias, stored=False)
        self.certificate = refit.certificate

    def _gather(self) -> None:
        """Make what was gathered for each key a part of the call under way; the policy pads it for new keys."""
        if self.store is None:
            return
        for name in self.store.buffers:
            if name.startswith(GATHERED):
                self.gathered.per_key[name.removeprefix(GATHERED)] = self.store.padded(name, 0)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Make row i of the batch what row ``rows[i]`` was."""
        self._keep_pending()
        self.gathered.select(rows)
        self.tokens = tuple(self.tokens[row] for row in rows.tolist()) if self.tokens else ()
        if self.store is not None:
            self.store.select(rows)

    def emptied(self) -> KeptKeys:
        """A cache of the same layer that has read nothing."""
        if self.pool is not None:
            self.pool.waiting.pop(self, None)
        return KeptKeys(self.policy, self.layer, self.pool)

    def padded(self, name: str) -> Tensor | None:
        """The "keys" or "values" as wide as the most that a head holds; None before any token was read."""
        if self.pending is not None:
            return self.pending.keys if name == "keys" else self.pending.values
        return None if self.store is None else self.store.padded(name)

    def nbytes(self) -> int:
        """The bytes that are held between calls: keys, values, their columns, free places, and what was gathered.

        A certificate counts too.
        """
        measured = [t for t in getattr(self.certificate, "__dict__", {}).values() if isinstance(t, Tensor)]
        of_rows = sum(t.untyped_storage().nbytes() for t in (*self.gathered.per_row.values(), *measured))
        return of_rows + (0 if self.store is None else self.store.nbytes())

    def gathered_bytes(self) -> int:
        """Those of them that the policy ranks keys by after later steps."""
        of_keys = {} if self.store is None else self.store.buffers
        tensors = [*self.gathered.per_row.values(), *(t for name, t in of_keys.items() if name.startswith(GATHERED))]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    def nominal_bytes(self) -> int:
        """The bytes of the keys and values that are kept, with what is added to their scores."""
        return 0 if self.store is None else self.store.nominal_bytes()

    def counts(self) -> Int[Tensor, "b g"]:
        """How many keys each head of each row holds, once tokens were read."""
        self._keep_pending()
        assert self.store is not None
        return self.store.count_by_head()
