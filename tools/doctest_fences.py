"""An extension of griffe: examples in docstrings (``>>>``) become fenced code, as the API reference shows them."""

from __future__ import annotations

import re
from typing import Any

import griffe

# An example: lines that begin with a prompt, and their outputs, up to an empty line.
EXAMPLE = re.compile(r"(?:^[ ]*>>> .*\n?(?:^[ ]*\S.*\n?)*)+", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The docstring with its examples as fences of ``pycon``.

    >>> fenced("One.\\n\\n>>> 1 + 1\\n2\\n\\nTwo.")
    'One.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n\\nTwo.'
    """
    return EXAMPLE.sub(lambda match: f"```pycon\n{match.group().rstrip()}\n```\n", docstring)


class DoctestFences(griffe.Extension):
    """Fences the examples of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
