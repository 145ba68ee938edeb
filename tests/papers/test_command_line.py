"""The command line of the papers: ``python -m papers``."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.__main__ import main


def test_figures_2_and_7(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "maps.html"
    assert main(["effective-maps", "--text", "The old ferry stayed in the harbour.", "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "harbour" in page.read_text() or "##bour" in page.read_text()


def test_the_folder_of_results_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "not" / "yet" / "result.json"
    assert main(["abc-family", "--out", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out


def test_help_names_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("wiki-corpus", "value-aware", "effective", "effective-maps"))
