"""Caches that keep some keys: one policy, one file, and what all of them share.

``@policy("name")`` on a subclass of ``KeyScore`` adds a policy. ``KVPolicy`` has the budget and the schedule, and
``al.evicting`` puts the policy into a model.
"""

from attnlab.caches.contract import KeyScore, Moment, Place
from attnlab.caches.kept_keys import KeptKeys
from attnlab.caches.kv_policy import KVPolicy, cache_policy
from attnlab.caches.registry import cache_policy_names, policy

__all__ = ["KVPolicy", "KeptKeys", "KeyScore", "Moment", "Place", "cache_policy", "cache_policy_names", "policy"]
