"""A small conversion that tests run in their own process, in others, and under ``accelerate launch -m`` this module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from attnlab.adapters import Plan
from attnlab.adapters.distillation import Distillation
from attnlab.pretraining.conversion import ConversionConfig, convert_model
from tests.adapters.test_load import save

SPEC = "abc-hybrid:slots=3,window=4,sinks=1,block=2"
SETTINGS = Distillation(batch=4, length=8, lengths=((8, 0.5), (16, 0.5)), every=1, evaluations=2, checkpoint_every=2)
STAGES = (("heads", 1.0), ("hidden", 1.0), ("logits", 2.0))


def files(folder: Path) -> Path:
    """A tiny Llama and a text."""
    folder.mkdir(parents=True, exist_ok=True)
    save("llama", folder / "llama")
    (folder / "text.txt").write_text("a b b a . a b\n\nb a b b\n\n" * 40)
    return folder


def config(folder: Path, **changes: Any) -> ConversionConfig:
    base: dict[str, Any] = {
        "model": str(folder / "llama"),
        "text": (str(folder / "text.txt"),),
        "mechanism": SPEC,
        "tokens": 12 * 32,
        "stages": STAGES,
        "settings": SETTINGS,
        "device": "cpu",
    }
    return ConversionConfig(**{**base, **changes})


def job(folder: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Convert, or go on."""
    return convert_model(config(folder, **changes), run_dir=run_dir, make_plan=halves)


def halves(loaded: Any, texts: Any) -> Plan:
    """A plan for the first layers."""
    return Plan({0: SPEC, 2: "window:r=4"}, report={"by": "the first half"})


if __name__ == "__main__":
    job(Path(sys.argv[1]), Path(sys.argv[2]))
