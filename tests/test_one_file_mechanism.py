"""A new mechanism is one file: here the one of the guide, found by an entry point or by its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnlab as al
from attnlab import registry
from attnlab.cli import main
from tests.commands.test_cli import QUICK, SHIPPED
from tests.commands.test_train import TRAINING
from tests.opened_pages import ROOT, python_blocks

USE = """
import sys
import attnlab as al
from attnlab.cli import main
spec = sys.argv[1]
mech = al.mechanism(spec)
assert mech.p == 1.5, mech
assert repr(al.mechanism(al.spec_of(mech))) == repr(mech)
al.check(mech).raise_if_failed()
main(["bench", "-m", spec, "--lengths", "16", "--heads", "2", "--width", "4", "--repeats", "1"])
"""


@pytest.fixture
def power(tmp_path: Path) -> Path:
    """A folder with the guide's mechanism as power.py."""
    (source,) = python_blocks("docs/your-own-mechanism.md")
    (tmp_path / "power.py").write_text(source)
    return tmp_path


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    al.all_mechanisms()
    for name in ("_entries", "_from_files"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def use(spec: str, folder: Path, *paths: Path) -> None:
    """Make, check and time the mechanism in a process of its own, started in ``folder``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    command = [sys.executable, "-c", USE, spec]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert spec in done.stdout


def test_an_entry_point_makes_a_file_known(power: Path) -> None:
    described = power / "power-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: power\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[attnlab.mechanisms]\npower = power:Power\n")
    use("power:p=1.5", ROOT, power)


def test_a_path_names_a_class_in_a_file(power: Path) -> None:
    use("./power.py:Power:p=1.5", power)


@pytest.mark.usefixtures("_own_registry")
def test_a_changed_file_is_run_again(power: Path) -> None:
    spec, file = f"{power}/power.py:Power", power / "power.py"
    assert al.mechanism(spec).p == 2.0
    file.write_text(file.read_text().replace("p: float = 2.0", "p: float = 4.0"))
    os.utime(file, ns=(0, 0))
    assert al.mechanism(spec).p == 4.0


@pytest.mark.usefixtures("_own_registry")
def test_a_stored_spec_runs_no_file_that_the_user_has_not_named(power: Path) -> None:
    spec = f"{power}/power.py:Power"
    with pytest.raises(ValueError, match="would run that file"):
        al.Plan.from_json({"layers": {"0": spec}})
    al.mechanism(spec)
    assert al.Plan.from_json({"layers": {"0": spec}}).layers == {0: spec}


@pytest.mark.usefixtures("_own_registry")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("power.py", "names a file and no class in it; write power.py:Class"),
        ("nowhere/power.py:Power", "there is no file nowhere/power.py"),
        ("power.py:Powder", "power.py has no mechanism named 'Powder'"),
        ("power.py:scores", "power.py has no mechanism named 'scores'"),
        ("power.py:Power:q=2", "power.py:Power has no setting 'q'; usage: power.py:Power:p=2.0"),
        ("power.py:Power:p=-1", "p must be positive, got -1"),
    ],
)
def test_a_wrong_path_says_what_would_be_right(
    spec: str, message: str, power: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(power)
    with pytest.raises(ValueError, match=message):
        al.mechanism(spec)


COMMANDS = {
    "bench": ["bench", "-m", "SPEC", "--lengths", "16", "--heads", "2", "--width", "4", "--repeats", "1"],
    "compare": ["compare", str(SHIPPED), "--text", "text.txt", *QUICK, "-m", "SPEC", "-o", "page.html"],
    "demo": ["demo", *QUICK, "-m", "SPEC", "--lengths", "32", "--out", "demo"],
    "explore": ["explore", str(SHIPPED), "Now is the winter.", "-m", "SPEC", "-o", "page.html"],
    "train": ["train", "--text", "text.txt", *TRAINING, "--attention", "SPEC", "--out", "run"],
}
CARELESS = """
from dataclasses import dataclass, replace
from attnlab import Mechanism
from attnlab.attention import scores
from attnlab.mechanisms.softmax import softmax


@dataclass(frozen=True)
class Careless(Mechanism):
    def reference(self, call):
        return softmax(scores(replace(call, causal=False, offset=0)))
"""


@pytest.mark.usefixtures("_own_registry")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_mechanism_from_a_file(
    command: str, power: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(power)
    lines = [f"Now is the winter number {i} of our discontent made summer by this sun of York." for i in range(200)]
    (power / "text.txt").write_text("\n".join(lines))
    assert main([word.replace("SPEC", "./power.py:Power") for word in COMMANDS[command]]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.usefixtures("_own_registry")
def test_a_mechanism_that_sees_the_future_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "careless.py").write_text(CARELESS)
    assert main([word.replace("SPEC", "./careless.py:Careless") for word in COMMANDS["bench"]]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "attnlab: warning: ./careless.py:Careless breaks the law hidden_keys_get_no_weight: causal: "
    )
    assert "it comes later, and causal=True" in line
