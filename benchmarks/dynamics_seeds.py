"""Figure 3's models, twenty seeds stacked against one by one: time, equality and verdicts. For a GPU.

python benchmarks/dynamics_seeds.py [--parts time,float64,float32,verdicts,figure-3] [--out FILE]

``float32`` compares a seed among twenty with the same stacked code run for it alone, with products that are summed in
one order whatever is stacked; and, as they come, with the model one by one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from storing import make_results, read_results, write_results

from attnlab.devices import best_device
from papers.common.row_store import Part
from papers.ktiw.config import PermutationsConfig
from papers.ktiw.permutations import LEARNED, figure_3_tasks, run_figure_3
from papers.ktiw.seeds import Curves, SeedTraining, fresh_models, train_one, train_seeds

Row = dict[str, Any]
SAME = 1e-5
TINY = PermutationsConfig(seeds=3, length=5, batch=4, width=8, steps=20)


class Bench:
    """The models and tasks of one setting, trained as asked."""

    def __init__(self, config: PermutationsConfig, *, members: int | None = None, batch: int | None = None) -> None:
        task = figure_3_tasks(config)["permutations", "hard"]
        self.config, self.members = config, members or config.seeds
        changes = {} if batch is None else {"batch_size": batch}
        self.tasks = [replace(task, seed=seed, **changes) for seed in range(self.members)]

    def models(self, seeds: Sequence[int], dtype: torch.dtype) -> list[Any]:
        return [m.to(dtype) for m in fresh_models(self.config.model(self.tasks[0]), seeds)]

    def stacked(self, how: SeedTraining, *, dtype: torch.dtype = torch.float32, only: int | None = None) -> Curves:
        """All seeds as one model, or one of them in a stack of its own."""
        seeds = list(range(self.members)) if only is None else [only]
        tasks = [self.tasks[i] for i in seeds]
        return train_seeds(self.models(seeds, dtype), tasks, how=how, device=best_device())

    def one_by_one(
        self, how: SeedTraining, *, dtype: torch.dtype = torch.float32, first: int | None = None
    ) -> list[Curves]:
        """Each seed, or only the first ones, as the ordinary model, on cuDNN."""
        tasks = self.tasks[:first]
        models = self.models(range(len(tasks)), dtype)
        return [train_one(m, t, how=how, device=best_device()) for m, t in zip(models, tasks, strict=True)]


def seconds(config: PermutationsConfig) -> list[Row]:
    """Time, in one run."""
    bench, steps = Bench(config), 4 if config is TINY else 40
    for how in (SeedTraining(steps=2), SeedTraining(steps=steps)):
        # The first round warms up.
        began = time.perf_counter()
        together = bench.stacked(how)
        whole = time.perf_counter() - began
        ordered = bench.stacked(replace(how, invariant=True))
        alone = sum(one.seconds for one in bench.one_by_one(how, first=2 if how.steps == 2 else None))
    return [
        _row(f"{bench.members} seeds, {steps} updates, float32: one by one, in seconds", alone),
        _row("the same as one stacked model", together.seconds),
        _row("one by one / stacked", alone / together.seconds),
        _row("one by one / stacked, with the capture of the graph", alone / whole),
        _row("one by one / stacked, products in one order", alone / ordered.seconds),
    ]


def float64(config: PermutationsConfig) -> list[Row]:
    """Stacked and one by one in double precision."""
    bench, how = Bench(config, members=3, batch=16), SeedTraining(steps=50)
    differences = _differences(bench.stacked(how, dtype=torch.float64), bench.one_by_one(how, dtype=torch.float64))
    return [_row("largest difference of a loss, float64, 50 updates, 3 seeds", max(differences))]


def float32(config: PermutationsConfig) -> list[Row]:
    """Ten updates in single precision: a seed in the stack, in a stack of one, and as the ordinary model.

    The stacks are those that ``time`` times.
    """
    bench, how = Bench(config), SeedTraining(steps=10)
    ordered = replace(how, invariant=True)
    alone, together = [bench.stacked(ordered, only=i) for i in range(bench.members)], bench.stacked(ordered)
    kinds = {
        "the same code for it alone, products in one order": _differences(together, alone),
        "the model one by one, products as they come": _differences(bench.stacked(how), bench.one_by_one(how)),
    }
    gain = sum(one.seconds for one in alone) / together.seconds
    rows = []
    for name, differences in kinds.items():
        same = sum(d <= SAME for d in differences)
        rows.append(_row(f"float32, 10 updates, seeds of {bench.members} within 1e-5 of {name}", same))
        rows.append(_row(f"float32, 10 updates, largest difference of a loss to {name}", max(differences)))
    rows.append(_row(f"{bench.members} stacks of one / a stack of {bench.members}, products in one order", gain))
    return rows


def verdicts(config: PermutationsConfig) -> list[Row]:
    """Learned or failed, after as many updates as heads are judged by."""
    bench, how = Bench(config), SeedTraining(steps=20 if config is TINY else config.head_steps)
    together, alone = bench.stacked(how), bench.one_by_one(how)
    ours = together.accuracy[-3:].mean(0) > LEARNED
    theirs = np.array([one.accuracy[-3:, 0].mean() for one in alone]) > LEARNED
    return [
        _row(f"{bench.members} seeds, {how.steps} updates: learned, stacked", int(ours.sum())),
        _row(f"{bench.members} seeds, {how.steps} updates: learned, one by one", int(theirs.sum())),
        _row(f"seeds of {bench.members} with the same verdict", int((ours == theirs).sum())),
    ]


def figure_3(config: PermutationsConfig) -> list[Row]:
    """All of Figure 3."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run_figure_3(config, Part(Path(folder) / "rows.json"))
        took = time.perf_counter() - began
    return [_row(f"Figure 3 in full ({4 * config.seeds} models, {config.steps} updates), in seconds", took)]


PARTS: dict[str, Callable[[PermutationsConfig], list[Row]]] = {
    "time": seconds,
    "float64": float64,
    "float32": float32,
    "verdicts": verdicts,
    "figure-3": figure_3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write, or update, this file")
    parser.add_argument("--tiny", action="store_true", help="a dry run on small shapes")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config = TINY if args.tiny else PermutationsConfig()
    sizes = {"members": config.seeds, "batch": config.batch, "length": config.length, "width": config.width}
    before = (read_results(args.out) if args.out else None) or {}
    known: dict[str, list[Row]] = before.get("parts", {})
    # What ``earlier`` says of parts that are not measured again still holds.
    earlier = {"earlier": before["earlier"]} if "earlier" in before else {}
    for part in args.parts.split(","):
        known[part] = PARTS[part](config)
        for row in known[part]:
            print(f"{row['what']}: {row['value']:.6g}", flush=True)
        if args.out:
            ordered = {name: known[name] for name in PARTS if name in known}
            rows = [row for measured in ordered.values() for row in measured]
            more = {"config": {**sizes, "tf32": False}, "parts": ordered, **earlier}
            write_results(args.out, make_results("dynamics_seeds", "ktiw", {"seeds": rows}, **more))


def _differences(together: Curves, alone: Sequence[Curves]) -> list[float]:
    """The largest difference of each seed's losses."""
    return [float(abs(together.losses[:, i] - one.losses[:, 0]).max()) for i, one in enumerate(alone)]


def _row(what: str, value: float) -> Row:
    return {"what": what, "value": value}


if __name__ == "__main__":
    main()
