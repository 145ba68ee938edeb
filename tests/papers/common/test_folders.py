"""Experiments and claims are found in folders: a new claim is one file, a new experiment two."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from papers.__main__ import _parser, main
from papers.common.claims import HELD, NOT_HELD, verdicts_on
from papers.common.folders import command_of, experiments_in, experiments_like, further_commands
from papers.common.row_store import Part, begin_work

CLAIMS = """
from papers.common.cells import cell
from papers.common.claims import Claim, less

CLAIMS = (
    Claim(
        name="made-up-less", paper="Made up", where="Table 1", statement="A is below B.", paper_value="1 against 2",
        results="made-up", test=less(cell("t", "loss", model="A"), cell("t", "loss", model="B")),
    ),
)
"""
CONFIG = """
LOSSES = {"A": 3.0, "B": 2.0}
"""
RUN = """
from pathlib import Path

from papers.common.folders import Experiment, add_out
from papers.common.row_store import make_results, write_results
from papers.made_up.config import LOSSES


def arguments(parser):
    add_out(parser, "made-up")
    parser.add_argument("--scale", type=float, default=1.0)


def run(options):
    rows = [{"model": model, "loss": options.scale * loss} for model, loss in LOSSES.items()]
    write_results(options.out, make_results("made-up", None, {"t": rows}, config={"scale": options.scale}))
    return options.out


EXPERIMENTS = {"made-up": Experiment("Two losses.", arguments, run, "--scale 2")}
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside the repository that holds the folder of one more paper."""
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").touch()
    return tmp_path


def papers(elsewhere: Path, *arguments: str) -> str:
    environment = {**os.environ, "ATTNLAB_PAPERS": str(elsewhere)}
    done = subprocess.run(
        [sys.executable, "-m", "papers", *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_new_claim_is_one_file(elsewhere: Path) -> None:
    (elsewhere / "made_up" / "claims.py").write_text(CLAIMS)
    (elsewhere / "results").mkdir()
    rows = [{"model": "A", "loss": 1.0}, {"model": "B", "loss": 2.0}]
    (elsewhere / "results" / "made-up.json").write_text(json.dumps({"name": "made-up", "tables": {"t": rows}}))
    page = elsewhere / "claims.html"
    printed = papers(elsewhere, "claims", "--results", str(elsewhere / "results"), "--out", str(page), "--json")
    [row] = [row for row in json.loads(printed)["claims"] if row["name"] == "made-up-less"]
    assert (row["verdict"], row["ours"], row["paper_value"]) == (HELD, "1 against 2", "1 against 2")
    assert "A is below B." in page.read_text()


def test_a_new_experiment_is_two_files_and_says_which_claims_it_supports(elsewhere: Path) -> None:
    (elsewhere / "made_up" / "config.py").write_text(CONFIG)
    (elsewhere / "made_up" / "run.py").write_text(RUN)
    listed = papers(elsewhere)
    assert "made-up: Two losses.\n    $ python -m papers made-up --scale 2\n" in listed
    (elsewhere / "made_up" / "claims.py").write_text(CLAIMS)
    out = elsewhere / "made-up.json"
    start = time.monotonic()
    printed = papers(elsewhere, "made-up", "--scale", "2", "--out", str(out))
    took = time.monotonic() - start
    assert printed.splitlines() == [
        f"wrote {out.resolve()}",
        f"{NOT_HELD}: A is below B. 6 against 4 (paper: 1 against 2)",
    ]
    result = json.loads(out.read_text())
    assert result["tables"]["t"] == [{"model": "A", "loss": 6.0}, {"model": "B", "loss": 4.0}]
    assert result["command"] == "python -m papers made-up --scale 2 --out made-up.json"
    # A rerun costs as long.
    assert 0 <= result["seconds"] <= took


def test_an_experiment_begins_with_the_name_of_its_folder(elsewhere: Path) -> None:
    (elsewhere / "made_up" / "config.py").write_text(CONFIG)
    (elsewhere / "made_up" / "run.py").write_text(RUN.replace('{"made-up": Exp', '{"other": Exp'))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        papers(elsewhere)
    assert "its experiments begin with made-up" in failed.value.stderr


@pytest.mark.parametrize("name", experiments_like(None))
def test_the_listed_command_line_is_complete(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiments = experiments_like(name)
    for command in (command_of(name, experiments[name]), *further_commands(name, experiments[name]).values()):
        options = _parser(experiments).parse_args(shlex.split(command)[3:])
        assert options.experiment is experiments[name]


def test_the_list_is_in_the_order_of_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    names = [
        line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line[:1].isalpha() and ": " in line
    ]
    first = [next(i for i, name in enumerate(names) if name.startswith(start)) for start in
             ("claims", "docs", "wiki-corpus", "value-aware", "effective", "abc-", "guidance", "ktiw-")]  # fmt: skip
    assert first == sorted(first)
    assert set(experiments_in("common")) == {"claims", "data", "docs", "shipped-lm", "wiki-corpus"}


@pytest.mark.parametrize("arguments", [[], ["abc-mt", "--help"], ["claims", "--help"]])
def test_help_and_list_import_no_torch_and_no_other_paper(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom papers.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('imported', *sorted(m for m in sys.modules if m == 'torch' or m.startswith('papers.')))"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()[1:]
    assert "torch" not in imported
    if arguments:
        others = ("papers.ktiw", "papers.guidance", "papers.effective", "papers.value_aware")
        assert not [name for name in imported if name.startswith(others)]


def test_from_a_command_to_its_claim_a_reader_passes_at_most_fourteen_files(tmp_path: Path) -> None:
    """Counted are the modules of papers/ that the command loads, packages' __init__.py aside: they hold one constant."""
    work = tmp_path / "work"
    begin_work(work, {})
    Part(work / "part-made-up.json").row("training", data="multi30k-en-de", target_tokens=12.0)
    script = (
        "import sys\nfrom papers.__main__ import main\nassert main(sys.argv[1:]) == 0\n"
        "loaded = [name for name, m in sys.modules.items() if name.startswith('papers.') and not hasattr(m, '__path__')]\n"
        "print('loaded', *sorted(loaded))"
    )
    options = ["abc-mt", "--collect", "--data", str(tmp_path), "--work", str(work), "--out", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, "-c", script, *options], capture_output=True, text=True, check=True)
    *_, verdict, last = done.stdout.splitlines()
    assert verdict.startswith("not run yet: ")
    loaded = last.split()[1:]
    assert "papers.abc.claims_translation" in loaded
    assert "papers.abc.mt" in loaded
    # It declares other commands.
    loaded.remove("papers.abc.run_arms")
    assert len(loaded) <= 14, loaded


def test_unknown_names_are_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["abc-nothing"])
    assert "abc-mt" in capsys.readouterr().err


def test_a_results_file_that_was_not_written_supports_nothing(tmp_path: Path) -> None:
    assert verdicts_on(tmp_path / "none.json", []) == []
