"""HTML as a tree that tests can ask questions of, from the standard library's parser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "hr", "input", "wbr"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str, cls: str | None = None, **attributes: str) -> list[Node]:
        return [node for node in self._walk() if node._matches(tag, cls, attributes)]

    def one(self, tag: str, cls: str | None = None, **attributes: str) -> Node:
        nodes = self.all(tag, cls, **attributes)
        assert len(nodes) == 1, f"{len(nodes)} elements {tag}.{cls} {attributes}"
        return nodes[0]

    def figure(self, name: str) -> Node:
        return self.one("figure", data_name=name)

    def data(self) -> Any:
        return json.loads(self.one("script", type="application/json").text)

    def _walk(self) -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child._walk()

    def _matches(self, tag: str, cls: str | None, attributes: dict[str, str]) -> bool:
        classes = (self.attributes.get("class") or "").split()
        return (
            self.tag == tag
            and (cls is None or cls in classes)
            and all(self.attributes.get(key.replace("_", "-")) == value for key, value in attributes.items())
        )


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("root")
        self.stack = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.stack[-1].children.append(node)
        if tag not in VOID:
            self.stack.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1].tag == tag, f"</{tag}> closes <{self.stack[-1].tag}>"
        self.stack.pop()

    def handle_data(self, text: str) -> None:
        self.stack[-1].children.append(text)


def parse(html: str) -> Node:
    """The tree; an element left open or closed in the wrong place fails the test."""
    builder = _Builder()
    builder.feed(html)
    builder.close()
    assert len(builder.stack) == 1, f"<{builder.stack[-1].tag}> is never closed"
    return builder.root
