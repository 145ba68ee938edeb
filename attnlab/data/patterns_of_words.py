"""Which regular expressions, read from a file, may take exponential time on some text: they are refused."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

__all__ = ["may_take_forever"]

# The parser of regular expressions, which Python 3.11 moved.
MOVED = sys.version_info >= (3, 11)
parser: Any = importlib.import_module("re._parser" if MOVED else "sre_parse")
ops: Any = importlib.import_module("re._constants" if MOVED else "sre_constants")

REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)


def may_take_forever(pattern: str) -> bool:
    r"""Whether a repeat may match the same characters in many ways: a repeat in it, or alternatives, that overlap.

    What is allowed in a repeat: characters, and repeats that a character of another kind separates.

    >>> [may_take_forever(p) for p in (r"\w+|[^\w\s]", r"\w+(?:-\w+)*", r"(\w+)+!", r"(a|aa)+!", r"(\w+\s?)*!")]
    [False, False, True, True, True]
    """
    return _ambiguous(parser.parse(pattern))


def _ambiguous(items: Any) -> bool:
    return any(
        (op in REPEATS and argument[1] > 1 and _overlaps(argument[2]))
        or any(_ambiguous(part) for part in _parts(op, argument))
        for op, argument in items
    )


def _overlaps(body: Any) -> bool:
    """Whether two rounds of an outer repeat may share characters in more than one way."""
    inner = [item for item in _flat(body) if item[0] in REPEATS]
    if any(op is ops.BRANCH for op, _ in _flat(body)):
        return True
    literals = [chr(argument) for op, argument in _flat(body) if op is ops.LITERAL]
    return bool(inner) and not any(
        all(not _matches(argument[2], character) for _, argument in inner) for character in literals
    )


def _flat(items: Any) -> list[Any]:
    """The items with those of groups in the place of the groups."""
    flat: list[Any] = []
    for op, argument in items:
        flat += _flat(argument[-1]) if op is ops.SUBPATTERN else [(op, argument)]
    return flat


def _matches(items: Any, character: str) -> bool:
    """Whether a repeat of these items can match the character; of more than one item, it is taken to."""
    flat = _flat(items)
    if len(flat) != 1:
        return True
    op, argument = flat[0]
    if op is ops.LITERAL:
        return chr(argument) == character
    if op is not ops.IN:
        return True
    negated = argument[0][0] is ops.NEGATE
    return negated != any(_in_set(member, character) for member in argument[negated:])


def _in_set(member: Any, character: str) -> bool:
    op, argument = member
    if op is ops.LITERAL:
        return chr(argument) == character
    if op is ops.RANGE:
        return argument[0] <= ord(character) <= argument[1]
    letter = next((short for name, short in (("WORD", "w"), ("DIGIT", "d"), ("SPACE", "s")) if name in str(argument)))
    return bool(re.match(f"\\{letter.upper() if 'NOT' in str(argument) else letter}", character))


def _parts(op: Any, argument: Any) -> list[Any]:
    """The sequences of items inside an item."""
    if op in REPEATS:
        return [argument[2]]
    if op is ops.SUBPATTERN:
        return [argument[-1]]
    if op is ops.BRANCH:
        return argument[1]
    return [argument[1]] if op in (ops.ASSERT, ops.ASSERT_NOT) else []
