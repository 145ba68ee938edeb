"""Fragments that pages share: sections, cards of facts, settings, and the whole result as a download."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages.html import Html, data, element

__all__ = ["config_list", "download_json", "explained", "facts", "flatten", "provenance_facts", "section"]


def section(title: str, *children: object, about: str = "") -> Html:
    """A titled part of the page with an optional sentence on what it shows."""
    return element(
        "section", element("h2", title), element("p", about, class_="about") if about else None, list(children)
    )


def facts(pairs: Sequence[tuple[str, object]]) -> Html:
    """Short name-value pairs in a card; pairs without a value are left out."""
    shown = [
        element("div", element("dt", name), element("dd", value), class_="wide" if len(str(value)) > 40 else None)
        for name, value in pairs
        if value not in (None, "")
    ]
    return element("div", element("dl", shown, class_="facts"), class_="card")


def explained(pairs: Sequence[tuple[str, str]]) -> Html:
    """Terms and what they mean, in a card."""
    shown = [element("div", element("dt", term), element("dd", meaning)) for term, meaning in pairs]
    return element("div", element("dl", shown, class_="explained"), class_="card")


def provenance_facts(result: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Seed, device, commit and versions, to run it again."""
    commit = result.get("commit")
    versions = result.get("versions") or {}
    return [
        ("Seed", result.get("seed")),
        ("Device", result.get("device")),
        ("Commit", str(commit)[:10] if commit else None),
        ("Python", result.get("python")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def config_list(config: Mapping[str, Any], *, title: str = "All settings") -> Html | None:
    """A configuration, flattened to dotted names and folded away."""
    if not config:
        return None
    pairs = [
        element("div", element("dt", key), element("dd", value, class_="mono"))
        for key, value in flatten(config).items()
    ]
    return element("details", element("summary", title), element("dl", pairs, class_="facts"), class_="card")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names.

    >>> flatten({"model": {"layers": 6}, "lr": 0.001})
    {'model.layers': '6', 'lr': '0.001'}
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def download_json(content: Any, *, name: str) -> Html:
    """The numbers behind the page, and a button that saves them."""
    button = element("button", "Download all numbers as JSON", type="button", data_download_json="all", data_name=name)
    return element("p", button, data(content, id="all"))
