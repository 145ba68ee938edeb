"""A real language model with a bounded memory: what `attnlab convert` makes of it in some minutes, and what that costs.

    python benchmarks/convert.py runs/convert --model smollm2 --text corpus/ --minutes 15 --seeds 0 1 2 \\
        --loss-text wikitext.txt --book moby-dick.txt --lambada lambada_test.jsonl

Students are trained by the command's own code: one in which every head is bounded (``--mechanism``), and at a share of
softmax's cache (``--budget``) a plan, and at equal bytes one size of memory for all heads, whole layers with softmax
and the rest bounded, sinks and a window, abc-hybrid and abc-mlp. They are evaluated beside their teacher, and beside
the teacher with evicted caches of the same share. With pure distillation (``--hard 0``) a softmax student would stay
its teacher, so the teacher is the only reference.

A loss over windows that are read in one piece knows nothing of eviction, which cuts the cache after a prompt.
``continuation`` is a loss that does: of the last tokens of a stretch of text, whose cache is cut before them, as
`attnlab judge` has it. The table ``conversion`` has a row for each student and seed, ``arms`` means over seeds,
``against`` the plan's distance from every other arm on the same windows and cases. With ``--train-only``, ``trained``
is what training measured on held-out text, and ``planned`` what planning measured before it. The same command goes on
where it was interrupted, and rows of other seeds stay: what was measured of a student lies in its run's
``scores.json``. So several processes may each train and evaluate some arms and seeds in one folder; the command with
all of them then makes the tables. ``benchmarks/wikitext.py`` makes the text of the loss.
``--tiny`` runs all of it with a small random model on a CPU, to see that everything fits together.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from convert_arms import ARMS, PLANNED, layers_plan, spec_for
from convert_tables import ROWS, against, means, row_of, with_seeds
from storing import make_results, read_results, write_results
from tiny_models import tiny_language_model, tiny_text
from torch.nn.functional import cross_entropy

from attnlab.adapters import LoadedModel, Plan, load_model
from attnlab.adapters.cache_bytes import cache_bytes, layer_shapes
from attnlab.adapters.distillation import Distillation
from attnlab.adapters.protocol import adapter_of
from attnlab.devices import best_device
from attnlab.evaluation.evaluate import EvaluateConfig, evaluate
from attnlab.evaluation.judge import judge
from attnlab.evaluation.judge_cases import JudgeCase
from attnlab.evaluation.judge_grid import JudgeConfig, make_cells
from attnlab.evaluation.plan_conversion import plan_conversion
from attnlab.evaluation.plans import head_specs
from attnlab.evaluation.tasks import TaskSettings
from attnlab.pretraining.conversion import ConversionConfig, convert_model
from attnlab.provenance import file_sha256, write_json
from attnlab.registry import spec_of
from attnlab.training import read_result

TRAINED, PLANNED_ROWS = "trained", "planned"
KEYS = {
    PLANNED_ROWS: ["memory", "budget", "seed"],
    TRAINED: ["model", "budget", "seed"],
    ROWS: ["model", "budget", "seed"],
    "arms": ["model", "budget"],
    "against": ["arm", "budget", "task"],
}
# The rate of a student that begins far from its teacher, as the command has it.
LR = 3e-4
# By task, the values of single windows and cases.
Scores = dict[str, list[float]]


@dataclass(frozen=True)
class Config:
    model: str
    # Every head: 128 keys' worth of memory in bfloat16; 124 keys, each with a score and a place.
    mechanism: str = "abc-select:slots=56,window=64,sinks=4"
    budget: float = 0.25
    minutes: float | None = 15.0
    tokens: int = 1_000_000_000
    # Rows of training, and the length at which a cache is counted and planned for.
    length: int = 2048
    batch: int = 32768
    # None: by the student's distance at the start.
    lr: float | None = None
    repeats: float = 0.1
    hard: float = 0.0
    heads_share: float = 0.05
    seeds: tuple[int, ...] = (0,)
    compile: bool = True
    window: int = 1024
    windows: int = 64
    passages: int = 1000
    cases: int = 100
    needle: int = 2000
    dtype: str = "bfloat16"
    # Products of training: bf16, no, or auto: bf16 on a GPU.
    precision: str = "auto"


TINY = Config(
    "", mechanism="abc-select:slots=4,window=4,sinks=1,block=1", minutes=None, tokens=256, length=64, batch=64,
    budget=0.6, compile=False, window=32, windows=3, passages=2, cases=2, needle=128, dtype="float32",
)  # fmt: skip


def convert_one(config: Config, name: str, seed: int, text: Path, work: Path) -> dict[str, Any]:
    """Train one student, or go on with it; what its result says, and the seconds that all of it took."""
    began = time.perf_counter()
    settings = Distillation(
        logits_lr=LR if config.lr is None else config.lr, scale_lr=config.lr is None,
        batch=config.batch // config.length, length=config.length, repeats=config.repeats, hard=config.hard, seed=seed,
        precision=config.precision, compile=config.compile and best_device().type == "cuda", evaluations=4,
    )  # fmt: skip
    at_budget: dict[str, Any] = {"budget": config.budget, "length": config.length}
    spec = spec_for(name, config.model, bounded=config.mechanism, dtype=config.dtype, **at_budget)
    conversion = ConversionConfig(
        model=config.model, text=(str(text),), mechanism=spec, budget=config.budget if name in PLANNED else None,
        tokens=config.tokens, minutes=config.minutes,
        stages=(("heads", config.heads_share), ("logits", 1 - config.heads_share)), settings=settings,
    )  # fmt: skip

    def planned(loaded: LoadedModel, texts: Any) -> Plan:
        at_seed = {**at_budget, "tokens": 8 * config.length, "seed": seed}
        if name == "layers":
            return layers_plan(loaded, texts, bounded=config.mechanism, **at_seed)
        return plan_conversion(loaded.model, texts, tokenizer=loaded.tokenizer, **at_seed)

    result = convert_model(
        conversion,
        run_dir=run_of(work, name, config.budget) / f"seed-{seed}",
        make_plan=planned,
        tokens=work / "tokens",
    )
    return {**result, "seconds": time.perf_counter() - began}


def run_of(work: Path, arm: str, budget: float) -> Path:
    """The folder of an arm's students; one arm has a size of its own."""
    return work / (arm if arm == "bounded" else f"{arm}-{budget:g}")


