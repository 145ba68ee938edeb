"""The folders of the papers, and the modules in them, found by their names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import papers

__all__ = ["folders", "modules", "paper_folder"]

# The folders in the order in which their experiments are listed; others follow by name.
ORDER = ("common", "value_aware", "effective", "abc", "guidance", "ktiw")


def folders() -> list[str]:
    """The names of the papers' folders, ``common`` among them."""
    names = [module.name for module in pkgutil.iter_modules(papers.__path__) if module.ispkg]
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def paper_folder(name: str) -> Path:
    """Where the folder of a paper lies."""
    [path] = importlib.import_module(f"papers.{name}").__path__
    return Path(path)


def modules(folder: str, prefix: str) -> Iterator[ModuleType]:
    """The modules of a folder whose names begin with ``prefix``, by name; they are imported."""
    path = str(paper_folder(folder))
    for module in sorted(pkgutil.iter_modules([path]), key=lambda module: module.name):
        if module.name.startswith(prefix) and not module.ispkg:
            yield importlib.import_module(f"papers.{folder}.{module.name}")
