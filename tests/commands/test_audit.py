"""``attnlab audit``: exit codes, files, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from attnlab.cli import main
from tests.adapters.test_load import save
from tests.commands.conftest import Fails

# No token of 16 sees the 18 keys that local heads are judged on: 7 statistics of 12 heads.
LENGTH = ("--length", "16")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save("llama", tmp_path / "llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a b b a a b a a a b b b a b " * 20)
    return path


@pytest.fixture
def baseline(model: Path, text: Path, tmp_path: Path) -> Path:
    assert main(["audit", str(model), "--text", str(text), *LENGTH, "--out", str(tmp_path / "before")]) == 0
    return tmp_path / "before" / "audit.json"


def zero_head(model: Path) -> None:
    """Layer 1, head 2: its columns of W_O."""
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][:, 12:18] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_exit_codes_and_files(
    model: Path, text: Path, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = ["audit", str(model), "--text", str(text), *LENGTH, "--baseline", str(baseline)]
    assert main(words) == 0
    assert "no change against the baseline, in 84 comparisons" in capsys.readouterr().out
    zero_head(model)
    assert main([*words, "--out", str(tmp_path / "after"), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result.pop("written") == [str(tmp_path / "after" / name) for name in ("audit.html", "audit.json")]
    assert result == json.loads((tmp_path / "after" / "audit.json").read_text())
    assert ["dead"] in [row["new_findings"] for row in result["changes"] if (row["layer"], row["head"]) == (1, 2)]
    assert "Heads that changed since the baseline: " in (tmp_path / "after" / "audit.html").read_text()


def test_bad_input_is_one_line_and_writes_nothing(
    model: Path, text: Path, baseline: Path, tmp_path: Path, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out = tmp_path / "new"
    words = ["audit", model, "--text", text, *LENGTH, "--out", out]
    assert "windows must be an int of at least 6, got 2" in fails(*words, "--windows", "2")
    assert "No such file" in fails(*words, "--baseline", tmp_path / "none.json")
    assert "is no audit" in fails(*words, "--baseline", model / "config.json")
    assert "use the same length for both" in fails(*words, "--length", "12", "--baseline", baseline)
    assert "is a file; name a folder" in fails(*words, "--out", text)
    assert "make it first" in fails(*words, "--out", out / "deeper")
    (tmp_path / "short.txt").write_text("a b")
    assert "the text has 2 tokens" in fails(*words, "--text", tmp_path / "short.txt")
    assert not out.exists()
    assert "replace its own baseline" in fails(*words, "--baseline", baseline, "--out", baseline.parent)
