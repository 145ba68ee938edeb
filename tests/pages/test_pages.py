"""The pages' structure and numbers, and that data can never become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnlab.pages import compare_page, element, run_page
from attnlab.pages.compare import finding
from attnlab.pages.html import data, join, page
from attnlab.pages.judge import judge_page
from attnlab.pages.maps import quantise
from attnlab.pages.runs import MOST_POINTS, curves, grouped, read_run

from .every_page import PAGES, write_page
from .examples import NASTY, a_comparison, a_comparison_with_maps, a_judgement, write_run
from .parsing import parse


def test_reports_never_import_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", seed=0)
    program = f"""
import sys
import papers.common.docs_tables
from attnlab.commands.report import report_runs
from papers.common.ledger_page import claims_page
report_runs([{str(folder)!r}], out={str(tmp_path / "page.html")!r})
claims_page({{}})
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_text_is_escaped_everywhere_and_the_payload_cannot_end_its_script() -> None:
    result = a_comparison_with_maps()
    result["rows"][1]["mechanism"] = NASTY
    result["model"]["name"] = result["text"]["name"] = result["introduction"] = NASTY
    result["rows"][-1]["refused"] = NASTY
    result["layers"] = {NASTY: [[0.5]]}
    result["tokens"][3] = NASTY
    result["device"] = NASTY
    result["config"] = {NASTY: NASTY}
    html = compare_page(result)
    tree = parse(html)
    assert not tree.all("img")
    assert "<script>alert" not in html
    scripts = [node for node in tree.all("script") if node.attributes.get("type") != "application/json"]
    # files.js, report.js and maps.js.
    assert len(scripts) == 3
    assert tree.one("div", "maps").data()["tokens"][3] == NASTY
    assert json.loads(tree.one("script", id="all").text)["model"]["name"] == NASTY


def test_policy_allows_the_page_s_own_scripts_and_nothing_else() -> None:
    tree = parse(page("title", element("p", "text")))
    policy = tree.one("meta", http_equiv="Content-Security-Policy").attributes["content"] or ""
    digests = [base64.b64encode(hashlib.sha256(node.text.encode()).digest()).decode() for node in tree.all("script")]
    assert "default-src 'none'" in policy
    assert policy.endswith("script-src " + " ".join(f"'sha256-{digest}'" for digest in digests))
    assert not tree.all("link")
    assert all("src" not in node.attributes for node in tree.all("script"))


