"""Where mechanisms, readings and policies come from: a package's files, entry points, and files that a user names."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

__all__ = ["existing_file", "import_all", "nearest_name", "run_file"]


def import_all(package_name: str, entry_point_group: str) -> None:
    """Import every module of a package, and what other packages offer under an entry point."""
    package = importlib.import_module(package_name)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for point in importlib.metadata.entry_points(group=entry_point_group):
        point.load()


def nearest_name(name: str, names: Iterable[str]) -> str:
    """A question for a message about an unknown name; nothing where no name is like it.

    >>> nearest_name("sofmax", ["softmax", "window"])
    "did you mean 'softmax'? "
    """
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def existing_file(path: str, usage: str) -> Path:
    """The file of this path; a ValueError, which ends with ``usage``, where there is none."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {path}; {usage}")
    return file


def run_file(file: Path) -> ModuleType:
    """The file as a module; it is run again after it has changed."""
    return _run(file, file.stat().st_mtime_ns)


@functools.cache
def _run(file: Path, changed: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"attnlab_user_{file.stem}", file)
    assert spec is not None, f"{file} ends with .py"
    assert spec.loader is not None, f"{file} ends with .py"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
