"""Tables in the repository's pages that are made from results files, never typed: ``python -m papers docs``.

A page marks where a table goes; what stands between the marks is replaced:

    <!-- table:papers/results/value-aware.json#table_1 columns=mechanism,mlm_error,mlm_error_paper -->
    <!-- /table -->

The name of a column that has spaces is written with underscores. ``with=column,column`` shows only the rows
that have something in one of these columns, where a table's rows are of several kinds.

Pages of a paper's folder mark where the list of its experiments goes, the line of its headline claims with their
verdicts, and the table of its results files with device, time, commit and command:

    <!-- experiments:abc -->
    <!-- /experiments -->
    <!-- headline:abc -->
    <!-- /headline -->
    <!-- sources:abc -->
    <!-- /sources -->

papers/DATA.md marks where the list of data sets goes, by ``<!-- data-sets -->``.

The pages are README.md, docs/*.md, docs/*/*.md, notes/*.md, papers/*.md and papers/*/*.md. ``--check`` changes nothing
and fails if
a page is stale, docs/claims.md included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.pages.numbers import number
from attnlab.pages.tables import columns_of
from attnlab.progress import each
from attnlab.provenance import write_atomic
from papers.common.data_sets import data_sets_in_markdown
from papers.common.folders import experiments_in_markdown, load_results, result_folder
from papers.common.ledger_page import claims_page, headline
from papers.common.scale import undertrained
from papers.common.sources import source_rows

__all__ = ["fill_pages", "fill_tables", "markdown_table", "stale_pages"]

REGION = re.compile(
    r"(?P<open><!-- table:(?P<file>[^\s#]+)#(?P<table>\S+)(?P<options>[^\n]*?) -->\n)"
    r".*?(?P<close><!-- /table -->)",
    re.DOTALL,
)
PAGES = ("README.md", "docs/*.md", "docs/*/*.md", "notes/*.md", "papers/*.md", "papers/*/*.md")
OF_FOLDERS = re.compile(
    r"(?P<open><!-- (?P<kind>experiments|headline|sources):(?P<folder>\w+) -->\n).*?(?P<close><!-- /(?P=kind) -->)",
    re.DOTALL,
)
DATA_SETS = re.compile(r"(?P<open><!-- data-sets -->\n).*?(?P<close><!-- /data-sets -->)", re.DOTALL)

FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def markdown_table(rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] = ()) -> str:
    """Rows as a Markdown table: all columns with the paper's beside ours, or the named ones in their order.

    >>> print(markdown_table([{"model": "BASE", "bleu": 26.1, "bleu_paper": 27.2}]))
    | model | bleu | bleu (paper) |
    | --- | ---: | ---: |
    | BASE | 26.1 | 27.2 |
    """
    known = columns_of(rows)
    by_key = {c.key: c for c in known}
    missing = [key for key in columns if key not in by_key]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}; the table has {', '.join(by_key)}")
    chosen = [by_key[key] for key in columns] if columns else known
    lines = [
        _line(c.title for c in chosen),
        _line("---:" if _numeric([row.get(c.key) for row in rows]) else "---" for c in chosen),
        *(_line(number(_plain(row.get(c.key))) for c in chosen) for row in rows),
    ]
    return "\n".join(lines)


def fill_tables(text: str, root: Path) -> str:
    """The page with every marked region filled, from the results file or the paper's folder that it names."""

    def of_folder(region: re.Match[str]) -> str:
        folder = region["folder"]
        if region["kind"] == "experiments":
            content = experiments_in_markdown(folder)
        else:
            results = load_results(root / "papers" / "results")
            content = headline(folder, results) if region["kind"] == "headline" else _sources(folder, results)
        return f"{region['open']}{content}\n{region['close']}"

    def filled(part: str) -> str:
        with_tables = OF_FOLDERS.sub(of_folder, REGION.sub(lambda region: _table(region, root), part))
        return DATA_SETS.sub(
            lambda region: f"{region['open']}{data_sets_in_markdown()}\n{region['close']}", with_tables
        )

    # A mark inside a code fence is an example and stays as it is.
    parts = FENCE.split(text)
    return "".join(part if i % 2 else filled(part) for i, part in enumerate(parts))


def _sources(folder: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    mine = {name: result for name, result in results.items() if result_folder(name) == folder}
    return markdown_table(source_rows(mine))


def _table(region: re.Match[str], root: Path) -> str:
    """A marked region with its table."""
    path = root / region["file"]
    if not path.exists():
        raise ValueError(f"{region['file']} does not exist; a table on the page names it")
    content = json.loads(path.read_text(encoding="utf-8"))
    tables = content.get("tables") or {}
    if region["table"] not in tables:
        raise ValueError(f"{region['file']} has no table {region['table']}; it has {', '.join(tables) or 'none'}")
    options = dict(option.split("=", 1) for option in region["options"].split())
    unknown = set(options) - {"columns", "with"}
    if unknown:
        raise ValueError(
            f"unknown option {', '.join(sorted(unknown))} in {region['open'].strip()}; there are: columns, with"
        )
    rows = tables[region["table"]]
    known = {column.key for column in columns_of(rows)}

    def named(option: str) -> list[str]:
        # A mark has no spaces, so that a name with spaces is written with underscores.
        return [c if c in known else c.replace("_", " ") for c in options.get(option, "").split(",") if c]

    columns, kinds = named("columns"), named("with")
    if unknown_kinds := set(kinds) - known:
        raise ValueError(f"no column {', '.join(sorted(unknown_kinds))}; the table has {', '.join(sorted(known))}")
    if kinds:
        rows = [row for row in rows if any(row.get(kind) is not None for kind in kinds)]
    short = undertrained(path.stem, region["table"], content)
    warning = "" if short is None else f"**{short}**\n\n"
    return region["open"] + warning + markdown_table(rows, columns=columns) + "\n" + region["close"]


def stale_pages(root: Path) -> dict[Path, str]:
    """The pages whose generated parts are not what the results say, with what they should hold."""
    claims = root / "docs" / "claims.md"
    wanted = {claims: claims_page(load_results(root / "papers" / "results"))[1]} if claims.parent.exists() else {}
    for path in each(sorted(path for pattern in PAGES for path in root.glob(pattern)), lambda path: path.name):
        if path != claims:
            text = path.read_text(encoding="utf-8")
            try:
                wanted[path] = fill_tables(text, root)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
    return {p: new for p, new in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != new}


def fill_pages(root: Path, *, check: bool = False) -> None:
    """Fill the pages of a repository; with ``check`` nothing is written, and a stale page is a ValueError."""
    stale = stale_pages(root)
    if check and stale:
        raise ValueError(f"{', '.join(map(str, stale))}: not what the results say; run python -m papers docs")
    for path, text in stale.items():
        write_atomic(path, text)
        print(f"wrote {path}")


def _numeric(values: Sequence[Any]) -> bool:
    """Whether a column holds numbers, with gaps at most."""
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _plain(value: Any) -> Any:
    return " to ".join(number(v) for v in value) if isinstance(value, list) else value
