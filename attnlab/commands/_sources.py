"""Names and settings of mechanisms, policies and readings, read from their sources.

To import them takes seconds, since they import torch, and a shell that completes a word must not wait for that. Tests
compare what is read here with the registries.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MECHANISMS", "POLICIES", "READINGS", "Sources"]


@dataclass(frozen=True)
class Sources:
    """A folder of attnlab, the decorator that registers what is in it, and the entry points of other packages."""

    folder: str
    decorator: str
    entry_points: str
    # The class whose settings every spec takes, and the one of them that the name of the spec stands for.
    common: str = ""
    named_by: str = ""

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        others = (point.name for point in importlib.metadata.entry_points(group=self.entry_points))
        return sorted({*self._registered(), *others})

    def settings(self, name: str) -> list[str]:
        """The settings that a spec of this name takes; none where another package registers it."""
        registered = self._registered()
        if name not in registered:
            return []
        fields = [*self._fields(registered[name]), *self._fields(self.common)]
        return [field for field in fields if field != self.named_by]

    def _registered(self) -> dict[str, str]:
        """{name: the class or function that is registered by it}."""
        return {
            ast.literal_eval(call.args[0]): name
            for name, node in _definitions(self.folder).items()
            for call in node.decorator_list
            if isinstance(call, ast.Call) and ast.unparse(call.func) == self.decorator
        }

    def _fields(self, name: str) -> list[str]:
        """The fields of a dataclass that its constructor takes, those of its bases in the folder first."""
        node = _definitions(self.folder).get(name)
        if not isinstance(node, ast.ClassDef):
            return []
        inherited = [field for base in node.bases for field in self._fields(ast.unparse(base).rpartition(".")[2])]
        if not any(ast.unparse(one).startswith("dataclass") for one in node.decorator_list):
            return inherited
        own = [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign) and _is_setting(one)]
        return list(dict.fromkeys([*inherited, *own]))


def _is_setting(line: ast.AnnAssign) -> bool:
    internal = line.value is not None and "init=False" in ast.unparse(line.value)
    return not internal and not ast.unparse(line.annotation).startswith("ClassVar")


@functools.cache
def _definitions(folder: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """The classes and functions in the files of a folder of attnlab."""
    files = (Path(__file__).parents[1] / folder).rglob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return {node.name: node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


MECHANISMS = Sources("mechanisms", "register", "attnlab.mechanisms")
POLICIES = Sources("caches", "policy", "attnlab.policies", common="KVPolicy", named_by="by")
READINGS = Sources("reading", "reading", "attnlab.readings")
