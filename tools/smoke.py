"""A smoke test of an installed attnlab, with no repository at hand: `python smoke.py` where the wheel is installed.

It works in an empty folder of its own, uses what the wheel brings (a model, a text, pages, licences) and nothing from
the network, and ends with exit code 0, or 1 and what went wrong.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXT = "The river was frozen, so the old ferry stayed in the harbour until the ice broke in spring."


def attnlab(*words: str) -> str:
    """What a command prints on standard output; it must succeed."""
    command = [sys.executable, "-m", "attnlab", *words]
    ran = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert ran.returncode == 0, f"{' '.join(words)}: exit code {ran.returncode}: {ran.stderr.strip()}"
    return ran.stdout


def check_distribution() -> None:
    """The wheel says its version, is typed, and brings its licences."""
    import attnlab as al

    root = Path(al.__file__).parent
    assert importlib.metadata.version("attnlab") == al.__version__
    assert (root / "py.typed").is_file(), "py.typed is missing"
    names = {Path(str(file)).name for file in importlib.metadata.files("attnlab") or ()}
    assert {"LICENSE", "NOTICE"} <= names, "the licences are missing"
    for folder in (path for path in (root / "shipped").iterdir() if path.is_dir()):
        assert (folder / "README.md").is_file(), f"{folder.name} is shipped without a licence"


def check_library() -> None:
    """A model attends by another mechanism, is recorded and read."""
    import torch

    import attnlab as al

    q = torch.randn(1, 2, 5, 4)
    for spec in ("softmax", "top-r:r=2", "kernel:elu", "value-aware:r=d+1"):
        mech, call = al.mechanism(spec), al.AttentionCall(q, q, q)
        assert torch.allclose(mech.weights(call) @ q, mech(call), atol=1e-4), f"{spec}: W @ v is not its output"
    model, tokenizer, _ = al.shipped_model()
    with torch.no_grad(), al.swap(model, "top-r:r=4"), al.record(model) as trace:
        model(**tokenizer(TEXT, return_tensors="pt"))
    weights = al.effective_attention(trace[0]).weights
    assert weights.isfinite().all(), "effective attention is not finite"


def check_commands() -> None:
    """The command line answers, and writes its pages."""
    from attnlab.adapters.load import SHIPPED

    assert attnlab("--version").split() == ["attnlab", importlib.metadata.version("attnlab")]
    assert "attnlab compare" in attnlab()
    assert json.loads(attnlab("doctor", "--json"))["works"]
    assert "complete -F _attnlab attnlab" in attnlab("completion", "bash")
    assert "top-r" in attnlab("completion", "bash", "--line", "attnlab compare m -m to").split()
    quick = ("--tokens", "60", "--length", "32", "--lengths", "64", "-m", "softmax", "-m", "top-r:r=2")
    result = json.loads(attnlab("demo", *quick, "--out", "demo", "--json"))
    assert [row["mechanism"] for row in result["comparison"]["rows"]] == ["softmax", "top-r:r=2"]
    assert result["memory"]["complete"], "the causal model and its twin were not compared"
    attnlab("explore", str(SHIPPED), TEXT, "--all", "-o", "page.html")
    attnlab("bench", "-m", "kernel:elu", "--lengths", "64", "--heads", "2", "--repeats", "1")
    for page in ("demo/index.html", "demo/explorer.html", "page.html"):
        assert Path(page).read_text(encoding="utf-8").startswith("<!doctype html>"), page


def main() -> int:
    """Run every check in an empty folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for check in (check_distribution, check_library, check_commands):
            began = time.monotonic()
            try:
                check()
            except Exception as error:
                print(f"{check.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
            print(f"{check.__name__}: good, {time.monotonic() - began:.1f} s")
        os.chdir("/")
    print(f"attnlab {importlib.metadata.version('attnlab')} on Python {sys.version.split()[0]}: good")
    return 0


if __name__ == "__main__":
    sys.exit(main())
