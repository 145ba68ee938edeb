"""The policies that tests run over."""

from __future__ import annotations

from attnlab.caches.registry import cache_policy_names, entry_of

__all__ = ["EXAMPLES", "RANKINGS"]

# Those that drop keys after every step and take any budget, under the names of the table in the guide.
RANKINGS = ("value-aware", "leave-one-out", "mass", "mass-norm", "recency", "random")
EXAMPLES = [spec for name in cache_policy_names() for spec in entry_of(name)[0].examples]
