"""From a name to a way of ranking keys: ``key_score("snapkv:window=64,kernel=5")``.

``@policy("name")`` adds one, from this folder, an entry point of the group ``attnlab.policies`` or a file's path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from attnlab.caches.contract import KeyScore
from attnlab.discovery import existing_file, import_all, nearest_name, run_file
from attnlab.registry import FILE_SPEC, parse_settings, usage

__all__ = ["PolicyEntry", "cache_policy_names", "entry_of", "key_score", "policy"]

ENTRY_POINT_GROUP = "attnlab.policies"

T = TypeVar("T", bound=type[KeyScore])


@dataclass(frozen=True)
class PolicyEntry:
    """A registered name, its class, and the specs it is tested with."""

    name: str
    cls: type[KeyScore]
    examples: tuple[str, ...]

    def usage(self) -> str:
        """The name with its settings and their defaults."""
        return usage(self.name, self.cls)


_entries: dict[str, PolicyEntry] = {}
# Plain names of what a paper's policy ranks by.
_other_names: dict[str, str] = {}


def policy(name: str, *, also: str | None = None, examples: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Class decorator: make a way to rank keys known as ``name``, and under a second name where it has one.

    ``examples`` are the specs that the laws are tested with.
    """

    def add(cls: T) -> T:
        known = _entries.get(name)
        if known is not None and known.cls.__qualname__ != cls.__qualname__:
            raise ValueError(f"the policy name {name!r} is taken by {known.cls.__qualname__}; choose another")
        _entries[name] = PolicyEntry(name, cls, examples or (name,))
        if also is not None:
            _other_names[also] = name
        return cls

    return add


def cache_policy_names() -> list[str]:
    """Every registered name of a cache policy, sorted.

    >>> "h2o" in cache_policy_names()
    True
    """
    return sorted(_load())


def key_score(spec: str) -> KeyScore:
    """The way to rank keys that a spec names: ``name``, ``name:key=value,...`` or ``./file.py:Class:key=value,...``.

    >>> key_score("snapkv:window=64")
    SnapKV(window=64, kernel=5)
    """
    entry, settings = entry_of(spec)
    try:
        return entry.cls(**parse_settings(settings, entry.cls, entry.name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec!r}: {error}") from None


def entry_of(spec: str) -> tuple[PolicyEntry, str]:
    """The policy that a spec names, and the text of its settings."""
    entries = _load()
    if in_file := FILE_SPEC.fullmatch(spec):
        return _entry_in_file(in_file["path"], in_file["name"]), in_file["settings"] or ""
    name, _, settings = spec.partition(":")
    name = _other_names.get(name, name)
    if name not in entries:
        hint = nearest_name(name, [*entries, *_other_names])
        listing = " | ".join(entries[n].usage() for n in sorted(entries))
        raise ValueError(
            f"no cache policy named {name!r}; {hint}by must be one of these, with their settings: {listing}"
        )
    return entries[name], settings


def _entry_in_file(path: str, name: str) -> PolicyEntry:
    file = existing_file(path, "a cache policy in a file is named as path/to/file.py:Class")
    cls = getattr(run_file(file), name, None)
    if not (isinstance(cls, type) and issubclass(cls, KeyScore)):
        raise ValueError(f"{path} has no cache policy named {name!r}: it is a subclass of attnlab.caches.KeyScore")
    return PolicyEntry(f"{path}:{name}", cls, (f"{path}:{name}",))


@functools.cache
def _load() -> dict[str, PolicyEntry]:
    import_all("attnlab.caches", ENTRY_POINT_GROUP)
    return _entries
