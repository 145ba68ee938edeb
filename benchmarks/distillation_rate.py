"""The learning rate that `attnlab convert` chooses, beside fixed ones, from three starting distances.

    python benchmarks/distillation_rate.py runs/rate --model stories15M/ --text lambada_test.jsonl

A tight window starts far from its teacher, a bounded memory nearer, a plan with most of softmax's cache very near. Each
is distilled for the same steps on the same tokens by every fixed rate, and by that of the rule (``near_rate``). A row
has the KL on held-out text at the start, after the last step, and of the student that is saved. The same command goes
on where it was interrupted. ``--tiny`` is a dry run on a small random model and the text that the package ships.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storing import make_results, read_results, write_results
from tiny_models import tiny_language_model

from attnlab.adapters import Plan, load_model
from attnlab.adapters.distillation import Distillation
from attnlab.data.text_folders import text_files, token_stream
from attnlab.evaluation.plan_conversion import plan_conversion
from attnlab.pretraining.conversion import ConversionConfig, convert_model
from attnlab.training import read_metrics

TABLE = "rates"
KL = "held-out/kl"
RULE = "by the rule"
STARTS = ("tight window", "bounded memory", "generous plan")


def generous_plan(args: argparse.Namespace) -> dict[str, Any]:
    """A plan for most of softmax's cache, made once."""
    file = args.work / "plan.json"
    if not file.exists():
        loaded = load_model(args.model)
        stream = token_stream(text_files([args.text]), loaded.tokenizer, cache=args.work / "tokens", leave_out=[])[0]
        texts = [loaded.tokenizer.decode(stream.tokens[: 64 * args.length].tolist())]
        plan = plan_conversion(
            loaded.model, texts, tokenizer=loaded.tokenizer, budget=args.budget, length=args.length,
            tokens=8 * args.length,
        )  # fmt: skip
        args.work.mkdir(parents=True, exist_ok=True)
        plan.save(file)
    return Plan.load(file).to_json()


def distilled(args: argparse.Namespace, start: str, ways: dict[str, Any], rate: float | None) -> dict[str, Any]:
    """One student by a fixed rate, or by the rule: what its folder says."""
    folder = args.work / f"{start} {'rule' if rate is None else f'{rate:g}'}".replace(" ", "-")
    settings = Distillation(
        logits_lr=args.lr if rate is None else rate, scale_lr=rate is None, batch=args.batch, length=args.length,
        evaluations=4, seed=args.seed,
    )  # fmt: skip
    config = ConversionConfig(
        model=str(args.model), text=(str(args.text),), tokens=args.steps * args.batch * args.length,
        stages=(("logits", 1.0),), settings=settings, **ways,
    )  # fmt: skip
    result = convert_model(config, run_dir=folder, tokens=args.work / "tokens")
    last = [line for line in read_metrics(folder / "stages" / "3-logits") if line["kind"] == "eval"][-1]
    saved = result["saved"]
    return {
        "rate": RULE if rate is None else f"{rate:g}", "lr": result["learning_rates"]["logits"],
        "kl_at_start": saved["kl_at_start"], "kl_at_end": last["values"][KL], "kl_saved": saved["kl"],
        "saved_step": saved["step"], "steps": last["step"],
    }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ways_of = {"mechanism": args.window}, {"mechanism": args.memory}, {"plan": generous_plan(args)}
    starts: dict[str, dict[str, Any]] = dict(zip(STARTS, ways_of, strict=True))
    for rate in (None, *args.rates):
        for start, ways in starts.items():
            if start not in args.starts:
                continue
            yield {"model": args.model.name, "start": start, **distilled(args, start, ways, rate)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the folder of the runs")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 3e-5, 3e-6])
    parser.add_argument("--lr", type=float, default=3e-4, help="the rate that the rule scales")
    parser.add_argument("--window", default="window:r=8")
    parser.add_argument("--memory", default="abc-select:slots=16,window=16,sinks=4")
    parser.add_argument("--budget", type=float, default=0.75)
    for name, default in (("steps", 200), ("batch", 2), ("length", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "distillation_rate.json")
    args = parser.parse_args()
    if args.tiny:
        args.model = tiny_language_model(args.work / "tiny-model")
        args.rates, args.steps, args.batch, args.length = [3e-4], 4, 1, 64
        args.memory = "abc-select:slots=4,window=4,sinks=1,block=1"
    config = {
        name: value
        for name, value in vars(args).items()
        if name not in ("work", "out", "text", "model", "tiny", "starts")
    }
    for row in rows(args):
        print(row, flush=True)
        result = make_results("distillation_rate", "ABC", {TABLE: [row]}, config=config,
                              keys={TABLE: ["model", "start", "rate"]})  # fmt: skip
        write_results(args.out, result, before=read_results(args.out))


if __name__ == "__main__":
    main()