def test_elements_escape_attributes_and_drop_none() -> None:
    assert element("a", None, "x", title='"<', data_x=None, hidden=True) == '<a title="&quot;&lt;" hidden>x</a>'
    assert join(["<", element("b", "&")]) == "&lt;<b>&amp;</b>"
    assert data({"a": "</script>\u2028"}) == (
        '<script type="application/json">{"a":"\\u003c/script\\u003e\\u2028"}</script>'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        data({"a": float("nan")})


def test_comparison_states_its_finding_from_the_numbers() -> None:
    stated = parse(finding(a_comparison())).text
    assert stated.startswith("value-aware:r=33 comes closest to exact attention: MLM error 41.2 %, where exact")
    assert "kernel:elu is furthest from it: MLM error 91.1 %." in stated
    assert "pairs" not in stated


def test_exact_rows_win_nothing_and_intervals_are_stated() -> None:
    result = a_comparison()
    aware = next(row for row in result["rows"] if row["mechanism"] == "value-aware:r=33")
    aware |= {"exact": True, "time_ratio": None, "memory_ratio": None}
    for name, (low, high) in {"top-r:r=33": (0.1, 0.3), "window:r=64": (0.2, 0.5), "kernel:elu": (2.0, 3.0)}.items():
        row = next(row for row in result["rows"] if row["mechanism"] == name)
        value = row["quality"]["value"]
        row["quality"] |= {"low": value - 0.025, "high": value + 0.025}
        row["quality"] |= {"loss_above": (low + high) / 2, "loss_above_low": low, "loss_above_high": high}
    stated = parse(finding(result)).text
    assert stated.startswith("top-r:r=33 comes closest to exact attention: MLM error 45 % [42, 47], where exact")
    assert "This text cannot tell it from window:r=64." in stated
    assert "value-aware:r=33 gives exact attention's own output here, by construction." in stated
    tree = parse(compare_page(result))
    timed = [row[0] for row in tree.figure("quality-and-time").data()["table"]["rows"]]
    assert "value-aware:r=33" not in timed
    assert "45 % [42, 47]" in tree.figure("mechanisms").text
    assert "44.7" not in tree.figure("mechanisms").text


def test_finding_without_quality_is_by_output_error_and_without_rows_says_so() -> None:
    result = a_comparison()
    for row in result["rows"]:
        row["quality"] = None
    assert "output error 2e-6" in parse(finding(result)).text
    assert "None of the mechanisms" in finding({"rows": [{"mechanism": "x", "refused": "no"}]})
    with pytest.raises(ValueError, match="needs 'rows'"):
        compare_page({"name": "compare"})


def test_a_perplexity_below_the_exact_one_is_no_closer_than_one_above() -> None:
    perplexities = {"top-r:r=8": 110.0, "kernel:elu": 70.0, "window:r=8": 95.0}
    rows = [
        {"mechanism": m, "quality": {"name": "perplexity", "value": v, "exact": 100.0}} for m, v in perplexities.items()
    ]
    stated = parse(finding({"rows": rows})).text
    assert stated == (
        "window:r=8 comes closest to exact attention: perplexity 95, where exact attention has 100. "
        "kernel:elu is furthest from it: perplexity 70."
    )


def test_comparison_page_has_table_scatter_heat_maps_and_refusals() -> None:
    tree = parse(compare_page(a_comparison()))
    table = tree.figure("mechanisms").data()["table"]
    assert table["columns"][:3] == ["mechanism", "quality", "output_error"]
    assert len(table["rows"]) == 9
    assert table["rows"][2][:4] == ["top-r:r=33", 0.447, 0.18, 0.12]
    assert "needs the previous layer's memory" in tree.one("div", "refused").text
    scatter = tree.figure("quality-and-time")
    assert len(scatter.all("path", "mark")) == 9 + 9
    assert scatter.data()["table"]["rows"][4] == ["value-aware:r=1", 2.1, pytest.approx(74.2)]
    heat = tree.figure("output-error-by-head")
    assert len(heat.all("div", "heat")) == 8
    assert len(heat.all("rect")) == 8 * 6 * 8
    assert "≥ 1" in heat.one("div", "key").text
    assert tree.figure("sweep-quality").data()["hover"]["series"][1]["x"] == [1, 2, 4, 8, 16, 33, 64, 128]


def test_errors_of_readings_are_columns_of_the_comparison_and_none_without_them() -> None:
    result = a_comparison()
    without = compare_page(result | {"rows": [row | {"reading_errors": {}} for row in result["rows"]]})
    assert "reading errors" not in without
    shown = compare_page(result | {"rows": [row | {"reading_errors": {"norm": 0.123}} for row in result["rows"]]})
    assert "norm error" in shown
    assert "0.123" in shown


def test_warnings_of_a_comparison_stand_on_its_page() -> None:
    assert "Warning" not in compare_page(a_comparison())
    shown = compare_page(a_comparison() | {"warnings": ["lsh:r=4 sees later tokens"]})
    assert "Warning: lsh:r=4 sees later tokens." in shown


def test_comparison_page_of_the_smallest_result() -> None:
    tree = parse(compare_page({"name": "compare", "rows": [{"mechanism": "kernel:elu", "output_error": 0.25}]}))
    assert "kernel:elu replaces exact attention: output error 0.25." in tree.one("p", "lead").text
    assert tree.figure("output-error").data()["table"]["rows"] == [["kernel:elu", 0.25]]
    parse(compare_page({"name": "compare", "rows": [{"mechanism": "kernel:elu", "refused": "why"}]}))


def test_comparison_page_packs_its_maps() -> None:
    result = a_comparison_with_maps()
    payload = parse(compare_page(result)).one("div", "maps").data()
    standard, effective = payload["maps"]
    assert (standard["layers"], standard["heads"], standard["queries"]) == (6, 8, len(result["tokens"]))
    assert not standard["signed"]
    assert effective["signed"]
    for packed, maps in ((standard, result["maps"]["standard"]), (effective, result["maps"]["effective"])):
        kind = np.int8 if packed["signed"] else np.uint8
        values = np.frombuffer(base64.b64decode(packed["data"]), dtype=kind) * packed["scale"]
        np.testing.assert_allclose(values, np.ravel(maps), atol=packed["scale"] / 2 * 1.001)
    inside = result | {"maps": {"tokens": result["tokens"], **result["maps"]}}
    del inside["tokens"], result["tokens"]
    assert parse(compare_page(inside)).one("div", "maps").data() == payload
    with pytest.raises(ValueError, match="need their 'tokens'"):
        compare_page(result)


def test_maps_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(layer, head, query, key\), got 3 dimensions"):
        quantise("standard", np.zeros((2, 3, 5)))
    result = a_comparison_with_maps()
    result["tokens"] = result["tokens"][:-1]
    with pytest.raises(ValueError, match="are 19 x 19, but there are 18 tokens"):
        compare_page(result)
    assert quantise("x", {"values": [[[[255, 0], [51, 204]]]], "scale": 1 / 255})["scale"] == pytest.approx(1 / 255)


def test_seeds_become_a_band_around_their_mean(tmp_path: Path) -> None:
    for seed, loss in ((0, 2.0), (1, 3.0), (2, 7.0)):
        folder = write_run(tmp_path / str(seed), seed=seed)
        lines = [{"step": s, "kind": "eval", "seconds": 1.0, "values": {"loss": loss + s}} for s in (0, 5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = grouped([read_run(tmp_path / str(seed)) for seed in range(3)])
    assert len(groups) == 1
    (series,) = curves(groups, "eval", "loss")
    assert (series.name, series.x, series.y) == ("mlm, 3 seeds", [0.0, 5.0], [4.0, 9.0])
    assert (series.low, series.high) == ([2.0, 7.0], [7.0, 12.0])
    tree = parse(run_page([tmp_path / str(seed) for seed in range(3)]))
    chart = tree.figure("eval-loss")
    assert len(chart.all("polygon", "band")) == 1
    assert len(chart.all("path", "faint")) == 3
    assert chart.data()["table"] == {
        "columns": ["series", "step", "loss", "low", "high"],
        "rows": [["mlm, 3 seeds", 0.0, 4.0, 2.0, 7.0], ["mlm, 3 seeds", 5.0, 9.0, 7.0, 12.0]],
    }


def test_run_page_tells_configurations_apart_and_shows_the_paper_beside_ours(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=0, lr=3e-4, finish=False, steps=500)]
    tree = parse(run_page(folders))
    assert "1 finished, 1 without a result yet" in tree.one("p", "lead").text
    runs = tree.figure("runs").data()["table"]
    assert runs["rows"][1][:4] == ["mlm", "no result yet", 0, "0.0003"]
    assert runs["rows"][1][runs["columns"].index("steps")] == 500
    names = [s["name"] for s in tree.figure("train-loss").data()["hover"]["series"]]
    assert names == ["mlm (lr 0.001)", "mlm (lr 0.0003)"]
    results = tree.figure("table_3a")
    assert results.data()["table"]["columns"] == ["run", "model", "bleu", "bleu_paper"]
    assert [cell.text for cell in results.all("td", "paper")] == ["27.2", "27.1"]
    assert "NVIDIA H200" in tree.text
    assert "d7d2dab0c1" in tree.text


def test_checkpoints_that_crowd_at_the_start_get_a_logarithmic_axis(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", seed=0, finish=False)
    steps = (0, 10, 50, 100, 150, 200, 250, 500, 4000)
    lines = [
        {"step": s, "kind": "eval", "seconds": 1, "values": {"valid/loss": 9 - s / 1000, "bad": None}} for s in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = parse(run_page([folder]))
    assert "The last evaluation loss is 5." in tree.one("p", "lead").text
    chart = tree.figure("eval-valid-loss")
    assert chart.data()["hover"]["x"] == [10.0, 4000.0, 62, 540, True]
    assert len(chart.data()["table"]["rows"]) == len(steps)
    assert not tree.all("figure", data_name="eval-bad")


def test_a_run_that_was_killed_or_resumed_is_still_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", seed=0, finish=False)
    entry = '{"step": %d, "kind": "train", "seconds": 1, "values": {"loss": %s}}\n'
    lines = entry % (0, "5.0") + entry % (10, "4.0") + entry % (20, "NaN") + entry % (10, "3.5") + entry % (30, "3.0")
    (folder / "metrics.jsonl").write_text(lines + '{"step": 40, "ki')
    run = read_run(folder)
    assert run.skipped == 1
    curve = run.curves["train", "loss"]
    assert (curve.steps, curve.values) == ([0.0, 10.0, 30.0], [5.0, 3.5, 3.0])
    assert "1 line of the metrics could not be read" in run_page([folder])
    (folder / "metrics.jsonl").unlink()
    parse(run_page([folder]))


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run\.json"):
        run_page([tmp_path])
    with pytest.raises(ValueError, match="at least one run folder"):
        run_page([])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        run_page([tmp_path])
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        run_page([tmp_path])


def test_long_runs_stay_small_pages(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", seed=0, steps=200_000)
    html = run_page([folder])
    assert len(html) < 300_000
    (series,) = parse(html).figure("train-loss").data()["hover"]["series"]
    assert len(series["x"]) <= MOST_POINTS + 1
    assert series["x"][-1] == 200_000


def test_runs_that_differ_in_nested_seeds_are_one_line(tmp_path):
    """``attnlab train`` records its seed in the settings of the model and of the loop."""
    for seed in (0, 1):
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        about = {
            "name": "lm",
            "seed": seed,
            "config": {"pretrain": {"seed": seed, "lr": 0.1}, "training": {"seed": seed}},
        }
        (folder / "run.json").write_text(json.dumps(about))
        lines = [
            {
                "step": s,
                "kind": "eval",
                "seconds": s,
                "values": {"valid/loss": 2.0 - s, "valid/lm": 2.0 - s, "valid/error": seed},
            }
            for s in (0, 1)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = run_page([tmp_path / "run-0", tmp_path / "run-1"])
    assert "lm, 2 seeds" in page
    assert "pretrain.seed" not in page
    # A single term's curve is that of the sum, drawn once; another metric is drawn.
    assert 'data-name="eval-valid-lm"' not in page
    assert "eval-valid-loss" in page
    assert "eval-valid-error" in page


def test_a_judgement_leads_with_the_policies_that_answered_everything_and_names_those_that_tie() -> None:
    lead = "With 25.0 % of the keys and the question unseen, {} nearest to the full cache: "
    rest = " over one task and length that the full cache can do, of 100 cases each; the intervals are in the table."
    result = a_judgement()
    assert lead.format("snapkv:window=16 stays") + "-0.20" + rest in judge_page(result)
    rows = [row for row in result["rows"] if row["budget"] == 0.25 and row["task"] == "needle" and row["length"] == 512]
    for row in rows:
        row["unseen"]["over_full"]["value"] = -0.1
    assert lead.format("h2o and snapkv:window=16 stay") + "-0.10" + rest in judge_page(result)
    # Beside a budget of all keys the full cache is no policy.
    whole = [{**row, "budget": 1.0} for row in result["rows"]]
    assert "full cache stays" not in judge_page({**result, "rows": whole})
    # A policy that refused a task is not compared on the others.
    second = [{**row, "length": 700} for row in result["rows"] if row["task"] == "needle" and row["length"] == 512]
    second = [{**row, "unseen": {"refused": "no"}} if row["policy"] == "h2o" else row for row in second]
    page = judge_page({**result, "rows": [*result["rows"], *second]})
    assert lead.format("snapkv:window=16 stays") + "-0.10 over 2 tasks and lengths" in page


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("explore") and name != "notebook"])
def test_regions_of_a_page_have_names_of_their_own(name: str, tmp_path: Path) -> None:
    """Who cannot see the page goes from region to region by their names."""
    content = write_page(name, tmp_path).read_text()
    names = re.findall(r'role="region" aria-label="([^"]*)"', content)
    assert sorted(set(names)) == sorted(names)
