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


def a_comparison_with_maps() -> dict[str, Any]:
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
    return a_comparison() | {
        "introduction": "The model and the text come with attnlab.",
        "tokens": tokens,
        "maps": {"standard": standard, "effective": effective},
        "explorer": "explorer.html",
    }


def a_demo() -> dict[str, Any]:
    """What ``attnlab demo --json`` prints, with one mechanism that keeps the quality."""
    with_maps = a_comparison_with_maps()
    layers, (standard, effective) = 6, (maps[3][5] for maps in with_maps["maps"].values())
    head = {
        "layer": 3, "head": 5, "rule": "changes", "removed": 0.46, "removed_mean": 0.31,
        "patterns": {"standard": "vertical+diagonal", "effective": "diagonal"},
        "most_changed": {"token": "[SEP]", "place": 18, "standard": 0.31, "effective": 0.04},
        "removed_by_head": [[(i + h) / 14 for h in range(8)] for i in range(layers)],
        "tokens": with_maps["tokens"], "maps": {"standard": standard, "effective": effective},
    }  # fmt: skip
    comparison = a_comparison("demo")
    comparison["rows"] = [dict(row) for row in comparison["rows"]]
    above = iter([(0.0, 0.0, 0.0), (0.01, -0.01, 0.03), *((i / 7, i / 7 - 0.05, i / 7 + 0.05) for i in range(1, 9))])
    for row in comparison["rows"]:
        if row.get("quality"):
            ends = zip(("loss_above", "loss_above_low", "loss_above_high"), next(above), strict=True)
            row["quality"] = row["quality"] | dict(ends)
    comparison["config"] = {**comparison.get("config", {}), "length": 256}
    comparison["text"] = {"name": "Moby-Dick", "tokens": 8192, "windows": 33}
    rows = [
        {
            "length": n, "windows": 16384 // n, "full_loss": 4 - n / 9000, "bounded_loss": 4.01 - n / 9500,
            "loss_above": 0.01 + n / 1e5, "loss_above_low": n / 1e5, "loss_above_high": 0.02 + n / 1e5,
            "full_bytes": 6144 * n, "bounded_bytes": 405_504, "full_tokens_per_second": 9e5 / n,
            "bounded_tokens_per_second": 412.0,
        }
        for n in (512, 1024, 2048, 4096, 8192)
    ]  # fmt: skip
    memory = {
        "complete": True, "model": "attnlab's causal LM", "text": "Moby-Dick", "learned": "trained", "tokens": 16384,
        "mechanism": "abc-select:slots=28,window=32", "keys": {"sinks": 4, "window": 32, "slots": 28, "size": 64},
        "config": {"batch": 16, "temperature": 0.7, "seed": 0}, "notes": ["longer texts are left out"], "rows": rows,
        "continuation": {
            "passage": "Call me Ishmael. " * 30, "passage_tokens": 181, "full": " He was a man of the sea.",
            "bounded": " He was a man of the world, and of\n\nthe ship.",
        },
    }  # fmt: skip
    about = {name: comparison[name] for name in ("seed", "versions", "python", "device", "commit")}
    return {
        "name": "demo", "complete": True, "seconds": 71.2, "text": "Moby-Dick", "explorer": "explorer.html",
        "models": {"1 and 2": "attnlab's masked LM", "3": "attnlab's causal LM"}, **about, "head": head,
        "comparison": comparison, "memory": memory,
    }  # fmt: skip


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


