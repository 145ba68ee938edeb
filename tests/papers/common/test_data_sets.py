"""The list of data sets, and what ``python -m papers data --check`` says of a folder."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from pathlib import Path

import pytest

from papers.__main__ import main
from papers.common import data_sets as module
from papers.common.data_sets import DataSet, check_folder, data_sets, data_sets_in_markdown, reports_in_words
from papers.common.folders import command_of, experiments_like
from papers.common.translation import TASKS, read_filipino, read_task
from papers.effective.glue import TASKS as GLUE
from papers.ktiw.corpora import READERS

BY_FOLDER = {one.folder: one for one in data_sets()}


def test_every_data_set_that_is_read_is_listed() -> None:
    read = {task.folder for task in TASKS.values()} | {"oromo", "tagalog", "glue", "enwik8", "wikitext-103"}
    named = {
        name
        for experiment_name, experiment in experiments_like(None).items()
        for name in re.findall(r"\bdata/([\w-]+)", command_of(experiment_name, experiment))
    }
    ktiw = {name.removesuffix("-short") for name in READERS if not name.startswith("news-")}
    assert read | named | ktiw <= set(BY_FOLDER)
    tasks = {name.partition("/")[0] for names in BY_FOLDER["glue"].needs for name in names}
    assert tasks == set(GLUE)


@pytest.mark.parametrize("one", data_sets(), ids=lambda one: one.folder)
def test_a_data_set_has_address_licence_and_checksums_or_says_that_we_have_none(one: DataSet) -> None:
    assert one.address
    assert all(address.startswith("http") for address in one.address)
    assert one.licence
    assert one.used_by
    assert one.needs
    assert all(re.fullmatch(r"[0-9a-f]{64}", file["sha256"]) and file["bytes"] > 0 for file in one.files)
    assert set(one.also) <= {file["name"] for file in one.files}
    assert one.files or "We have none" in one.subset
    assert f"### {one.folder}\n" in data_sets_in_markdown()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """One data set of two files, of which ours is known."""
    content = b"a line\n"
    ours = {"name": "train.txt", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    one = DataSet(
        "d", "D", ("http://example.org/d",), "none", ("X",), (("train.txt", "all.zip"), ("test.txt",)), "", "",
        (ours, {**ours, "name": "more.txt"}), also=("more.txt",),
    )  # fmt: skip
    monkeypatch.setattr(module, "data_sets", lambda: (one,))
    return content


def test_a_folder_is_complete_incomplete_or_missing(listed: bytes, tmp_path: Path) -> None:
    assert check_folder(tmp_path)[0]["state"] == "missing"
    (tmp_path / "d").mkdir()
    # Compressed, it is the same file.
    (tmp_path / "d" / "train.txt.xz").write_bytes(lzma.compress(listed))
    [report] = check_folder(tmp_path)
    assert (report["state"], report["as_ours"], report["missing"]) == ("incomplete", ["train.txt"], ["test.txt"])
    more = "not there, but read for our results: more.txt"
    said = "d: incomplete; as ours: train.txt; missing: test.txt (http://example.org/d)"
    assert reports_in_words([report]) == f"{said}; {more}"
    (tmp_path / "d" / "test.txt").write_text("another")
    (tmp_path / "d" / "train.txt.xz").unlink()
    (tmp_path / "d" / "all.zip").touch()
    [report] = check_folder(tmp_path)
    assert (report["state"], report["as_ours"], report["other"]) == ("complete", [], ["all.zip", "test.txt"])
    (tmp_path / "d" / "more.txt").write_bytes(listed)
    [report] = check_folder(tmp_path)
    assert (report["as_ours"], report["without"]) == (["more.txt"], [])
    assert more not in reports_in_words([report])


def test_the_command_says_it(listed: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("d: missing; missing: train.txt or all.zip, test.txt (http")
    assert main(["data", "--check", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "missing"
    assert main(["data", "--check", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_list_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(data_sets())


def test_pairs_are_read_as_published(tmp_path: Path) -> None:
    (tmp_path / "tatoeba-spa-eng").mkdir()
    lines = "".join(f"Go {i}.\tVe {i}.\tCC-BY 2.0 (France)\n" for i in range(300))
    (tmp_path / "tatoeba-spa-eng" / "spa.txt").write_text(lines)
    train = read_task(TASKS["tatoeba-es-en"], tmp_path)["train"]
    assert (train.source[0][:2], train.target[0][:2]) == ("Ve", "Go")
    alt = tmp_path / "ALT-Parallel-Corpus"
    alt.mkdir()
    (alt / "data_fil.txt").write_text("SNT.1\tisa\nSNT.2\tdalawa\nSNT.3\n")
    (alt / "data_en.txt").write_text("SNT.2\ttwo\nSNT.1\tone\n")
    assert read_filipino(tmp_path) == (["isa", "dalawa"], ["one", "two"])
