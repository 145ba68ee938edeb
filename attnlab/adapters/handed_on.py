"""What a forward pass does with the keys that its cache returns, read from its source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["hands_keys_on"]

# An attention function takes the module or its queries, keys, values and a mask.
LEAST_ARGUMENTS = 4


@functools.cache
def hands_keys_on(forward: Callable[..., Any]) -> bool:
    """Whether a forward pass only hands the keys and values that its cache returns to an attention function.

    One that looks at them first (makes a mask of values, or asks for their length) must get all of them.
    """
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(forward)))))
    except (OSError, TypeError, SyntaxError):
        return False
    updates = [node for node in nodes if isinstance(node, ast.Assign) and _calls_update(node.value)]
    if len(updates) != 1:
        return False
    names = {node.id for target in updates[0].targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return _only_arguments(names, [node for node in nodes if getattr(node, "lineno", 0) > (updates[0].end_lineno or 0)])


def _calls_update(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update"


def _only_arguments(names: set[str], nodes: list[ast.AST]) -> bool:
    """Whether these names occur, and only as arguments of calls that may be attention functions."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) >= LEAST_ARGUMENTS]
    arguments = {id(argument) for call in calls for argument in call.args}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    return bool(uses) and all(id(use) in arguments for use in uses)
