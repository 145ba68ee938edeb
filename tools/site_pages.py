"""What the site needs beside MkDocs: hooks that mkdocs.yml names, and the fence for equations.

- Guides link to pages and pictures outside docs/ (the papers' results, notes, CONTRIBUTING). These, and the pages that
  they link to, are put on the site under repository/, and links to other files of the repository become plain text.
- A page of docs/api says ``<!-- names: ROOM ... -->``; the public names whose modules lie in these rooms are documented
  there, so a new name cannot be forgotten.
- A page that says ``<!-- commands -->`` gets the table of commands.
- A tutorial gets the outputs of its last execution by tools/tutorials.py, and its notebook to download.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnlab
from attnlab.commands.table import COMMANDS
from tools.tutorials import CELL, code_cells, kept, tutorials

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS, OUTSIDE = "docs/", "repository/"
FENCE = re.compile(r"(^[ ]*```.*?^[ ]*```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)#\s]*)(#[^)\s]*)?\)")
NAMES = re.compile(r"<!-- names: ([\w ]+) -->")
COMMAND_TABLE = "<!-- commands -->"
# Pages outside docs/ that the navigation names and no guide needs to link to.
IN_NAVIGATION = ("CHANGELOG.md", "papers/README.md")
PICTURES = (".svg", ".png")


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """The page with ``change`` applied to what is not code.

    >>> outside_fences("a `a` a", str.upper)
    'A `a` A'
    """
    return "".join(part if FENCE.fullmatch(part) else change(part) for part in FENCE.split(markdown))


def repository_path(uri: str) -> str:
    """Where a page of the site lies in the repository.

    >>> repository_path("abc.md"), repository_path("repository/papers/abc/RESULTS.md")
    ('docs/abc.md', 'papers/abc/RESULTS.md')
    """
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else DOCS + uri


def site_uri(path: str) -> str:
    """Where a file of the repository lies on the site: the inverse of ``repository_path``."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else OUTSIDE + path


def link_target(page: str, link: str) -> str:
    """The file of the repository that a link of a page (both as paths in the repository) leads to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").exists() else path


def published(path: str) -> bool:
    """Whether a file outside docs/ is shown on the site when a page links to it."""
    return path.endswith((".md", *PICTURES)) and (ROOT / path).is_file()


def linked_files(page: str) -> Iterator[str]:
    """The files of the repository that a page links to."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for _, link, _ in LINK.findall(text):
        if link and "://" not in link:
            yield link_target(page, link)


def outside_files(pages: list[str]) -> list[str]:
    """Files outside docs/ among these pages, or that they link to, directly or through one another."""
    reached = {page for page in pages if not page.startswith(DOCS)}
    waiting = list(pages)
    while waiting:
        for path in linked_files(waiting.pop()):
            if not path.startswith(DOCS) and published(path) and path not in reached:
                reached.add(path)
                waiting += [path] if path.endswith(".md") else []
    return sorted(reached)


def moved_links(markdown: str, uri: str) -> str:
    """The page's links as the site needs them; a link to a file that is not on the site leaves its text."""

    def moved(match: re.Match[str]) -> str:
        label, link, anchor = match.group(1), match.group(2), match.group(3) or ""
        if not link or "://" in link:
            return match.group()
        target = link_target(repository_path(uri), link)
        if not target.startswith(DOCS) and not published(target):
            return label[1:-1]
        return f"{label}({posixpath.relpath(site_uri(target), posixpath.dirname(uri) or '.')}{anchor})"

    # A label may hold code, so whole links are hidden from the search for code.
    return outside_fences(
        re.sub(r"\[`([^`\]\n]+)`\]\(", "[<code>\\1</code>](", markdown), lambda text: LINK.sub(moved, text)
    )


def names_of(rooms: list[str]) -> list[str]:
    """The public names whose modules lie in these rooms of attnlab, in the order of the package's list of modules."""
    return [
        name for module, names in attnlab._OFFERED.items() if module.split(".")[0] in rooms for name in names.split()
    ]


def definition_of(name: str) -> str:
    """The path at which a public name is defined: a module may bear the name of its function, so its alias misleads.

    >>> definition_of("convert")
    'attnlab.adapters.convert.convert'
    """
    value = getattr(attnlab, name)
    return f"{value.__module__}.{value.__qualname__}"


