"""The row store: rows that outlive a kill, parts of several processes, results that grow, and the source of each row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlab import provenance
from papers.common import row_store
from papers.common.row_store import (
    Part,
    begin_work,
    choose_rows,
    collect,
    gather,
    make_results,
    merge_results,
    read_results,
    write_results,
)

KEYS = {"t": ["m", "r"]}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The commit and the command that rows are made by; a test may change them."""
    current: dict[str, str | None] = {"commit": "aaa", "command": "python -m papers first"}
    monkeypatch.setattr(row_store, "commit", lambda: current["commit"])
    monkeypatch.setattr(row_store, "provenance", lambda: provenance.provenance() | {"commit": current["commit"]})
    monkeypatch.setattr(row_store, "command_line", lambda: current["command"])
    return current


def _result(rows: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    return {"name": "r", "commit": "a", "tables": {"t": rows}, **extra}


def test_merging_replaces_the_same_settings_and_keeps_the_rest() -> None:
    old = _result([{"m": "a", "r": 1, "x": 0.5}, {"m": "a", "r": 2, "x": 0.6}])
    new = {
        "name": "r",
        "commit": "b",
        "tables": {"t": [{"m": "a", "r": 2, "x": 0.7}, {"m": "b", "r": 1, "x": 0.8}], "u": [{"y": 1.0}]},
    }
    merged = merge_results(old, new)
    assert merged["tables"] == {
        "t": [{"m": "a", "r": 1, "x": 0.5}, {"m": "a", "r": 2, "x": 0.7}, {"m": "b", "r": 1, "x": 0.8}],
        "u": [{"y": 1.0}],
    }
    assert (merged["commit"], merged["earlier"]) == ("b", [{"commit": "a"}])
    assert old["tables"]["t"][1]["x"] == 0.6
    assert merge_results(merged, merged)["tables"] == merged["tables"]


def test_merging_by_declared_keys() -> None:
    old = _result([{"m": "a", "steps": 10}], keys={"t": ["m"]})
    new = _result([{"m": "a", "steps": 20}])
    merged = merge_results(old, new)
    assert merged["tables"]["t"] == [{"m": "a", "steps": 20}]
    assert merged["keys"] == {"t": ["m"]}
    assert "earlier" not in merged
    with pytest.raises(ValueError, match="cannot be merged"):
        merge_results(old, {"name": "other"})


def test_a_row_is_on_disk_before_the_next_one_is_measured(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from papers.common.row_store import Part\n"
        "part = Part(Path(sys.argv[1])); part.row('t', m='a', x=1.0); part.row('t', m='b', x=2.0); os._exit(9)"
    )
    path = tmp_path / "part.json"
    assert subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True).returncode == 9
    assert gather({"p": path}).tables == {"t": [{"m": "a", "x": 1.0}, {"m": "b", "x": 2.0}]}
    assert list(tmp_path.iterdir()) == [path]


def test_rows_of_a_part_are_replaced_by_key_and_kept_without_keys(tmp_path: Path) -> None:
    part = Part(tmp_path / "p.json", keys=KEYS)
    part.extend("t", [{"m": "a", "r": 1, "x": 1.0}, {"m": "a", "r": 2, "x": 2.0}, {"m": "a", "r": 1, "x": 3.0}])
    part.extend("u", [{"m": "a"}, {"m": "a"}])
    assert [row["x"] for row in part.content["tables"]["t"]] == [2.0, 3.0]
    assert len(part.content["tables"]["u"]) == 2
    assert part.has("t", m="a", r=2)
    assert not part.has("t", m="b")
    part.add_tables({"empty": []})
    assert part.has("empty")
    assert not part.has("never made")


def test_every_row_has_the_commit_and_the_command_that_made_it(tmp_path: Path, source: dict[str, str | None]) -> None:
    Part(tmp_path / "one.json", keys=KEYS).row("t", m="a", r=1, x=1.0)
    source |= {"commit": "bbb"}
    Part(tmp_path / "one.json", keys=KEYS).row("t", m="a", r=2, x=2.0)
    source |= {"command": "python -m papers second"}
    Part(tmp_path / "two.json", keys=KEYS).row("t", m="b", r=1, x=3.0)
    rows = gather({name: tmp_path / f"{name}.json" for name in ("one", "two", "absent")})
    result = make_results("r", "ABC", rows.tables, config={"width": 8}, rows_of=rows, keys=KEYS)
    assert result["sources"] == [
        {"commit": "aaa", "command": "python -m papers first"},
        {"commit": "bbb", "command": "python -m papers first"},
        {"commit": "bbb", "command": "python -m papers second"},
    ]
    assert result["made_by"] == {"t": [0, 1, 2]}
    assert {"name", "paper", "config", "seed", "versions", "python", "device", "commit", "command"} <= set(result)


