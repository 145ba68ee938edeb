"""Limits that keep the house readable: how long and how branched a function may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from radon.complexity import cc_visit

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 60
MOST_COMPLEX = 15
# A Triton kernel is one function whatever its length, so kernels are measured by their tests and benchmarks.
FOLDERS = ("attnlab", "papers", "benchmarks")
EXEMPT = ("attnlab/kernels/",)


def modules() -> list[str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return [name for name in names if not name.startswith(EXEMPT)]


def long_functions(source: str, most: int = LONGEST) -> list[str]:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = {n.name: (n.end_lineno or n.lineno) - n.lineno + 1 for n in functions}
    return [f"{name} has {lines} lines" for name, lines in lengths.items() if lines > most]


def complex_functions(source: str, most: int = MOST_COMPLEX) -> list[str]:
    blocks = cc_visit(source)
    return [f"{b.fullname} has complexity {b.complexity}" for b in blocks if b.letter != "C" and b.complexity > most]


@pytest.mark.parametrize("name", modules())
def test_functions_are_short_and_plain(name: str) -> None:
    source = (ROOT / name).read_text(encoding="utf-8")
    assert long_functions(source) + complex_functions(source) == []


def test_the_limits_see_what_is_over_them() -> None:
    source = "def f(x):\n" + "".join(f"    if x == {i}:\n        x += 1\n" for i in range(4))
    assert long_functions(source, most=8) == ["f has 9 lines"]
    assert complex_functions(source, most=4) == ["f has complexity 5"]
    assert long_functions(source, most=9) + complex_functions(source, most=5) == []
