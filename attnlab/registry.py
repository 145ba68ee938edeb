"""From a spec string to a mechanism: ``mechanism("value-aware:r=65")``.

A name is that of a file in ``attnlab/mechanisms``, of an entry point of another package, or of a class in a file of the
user's own: ``mechanism("./power.py:Power:p=3")``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from attnlab.attention import Mechanism
from attnlab.discovery import existing_file, import_all, nearest_name, run_file

__all__ = [
    "FILE_SPEC",
    "Entry",
    "all_mechanisms",
    "mechanism",
    "mechanism_names",
    "parse_settings",
    "register",
    "settings_of",
    "spec_of",
    "stored_mechanism",
    "usage",
]

ENTRY_POINT_GROUP = "attnlab.mechanisms"

T = TypeVar("T", bound=type[Mechanism])


@dataclass(frozen=True)
class Entry:
    """A registered name, its class, and the specs the conformance suite runs it with."""

    name: str
    cls: type[Mechanism]
    examples: tuple[str, ...]

    def usage(self) -> str:
        """The name with its settings and their defaults, as an error message lists them."""
        return usage(self.name, self.cls)


_entries: dict[str, Entry] = {}

# ``power.py:Power`` or ``power.py:Power:p=3``: a class in a file, and its settings.
FILE_SPEC = re.compile(r"(?P<path>.+?\.py):(?P<name>\w+)(:(?P<settings>.*))?", re.DOTALL)
# The classes in files that ``mechanism`` was asked for, by file and name.
_from_files: dict[tuple[Path, str], Entry] = {}
# Whether a spec may name a file that has not been named before.
_new_files_allowed = ContextVar("_new_files_allowed", default=True)


def register(name: str, *, examples: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Class decorator: make a mechanism known as ``name``; ``examples`` are the specs it is tested with."""

    def add(cls: T) -> T:
        known = _entries.get(name)
        if known is not None and known.cls.__qualname__ != cls.__qualname__:
            raise ValueError(f"mechanism name {name!r} is taken by {known.cls.__qualname__}; choose another")
        _entries[name] = Entry(name, cls, examples or (name,))
        return cls

    return add


def mechanism(spec: str | Mechanism) -> Mechanism:
    """The mechanism a spec string names: ``name``, or ``name:key=value,...`` (a bare value fills the first setting).

    ``path/to/file.py:Class``, with settings after another colon, runs that file and takes the class.

    >>> mechanism("kernel:poly,degree=2")
    Kernelized(kernel='poly', degree=2)
    """
    if isinstance(spec, Mechanism):
        return spec
    if not isinstance(spec, str):
        raise ValueError(f"a mechanism is given as a spec string or an object, got {type(spec).__name__}")
    entry, settings = _find(spec.strip())
    try:
        return entry.cls(**parse_settings(settings, entry.cls, entry.name))
    except TypeError as error:
        raise ValueError(f"{spec!r}: {error}; usage: {entry.usage()}") from None
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}") from None


def stored_mechanism(spec: str) -> Mechanism:
    """The mechanism of a spec that was read from a saved model or another stored file.

    Such a spec runs no code of its own choice: a Python file that it names must have been named by the user before.
    """
    token = _new_files_allowed.set(False)
    try:
        return mechanism(spec)
    finally:
        _new_files_allowed.reset(token)


def mechanism_names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_load())


def all_mechanisms() -> list[str]:
    """The specs that the conformance suite, the benchmark and the comparison run over."""
    entries = _load()
    return [spec for name in sorted(entries) for spec in entries[name].examples]


def spec_of(mech: Mechanism) -> str:
    """The spec string that rebuilds this mechanism's settings: the inverse of ``mechanism``."""
    for entry in (*_from_files.values(), *_load().values()):
        if entry.cls is type(mech):
            shown = [
                f"{f.name}={getattr(mech, f.name)}"
                for f in settings_of(entry.cls)
                if getattr(mech, f.name) != f.default
            ]
            return f"{entry.name}:{','.join(shown)}" if shown else entry.name
    raise ValueError(f"{type(mech).__name__} is not registered; decorate it with attnlab.register(name)")


def _find(spec: str) -> tuple[Entry, str]:
    """The entry that a spec names, and the text of its settings."""
    if in_file := FILE_SPEC.fullmatch(spec):
        return _entry_in_file(in_file["path"], in_file["name"]), in_file["settings"] or ""
    name, _, settings = spec.partition(":")
    if name.endswith(".py"):
        raise ValueError(f"{spec!r} names a file and no class in it; write {name}:Class, or {name}:Class:key=value")
    entries = _load()
    if name not in entries:
        hint = nearest_name(name, entries)
        listing = " | ".join(entries[n].usage() for n in sorted(entries))
        raise ValueError(f"no mechanism named {name!r}; {hint}the names and their settings: {listing}")
    return entries[name], settings


def _entry_in_file(path: str, name: str) -> Entry:
    file = existing_file(path, "a mechanism in a file is named as path/to/file.py:Class")
    if not _new_files_allowed.get() and (file, name) not in _from_files:
        raise ValueError(
            f"a saved file asks for the mechanism {name} in {path}, which would run that file; if you trust it, "
            f'call attnlab.mechanism("{path}:{name}") first'
        )
    # Entry points and attnlab's own mechanisms first, so that a name that is taken is an error in the user's file.
    _load()
    cls = getattr(run_file(file), name, None)
    if not (isinstance(cls, type) and issubclass(cls, Mechanism)):
        raise ValueError(f"{path} has no mechanism named {name!r}: a mechanism is a subclass of attnlab.Mechanism")
    entry = Entry(f"{path}:{name}", cls, (f"{path}:{name}",))
    _from_files[file, name] = entry
    return entry


@functools.cache
def _load() -> dict[str, Entry]:
    import_all("attnlab.mechanisms", ENTRY_POINT_GROUP)
    return _entries


def usage(name: str, cls: type) -> str:
    """A name with the settings of its class and their defaults."""
    shown = [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in settings_of(cls)]
    return f"{name}:{','.join(shown)}" if shown else name


def settings_of(cls: type) -> list[dataclasses.Field[Any]]:
    """The settings that a spec of this class can name."""
    return [f for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []


def parse_settings(rest: str, cls: type, name: str) -> dict[str, Any]:
    """The settings ``key=value,...`` of a class that is known by this name; a bare value fills its first setting."""
    settings = {f.name: f for f in settings_of(cls)}
    parsed: dict[str, Any] = {}
    for position, item in enumerate(part for part in rest.split(",") if part.strip()):
        key, equals, value = (s.strip() for s in item.partition("="))
        if not equals:
            if position > 0 or not settings:
                raise ValueError(f"{item!r} is not key=value; usage: {usage(name, cls)}")
            key, value = next(iter(settings)), key
        if key not in settings:
            raise ValueError(f"{name} has no setting {key!r}; usage: {usage(name, cls)}")
        if key in parsed:
            raise ValueError(f"setting {key!r} is given twice")
        parsed[key] = _value(key, value, str(settings[key].type))
    return parsed


def _value(key: str, text: str, kind: str) -> Any:
    """``text`` as a value of the field's annotated type; alternatives such as ``int | str`` are tried in order."""
    if text.lower() == "none" and "None" in kind:
        return None
    if "bool" in kind and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for name, convert in (("int", int), ("float", float)):
        if name in kind:
            try:
                return convert(text)
            except ValueError:
                pass
    if "str" in kind or "Literal" in kind:
        return text
    raise ValueError(f"setting {key}={text!r} must be {kind}")
