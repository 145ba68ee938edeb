"""The oldest Python that pyproject.toml promises, 3.10, has every name of the standard library that is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
# What later versions of Python have added: modules, and names of modules.
NEWER_BY_MODULE = {
    "asyncio": "Barrier Runner TaskGroup timeout timeout_at",
    "builtins": "BaseExceptionGroup ExceptionGroup PythonFinalizationError",
    "contextlib": "chdir",
    "copy": "replace",
    "datetime": "UTC",
    "enum": "EnumCheck ReprEnum StrEnum member nonmember verify",
    "hashlib": "file_digest",
    "inspect": "getasyncgenstate getmembers_static markcoroutinefunction",
    "itertools": "batched",
    "logging": "getHandlerByName getHandlerNames getLevelNamesMapping",
    "math": "cbrt exp2 fma sumprod",
    "operator": "call is_none is_not_none",
    "os": "process_cpu_count",
    "os.path": "isjunction isreserved splitroot",
    "random": "binomialvariate",
    "re": "NOFLAG PatternError",
    "statistics": "kde kde_random",
    "sys": "activate_stack_trampoline exception monitoring",
    "types": "CapsuleType get_original_bases",
    "typing": "LiteralString Never NotRequired ReadOnly Required Self TypeAliasType TypeIs TypeVarTuple Unpack "
    "assert_never assert_type clear_overloads dataclass_transform get_overloads get_protocol_members is_protocol "
    "override reveal_type",
    "warnings": "deprecated",
}
NEWER = {"tomllib"} | {f"{module}.{name}" for module, names in NEWER_BY_MODULE.items() for name in names.split()}


def used_names(source: str) -> Iterator[str]:
    """``module`` and ``module.name`` of all that a file imports or takes from a module, whatever it calls the module."""
    nodes = list(ast.walk(ast.parse(source, feature_version=OLDEST)))
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                modules |= {alias.asname: alias.name} if alias.asname else {package: package}
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Name):
            yield f"builtins.{node.id}"
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield f"{modules.get(first, 'no module')}.{rest}"


def newer_names(source: str) -> list[str]:
    """The names of a source text that Python 3.10 does not have."""
    return sorted(NEWER.intersection(used_names(source)))


def test_the_oldest_python_is_the_one_that_is_promised() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">={}.{}"'.format(*OLDEST) in project


@pytest.mark.parametrize("folder", ["attnlab", "papers", "benchmarks"])
def test_no_name_is_newer_than_the_oldest_python(folder: str) -> None:
    sources = {file: file.read_text(encoding="utf-8") for file in (ROOT / folder).rglob("*.py")}
    newer = {file.relative_to(ROOT).as_posix(): newer_names(source) for file, source in sources.items()}
    assert newer
    assert {file: names for file, names in newer.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "newer"),
    [
        ("import hashlib\nhashlib.file_digest(f, 'sha256')", ["hashlib.file_digest"]),
        ("import hashlib as h\nh.file_digest(f, 'sha256')", ["hashlib.file_digest"]),
        ("from itertools import batched, chain", ["itertools.batched"]),
        ("import datetime\ndatetime.UTC", ["datetime.UTC"]),
        ("import os.path\nos.path.splitroot(p)", ["os.path.splitroot"]),
        ("def f():\n    import tomllib", ["tomllib"]),
        ("raise ExceptionGroup('two', [])", ["builtins.ExceptionGroup"]),
        ("from typing import Any, Self", ["typing.Self"]),
        ("import hashlib\nself.file_digest = hashlib.sha256().hexdigest()", []),
        ("import copy, dataclasses\ndataclasses.replace(x)\ncopy.copy(x)", []),
    ],
)
def test_newer_names_are_seen_however_they_are_written(source: str, newer: list[str]) -> None:
    assert newer_names(source) == newer


def test_newer_syntax_is_refused() -> None:
    with pytest.raises(SyntaxError):
        newer_names("try:\n    pass\nexcept* ValueError:\n    pass")
