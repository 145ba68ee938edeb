"""Errors with a remedy in Python, which the command line leaves out, of memory, and of JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["PythonRemedyError", "first_line", "is_out_of_memory", "placed", "problem_of", "read_json_object", "refusal"]


class PythonRemedyError(ValueError):
    """A ValueError whose remedy is an argument or a call: ``problem`` alone is what the command line prints.

    >>> str(PythonRemedyError("line 3 is not JSON", remedy="to leave it out pass malformed=Malformed('skip')"))
    "line 3 is not JSON; to leave it out pass malformed=Malformed('skip')"
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


def problem_of(error: BaseException) -> str:
    """An error's message without its remedy in Python."""
    return error.problem if isinstance(error, PythonRemedyError) else str(error)


def placed(place: str, error: ValueError) -> ValueError:
    """The same error with the place where it arose before its message."""
    if isinstance(error, PythonRemedyError):
        return PythonRemedyError(f"{place}: {error.problem}", remedy=error.remedy)
    return ValueError(f"{place}: {error}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


# How torch, C++, the kernel and the loader of shared libraries say that there is no memory left.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, also where a library says so by an error of another type.

    >>> is_out_of_memory(RuntimeError("std::bad_alloc")), is_out_of_memory(ValueError("not enough memory for a book"))
    (True, False)
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, (RuntimeError, ImportError, OSError)) and any(sign in text for sign in OUT_OF_MEMORY)


def refusal(error: Exception, sentence: str) -> ValueError:
    """A ValueError of this sentence to raise for an error of a library; want of memory is raised as it came."""
    if is_out_of_memory(error):
        raise error
    return ValueError(sentence)


def read_json_object(path: Path | str, *, remedy: str = "") -> dict[str, Any]:
    """The JSON object in a file; anything else in it is a ValueError that names the file."""
    path = Path(path)
    remedy = remedy and f"; {remedy}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read{remedy}") from None
    # The limit on the digits of an int, bad UTF-8 and bad JSON are all ValueErrors.
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({first_line(error)}){remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}{remedy}")
    return content
