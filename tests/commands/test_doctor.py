"""``attnlab doctor``: what works, what is missing, and the command that brings it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnlab
from attnlab.cli import main
from attnlab.commands.doctor import CORE, FEATURES

ROOT = Path(__file__).resolve().parents[2]


def doctor(capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def feature(result: dict[str, Any], name: str) -> dict[str, Any]:
    [state] = [state for state in result["features"] if state["name"] == name]
    return state


def without(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """As if packages had these versions, or were not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        shown = versions.get(name.replace("-", "_"), real(name))
        if shown is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return shown

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_the_core_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    result = doctor(capsys)
    assert result["works"]
    assert result["problem"] is None
    assert result["attnlab"] == attnlab.__version__
    assert result["core"]["packages"]["torch"]["version"] == torch.__version__
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("works    core: torch ")


def test_what_is_missing_is_named_with_the_command_that_brings_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, lm_eval=None, joblib="1.3.9")
    result = doctor(capsys)
    assert feature(result, "eval")["remedy"] == 'pip install "lm-eval>=0.4.13"'
    assert feature(result, "ray")["remedy"] == 'pip install "joblib>=1.4"'
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "missing  eval, for attnlab evaluate: no lm-eval\n         $ pip install" in shown
    assert "joblib 1.3.9 (needs 1.4)" in shown


def test_a_core_that_is_too_old_or_broken_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        without(patch, transformers="4.57.1")
        result = doctor(capsys, code=1)
    assert result["problem"] == "missing or too old: transformers"
    assert result["core"]["remedy"] == 'pip install "transformers>=5.0"'
    real = importlib.import_module

    def broken(name: str, *rest: Any) -> Any:
        if name == "transformers":
            raise RuntimeError("tokenizers is too new\nand more")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    problem = doctor(capsys, code=1)["problem"]
    assert problem == "transformers is installed but cannot be imported: tokenizers is too new"


def test_without_any_package_it_still_answers() -> None:
    """-S leaves out all installed packages."""
    command = [sys.executable, "-S", "-m", "attnlab", "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert ran.returncode == 1
    assert ran.stderr == ""
    assert "broken   core: no torch, no transformers, no safetensors, no numpy" in ran.stdout
    assert '$ pip install "torch>=2.6"' in ran.stdout


def test_a_gpu_is_shown_with_its_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(
        is_available=lambda: True,
        mem_get_info=lambda: (3 << 30, 8 << 30),
        get_device_name=lambda: "Tiny",
        device_count=lambda: 2,
        get_device_capability=lambda: (9, 0),
    )
    monkeypatch.setattr(torch, "cuda", gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    shown = doctor(capsys)["gpu"]
    assert (shown["name"], shown["memory_bytes"], shown["capability"]) == ("Tiny", 8 << 30, "9.0")
    assert main(["doctor"]) == 0
    assert "GPU: 2 x Tiny, 8 GiB (3 free), CUDA 13.0" in capsys.readouterr().out


def test_the_packages_are_those_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def least(requirements: list[str]) -> dict[str, str]:
        return dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in requirements)  # type: ignore[union-attr]

    assert CORE.packages == least(project["dependencies"])
    # What is for the developers of attnlab is not a user's.
    extras = {name for name in project["optional-dependencies"] if name not in ("dev", "site")}
    assert {one.extra: one.packages for one in FEATURES} == {
        name: least(project["optional-dependencies"][name]) for name in extras
    }
    assert f">={'.'.join(map(str, (3, 10)))}" == project["requires-python"]
