"""Multi-query associative recall at equal memory: which bounded attention remembers a pair that has left the window?

    python benchmarks/recall.py runs/recall                                 # a GPU: 64 pairs in 512 tokens
    python benchmarks/recall.py runs/recall --width 128 --rows 16           # the same task with a model for a CPU
    python benchmarks/recall.py runs/recall --tiny                          # a dry run on a CPU: 8 pairs in 64 tokens

A model of two layers learns each mechanism for each seed, in a run folder of its own. Trained on the task itself, no
attention finds out whose value a value is, not even softmax: so a model first learns tasks of few pairs, few keys and
short sequences, in which every later place is a question, then ever larger ones. A memory without parameters of its
size grows with the task: where all pairs fit into every head from the start, one head learns to remember all of them
and is later too small, while heads whose memories are always a little small learn to share the pairs out.

The same command goes on where it was interrupted. ``benchmarks/results/recall.json``, or ``--out``, gets the share of
questions answered, and how it stood before each task grew.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from storing import make_results, read_results, write_results

from attnlab.data.recall import RecallTask
from attnlab.loss import IGNORED, Loss
from attnlab.models import Transformer, TransformerConfig
from attnlab.training import (
    CrossEntropy,
    Evaluation,
    Recipe,
    Schedule,
    Settings,
    every,
    load_weights,
    read_metrics,
    read_result,
    train,
)
from attnlab.training.runs import read_run

# The table, and the run on the task itself.
TABLE, WHOLE = "recall", "whole"
# The last keys that abc-select holds exactly: layer 1 looks for the token before. All others it chooses.
EXACT = 4


@dataclass(frozen=True)
class Config:
    pairs: int = 64
    length: int = 512
    # Questions come more than so many tokens after the last pair: beyond what two windows reach.
    apart: int = 128
    keys: int = 512
    values: int = 128
    # Keys that a head may hold.
    memory: int = 64
    width: int = 256
    heads: int = 4
    rows: int = 128
    # Updates on each task that is smaller than the last, beginning with so many pairs, and on the last.
    small_steps: int = 1000
    fewest: int = 4
    steps: int = 3000
    warmup: int = 200
    # Higher rates unlearn a task that is mastered: which keys are kept jumps with the scores.
    lr: float = 5e-4
    evaluations: int = 6
    batches: int = 8

    def task(self, seed: int, stage: Stage | None = None) -> RecallTask:
        """Batches of this seed: the task itself, or an easier one of the same vocabulary."""
        sizes = {"keys": self.keys, "values": self.values, "rows": self.rows, "seed": seed}
        if stage is None:
            return RecallTask(pairs=self.pairs, length=self.length, apart=self.apart, **sizes)
        # Shorter in proportion: the first tasks fit into the memory, and what to keep is learned when answers are.
        length, apart = (n * stage.pairs // self.pairs for n in (self.length, self.apart))
        return RecallTask(pairs=stage.pairs, length=length, apart=apart, drawn=stage.drawn, dense=True, **sizes)

    def memory_at(self, stage: Stage | None) -> int:
        """Keys of a memory that grows with the task: besides the exact ones, as many for each pair as at the end."""
        return self.memory if stage is None else EXACT + max(1, (self.memory - EXACT) * stage.pairs // self.pairs)

    @property
    def growing(self) -> list[Stage]:
        """The easier tasks: pairs and the keys that they are drawn from double, then the keys alone."""
        stages = [Stage(self.fewest, min(self.keys, 4 * self.fewest))]
        while stages[-1] != Stage(self.pairs, self.keys):
            last = stages[-1]
            stages.append(Stage(min(self.pairs, 2 * last.pairs), min(self.keys, 2 * last.drawn)))
        return stages


class Stage(NamedTuple):
    """Pairs of a task in which every later place is a question, and how many keys they are drawn from."""

    pairs: int
    drawn: int


TINY = replace(
    Config(), pairs=8, length=64, apart=32, keys=16, values=16, memory=16, width=64, heads=4, rows=32, steps=200,
    small_steps=200, warmup=20, lr=3e-3, evaluations=2,
)  # fmt: skip


# What an option of the command sets.
SIZES = (
    "pairs",
    "length",
    "apart",
    "keys",
    "values",
    "memory",
    "width",
    "rows",
    "small_steps",
    "steps",
    "warmup",
    "lr",
)


def compared(memory: int) -> dict[str, str]:
    """Specs by name; of hybrids three quarters of the memory are slots, since a pair is asked for far away."""
    slots, window = memory - memory // 4, max(4, memory // 4)
    # A query at the beginning of a block still sees the tokens just before it.
    block = window // 2
    hybrid = f"abc-hybrid:slots={slots},window={window},sinks=0,block={block},control=x"
    return {
        "softmax": "softmax",
        "window": f"abc-window:slots={memory}",
        "abc-mlp": f"abc-mlp:slots={memory},tied=false",
        "select": f"abc-select:slots={memory - EXACT},window={EXACT},sinks=0,block={EXACT // 2}",
        "hybrid": hybrid,
        "hybrid, no mass": f"{hybrid},mass=false",
        "hybrid, control of key": hybrid.replace("=x", "=key"),
        "hybrid, half slots": f"abc-hybrid:slots={memory // 2},window={memory // 2},sinks=0,block={block},control=x",
    }


# Mechanisms whose parameters do not depend on how much they remember, so that their memory can grow.
GROWING = ("window", "select")


class Answered:
    """The share of questions whose most likely answer is right, as a term that has no weight in the loss."""

    name = "answered"

    def weight(self, step: int) -> float:
        """None."""
        return 0.0

    def __call__(self, model: Any, output: Any, batch: Any, step: int) -> Loss:
        asked = batch["labels"] != IGNORED
        right = (output.logits.argmax(-1) == batch["labels"]) & asked
        return Loss(right.sum().float(), asked.sum())


def make_model(config: Config, spec: str, seed: int) -> Transformer:
    """Two layers; large first weights, with which the previous token is found soon."""
    torch.manual_seed(seed)
    model = Transformer(
        TransformerConfig(
            kind="decoder", vocab=config.task(0).vocab, width=config.width, heads=config.heads, layers=2,
            hidden=2 * config.width, positions="rotary", causal_attention=spec, bias=False, tied=False, init="xavier",
            embed_scale=True,
        )
    )  # fmt: skip
    # Parameters of the control are made at the first call, before the optimizer looks for them.
    model(config.task(seed).batch(0)["input_ids"][:1])
    return model


def learn(config: Config, name: str, seed: int, folder: Path) -> None:
    """Train one model on ever larger tasks, or go on with it, and evaluate it on sequences that it has not seen."""
    before: Path | None = None
    for stage in (*config.growing, None):
        task = WHOLE if stage is None else f"{stage.pairs}-pairs-of-{stage.drawn}"
        spec = compared(config.memory_at(stage) if name in GROWING else config.memory)[name]
        model = make_model(config, spec, seed)
        if before is not None:
            load_weights(model, before)
        steps = config.steps if stage is None else config.small_steps
        settings = Settings(
            steps=steps,
            recipe=Recipe(lr=config.lr, weight_decay=0.01),
            # Which keys are kept jumps with the scores: a rate that falls lets them settle before the task grows.
            schedule=Schedule("cosine", warmup=config.warmup),
            seed=seed,
            evaluate_at=every(max(1, steps // config.evaluations), steps=steps),
            checkpoint_seconds=60,
            # Scores of recall are sharp, and half precision would round them.
            precision="no",
        )
        train(
            model,
            config.task(seed, stage),
            terms=[CrossEntropy(), Answered()],
            settings=settings,
            run_dir=folder / task,
            config={"spec": spec, "stage": task, **asdict(config)},
            evaluations={"held-out": Evaluation(config.task(10_000 + seed, stage), config.batches)},
            resume=True,
        )
        before = folder / task


def learned(folder: Path) -> dict[str, Any] | None:
    """What was measured last on the task itself, maybe before its training ended; None where it has not begun."""
    if not (folder / WHOLE / "run.json").exists():
        return None
    last = [row for row in read_metrics(folder / WHOLE) if row["kind"] == "eval"][-1]
    finished = {run.name: result["metrics"] for run in sorted(folder.iterdir()) if (result := read_result(run))}
    return {
        "answered": last["values"]["held-out/answered"], "loss": last["values"]["held-out/cross_entropy"],
        "answered_before": {task: own["held-out/answered"] for task, own in finished.items() if task != WHOLE},
        "updates": last["step"], "trained_on": read_run(folder / WHOLE)["device"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="the folder of the runs")
    parser.add_argument("--only", nargs="+", help="names of what to compare; by default all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for option in SIZES:
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(getattr(Config, option)))
    parser.add_argument(
        "--as-trained", action="store_true", help="train nothing: runs that were ended as they are, with their updates"
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recall.json")
    args = parser.parse_args()
    asked = {option: value for option in SIZES if (value := getattr(args, option)) is not None}
    config = replace(TINY if args.tiny else Config(), **asked)
    specs = compared(config.memory)
    if unknown := set(args.only or ()) - specs.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(specs)}")
    for seed in args.seeds:
        for name in args.only or specs:
            labels = {"mechanism": name, "spec": specs[name], "seed": seed, "steps": config.steps, "lr": config.lr,
                      "pairs": config.pairs, "length": config.length, "memory": config.memory,
                      "width": config.width}  # fmt: skip
            folder = args.work / f"{name.replace(', ', '-').replace(' ', '-')}-{config.pairs}-{seed}"
            if not args.as_trained:
                learn(config, name, seed, folder)
            if (measured := learned(folder)) is None:
                parser.error(f"--as-trained: {folder} has no run on the task itself")
            row = labels | measured
            print(row, flush=True)
            result = make_results("recall", "ABC", {TABLE: [row]}, config=asdict(config), keys={TABLE: list(labels)})
            write_results(args.out, result, before=read_results(args.out))


if __name__ == "__main__":
    main()
