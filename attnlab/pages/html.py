"""Markup in which text is escaped unless it is already ``Html``; and pages that load nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from pathlib import Path
from typing import Any

from attnlab.pages.colours import theme_css

__all__ = ["Html", "asset", "breakable", "data", "digest", "element", "join", "page", "page_head"]

ASSETS = Path(__file__).parent / "assets"
VOID = frozenset({"wbr", "meta", "link", "br", "hr", "input"})


class Html(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """One element; ``class_`` is class, ``data_name`` is data-name; None and False leave an attribute out.

    >>> element("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    >>> element("td", "none", data_value=0.0)
    '<td data-value="0.0">none</td>'
    """
    # Zero equals False, and is a value.
    kept = {name: value for name, value in attributes.items() if value is not None and value is not False}
    shown = "".join(_attribute(name, value) for name, value in kept.items())
    if tag in VOID:
        return Html(f"<{tag}{shown}>")
    return Html(f"<{tag}{shown}>{join(children)}</{tag}>")


def join(children: object) -> Html:
    """Children one after the other: Html as it is, sequences flattened, None left out, the rest escaped."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, (list, tuple)):
        return Html("".join(join(child) for child in children))
    return Html(html.escape(str(children), quote=False))


def breakable(text: str) -> Html:
    """A spec string that may be broken after its separators, as in a narrow column."""
    escaped = join(str(text))
    for separator in ":,=":
        escaped = Html(escaped.replace(separator, f"{separator}<wbr>"))
    return escaped


def data(content: Any, **attributes: object) -> Html:
    """JSON for the page's script, in which no text can end the script element or start a comment."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return element("script", Html(text), type="application/json", **attributes)


def page(title: str, body: object, *, subtitle: str = "", scripts: tuple[str, ...] = ("report.js",)) -> str:
    """One self-contained page: styles and scripts inside, and a policy that lets nothing else run or load."""
    # Plain scripts have no exports; the names at the top of files.js are visible to the scripts after it.
    code = [asset("files.js").replace("export const", "const"), *(asset(name) for name in scripts)]
    hashes = " ".join(f"'sha256-{digest(text)}'" for text in code)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {hashes}"
    head = page_head(title, policy=policy, style=theme_css() + asset("report.css"))
    masthead = element(
        "header",
        element("span", element("span", class_="logo", aria_hidden="true"), "attnlab", class_="brand"),
        element("span", subtitle, class_="subtitle"),
        element("button", "Dark", type="button", class_="theme", aria_label="Switch between light and dark"),
        class_="masthead",
    )
    content = element("body", masthead, element("main", body), [element("script", Html(text)) for text in code])
    return f"<!doctype html>\n{element('html', head, content, lang='en')}\n"


def page_head(title: str, *, policy: str, style: str, referrer: str | None = None) -> Html:
    """The head of a page: what may run and load by its policy, its title and its style."""
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content=referrer) if referrer else None,
        element("title", f"{title} · attnlab"),
        element("style", Html(style)),
    )


@cache
def asset(name: str) -> str:
    """The text of a style sheet or script of this package."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _attribute(name: str, value: object) -> str:
    name = name.rstrip("_").replace("_", "-") if name not in ("viewBox",) else name
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def digest(text: str) -> str:
    """The hash by which a page's policy allows a script or a style."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
