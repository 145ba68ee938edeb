"""Where mechanisms and readings come from: a package's files, entry points, and files that a user names."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["import_all", "run_file"]


def import_all(package_name: str, entry_point_group: str) -> None:
    """Import every module of a package, and what other packages offer under an entry point."""
    package = importlib.import_module(package_name)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for point in importlib.metadata.entry_points(group=entry_point_group):
        point.load()


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
