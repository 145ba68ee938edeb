"""Made-up results with the shape of real ones: numbers a test can check, text that tries to break the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"q\" 'a' \u2028"


def a_comparison(name: str = "compare") -> dict[str, Any]:
    measured = {
        # mechanism: (mlm error, output error, score error, time, memory)
        "softmax": (0.412, 0.0, 0.0, 1.0, 1.0),
        "value-aware:r=33": (0.412, 2e-6, 0.91, 14.2, 1.6),
        "top-r:r=33": (0.447, 0.18, 0.12, 2.4, 1.2),
        "top-r:r=1": (0.861, 0.93, 0.74, 1.9, 1.1),
        "value-aware:r=1": (0.742, 0.71, 1.12, 2.1, 1.1),
        "window:r=64": (0.532, 0.37, 0.41, 0.8, 0.7),
        "kernel:elu": (0.911, 0.98, 0.83, 0.6, 0.5),
        "lsh:r=64,rounds=4": (0.602, 0.44, 0.47, 3.3, 1.9),
        "orf:features=256,variant=corrected": (0.688, 0.52, 0.66, 1.3, 0.9),
    }
    rows: list[dict[str, Any]] = [
        {
            "mechanism": spec,
            "quality": {"name": "mlm_error", "value": error, "exact": 0.412},
            "output_error": output,
            "score_error": score,
            "after_projection": output * 0.9,
            "effective_error": output * 1.05,
            "time_ratio": time,
            "memory_ratio": memory,
            "refused": None,
        }
        for spec, (error, output, score, time, memory) in measured.items()
    ]
    rows.append(
        {
            "mechanism": "abc-luna:slots=32",
            "quality": None,
            "refused": "needs the previous layer's memory, and there is none",
        }
    )
    layers = {
        spec: [[min(1.4, output * (0.4 + 0.2 * i + 0.11 * ((3 * i + j) % 5))) for j in range(8)] for i in range(6)]
        for spec, (_, output, *_) in measured.items()
        if spec != "softmax"
    }
    steps = (1, 2, 4, 8, 16, 33, 64, 128)
    return {
        "name": name,
        "model": {"name": "attnlab-mlm-small", "parameters": 7_340_032, "layers": 6, "heads": 8, "task": "masked LM"},
        "text": {"name": "frankenstein.txt", "tokens": 16_384, "windows": 64},
        "config": {"batch": 8, "seed": 0, "length": 256},
        "seed": 0,
        "versions": {"attnlab": "0.1.0", "torch": "2.13.0", "transformers": "5.22.0"},
        "python": "3.11.2",
        "device": "x86_64 CPU, 2 threads",
        "commit": "d7d2dab0c1f2e3d4",
        "rows": rows,
        "layers": layers,
        "sweeps": {
            "top-r": [{"r": r, "quality": 0.412 + 0.45 / r**0.7, "output_error": 0.93 / r**0.5} for r in steps],
            "value-aware": [
                {"r": r, "quality": 0.412 + (0.33 / r if r < 33 else 0), "output_error": 0.71 / r if r < 33 else 0.0}
                for r in steps
            ],
        },
    }


def _normalised(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def a_judgement() -> dict[str, Any]:
    """Three policies at two budgets on two tasks; at 2,048 tokens the full cache cannot find the needle either."""

    def scores(score: float, full: float, *, cannot: bool) -> dict[str, Any]:
        over = {"value": score - full, "low": score - full - 0.04, "high": score - full + 0.04}
        ends = {"low": score - 0.1, "high": score + 0.1}
        return {"score": score, **ends, "n": 100, "over_full": over, "full_cannot": cannot}

    rows: list[dict[str, Any]] = []
    for task, length, full in (("needle", 512, 0.98), ("needle", 2048, 0.31), ("loss", 512, 3.2)):
        cannot, sign = full < 0.5, 1 if task == "loss" else -1
        policies = [("full cache", 1.0, 0.0)]
        policies += [
            (name, b, loss / b) for b in (0.5, 0.25) for name, loss in (("h2o", 0.1), ("snapkv:window=16", 0.05))
        ]
        for policy, budget, lost in policies:
            unseen = scores(full + sign * lost, full, cannot=cannot)
            seen = None if task == "loss" else scores(full + sign * lost / 2, full, cannot=cannot)
            ratios = {
                "bytes_ratio": budget,
                "prefill_ratio": 1 + lost,
                "decode_ratio": 0.9 if task == "needle" else None,
            }
            place = {"task": task, "length": length, "policy": policy, "budget": budget, "spec": policy}
            rows.append({**place, "unseen": unseen, "seen": seen, "bytes": 1e6 * budget, **ratios})
        refusal = {"refused": "it reads the prompt twice"}
        place = {"task": task, "length": length, "policy": "kvzip", "budget": 0.5, "spec": "kvzip"}
        empty = dict.fromkeys(("bytes", "bytes_ratio", "prefill_ratio", "decode_ratio"))
        rows.append({**place, "unseen": refusal, "seen": None if task == "loss" else refusal, **empty})
    model = {"name": "a model", "parameters": 12345, "dtype": "float32"}
    return {"name": "judge", "model": model, "config": {"cases": 100}, "rows": rows, "seed": 0, "device": "a CPU"}


def a_demo() -> dict[str, Any]:
    tokens = "[CLS] You will re ##jo ##ice to hear that no dis ##aster has acc ##omp ##anied the [MASK] [SEP]".split()  # noqa: SIM905
    n = len(tokens)
    standard = [
        [
            [
                _normalised(
                    [
                        math.exp(-abs(q - k - (h % 4 - 1)) * (0.4 + 0.3 * i)) + (h > 4) * 3.0 * (k == n - 1)
                        for k in range(n)
                    ]
                )
                for q in range(n)
            ]
            for h in range(8)
        ]
        for i in range(6)
    ]
    effective = [
        [[[w - 0.6 * (k == n - 1) * w - 0.01 for k, w in enumerate(r)] for r in m] for m in layer] for layer in standard
    ]
    return a_comparison("demo") | {
        "introduction": "This page was made by make demo on the model and the text that come with attnlab.",
        "tokens": tokens,
        "maps": {"standard": standard, "effective": effective},
    }


def write_run(
    folder: Path,
    *,
    seed: int,
    lr: float = 1e-3,
    name: str = "mlm",
    steps: int = 2000,
    finish: bool = True,
    offset: float = 0.0,
) -> Path:
    """A run folder as attnlab/training writes it."""
    folder.mkdir(parents=True)
    about = {
        "name": name,
        "config": {
            "seed": seed,
            "optimiser": {"lr": lr, "warmup": 100},
            "model": {"layers": 6, "width": 256},
            "batch": 64,
        },
        "seed": seed,
        "versions": {"attnlab": "0.1.0", "torch": "2.13.0"},
        "python": "3.11.2",
        "device": "NVIDIA H200",
        "commit": "d7d2dab0c1f2e3d4",
    }
    (folder / "run.json").write_text(json.dumps(about))
    lines = []
    for step in range(0, steps + 1, 10):
        wiggle = 0.06 * math.sin(step / 37 + 2.1 * seed) + 0.03 * math.sin(step * 1.7 + seed)
        loss = 3.0 + offset + 5 * math.exp(-step / (4e2 * (1e-3 / lr) ** 0.3)) + wiggle
        lines.append(
            {
                "step": step,
                "kind": "train",
                "seconds": step * 0.21,
                "values": {"loss": loss, "lr": lr * min(1, (step + 1) / 100)},
            }
        )
        if step % 200 == 0:
            lines.append(
                {
                    "step": step,
                    "kind": "eval",
                    "seconds": step * 0.21,
                    "values": {"loss": loss + 0.05, "mlm_accuracy": 1 - loss / 9},
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finish:
        tables = {
            "table_3a": [
                {"model": "BASE", "bleu": 26.4, "bleu_paper": 27.2},
                {"model": "ABC_MLP 32-8", "bleu": 26.2, "bleu_paper": 27.1},
            ]
        }
        (folder / "result.json").write_text(
            json.dumps({"name": name, "metrics": {"eval_loss": 3.05 + offset}, "tables": tables})
        )
    return folder
