"""The page: one HTML file with its style, its script and its data, and a policy that lets nothing else load or run."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from attnlab.pages.colours import theme_css
from attnlab.pages.explorer.payload import Packed
from attnlab.pages.html import Html, asset, data, digest, element, page_head

__all__ = ["explorer_page", "script", "style"]

ASSETS = Path(__file__).parent / "assets"
# Modules among the assets of the reports: those that reports use too, and those of the page of a long text.
SHARED = ("files", "long", "long_data", "long_lanes", "long_maps", "long_text")
# A module comes after those it imports.
MODULES = (
    "data colour surface dom files maps actions grid heat lines passage tip pane chart tables timeline exports keys "
    "state controls cards app"
)
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:const|class) (\w+))", re.MULTILINE)


def explorer_page(packed: Packed, *, entry: str = "page", modules: str = MODULES, more_style: str = "") -> bytes:
    """The whole file, as bytes: a page of many maps is large, and is not copied more often than needed."""
    code, css = script(entry, modules), style() + more_style
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest(code)}'; style-src 'sha256-{digest(css)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    head = page_head(packed.meta["title"], policy=policy, style=css, referrer="no-referrer")
    without_script = element("noscript", "This page draws attention maps with a script; allow scripts to see them.")
    root = element("div", _masthead(packed.meta["title"]), without_script, id="attnlab", class_="x-root")
    body = [root, data(packed.meta, id="attnlab-meta")]
    parts = [f'<!doctype html>\n<html lang="en">{head}<body>{"".join(body)}'.encode()]
    for name, blob in packed.blobs.items():
        parts += [str(element("script", type="text/plain", data_blob=name)).removesuffix("</script>").encode(), blob]
        parts.append(b"</script>")
    parts.append(str(element("script", Html(code), type="module")).encode() + b"</body></html>\n")
    return b"".join(parts)


def _masthead(title: str) -> Html:
    """What is painted while the data behind it are still being read; the script puts its own in this place."""
    logo = element("span", class_="logo", aria_hidden="true")
    name = element("div", element("h1", title), class_="subtitle")
    return element("header", element("span", logo, "attnlab", class_="brand"), name, class_="masthead")


@cache
def script(entry: str, modules: str = MODULES) -> str:
    """The modules in one: each becomes a function that returns its exports, and ``entry`` follows unchanged.

    A page opened from a disk may not import files, so all modules become one script. Nothing else is changed: an
    import reads from the modules before, an export is a name in the returned object.
    """
    return "const modules = {};\n" + "\n".join(
        [*(_wrapped(name) for name in modules.split()), _imports(_source(entry))]
    )


def _wrapped(name: str) -> str:
    source = _source(name)
    names = ", ".join(EXPORT.findall(source))
    return f"modules.{name} = (() => {{\n{EXPORT.sub('', _imports(source))}return {{ {names} }};\n}})();\n"


def _imports(source: str) -> str:
    return IMPORT.sub(r"const \1 = modules.\2;", source)


def _source(name: str) -> str:
    if name in SHARED:
        return asset(f"{name}.js")
    return (ASSETS / f"{name}.js").read_text(encoding="utf-8")


@cache
def style(*, host: bool = False) -> str:
    """The style of reports and the explorer's own; for a shadow root if ``host``."""
    css = theme_css() + asset("report.css") + (ASSETS / "explorer.css").read_text(encoding="utf-8")
    if not host:
        return css
    # :root:not([data-theme=light]) becomes :host(:not([data-theme=light])), and html and body the host itself.
    css = re.sub(r":root((?::not\()?\[[^\]]*\]\)?)", r":host(\1)", css).replace(":root", ":host")
    return re.sub(r"^(?:html|body)(?= \{)", ":host", css, flags=re.MULTILINE)