def a_recommendation(*, by: str = "layers") -> dict[str, Any]:
    """Plans for two budgets, with each layer's or each head's sensitivity to two mechanisms."""
    candidates = ["top-r:r=8", "value-aware:r=d+1"]

    def plan(spec: str, budget: float | None, replaced: int) -> dict[str, Any]:
        costs = {"attention_bytes": 1 - replaced / 8, "time_ratio": 1.2, "quality": {"value": 21.0 + replaced}}
        losses = {"loss_increase": 0.002 * replaced, "predicted_increase": 0.003 * replaced, "held_out_increase": None}
        layers = {f"decoder {i}": spec for i in range(replaced)}
        counts = {"replaced": replaced, "units": 4, "plan": {"layers": layers}}
        return {"mechanism": spec, "budget": budget, **counts, **losses, **costs}

    heads = range(4) if by == "heads" else (None,)
    sensitivity = [
        {"kind": "decoder", "layer": i, "head": head, "mechanism": spec, "increase": None if i == 3 else 0.01 * i}
        for i in range(4)
        for head in heads
        for spec in candidates
    ]
    return {
        "by": by,
        "sentence": "top-r:r=8 in 3 of 4 layers adds 0.6 % to the loss",
        "exact": {"name": "perplexity", "loss": 3.0},
        "candidates": candidates,
        "sensitivity": sensitivity,
        "rows": [plan("softmax", None, 0), plan("top-r:r=8", 0.01, 3), plan("value-aware:r=d+1", 0.02, 4)],
        "left_out": [plan("top-r:r=8", 0.02, 4)],
    }


def an_evaluation() -> dict[str, Any]:
    """Three kinds of attention on the loss and on needles, and one that was refused."""

    def tasks(worse: float) -> dict[str, Any]:
        over = {"value": worse, "low": worse - 0.01, "high": worse + 0.01}
        loss = {"loss": 3.1 + worse, "low": 3.0 + worse, "high": 3.2 + worse, "perplexity": 22.2, "over_own": over}
        cases = [{"depth": i / 8, "recall": float(i * worse < 1), "text": NASTY} for i in range(8)]
        needles = {f"needle {n}": {"recall": 1 - worse, "low": 0.4, "high": 1.0, "cases": cases} for n in (512, 2048)}
        return {"loss": loss, "lambada_openai": {"acc": 0.4 - worse, "low": 0.1, "high": 0.5}, **needles}

    subjects = {"own attention": 0.0, "top-r:r=16": 0.02, "snapkv:window=16,budget=0.25": 0.31}
    rows = [{"subject": name, "refused": None, "seconds": 3.4, "tasks": tasks(w)} for name, w in subjects.items()]
    rows.append({"subject": "abc-luna:slots=32", "refused": "it has no causal form", "tasks": {}})
    model = {"name": "a model", "parameters": 12345, "dtype": "float32"}
    return {"name": "evaluate", "model": model, "config": {"cases": 8}, "rows": rows, "seed": 0, "device": "a CPU"}


def an_audit() -> dict[str, Any]:
    """Two layers of four heads; one head is a duplicate now and was none in the baseline."""
    names = {"share": "share of the output", "entropy": "of the weights", "sinks": "weight", "nearest": "distance"}
    heads: list[dict[str, Any]] = []
    for layer in range(2):
        for head in range(4):
            place = {"kind": "decoder", "layer": layer, "head": head, "key_value_head": head // 2}
            mean = (1 + layer + head) / 6
            statistics = {name: {"mean": mean, "low": mean - 0.01, "high": mean + 0.01} for name in names}
            finding = [{"name": "duplicate", "statistic": "nearest"}] if head == 2 else []
            heads.append({**place, "statistics": statistics, "findings": finding, "nearest_head": 3})
    numbers = {"before": 0.6, "now": 0.1, "odds_difference": -2.6, "low": -3.0, "high": -2.1, "floor": 0.3}
    place = {"kind": "decoder", "layer": 1, "head": 2, "key_value_head": 1, "statistic": "nearest"}
    change = {**place, **numbers, "new_findings": ["duplicate"], "gone_findings": []}
    text = {"name": "frankenstein.txt", "windows": 6}
    return {
        "name": "audit",
        "model": {"name": "a model", "parameters": 12345},
        "text": text,
        "shape": {"length": 64},
        "statistics": names,
        "heads": heads,
        "baseline": {"text": text, "comparisons": 64},
        "changes": [change],
    }
