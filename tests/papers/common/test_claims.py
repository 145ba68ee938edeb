"""Every claim's predicate is real code: it holds on the paper's own numbers and fails on others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.commands.report import report_runs
from attnlab.pages.numbers import MISSING
from papers.common.cells import cell
from papers.common.claims import (
    HELD,
    NOT_HELD,
    NOT_RUN,
    NOT_TESTABLE,
    Claim,
    Verdict,
    all_of,
    at_least,
    close,
    compared,
    everywhere,
    judge,
    less,
    unless,
)
from papers.common.folders import load_results
from papers.common.ledger_page import (
    all_claims,
    claims_in,
    claims_json,
    claims_page,
    headline,
    papers_of,
    report_claims,
    tables_wanted,
)
from tests.pages.examples import write_run
from tests.pages.parsing import parse
from tests.papers.common.made_up import SPOILED, as_the_papers_say, spoiled

CLAIMS = {claim.name: claim for claim in all_claims()}
PAPERS = papers_of(all_claims())


def _claim(test: Any) -> Claim:
    return Claim("c", "OVA", "Table 1", "statement", "1", "r", test)


def _judged(test: Any, rows: list[dict[str, Any]], **extra: Any) -> Verdict:
    return judge(_claim(test), {"r": {"name": "r", "tables": {"t": rows}, **extra}})


def test_names_are_unique_and_every_paper_has_claims() -> None:
    assert len(CLAIMS) == len(all_claims())
    assert list(PAPERS)[:5] == ["AG", "KTIW", "Effective", "ABC", "OVA"]
    assert all(PAPERS.values())
    assert set(SPOILED) <= set(CLAIMS)


@pytest.mark.parametrize("name", ["ova-worked-example", *SPOILED])
def test_claim_holds_on_the_papers_numbers(name: str) -> None:
    verdict = judge(CLAIMS[name], as_the_papers_say())
    assert verdict.state == HELD, verdict
    assert verdict.ours


@pytest.mark.parametrize("name", SPOILED)
def test_claim_does_not_hold_on_other_numbers(name: str) -> None:
    assert judge(CLAIMS[name], spoiled(name)).state == NOT_HELD


@pytest.mark.parametrize("name", SPOILED)
def test_claim_without_results_is_not_run(name: str) -> None:
    claim = CLAIMS[name]
    assert judge(claim, {}).state == NOT_RUN
    verdict = judge(claim, {claim.results: {"name": claim.results, "tables": {}}})
    assert verdict.state == NOT_RUN
    assert "no table" in verdict.reason


@pytest.mark.parametrize("name", SPOILED)
def test_claim_reads_only_tables_and_columns_that_are_documented(name: str) -> None:
    claim = CLAIMS[name]
    documented = tables_wanted()[claim.results]
    assert claim.test.cells
    for wanted in claim.test.cells:
        assert wanted.table in documented
        for column in (wanted.column, *(key for key, _ in wanted.where)):
            assert column in documented[wanted.table], (wanted.table, column)


def test_paired_seeds_give_an_interval_and_decide_by_it() -> None:
    test = less(cell("t", "loss", m="a"), cell("t", "loss", m="b"))
    # Differences 1, 2, 3: mean 2, t interval -0.484 to 4.484; with 1.9, 2.0, 2.1 it excludes zero.
    wide = [{"m": m, "seed": s, "loss": v} for m, vs in (("a", (1, 1, 1)), ("b", (2, 3, 4))) for s, v in enumerate(vs)]
    verdict = _judged(test, wide)
    assert verdict.state == NOT_TESTABLE
    assert verdict.interval == pytest.approx((-0.484, 4.484), abs=1e-3)
    assert verdict.ours == "1 against 3"
    narrow = [{**row, "loss": {2: 2.9, 3: 3.0, 4: 3.1}.get(row["loss"], row["loss"])} for row in wide]
    assert _judged(test, narrow).state == HELD
    other_way = less(cell("t", "loss", m="b"), cell("t", "loss", m="a"))
    assert _judged(other_way, narrow).state == NOT_HELD
    # Without b's last seed the two that both have count: differences 1.9 and 2.0.
    shared = _judged(test, [row for row in narrow if row != narrow[-1]])
    assert (shared.state, shared.ours) == (HELD, "1 against 2.95")
    assert shared.interval == pytest.approx((1.315, 2.585), abs=1e-3)


def test_a_claim_can_bring_its_own_interval_and_a_reason_why_it_is_not_decided() -> None:
    rows = [{"m": "a", "loss": 1.0}, {"m": "b", "loss": 2.0}]

    def test(*bounds: float) -> Any:
        first, second = (cell("t", "loss", m=m) for m in "ab")
        return compared(first, second, lambda a, b: b - a, bounds=lambda _: bounds or None)

    alone = _judged(test(), rows)
    assert (alone.state, alone.ours, alone.seeds, alone.interval) == (HELD, "1 against 2", 1, None)
    assert alone.reason == "the margin is 1, on the claim's side"
    assert _judged(test(-0.1, 2.1), rows).state == NOT_TESTABLE
    assert _judged(test(0.2, 1.8), rows).interval == (0.2, 1.8)
    # The mean margin, 1, is outside: that interval was made from other numbers.
    assert _judged(test(2.5, 3.5), rows).interval is None
    small = _judged(unless(lambda _: "too small", test()), rows)
    assert (small.state, small.ours, small.reason) == (NOT_TESTABLE, "1 against 2", "too small")
    assert _judged(unless(lambda _: None, test()), rows).state == HELD


def test_a_part_that_is_refuted_decides_though_another_was_not_run() -> None:
    rows = [{"m": "a", "loss": 1.0}, {"m": "b", "loss": 2.0}]
    a, b, none = (cell("t", "loss", m=m) for m in ("a", "b", "none"))
    assert _judged(all_of(less(b, a), less(a, none)), rows).state == NOT_HELD
    assert _judged(all_of(less(a, b), less(a, none)), rows).state == NOT_RUN
    both = _judged(all_of(less(a, b), less(b, a)), rows)
    assert both.reason == "2 against 1: the margin is -1, against the claim"
    assert [part.state for part in both.comparisons()] == [HELD, NOT_HELD]


def test_close_bounded_and_everywhere() -> None:
    rows = [{"d": "x", "a": 1.0, "b": 1.1}, {"d": "y", "a": 1.0, "b": 3.0}, {"d": "z", "a": None, "b": 1.0}]
    near = lambda d: close(cell("t", "a", d=d), cell("t", "b", d=d), within=0.2)  # noqa: E731
    assert _judged(near("x"), rows).state == HELD
    assert _judged(near("y"), rows).state == NOT_HELD
    assert _judged(near("z"), rows) == Verdict(NOT_RUN, reason="missing: a for d z, in table t")
    assert _judged(close(cell("t", "a", d="y"), cell("t", "b", d="y"), relative=0.7), rows).state == HELD
    together = _judged(everywhere("t", "d", near), rows)
    assert (together.state, together.ours) == (NOT_HELD, "1 of 2")
    assert together.reason == "all must hold: x 1 against 1.1; y 1 against 3 (not held)"
    assert [part.label for part in together.parts] == ["x", "y"]
    apart = lambda d: less(cell("t", "b", d=d), cell("t", "a", d=d))  # noqa: E731
    assert _judged(everywhere("t", "d", apart), rows).reason == "all must hold: x 1.1 against 1; y 3 against 1"
    spread = [{"d": "x", "seed": seed, "a": 1.0, "b": b} for seed, b in enumerate((0.5, 1.6))]
    unsure = _judged(everywhere("t", "d", apart), spread)
    assert (unsure.state, unsure.ours) == (NOT_TESTABLE, "0 of 1")
    assert unsure.reason == "all must hold: x 1.05 against 1 (its interval includes zero)"
    assert _judged(all_of(near("x")), rows) == _judged(near("x"), rows)
    assert _judged(everywhere("t", "d", near, share=0.5), rows).state == HELD
    assert _judged(at_least(cell("t", "b", d="x"), 1.1), rows).state == HELD
    with pytest.raises(ValueError, match="state must be one of held"):
        Verdict("maybe")


def test_seeds_are_averaged_and_ambiguous_rows_are_refused() -> None:
    results = as_the_papers_say()
    results["abc-decoding"]["tables"]["figure_1"] += [
        {"model": "RFA", "length": 4096, "tokens_per_second": 884.0, "seed": 1}
    ]
    assert judge(CLAIMS["abc-decoding-beats-rfa"], results).ours == "1.18 times at 4,096 tokens"
    test = at_least(cell("t", "x", m="a"), 1.0)
    verdict = _judged(test, [{"m": "a", "split": s, "x": 2.0} for s in ("dev", "test")])
    assert verdict.state == NOT_RUN
    assert verdict.reason == "table t has several rows for m a with the same seed; one is expected"
    del results["ktiw-multihead"]["tables"]["figure_6"][0]["learned"]
    assert judge(CLAIMS["ktiw-bad-heads-fail"], results).reason == "a row of the results has no column learned"


def test_the_page_and_the_markdown_count_and_list_every_claim() -> None:
    results = spoiled("ova-longer-is-better")
    del results["ktiw-frozen"]
    html, markdown = claims_page(results)
    tree = parse(html)
    variants = sum(claim.is_variant for claim in CLAIMS.values())
    own = len(CLAIMS) - variants
    summary = f"Of the papers' {own} claims, {own - 2} held, 1 not held, 1 not run yet. Of our {variants} variants"
    assert tree.one("p", "lead").text.startswith(summary)
    assert summary in markdown
    listed = sum(len(tree.figure(f"claims-{paper.lower()}").one("tbody").all("tr")) for paper in PAPERS)
    assert listed == own
    with_variants = {claim.paper.lower() for claim in CLAIMS.values() if claim.is_variant}
    assert sum(len(tree.figure(f"variants-{p}").one("tbody").all("tr")) for p in with_variants) == variants
    sections = markdown.split("\n## ")
    [of_variants] = [part for part in sections if part.startswith("Our variants")]
    assert of_variants.count("\n| ") == variants + 2 * len(with_variants)
    assert sum(part.count("\n| ") for part in sections[1 : 1 + len(PAPERS)]) == own + 2 * len(PAPERS)
    by_paper = {row[0]: row[1:] for row in tree.figure("verdicts").data()["table"]["rows"]}
    of_ova = sum(claim.paper == "OVA" and not claim.is_variant for claim in CLAIMS.values())
    assert by_paper["OVA"][:2] == [of_ova - 1, 1]
    assert by_paper["KTIW"][3] == 1
    failed = [node.text for node in tree.all("span", "failed")]
    assert failed == [NOT_HELD]
    assert "| Figure 3 | 24.2 against 26.6 | 27 against 26.6 | \u2013 | single run | not held |" in markdown


def test_every_row_of_the_ledger_says_why_how_often_and_at_which_scale() -> None:
    """Over the results that are there: a reason, the runs, an interval where there are seeds, the scale."""
    results = load_results()
    for row in claims_json(results):
        verdict = judge(CLAIMS[row["name"]], results)
        assert row["reason"], row["name"]
        if verdict.state == NOT_RUN:
            continue
        seeds = [one for one in verdict.comparisons() if (one.seeds or 0) > 1]
        assert all(one.interval is not None for one in seeds), row["name"]
        if verdict.ours:
            assert row["runs"] == "computed" or "run" in row["runs"] or "seeds" in row["runs"]
        assert row["scale"] != MISSING or not CLAIMS[row["name"]].results, row["name"]


def test_every_paper_has_headline_claims() -> None:
    for folder in ("abc", "guidance", "ktiw", "effective", "value_aware"):
        line = headline(folder, as_the_papers_say())
        assert line.startswith("Headline claims as they stand:\n\n- ")
        assert line.count("**held**") == sum(bool(claim.headline) for claim in claims_in(folder)) >= 2


def test_commands_write_their_pages(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name, result in as_the_papers_say().items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(result))
    report = report_claims(results=tmp_path / "results", out=tmp_path / "c.html", markdown=tmp_path / "claims.md")
    assert {row["verdict"] for row in report["claims"]} == {HELD}
    assert (tmp_path / "claims.md").read_text().startswith("# Claims\n")
    json.dumps(report, allow_nan=False)
    run = write_run(tmp_path / "run", seed=0)
    assert report_runs([run], out=tmp_path / "r.html")["runs"][0]["metrics"] == {"eval_loss": 3.05}
    parse((tmp_path / "r.html").read_text())
    with pytest.raises(ValueError, match="is no folder"):
        report_claims(results=tmp_path / "nowhere")


def test_undertrained_language_models_say_so_on_the_first_line_of_their_table(tmp_path: Path) -> None:
    from papers.common.docs_tables import fill_tables
    from papers.common.scale import TRAINED, undertrained

    page = "<!-- table:papers/results/abc-lm.json#table_2a columns=model,perplexity -->\n<!-- /table -->"
    (tmp_path / "papers" / "results").mkdir(parents=True)
    for per_piece, short in ((TRAINED + 1, True), (TRAINED, False)):
        rows = [{"model": "BASE", "context": 0, "perplexity": 200.0, "perplexity_per_token": per_piece}]
        rows.append({**rows[0], "model": "Linformer", "perplexity_per_token": 500.0})
        result = {"name": "abc-lm", "config": {"layers": 3, "width": 8}, "tables": {"table_2a": rows, "training": []}}
        (tmp_path / "papers" / "results" / "abc-lm.json").write_text(json.dumps(result))
        first = fill_tables(page, tmp_path).splitlines()[1]
        assert first.startswith("**Undertrained: ") == short
        assert ("61 per piece" in first) == short
        assert (undertrained("abc-lm", "table_2b", result) is None) is True
        row = next(c for c in claims_json({"abc-lm": result}) if c["name"] == "abc-close-to-base")
        assert row["scale"].endswith(", undertrained") == short
