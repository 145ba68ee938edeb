"""A real language model with a bounded memory: what `attnlab convert` makes of it in some minutes, and what that costs.

    python benchmarks/convert.py runs/convert --model smollm2 --text corpus/ --minutes 15 \\
        --loss-text wikitext.txt --book moby-dick.txt --lambada lambada_test.jsonl

Students are trained by the command's own code: one in which every head is bounded (``--mechanism``), and with a share
of softmax's cache (``--budget``) a plan, one size of memory for all heads, and sinks and a window for all heads. They
are evaluated beside their teacher and beside the teacher with evicted caches of the same share. With pure distillation
(``--hard 0``) a softmax student would stay its teacher, so the teacher is the only reference. The same command goes on
where it was interrupted. ``benchmarks/wikitext.py`` makes the text of the loss.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from storing import make_results, read_results, write_results

from attnlab.adapters import LoadedModel, load_model
from attnlab.adapters.cache_bytes import cache_bytes, layer_shapes
from attnlab.adapters.distillation import Distillation
from attnlab.adapters.protocol import adapter_of
from attnlab.devices import best_device
from attnlab.evaluation.candidates import fitting
from attnlab.evaluation.evaluate import EvaluateConfig, evaluate
from attnlab.evaluation.plan_conversion import plan_conversion
from attnlab.evaluation.plans import head_specs
from attnlab.evaluation.tasks import TaskSettings
from attnlab.pretraining.conversion import ConversionConfig, convert_model
from attnlab.registry import spec_of
from attnlab.training import read_result

TABLE = "conversion"
# What the table calls the students.
ARMS = {
    "bounded": "every head bounded",
    "plan": "plan",
    "uniform": "one size for all heads",
    "window": "sinks and window",
}


@dataclass(frozen=True)
class Config:
    model: str
    # Every head: 128 keys' worth of memory in bfloat16; 124 keys, each with a score and a place.
    mechanism: str = "abc-select:slots=56,window=64,sinks=4"
    budget: float = 0.25
    minutes: float = 15.0
    tokens: int = 1_000_000_000
    # Rows of training, and the length at which a cache is counted and planned for.
    length: int = 2048
    batch: int = 32768
    lr: float = 3e-4
    repeats: float = 0.1
    hard: float = 0.0
    heads_share: float = 0.05
    seed: int = 0
    compile: bool = True
    window: int = 1024
    windows: int = 64
    passages: int = 1000
    cases: int = 100
    needle: int = 2000
    dtype: str = "bfloat16"


def spec_for(config: Config, name: str) -> str | None:
    """The one mechanism of a student, None of a plan."""
    if name in ("bounded", "plan"):
        return config.mechanism if name == "bounded" else None
    teacher = load_model(config.model, dtype=getattr(torch, config.dtype)).model
    shapes = layer_shapes(teacher)
    of_head = int(config.budget * cache_bytes(teacher, config.length)) // sum(shape.groups for shape in shapes)
    with_slots, without = fitting(shapes[0], config.length, of_head)
    return with_slots if name == "uniform" else without


def convert_one(config: Config, name: str, text: Path, folder: Path) -> dict[str, Any]:
    """Train one student, or go on with it; what its result says, and the seconds that all of it took."""
    began = time.perf_counter()
    settings = Distillation(
        logits_lr=config.lr, batch=config.batch // config.length, length=config.length, repeats=config.repeats,
        hard=config.hard, seed=config.seed, compile=config.compile and best_device().type == "cuda", evaluations=4,
    )  # fmt: skip
    conversion = ConversionConfig(
        model=config.model, text=(str(text),), mechanism=spec_for(config, name),
        budget=config.budget if name == "plan" else None, tokens=config.tokens, minutes=config.minutes,
        stages=(("heads", config.heads_share), ("logits", 1 - config.heads_share)), settings=settings,
    )  # fmt: skip

    def planned(loaded: LoadedModel, texts: Any) -> Any:
        return plan_conversion(
            loaded.model, texts, tokenizer=loaded.tokenizer, budget=config.budget, length=config.length,
            tokens=8 * config.length, seed=config.seed,
        )  # fmt: skip

    result = convert_model(conversion, run_dir=folder, make_plan=planned, tokens=folder.parent / "tokens")
    return {**result, "seconds": time.perf_counter() - began}


def settings_of(config: Config, files: argparse.Namespace) -> TaskSettings:
    """The text and the numbers of cases of all tasks."""
    return TaskSettings(
        text=files.loss_text, window=config.window, windows=config.windows, lambada=files.lambada,
        passages=config.passages, lengths=(config.needle,), cases=config.cases,
    )  # fmt: skip


def scores(config: Config, model: LoadedModel, files: argparse.Namespace, answers: Path) -> dict[str, Any]:
    """The model's scores by task."""
    tasks = ("loss", *(("lambada",) if files.lambada else ()), "needle")
    measured = evaluate(model, config=EvaluateConfig(tasks, settings_of(config, files), batch=16), answers=answers)
    of_tasks = dict(measured["rows"][0]["tasks"])
    if files.book:
        book = TaskSettings(text=files.book, window=config.window, windows=max(1, config.windows // 4))
        again = evaluate(model, config=EvaluateConfig(("loss",), book, batch=16))
        of_tasks["book"] = again["rows"][0]["tasks"]["loss"]
    return of_tasks


def row_of(name: str, tasks: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    row: dict[str, Any] = {"model": name}
    for column, task in (("loss", "loss"), ("book_loss", "book")):
        if task in tasks:
            row |= {column: tasks[task]["loss"], f"{column}_above": tasks[task]["loss"] - teacher[task]["loss"]}
    for task, values in tasks.items():
        if task not in ("loss", "book"):
            row[task.split()[0]] = values["recall" if "recall" in values else "acc"]
    return row


def _learned(folder: Path) -> dict[str, Any]:
    """The tokens that a student has learned from, and how many a second, compiling and evaluating included."""
    result = read_result(folder)
    if result is None:
        return {}
    return {"training_tokens": result["tokens"], "tokens_per_second": result["tokens_per_second"]["logits"]}


def loaded_for_evaluation(path: str | Path, config: Config) -> LoadedModel:
    loaded = load_model(path, dtype=getattr(torch, config.dtype))
    loaded.model.to(best_device())
    return loaded


def evaluated(config: Config, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of the table for the teacher, for each student, and for the teacher with evicted caches."""
    teacher, answers = loaded_for_evaluation(config.model, config), args.work / "answers.jsonl"
    whole = cache_bytes(teacher.model, config.length)
    first = scores(config, teacher, args, answers)
    yield row_of("teacher", first, first) | {"cache": 1.0, "softmax_heads": softmax_heads(teacher)}
    for name in ARMS:
        if not (args.work / name / "model").is_dir():
            continue
        student = loaded_for_evaluation(args.work / name / "model", config)
        held = {
            "cache": cache_bytes(student.model, config.length) / whole,
            "softmax_heads": softmax_heads(student),
        }
        row = row_of(ARMS[name], scores(config, student, args, answers), first)
        yield row | held | _learned(args.work / name)
    if args.policies:
        # A policy cuts the cache after the prompt: a window's loss, read in one piece, knows nothing of it.
        recall = EvaluateConfig(("needle",), settings_of(config, args), batch=16)
        specs = [f"{name}:budget={config.budget}" for name in args.policies]
        for row in evaluate(teacher, policies=specs, config=recall, answers=answers)["rows"][1:]:
            yield row_of(row["subject"], dict(row["tasks"]), first) | {"cache": config.budget}


def softmax_heads(loaded: LoadedModel) -> int:
    """The key/value heads that keep every key."""
    adapter, groups = adapter_of(loaded.model), layer_shapes(loaded.model)[0].groups
    specs = [spec_of(adapter.mechanism_at(site)) for site in adapter.sites()]
    return sum(head_specs(spec, groups).count("softmax") for spec in specs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the folder of the runs")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True)
    for name in ("--loss-text", "--book", "--lambada"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    for name in ("minutes", "budget", "lr", "repeats", "hard", "heads_share"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Config, name))
    for name in ("tokens", "length", "batch", "seed", "window", "windows", "passages", "cases", "needle"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name))
    for name in ("mechanism", "dtype"):
        parser.add_argument(f"--{name}", default=getattr(Config, name))
    parser.add_argument("--policies", nargs="*", default=("tova", "snapkv"), help="evicted caches beside the students")
    parser.add_argument("--train-only", action="store_true", help="evaluate later, by the same command without this")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "convert.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = Config(**{name: getattr(args, name) for name in Config.__dataclass_fields__})
    for arm in args.arms:
        made = convert_one(config, arm, args.text, args.work / arm)
        print(arm, {name: value for name, value in made.items() if name != "cache"}, flush=True)
    if args.train_only:
        return
    for row in evaluated(config, args):
        print(row, flush=True)
        named = asdict(config) | {"model": Path(config.model).name}
        result = make_results("convert", "ABC", {TABLE: [row]}, config=named, keys={TABLE: ["model"]})
        write_results(args.out, result, before=read_results(args.out))


if __name__ == "__main__":
    main()
