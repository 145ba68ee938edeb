"""The heads of a model while it is guided, as a run folder that ``attnlab explore`` plays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlab.adapters import record
from attnlab.data.tokenisers import Tokeniser
from attnlab.guidance import guidance_by_head
from attnlab.patterns import SpecialTokens
from attnlab.provenance import provenance, write_atomic, write_json
from attnlab.reading.timeline import record_step
from papers.guidance.config import Arm, MlmConfig

__all__ = ["record_heads", "write_run"]


@torch.no_grad()
def record_heads(
    model: Any,
    batch: dict[str, torch.Tensor],
    config: MlmConfig,
    arm: Arm,
    tokeniser: Tokeniser,
    tokens: SpecialTokens,
    run_dir: Path,
    step: int,
    loss: float,
    *,
    length: int = 24,
) -> None:
    """The maps of one text and the AG loss of every guided head, as the explorer plays them."""
    ids = batch["input_ids"][:1, :length]
    with record(model.eval()) as trace:
        model(ids)
    by_head = guidance_by_head(trace, config.guidance(arm), ids, tokens=tokens)
    names = [tokeniser.decode([i]) for i in ids[0].tolist()]
    record_step(run_dir, step, trace, tokens=names, scalars={"guidance loss": by_head.cpu(), "MLM loss": loss})


def write_run(
    run_dir: Path,
    *,
    name: str,
    config: Mapping[str, Any],
    seed: int,
    curve: Mapping[str, Sequence[float]],
    evaluations: Sequence[Mapping[str, Any]],
    seconds: float,
) -> None:
    """run.json and metrics.jsonl beside the recorded steps; ``curve`` is thinned, and its times are even shares."""
    last = max(1, curve["at"][-1]) if curve["at"] else 1
    lines = [
        {
            "step": at,
            "kind": "train",
            "seconds": round(seconds * at / last, 3),
            "values": {"masked-lm": task, "guidance": pull},
        }
        for at, task, pull in zip(curve["at"], curve["task"], curve["guidance"], strict=True)
    ]
    lines += [
        {
            "step": e["at"],
            "kind": "eval",
            "seconds": round(seconds * e["at"] / last, 3),
            "values": {"valid/masked-lm": e["valid_loss"]},
        }
        for e in evaluations
    ]
    lines.sort(key=lambda line: (line["step"], line["kind"]))
    write_json(run_dir / "run.json", {"name": name, "config": dict(config), "seed": seed, **provenance()})
    write_atomic(run_dir / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