def test_sources_are_merged_with_the_rows(tmp_path: Path, source: dict[str, str | None]) -> None:
    old = make_results(
        "r", None, {"t": [{"m": "a", "r": 1, "x": 1.0}, {"m": "a", "r": 2, "x": 2.0}]}, config={}, keys=KEYS
    )
    assert (old["made_by"], "paper" in old) == ({"t": 0}, False)
    source |= {"commit": "ccc"}
    new = make_results("r", None, {"t": [{"m": "a", "r": 2, "x": 5.0}], "u": [{"y": 1.0}]}, config={}, keys=KEYS)
    merged = write_results(tmp_path / "r.json", new, before=old)
    assert merged == read_results(tmp_path / "r.json")
    assert [row["x"] for row in merged["tables"]["t"]] == [1.0, 5.0]
    assert [merged["sources"][place]["commit"] for place in merged["made_by"]["t"]] == ["aaa", "ccc"]
    assert merged["sources"][merged["made_by"]["u"]]["commit"] == "ccc"
    turned = choose_rows(merged, lambda table, rows: list(reversed(range(len(rows)))))
    assert [row["x"] for row in turned["tables"]["t"]] == [5.0, 1.0]
    assert turned["made_by"]["t"] == merged["made_by"]["t"][::-1]


def test_rows_of_a_file_without_sources_are_of_its_commit(source: dict[str, str | None]) -> None:
    old = _result([{"m": "a", "r": 1, "x": 1.0}])
    new = make_results("r", None, {"t": [{"m": "a", "r": 2, "x": 2.0}]}, config={}, keys=KEYS)
    merged = merge_results(old, new)
    made = [merged["sources"][place] for place in merged["made_by"]["t"]]
    assert made == [{"commit": "a", "command": None}, source]
    # Two files without sources stay without.
    assert "sources" not in merge_results(old, _result([{"m": "b", "x": 1.0}]))


def test_a_table_without_keys_keeps_rows_that_differ_in_numbers_only() -> None:
    rows = [{"what": "time", "value": 1.0}, {"what": "time", "value": 2.0}]
    merged = merge_results({"name": "r", "tables": {}}, _result(rows))
    assert merged["tables"]["t"] == rows


def test_the_commit_travels_with_a_copy_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "attnlab"
    package.mkdir()
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    commit = provenance.commit.__wrapped__
    monkeypatch.delenv("ATTNLAB_COMMIT", raising=False)
    assert commit() is None
    monkeypatch.setenv("ATTNLAB_COMMIT", "from-the-variable")
    assert commit() == "from-the-variable"
    (tmp_path / "COMMIT").write_text("from-the-file\n")
    assert commit() == "from-the-file"


def test_a_command_names_no_folder_of_the_machine() -> None:
    arguments = ["benchmarks/tokenise.py", "/home/me/text.xz", "--out=/home/me/r.json", "--lr", "0.1"]
    assert provenance.command_line(arguments) == "python benchmarks/tokenise.py text.xz --out=r.json --lr 0.1"
    others = ["x.py", "translation:/home/me/data", "https://a.b/c", "recall:0", "a=b=/c/d", "rfa:features=3"]
    assert provenance.command_line(others).split()[2:] == ["translation:data", *others[2:4], "a=b=d", others[5]]


def test_a_part_of_an_older_run_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"tables": {"t": [{"m": "a", "r": 1}]}, "facts": {}}))
    Part(path, keys=KEYS).row("t", m="b", r=1)
    rows = gather({"p": path})
    assert [row["m"] for row in rows.tables["t"]] == ["a", "b"]
    assert rows.made_by == {"t": [None, 0]}


def test_a_curve_that_is_shorter_the_second_time_keeps_no_point_of_the_first(tmp_path: Path) -> None:
    """Seed 0 is trained again, for 20 updates instead of 30; seed 1 is not."""
    keys, curves = {"curve": ["seed", "step"]}, {"curve": ["seed"]}
    for work, trainings in (("first", {0: 30, 1: 30}), ("again", {0: 20})):
        begin_work(tmp_path / work, {})
        part = Part(tmp_path / work / "part-a.json", keys=keys)
        for seed, steps in trainings.items():
            part.extend("curve", [{"seed": seed, "step": step, "loss": 1.0} for step in range(10, steps + 1, 10)])
        result = collect("r", "P", [tmp_path / work], tmp_path / "r.json", keys=keys, notes={}, curves=curves)
    steps = [(row["seed"], row["step"]) for row in result["tables"]["curve"]]
    assert sorted(steps) == [(0, 10), (0, 20), (1, 10), (1, 20), (1, 30)]