def settings_of(config: Config, files: argparse.Namespace) -> TaskSettings:
    """The text and the numbers of cases of all tasks."""
    return TaskSettings(
        text=files.loss_text, window=config.window, windows=config.windows, lambada=files.lambada,
        passages=config.passages, lengths=(config.needle,), cases=config.cases,
    )  # fmt: skip


def continuations(config: Config, files: argparse.Namespace) -> JudgeConfig:
    """Policies at the budget, and stretches of the text whose last tokens are scored after the cache is cut."""
    settings = replace(settings_of(config, files), lengths=(config.length,))
    policies = tuple(files.policies) or ("streaming-llm",)
    return JudgeConfig(policies, budgets=(config.budget,), tasks=("loss",), settings=settings)


def scores(
    config: Config, model: LoadedModel, files: argparse.Namespace, answers: Path, cases: Sequence[JudgeCase]
) -> Scores:
    """The values of all windows and cases by task."""
    tasks, batch = ("loss", *(("lambada",) if files.lambada else ()), "needle"), rows_at_once()
    measured = evaluate(model, config=EvaluateConfig(tasks, settings_of(config, files), batch=batch), answers=answers)
    found = {name: values_of(task) for name, task in measured["rows"][0]["tasks"].items()}
    if files.book:
        book = TaskSettings(text=files.book, window=config.window, windows=max(1, config.windows // 4))
        again = evaluate(model, config=EvaluateConfig(("loss",), book, batch=batch))
        found["book"] = values_of(again["rows"][0]["tasks"]["loss"])
    found["continuation"] = continuation_losses(model, cases)
    return {name.split()[0]: values for name, values in found.items()}


def kept_scores(file: Path, config: Config, files: argparse.Namespace, measure: Callable[[], Scores]) -> Scores:
    """What ``measure`` returns, kept in a file with what it was measured by; measured anew where that differs."""
    sizes = ("budget", "length", "window", "windows", "passages", "cases", "needle", "dtype")
    texts = [None if path is None else file_sha256(path) for path in (files.loss_text, files.book, files.lambada)]
    by = {name: getattr(config, name) for name in sizes} | {"texts": texts}
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["by"] == by:
            return dict(kept["scores"])
    made = measure()
    write_json(file, {"by": by, "scores": made})
    return made


def values_of(task: dict[str, Any]) -> list[float]:
    """A task's single values; a window of the loss counts by its tokens, so that the values' mean is the loss."""
    if "cases" in task:
        return [case["recall"] for case in task["cases"]]
    weights = task.get("weights") or [1] * len(task["values"])
    return [value * weight * len(weights) / sum(weights) for value, weight in zip(task["values"], weights, strict=True)]


@torch.no_grad()
def continuation_losses(loaded: LoadedModel, cases: Sequence[JudgeCase], *, batch: int = 4) -> list[float]:
    """Nats a token of each case's target, of a model that keeps by itself what it remembers of the context."""
    losses: list[float] = []
    for i in range(0, len(cases), batch):
        part = cases[i : i + batch]
        ids = torch.tensor([[*case.context, *case.question, *case.target] for case in part], device=loaded.model.device)
        scored = len(part[0].target)
        logits = loaded.model(ids).logits[:, -scored - 1 : -1].float()
        each = cross_entropy(logits.transpose(1, 2), ids[:, -scored:], reduction="none")
        losses += each.mean(1).tolist()
    return losses


def trained(config: Config, work: Path) -> Iterator[dict[str, Any]]:
    """What training itself measured of each student, on text held out from it: evidence before any evaluation."""
    for name in ARMS:
        for run in sorted(run_of(work, name, config.budget).glob("seed-*")):
            if (result := read_result(run)) is not None:
                measured = result["metrics"]
                yield {
                    **labels_of(name, config, run), **_learned(run), "kl_at_start": result["saved"]["kl_at_start"],
                    "kl": measured["held-out/kl"], "loss_above": measured["held-out/above teacher"],
                }  # fmt: skip


def planned_rows(config: Config, work: Path) -> Iterator[dict[str, Any]]:
    """What planning measured before any training: both plans and one size for all heads, plain and recall windows."""
    for run in sorted(run_of(work, "plan", config.budget).glob("seed-*")):
        measured = json.loads((run / "plan-report.json").read_text(encoding="utf-8"))["measured"]
        for row in measured:
            labels = {"memory": row["name"], "budget": config.budget, "seed": labels_of("plan", config, run)["seed"]}
            above = {name: value for name, value in row.items() if "above" in name}
            yield labels | {"cache": row["bytes"] / measured[0]["bytes"], **above}


def labels_of(name: str, config: Config, run: Path) -> dict[str, Any]:
    budget = None if name == "bounded" else config.budget
    return {"model": ARMS[name], "budget": budget, "seed": int(run.name.removeprefix("seed-"))}


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


def evaluated(config: Config, args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Scores]]:
    """A row and its single values for the teacher, for each student, and for the teacher with evicted caches."""
    teacher, answers = loaded_for_evaluation(config.model, config), args.work / "answers.jsonl"
    whole, keep = cache_bytes(teacher.model, config.length), partial(kept_scores, config=config, files=args)
    [cases] = make_cells(continuations(config, args), teacher).values()
    measure = partial(scores, config, files=args, answers=answers, cases=cases)
    first = keep(args.work / "teacher-scores.json", measure=partial(measure, teacher))
    row = partial(row_of, teacher=first)
    yield row({"model": "teacher", "cache": 1.0, "softmax_heads": softmax_heads(teacher)}, first), first
    for name, run in runs_to_show(config, args):
        student = loaded_for_evaluation(run / "model", config)
        share = cache_bytes(student.model, config.length) / whole
        labels = {**labels_of(name, config, run), "cache": share, "softmax_heads": softmax_heads(student)}
        own = keep(run / "scores.json", measure=partial(measure, student))
        yield row(labels | _learned(run), own), own
    for policy in args.policies:
        file = args.work / f"eviction-{policy.partition(':')[0]}-{config.budget:g}-scores.json"
        own = keep(file, measure=partial(evicted_scores, config, args, teacher, policy))
        yield row({"model": f"eviction, {policy}", "budget": config.budget, "cache": config.budget}, own), own


def rows_at_once() -> int:
    """Windows and prompts of a batch: few on a CPU, since each has a row of logits for every token."""
    return 16 if best_device().type == "cuda" else 4


def runs_to_show(config: Config, args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """The named arms and seeds, and what was measured of others in the folder."""
    for name in ARMS:
        for run in sorted(run_of(args.work, name, config.budget).glob("seed-*")):
            named = name in args.arms and labels_of(name, config, run)["seed"] in config.seeds
            if (run / "model").is_dir() and (named or (run / "scores.json").exists()):
                yield name, run


def evicted_scores(config: Config, args: argparse.Namespace, teacher: LoadedModel, policy: str) -> Scores:
    """What the teacher keeps of needles and of continuations where a policy cuts its cache to the budget."""
    recall = EvaluateConfig(("needle",), settings_of(config, args), batch=rows_at_once())
    spec = f"{policy}{',' if ':' in policy else ':'}budget={config.budget}"
    [_, needles] = evaluate(teacher, policies=[spec], config=recall, answers=args.work / "answers.jsonl")["rows"]
    own = {task.split()[0]: values_of(values) for task, values in needles["tasks"].items()}
    one = replace(continuations(config, args), policies=(policy,))
    [losses] = [
        r["unseen"] for r in judge(teacher, one, answers=args.work / "judged.jsonl")["rows"] if r["policy"] == policy
    ]
    return own | ({"continuation": losses["scores"]} if "scores" in losses else {})


def softmax_heads(loaded: LoadedModel) -> int:
    """The key/value heads that keep every key."""
    adapter, groups = adapter_of(loaded.model), layer_shapes(loaded.model)[0].groups
    specs = [spec_of(adapter.mechanism_at(site)) for site in adapter.sites()]
    return sum(head_specs(spec, groups).count("softmax") for spec in specs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the folder of the runs")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path)
    for name in ("--loss-text", "--book", "--lambada"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=Config.seeds)
    for name in ("minutes", "budget", "lr", "repeats", "hard", "heads_share"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Config, name))
    for name in ("tokens", "length", "batch", "window", "windows", "passages", "cases", "needle"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name))
    for name in ("mechanism", "dtype", "precision"):
        parser.add_argument(f"--{name}", default=getattr(Config, name))
    parser.add_argument("--policies", nargs="*", default=("tova", "snapkv"), help="evicted caches beside the students")
    parser.add_argument(
        "--train-only",
        action="store_true",
        help="write what training measured; evaluate later, by the same command without this",
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "convert.json")
    args = parser.parse_args()
    if args.text is None and not args.tiny:
        parser.error("--text names the text to learn from")
    return args


def config_of(args: argparse.Namespace) -> Config:
    """The settings; of a dry run the small ones, with a small model and text in the folder of the runs."""
    if not args.tiny:
        return Config(**{name: getattr(args, name) for name in Config.__dataclass_fields__} | {"seeds": (*args.seeds,)})
    args.text = args.loss_text = tiny_text(args.work / "text.txt")
    return replace(TINY, model=str(tiny_language_model(args.work / "tiny-model")), seeds=(*args.seeds,))


def main() -> None:
    args = arguments()
    config = config_of(args)
    for seed in config.seeds:
        for arm in args.arms:
            made = convert_one(config, arm, seed, args.text, args.work)
            print(arm, seed, {name: value for name, value in made.items() if name != "cache"}, flush=True)
    named = asdict(config) | {"model": Path(config.model).name, "seeds": list(config.seeds)}
    write = partial(make_results, "convert", "ABC", config=named, keys=KEYS)
    if args.train_only:
        tables = {TRAINED: list(trained(config, args.work)), PLANNED_ROWS: list(planned_rows(config, args.work))}
        made = write({name: rows for name, rows in tables.items() if rows})
        write_results(args.out, made, before=read_results(args.out))
        return
    by_arm: dict[str, list[Scores]] = {}
    for row, own in evaluated(config, args):
        print(row, flush=True)
        by_arm.setdefault(row["model"], []).append(own)
        write_results(args.out, write({ROWS: [row]}), before=with_seeds(read_results(args.out)))
    made = read_results(args.out)
    assert made is not None
    derived = {"arms": means(made["tables"][ROWS])}
    if ARMS["plan"] in by_arm:
        derived["against"] = [{"budget": config.budget, **row} for row in against(by_arm, ARMS["plan"])]
    write_results(args.out, write(derived), before=made)


if __name__ == "__main__":
    main()
