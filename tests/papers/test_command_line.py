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


@pytest.mark.parametrize(
    "experiment",
    [
        ("value-aware", "--corpus", "stores", "--work", "runs"),
        ("effective", "--data", "glue", "--tagger", "tagger.json"),
        ("effective-patterns", "--texts", "texts.txt"),
        ("effective-classifier",),
        ("abc-family",),
    ],
    ids=lambda experiment: experiment[0],
)
def test_an_experiment_asks_for_its_folder_before_the_work(
    experiment: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*experiment, "--out", str(tmp_path / "nowhere" / "result.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nowhere is no folder" in err
    assert err.count("\n") == 1


def test_help_names_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("wiki-corpus", "value-aware", "effective", "effective-maps"))
