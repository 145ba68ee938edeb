"""``attnlab judge``: key/value cache policies beside the full cache, on the same cases, in one run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import (
    answers_argument,
    answers_file,
    check_page,
    device_argument,
    dtype_argument,
    model_argument,
    page_argument,
)

if TYPE_CHECKING:
    from attnlab.evaluation.judge_grid import JudgeConfig

__all__ = ["arguments", "run"]

POLICIES = ["streaming-llm", "h2o", "snapkv", "leave-one-out"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model_argument(parser)
    _grid_arguments(parser)
    parser.add_argument(
        "--batch", type=int, metavar="N", default=8, help="cases that are read at once (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        default=1,
        help="processes that share the batches; each loads the model (default: %(default)s)",
    )
    device_argument(parser)
    dtype_argument(parser)
    page_argument(parser, "judge.html", "the page, or with the ending .json the numbers")
    answers_argument(parser)


def _grid_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        default=POLICIES,
        help=f"cache policies with their settings, without a budget, such as snapkv:window=16 (default: "
        f"{' '.join(POLICIES)})",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=float,
        metavar="SHARE",
        default=[0.5, 0.25],
        help="shares of the context's keys that are kept (default: 0.5 0.25)",
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        metavar="N",
        default=[1024],
        help="tokens of a case, its answer included (default: 1024)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="needle, needle-multikey, needle-multivalue, needle-multiquery, variables, common-words, frequent-words, "
        "loss, lambada (default: needle, variables, common-words and loss, and lambada where its file is given)",
    )
    parser.add_argument(
        "--cases", type=int, metavar="N", default=8, help="cases of each task at each length (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the cases (default: %(default)s)")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="the text that fills contexts and is continued (default: the text shipped with attnlab, 8,000 characters)",
    )
    parser.add_argument("--lambada", type=Path, metavar="FILE", help='LAMBADA as JSON lines of {"text": ...}')


def run(options: argparse.Namespace) -> Answer:
    """Judge, and write the page after each task and length."""
    from attnlab.evaluation.judge import judge
    from attnlab.evaluation.judge_lines import judge_lines
    from attnlab.pages.judge import judge_page
    from attnlab.provenance import write_atomic, write_json

    check_page(options.out, json=options.json)
    answers = answers_file(options)
    config = _config(options)

    def write(result: dict[str, Any]) -> None:
        if options.out.suffix == ".json":
            write_json(options.out, result)
        else:
            write_atomic(options.out, judge_page(result))

    result = judge(
        options.model,
        config,
        answers=answers,
        jobs=options.jobs,
        device=options.device,
        dtype=options.dtype,
        on_result=write,
    )
    return Answer(result, judge_lines(result), [answers, options.out])


def _config(options: argparse.Namespace) -> JudgeConfig:
    from attnlab.evaluation.judge_grid import DEFAULT_TASKS, JudgeConfig
    from attnlab.evaluation.tasks import TaskSettings

    for name in ("batch", "jobs", "cases"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    tasks = options.tasks or [*DEFAULT_TASKS, *(["lambada"] if options.lambada else [])]
    if options.lambada and "lambada" not in tasks:
        raise ValueError("--lambada is the file of the task lambada, which --tasks leaves out; name it there too")
    settings = TaskSettings(
        text=options.text,
        lambada=options.lambada,
        passages=None,
        lengths=tuple(dict.fromkeys(options.lengths)),
        cases=options.cases,
        seed=options.seed,
    )
    return JudgeConfig(
        policies=tuple(options.policies),
        budgets=tuple(options.budgets),
        tasks=tuple(tasks),
        settings=settings,
        batch=options.batch,
    )
