"""Types and shapes in the signatures of attnlab are checked while the tests run.

jaxtyping binds and checks the arguments of every call twice. Only signatures with a shape need that; others are checked
by beartype alone, which costs a tenth.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

import jaxtyping
from beartype import beartype

SHAPE = re.compile(r"\b(Bool|Float|Int|Shaped)\[")


@contextmanager
def checked_signatures(package: str) -> Iterator[None]:
    """What is imported from the package inside has its signatures checked."""
    of_shapes = jaxtyping.jaxtyped

    def checked(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
        if function is None:
            return functools.partial(checked, typechecker=typechecker)
        if inspect.isfunction(function) and not any(map(SHAPE.search, map(str, function.__annotations__.values()))):
            return _plain(function)
        return of_shapes(function, typechecker=typechecker)

    jaxtyping.jaxtyped = checked  # type: ignore[assignment]
    try:
        with jaxtyping.install_import_hook(package, "beartype.beartype"):
            yield
    finally:
        jaxtyping.jaxtyped = of_shapes


def _plain(function: Any) -> Any:
    """The function with its arguments and its result checked; annotations stay the strings that they are."""
    written = function.__annotations__
    function.__annotations__ = {name: _resolved(hint, function.__globals__) for name, hint in written.items()}
    checked = beartype(function)
    function.__annotations__ = checked.__annotations__ = written
    return checked


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """A type for its name; Any where it is not known yet, such as the class that a method is of."""

    def holder(value: Any) -> None: ...

    holder.__annotations__ = {"value": hint}
    try:
        return get_type_hints(holder, names)["value"]
    except Exception:
        return Any
