"""``attnlab evaluate``: a language model's loss and recall under several kinds of attention, by lm-eval."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import (
    answers_argument,
    answers_file,
    check_mechanisms,
    check_page,
    device_argument,
    dtype_argument,
    mechanism_argument,
    model_argument,
    page_argument,
    trust_argument,
)
from attnlab.progress import note, showing

if TYPE_CHECKING:
    from attnlab.evaluation.evaluate import EvaluateConfig
    from attnlab.evaluation.tasks import TaskSettings

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model_argument(parser)
    _subject_arguments(parser)
    _task_arguments(parser)
    parser.add_argument("--batch", type=int, metavar="N", default=4, help="sequences in a batch (default: %(default)s)")
    device_argument(parser)
    dtype_argument(parser)
    trust_argument(parser)
    page_argument(parser, "evaluation.html")
    answers_argument(parser)


def _subject_arguments(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    mechanism_argument(parser, "put this mechanism in every layer; repeat for more", **several)
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="put a plan's mechanisms in its layers (compare --recommend --plans writes plans); repeat for more",
        **several,
    )
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help="a cache that evicts keys, such as h2o:budget=64,sinks=4 or snapkv:window=32,budget=0.25; repeat for more",
        **several,
    )


def _task_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="loss, lambada, needle, needle-multikey, needle-multivalue, needle-multiquery, variables, common-words, "
        "frequent-words, or a task of lm-eval whose data is at hand (default: loss and needle, and lambada where its "
        "file is given)",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="64 windows, all of LAMBADA, 100 cases at 512, 1,024 and 2,048 tokens; without it 8 windows, 100 "
        "passages, 8 cases at 512",
    )
    for name, kind, metavar, explanation in (
        ("text", Path, "FILE", "the text of the task loss (default: the text shipped with attnlab)"),
        ("window", int, "N", "tokens in a window (default: 1024)"),
        ("stride", int, "N", "new tokens that each window scores (default: all of them)"),
        ("windows", int, "N", "how many windows of the text are scored"),
        ("lambada", Path, "FILE", 'LAMBADA as JSON lines of {"text": ...}'),
        ("passages", int, "N", "how many passages of LAMBADA are read"),
        ("haystack", Path, "FILE", "a text for needles to hide in (default: noise)"),
        ("cases", int, "N", "cases of each generated task at each length"),
        ("seed", int, "N", "seed of the generated tasks (default: 0)"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=explanation)
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens of the generated tasks' prompts")
    parser.add_argument(
        "--chat-template", action="store_true", help="put each prompt into the tokenizer's chat template"
    )


def run(options: argparse.Namespace) -> Answer:
    """Evaluate, and write the page after each subject."""
    import torch

    from attnlab.adapters import load_model
    from attnlab.devices import to_device
    from attnlab.evaluation.evaluate import evaluate, subjects_of
    from attnlab.evaluation.evaluate_lines import evaluation_lines
    from attnlab.pages.evaluate import evaluate_page
    from attnlab.provenance import write_atomic

    check_page(options.out, json=options.json)
    answers = answers_file(options)
    check_mechanisms(options.mechanism)
    subjects_of(options.mechanism, options.plan, options.policy)
    config = _config(options)
    with showing("evaluating", at_once=False):
        note("reading the model")
        loaded = load_model(
            options.model, trust_remote_code=options.trust_remote_code, dtype=getattr(torch, options.dtype)
        )
    to_device(options.device, loaded.model)

    def write(result: dict[str, Any]) -> None:
        write_atomic(options.out, evaluate_page(result))

    result = evaluate(
        loaded,
        mechanisms=options.mechanism,
        plans=options.plan,
        policies=options.policy,
        config=config,
        name=Path(options.model).name,
        answers=answers,
        on_result=write,
    )
    return Answer(result, evaluation_lines(result), [answers, options.out])


def _config(options: argparse.Namespace) -> EvaluateConfig:
    from attnlab.evaluation.evaluate import FULL, QUICK, EvaluateConfig

    tasks = options.tasks or ["loss", *(["lambada"] if options.lambada else []), "needle"]
    if options.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {options.batch}")
    _refuse_unused(options, tasks)
    return EvaluateConfig(
        tasks=tuple(tasks),
        settings=_settings(FULL if options.full else QUICK, options),
        batch=options.batch,
        chat_template=options.chat_template,
    )


def _refuse_unused(options: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Raise a ValueError if an option is given whose tasks are not run."""
    from attnlab.evaluation.ruler import RULER_TASKS

    for names, own in (
        (("text", "window", "stride", "windows"), ("loss",)),
        (("lambada", "passages"), ("lambada",)),
        (("haystack", "cases", "lengths"), tuple(RULER_TASKS)),
    ):
        given = [name for name in names if getattr(options, name) is not None]
        if given and not set(own) & set(tasks):
            task = f"the task {own[0]}" if len(own) == 1 else "generated tasks such as needle"
            raise ValueError(f"--{given[0]} is for {task}, which --tasks leaves out; name it there too")


def _settings(base: TaskSettings, options: argparse.Namespace) -> TaskSettings:
    names = ("text", "window", "stride", "windows", "lambada", "passages", "haystack", "cases", "seed")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.lengths:
        changes["lengths"] = tuple(options.lengths)
    return replace(base, **changes)
