"""Every experiment shows its progress on standard error, through the one helper or the training loop's own line."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnlab.progress import QUIET, each, note, showing
from papers.__main__ import main
from papers.common.folders import RESULTS, experiments_like
from papers.common.row_store import Part

# What runs without a corpus, in a second or in some, and its arguments; {out} is a path of the test's own.
CHEAP = {
    "data": "--check {data}",
    "claims": f"--results {RESULTS} --out {{out}}.html",
    "value-aware-words": "--wikitext {data} --out {out}",
    "effective-maps": "--text 'The cat sat.' --out {out}.html",
    "effective-figures": f"--results {RESULTS} --out {{out}}",
    "abc-family": "--out {out}.json",
    "abc-figures": f"--results {RESULTS} --out {{out}}",
    "guidance-patterns": "--out {out}.html",
    "ktiw-figures": f"--results {RESULTS} --out {{out}}",
}
SLOW = {
    "ktiw-diagnosis": "--out {out}.json",
    "abc-decoding": "--work {out} --out {out}.json",
    "effective-patterns": "--texts {data}/texts.txt --out {out}.json",
    "effective-classifier": "--out {out}.json",
    "ktiw-permutations": "--out {out}.json",
    "ktiw-multihead": "--out {out}.json",
    "ktiw-local": "--out {out}.json",
    "ktiw-permute-function": "--out {out}.json",
    "truth": "--work {out} --out {out}.json",
}
# What needs a corpus or a whole run: by what it reports.
ELSEWHERE = {
    "docs": "stale_pages: each page; test_docs.py runs it",
    "wiki-corpus": "prepare_wiki_corpus: articles and stores; test_wiki_corpus.py runs it",
    "shipped-lm": "the training loop's lines, then each length",
    "value-aware": "reproduce: the rows of its processes",
    "value-aware-lm": "measure: each mechanism and batch of windows",
    "effective": "run: the rows of its processes",
    "abc-lm": "Part",
    "abc-mt": "Part",
    "abc-doc-mt": "Part",
    "abc-mlm": "Part",
    **dict.fromkeys(("abc-lm-arm", "abc-mlm-arm", "guidance-electra-arm", "ktiw-bases"), "the training loop"),
    "abc-distill": "Part",
    "guidance": "run_parts: each part",
    "guidance-arm": "the training loop",
    **dict.fromkeys(("ktiw-data", "ktiw-proxy-rates"), "_read_corpora: each data set"),
    **dict.fromkeys(
        ("ktiw-table2", "ktiw-tau", "ktiw-train", "ktiw-frozen", "ktiw-logreg", "ktiw-optimal"), "the training loop"
    ),
    "ktiw-alignment": "write_alignment",
    "ktiw-transformers": "the training loop",
    "truth-rxnmapper": "a few files, at once; test_truth.py runs it",
}


def test_every_experiment_is_one_of_these() -> None:
    assert {*CHEAP, *SLOW, *ELSEWHERE} == set(experiments_like(None))
    assert len(CHEAP) + len(SLOW) + len(ELSEWHERE) == len(experiments_like(None))


@pytest.mark.parametrize("name", [*CHEAP, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_quick_run_reports_its_progress(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(" = Fox = \n\n The fox runs .\n")
    (tmp_path / "texts.txt").write_text("The fox runs.\n")
    words = shlex.split({**CHEAP, **SLOW}[name].format(data=tmp_path, out=tmp_path / "out"))
    assert main([name, *words, "--quick"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith((f"{name}: ", "step ")) for line in lines[1:]), lines


def test_lines_are_written_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    note("outside of an experiment")
    with showing("copying"):
        assert list(each([1, 2, 3], lambda number: f"seed {number}")) == [1, 2, 3]
    assert capsys.readouterr().err == "copying: seed 1 (1 of 3)\n"


def test_a_line_comes_once_and_then_not_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("attnlab.progress.time", SimpleNamespace(monotonic=lambda: now))
    with showing("copying"):
        for seconds in (0.0, 3.0, QUIET - 1, QUIET, QUIET + 3, 2 * QUIET - 1, 2 * QUIET):
            now = 100 + seconds
            note(f"after {seconds:g} s")
    assert capsys.readouterr().err == "copying: after 0 s\ncopying: after 10 s\ncopying: after 20 s\n"


def test_rows_are_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with showing("copying"):
        Part(tmp_path / "part.json").row("table_1", r=2)
    assert capsys.readouterr().err == "copying: table_1: 1 rows\n"
