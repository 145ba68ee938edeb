"""Results beside the papers' numbers, and pages whose tables are made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papers.common.docs_tables import fill_pages, fill_tables, markdown_table, stale_pages
from papers.common.folders import beside_paper, load_results, paper_table


def _result(rows: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    return {"name": "r", "commit": "a", "tables": {"t": rows}, **extra}


def test_paper_tables_hold_the_papers_numbers() -> None:
    table = {row["dataset"]: row for row in paper_table("ktiw-table2", "table_2")}
    assert (table["Multi30k"]["a_alpha_beta"], table["News En-Pt"]["xi_star"], table["SST"]["xi_uf_px"]) == (
        48.78,
        67.75,
        83.53,
    )
    assert len(paper_table("abc-mt", "table_5")) == 10
    assert paper_table("effective", "table_2")[8]["heterogeneous"] == 50.4
    assert paper_table("value-aware", "nothing") == []
    row = beside_paper(
        [{"model": "BASE", "n": None, "perplexity": 31.0, "seed": 3}],
        results="abc-lm",
        table="table_2b",
        keys=["model", "n"],
    )
    assert row == [{"model": "BASE", "n": None, "perplexity": 31.0, "seed": 3, "perplexity_paper": 18.5}]


def test_unreadable_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not readable JSON"):
        load_results(tmp_path)
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        load_results(tmp_path)
    assert load_results(tmp_path / "none") == {}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    rows = [{"m": "a|b", "x": 0.123456, "x_paper": 0.2, "r": [1, 2.5]}, {"m": "c", "x": None}]
    (tmp_path / "results" / "r.json").write_text(json.dumps(_result(rows)))
    (tmp_path / "README.md").write_text("# T\n<!-- table:results/r.json#t columns=m,x -->\nold\n<!-- /table -->\nend\n")
    (tmp_path / "docs" / "p.md").write_text("<!-- table:results/r.json#t -->\n<!-- /table -->\n")
    return tmp_path


def test_pages_are_filled_and_stale_ones_found(repository: Path) -> None:
    with pytest.raises(ValueError, match=r"README\.md.*not what the results say"):
        fill_pages(repository, check=True)
    fill_pages(repository)
    assert (repository / "README.md").read_text() == (
        "# T\n<!-- table:results/r.json#t columns=m,x -->\n"
        "| m | x |\n| --- | ---: |\n| a\\|b | 0.123 |\n| c | \u2013 |\n<!-- /table -->\nend\n"
    )
    assert "| m | x | x (paper) | r |" in (repository / "docs" / "p.md").read_text()
    assert "| a\\|b | 0.123 | 0.2 | 1 to 2.5 |" in (repository / "docs" / "p.md").read_text()
    assert (repository / "docs" / "claims.md").read_text().startswith("# Claims")
    assert stale_pages(repository) == {}
    fill_pages(repository, check=True)


@pytest.mark.parametrize("page", ["notes/n.md", "papers/OVERVIEW.md", "papers/abc/RESULTS.md"])
def test_notes_and_pages_of_papers_are_filled_too(repository: Path, page: str) -> None:
    path = repository / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("<!-- table:results/r.json#t columns=m -->\n<!-- /table -->\n")
    assert path in stale_pages(repository)
    fill_pages(repository)
    assert "| c |" in path.read_text()


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ("results/none.json#t", "does not exist"),
        ("results/r.json#u", "has no table u; it has t"),
        ("results/r.json#t columns=y", "no column y; the table has m, x, x_paper, r"),
        ("results/r.json#t with=y", "no column y; the table has m, r, x, x_paper"),
        ("results/r.json#t rows=3", "unknown option rows"),
    ],
)
def test_a_page_that_names_a_missing_table_is_an_error(repository: Path, region: str, message: str) -> None:
    text = f"<!-- table:{region} -->\n<!-- /table -->"
    with pytest.raises(ValueError, match=message):
        fill_tables(text, repository)
    (repository / "docs" / "p.md").write_text(text)
    with pytest.raises(ValueError, match=r"p\.md"):
        fill_pages(repository, check=True)


def test_an_example_of_a_mark_in_a_code_fence_is_left_alone(repository: Path) -> None:
    fenced = "```\n<!-- table:results/none.json#t -->\n<!-- /table -->\n```\n"
    real = "<!-- table:results/r.json#t columns=m -->\n<!-- /table -->\n"
    filled = fill_tables(fenced + real + fenced, repository)
    assert filled.startswith(fenced)
    assert filled.endswith(fenced)
    assert "| c |" in filled


def test_markdown_tables_align_numbers() -> None:
    assert markdown_table([{"a": None, "b": 1}, {"a": "x", "b": 20_000}]).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| \u2013 | 1 |",
        "| x | 20,000 |",
    ]
