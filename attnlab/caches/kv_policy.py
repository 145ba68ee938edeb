"""What all cache policies share: a budget and its split, when keys are dropped, and budgets for heads and layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attnlab.caches.contract import KeyScore, Moment, ranks
from attnlab.caches.registry import entry_of, key_score
from attnlab.fields import check_fields, check_int
from attnlab.registry import parse_settings, settings_of
from attnlab.shapes import Bool, Float

__all__ = ["KVPolicy", "cache_policy", "keep_masks", "policy_spec", "pyramid"]

WHEN = ("step", "prefill")
HEADS = ("each", "shared")
LAYERS = ("even", "pyramid", "shared")
# PyramidKV's beta: the last layer keeps 1 / beta of the mean budget.
BETA = 20


@dataclass(frozen=True)
class KVPolicy:
    """Keep ``budget`` keys per head: the first ``sinks``, the last ``recent``, and the best of the rest by ``by``.

    ``by`` names a policy and its settings, as in "snapkv:window=64,kernel=5"; its file in ``attnlab/caches`` has the
    equation. A budget below 1 is a share of the tokens read. ``recent``, ``sinks``, ``when``, ``layers`` and
    ``safeguard`` are the policy's own where they are None. ``when``: "step" drops keys after every call of the model,
    "prefill" once, after the first call, which reads the prompt; what is generated then stays. ``heads="shared"`` lets
    the heads of a layer share their budgets (AdaKV, Feng et al., 2024), each keeping at least the best ``safeguard`` of
    its own. ``layers="pyramid"`` gives early layers more and late ones less (PyramidKV, Cai et al., 2024); "shared"
    lets all heads of all layers share their budgets (KVzip, Kim et al., 2025), and cuts them together after the prompt.

    >>> KVPolicy(64, by="h2o").split()
    (0, 32, 32)
    """

    budget: float | int
    by: str = "leave-one-out"
    recent: int | None = None
    sinks: int | None = None
    when: str | None = None
    heads: str = "each"
    layers: str | None = None
    safeguard: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 < self.budget < 1):
            # A share, or a whole number of keys.
            check_int("budget, unless it is a share between 0 and 1,", self.budget, least=1)
        for name in ("recent", "sinks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=0)
        for name, allowed in (("when", WHEN), ("heads", HEADS), ("layers", LAYERS)):
            if getattr(self, name) not in (*allowed, *([None] if name != "heads" else [])):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.safeguard is not None and not 0 <= self.safeguard <= 1:
            raise ValueError(f"safeguard must be a share from 0 to 1, got {self.safeguard}")
        self._check_score()

    def _check_score(self) -> None:
        score, cannot = self.score, self.score.cannot()
        asked = (
            ("when=step", "step", self.schedule == "step"),
            ("heads=shared", "shared", self.heads == "shared"),
            ("layers=shared", "shared", self.shares_layers),
        )
        for setting, what, is_asked in asked:
            if is_asked and what in cannot:
                raise ValueError(f"{self.by!r} cannot take {setting}: {cannot[what]}")
        if self.shares_layers and self.schedule == "step":
            raise ValueError("layers=shared needs when=prefill: layers are cut together, once, after the prompt")
        sinks, least = self.sinks or 0, score.least_recent()
        if self.recent is not None and self.recent < least:
            raise ValueError(f"{self.by!r} always keeps its last {least} keys; recent={self.recent} is fewer")
        recent = max(self.recent or 0, least)
        if self.budget >= 1 and recent + sinks > self.budget:
            raise ValueError(f"recent={recent} and sinks={sinks} exceed the budget of {self.budget} keys")

    @functools.cached_property
    def score(self) -> KeyScore:
        """How it ranks keys."""
        return key_score(self.by)

    @property
    def schedule(self) -> str:
        """When keys are dropped: "step" or "prefill"."""
        return self.when or self.score.when

    @property
    def shares_layers(self) -> bool:
        """Whether all heads of all layers share their budgets."""
        return (self.layers or self.score.layers) == "shared"

    def split(self, budget: int | None = None) -> tuple[int, int, int]:
        """How many keys are kept as sinks, as recent and by rank, of ``budget`` keys (by default the policy's).

        Where a share or a layer's budget is fewer than sinks and recent together, the sinks come first.
        """
        if budget is None:
            if self.budget < 1:
                raise ValueError(f"a budget of {self.budget} is a share of the tokens read; name the number of keys")
            budget = int(self.budget)
        # A policy's own sinks take at most half of the budget.
        sinks = min(self.score.sinks, budget // 2) if self.sinks is None else min(self.sinks, budget)
        recent = self.score.recent(budget - sinks) if self.recent is None else self.recent
        recent = min(recent, budget - sinks)
        return sinks, recent, budget - sinks - recent

    def budgets(self, read: Sequence[int], *, layer: int = 0, layers: int = 1) -> tuple[int, ...]:
        """The keys that a head of this layer may keep in each row, where so many tokens were read; at least 1."""
        return tuple(self._budget(tokens, layer, layers) for tokens in read)

    def _budget(self, read: int, layer: int, layers: int) -> int:
        mean = self.budget if self.budget >= 1 else self.budget * read
        if (self.layers or self.score.layers) != "pyramid":
            return max(1, int(mean))
        sinks, recent, _ = self.split(max(1, int(mean)))
        # Half the budget is what most policies keep of the latest keys; only what must stay bounds a layer from below.
        reserved = (sinks if self.sinks is not None else 0) + max(self.recent or 0, self.score.least_recent())
        return pyramid(mean, read, layer=layer, layers=layers, reserved=min(reserved, sinks + recent))


def cache_policy(spec: str | KVPolicy) -> KVPolicy:
    """The policy that a spec string names: "snapkv:window=64,budget=0.25", or "budget=64,by=recency,sinks=4".

    >>> cache_policy("h2o:budget=64,sinks=4").split()
    (4, 30, 30)
    """
    if isinstance(spec, KVPolicy):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a cache policy is a spec string or a KVPolicy, got {type(spec).__name__}")
    # Without a name the spec has settings only, one of which may name the policy.
    named = "=" not in spec.partition(":")[0]
    settings = _settings_of_named(spec) if named else parse_settings(spec, KVPolicy, "a cache policy")
    if "budget" not in settings:
        raise ValueError(f"a cache policy needs its budget, such as budget=64 or budget=0.25; got {spec!r}")
    try:
        return KVPolicy(**settings)
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}") from None


def _settings_of_named(spec: str) -> dict[str, Any]:
    """The fields of the policy that "name:settings" names: common settings, and the others as part of ``by``."""
    entry, rest = entry_of(spec)
    common = {f.name for f in settings_of(KVPolicy)} - {"by"}
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    shared = [part for part in parts if part.partition("=")[0].strip() in common]
    own = ",".join(part for part in parts if part not in shared)
    settings = parse_settings(",".join(shared), KVPolicy, "a cache policy")
    return settings | {"by": f"{entry.name}:{own}" if own else entry.name}


def policy_spec(policy: KVPolicy) -> str:
    """The settings that differ from their defaults, as ``cache_policy`` reads them."""
    shown = {f.name: getattr(policy, f.name) for f in fields(policy) if getattr(policy, f.name) != f.default}
    settings = {"budget": policy.budget, "by": policy.by} | shown
    if ":" in policy.by:
        del settings["by"]
    listed = ",".join(f"{name}={value}" for name, value in settings.items())
    return f"{policy.by},{listed}" if ":" in policy.by else listed


def pyramid(mean: float, read: int, *, layer: int, layers: int, reserved: int) -> int:
    """PyramidKV's budget of a layer (Cai et al., 2024): from 2 - 1/beta of the mean down to 1/beta of it.

    No layer keeps more than the tokens read less those ``reserved``; the rest goes to the last layers. Where a layer
    would keep fewer than the reserved keys, every layer keeps the mean.

    >>> [pyramid(20, 1000, layer=i, layers=3, reserved=0) for i in range(3)]
    [39, 20, 1]
    """
    last = mean / BETA
    first = 2 * mean - last
    if first >= read - reserved:
        first = read - reserved
        last = 2 * mean - first
    if not first >= last >= reserved:
        return max(1, round(mean))
    return max(1, round(first - layer * (first - last) / max(1, layers - 1)))


def keep_masks(
    policy: KVPolicy, moments: Sequence[Moment], scores: Sequence[Float[Tensor, "b g k"]]
) -> tuple[Bool[Tensor, "b g k"], ...]:
    """The keys to keep of those held in each of several layers, which share their budgets where the policy says so.

    The larger the score the better; equal scores keep the later key.
    """
    held, sure = (torch.cat([getattr(moment, name) for moment in moments], 1) for name in ("held", "sure"))
    budget = moments[0].per_row(moments[0].budgets)
    score = torch.cat(list(scores), 1).masked_fill(sure, torch.inf).masked_fill(~held, -torch.inf)
    place = ranks(score)
    if policy.heads == "shared" or policy.shares_layers:
        share = policy.score.safeguard if policy.safeguard is None else policy.safeguard
        safe = (share * budget).long().clamp_min(int(share > 0))
        place = ranks(score.masked_fill(held & (place < safe), torch.inf).flatten(1)).view_as(score)
        budget = budget * score.shape[1]
    return (held & (place < budget)).split([score.shape[1] for score in scores], 1)
