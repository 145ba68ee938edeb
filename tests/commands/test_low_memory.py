"""Where there is no memory, a command ends with one line, wherever the memory was missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlab import cli
from attnlab.adapters import load_model
from attnlab.adapters.load import SHIPPED

ROOT = Path(__file__).resolve().parents[2]


def no_memory(*args: Any, **named: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("place", ["command_module", "make_parser"])
def test_a_command_that_cannot_be_loaded(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, place, no_memory)
    assert cli.main(["bench", "-m", "softmax"]) == 2
    assert capsys.readouterr().err.startswith("attnlab: there is not enough memory for this")


@pytest.mark.parametrize("loader", ["AutoConfig", "AutoTokenizer", "BertForMaskedLM"])
def test_a_model_that_does_not_fit_is_not_called_damaged(loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(getattr(transformers, loader), "from_pretrained", no_memory)
    with pytest.raises(MemoryError):
        load_model(SHIPPED)


def test_a_library_that_cannot_be_mapped() -> None:
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20)); "
    code = f"{limited}import sys; sys.argv[1:] = ['bench', '-m', 'softmax']; runpy.run_module('attnlab', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("attnlab: there is not enough memory for this (libtorch")
    assert done.stderr.count("\n") == 1