def members_of(name: str) -> str:
    """A mechanism is documented by its settings; the methods by which it works are those of every mechanism."""
    value = getattr(attnlab, name)
    settings = isinstance(value, type) and issubclass(value, attnlab.Mechanism) and value is not attnlab.Mechanism
    return "\n    options:\n      members: false" if settings else ""


def with_names(markdown: str) -> str:
    """Every mark of an API page replaced by what mkdocstrings documents there, each also under its public name."""

    def documented(match: re.Match[str]) -> str:
        names = names_of(match.group(1).split())
        return "\n\n".join(
            f'<span id="attnlab.{name}"></span>\n\n::: {definition_of(name)}{members_of(name)}' for name in names
        )

    return NAMES.sub(documented, markdown)


def command_table() -> str:
    """Every command of the command line: what it does, and an example."""
    rows = [f"| `{command.examples[0]}` | {command.summary} |" for command in COMMANDS.values()]
    return "\n".join(["| command | what it does |", "| --- | --- |", *rows])


def shown(output: Any, place: str) -> tuple[str, dict[str, str]]:
    """One output of a cell as HTML, and the files that it needs beside the page; ``place`` names them.

    A whole page, such as the explorer's, goes into a file of its own, in a frame.
    """
    if output.output_type == "stream":
        return (f"<pre><code>{html.escape(output.text)}</code></pre>", {}) if output.name == "stdout" else ("", {})
    content = output.data
    if "text/html" not in content:
        return f"<pre><code>{html.escape(content['text/plain'])}</code></pre>", {}
    frame = re.search(r'<iframe srcdoc="([^"]*)"', content["text/html"])
    if frame is None:
        return content["text/html"], {}
    title = html.escape(content.get("text/plain", "a page"))
    return f'<iframe class="page" title="{title}" src="{place}.html"></iframe>', {
        f"{place}.html": html.unescape(frame.group(1))
    }


def with_outputs(markdown: str, notebook: Any, name: str) -> tuple[str, dict[str, str]]:
    """A tutorial's page with the outputs below its cells, and the files that they need."""
    outputs = iter([cell.outputs for cell in code_cells(notebook)])
    files: dict[str, str] = {}

    def with_its_outputs(match: re.Match[str]) -> str:
        parts = []
        for number, output in enumerate(next(outputs)):
            part, more = shown(output, f"{name}-{len(files)}-{number}")
            parts.append(part)
            files.update(more)
        below = "".join(parts)
        return match.group() + (f'\n<div class="cell-output">{below}</div>\n' if below else "")

    return CELL.sub(with_its_outputs, markdown), files


def math_fence(source: str, *_: Any, **__: Any) -> str:
    """A fence of ``math`` in LaTeX as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    return f'<div class="math">{convert(source, display="block")}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and pictures outside docs/, and the notebooks of the tutorials that were run."""
    from mkdocs.structure.files import File

    pages = [repository_path(file.src_uri) for file in files.documentation_pages()]
    for path in outside_files([*pages, *IN_NAVIGATION]):
        files.append(File.generated(config, site_uri(path), abs_src_path=str(ROOT / path)))
    for page in tutorials():
        if (notebook := kept(page)) is not None:
            files.append(File.generated(config, f"tutorials/{page.stem}.ipynb", content=json.dumps(notebook, indent=1)))
    return files


def tutorial_page(markdown: str, page: Path, site: Path) -> str:
    """A tutorial as the site shows it, once it was run; the pages that its cells show are written beside it."""
    notebook = kept(page)
    if notebook is None:
        return markdown
    markdown, frames = with_outputs(markdown, notebook, page.stem)
    site.mkdir(parents=True, exist_ok=True)
    for file, content in frames.items():
        (site / file).write_text(content, encoding="utf-8")
    seconds = f"Run in {notebook.metadata['attnlab']['seconds']:.0f} seconds."
    return f"{markdown}\n\n---\n\n{seconds} [This page as a notebook]({page.stem}.ipynb)\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page as MkDocs is to read it."""
    source = ROOT / repository_path(page.file.src_uri)
    markdown = with_names(moved_links(markdown, page.file.src_uri)).replace(COMMAND_TABLE, command_table())
    return tutorial_page(markdown, source, Path(config.site_dir, "tutorials")) if source in tutorials() else markdown
