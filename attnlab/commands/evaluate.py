"""``attnlab evaluate``: a language model's loss and recall under several kinds of attention, by lm-eval."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._shared import answer_arguments, check_mechanisms, device_arguments, print_json

if TYPE_CHECKING:
    from attnlab.evaluation.evaluate import EvaluateConfig
    from attnlab.evaluation.tasks import TaskSettings

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", metavar="MODEL", help="a model folder, a GGUF file, a hub name, or smollm2")
    _subject_arguments(parser)
    _task_arguments(parser)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch (default: %(default)s)")
    device_arguments(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("evaluation.html"), help="the page (default: %(default)s)"
    )
    answer_arguments(parser)


def _subject_arguments(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "-m", "--mechanism", metavar="SPEC", help="put this mechanism in every layer; repeat for more", **several
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="put a plan's mechanisms in its layers (compare --recommend --plans writes plans); repeatable",
        **several,
    )
    parser.add_argument(
        "--policy",
        metavar="SPEC",
        help="a cache that evicts keys, such as h2o:budget=64,sinks=4 or snapkv:window=32,budget=0.25; repeatable",
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
    parser.add_argument("--text", type=Path, help="the text of the task loss (default: the text shipped with attnlab)")
    parser.add_argument("--window", type=int, help="tokens in a window (default: 1024)")
    parser.add_argument("--stride", type=int, help="new tokens that each window scores (default: all of them)")
    parser.add_argument("--windows", type=int, help="how many windows of the text are scored")
    parser.add_argument("--lambada", type=Path, help='LAMBADA as JSON lines of {"text": ...}')
    parser.add_argument("--passages", type=int, help="how many passages of LAMBADA are read")
    parser.add_argument("--haystack", type=Path, help="a text for needles to hide in (default: noise)")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the generated tasks' prompts")
    parser.add_argument("--cases", type=int, help="cases of each generated task at each length")
    parser.add_argument("--seed", type=int, help="of the generated tasks (default: 0)")
    parser.add_argument(
        "--chat-template", action="store_true", help="put each prompt into the tokenizer's chat template"
    )


def run(options: argparse.Namespace) -> None:
    """Evaluate, and write the page after each subject."""
    import torch

    from attnlab.adapters import load_model
    from attnlab.devices import to_device
    from attnlab.evaluation.evaluate import evaluate, subjects_of
    from attnlab.evaluation.evaluate_lines import evaluation_lines
    from attnlab.pages.evaluate import evaluate_page
    from attnlab.provenance import check_writable, write_atomic

    answers = options.answers or options.out.with_suffix(".answers.jsonl")
    for path in (options.out, answers):
        check_writable(path)
    check_mechanisms(options.mechanism)
    subjects_of(options.mechanism, options.plan, options.policy)
    config = _config(options)
    loaded = load_model(options.model, trust_remote_code=options.trust_remote_code, dtype=getattr(torch, options.dtype))
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
    if options.json:
        print_json(result)
    else:
        print("\n".join(evaluation_lines(result)))
    print(f"wrote {options.out.resolve()}", file=sys.stderr if options.json else sys.stdout)


def _config(options: argparse.Namespace) -> EvaluateConfig:
    from attnlab.evaluation.evaluate import FULL, QUICK, EvaluateConfig

    tasks = options.tasks or ["loss", *(["lambada"] if options.lambada else []), "needle"]
    if options.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {options.batch}")
    return EvaluateConfig(
        tasks=tuple(tasks),
        settings=_settings(FULL if options.full else QUICK, options),
        batch=options.batch,
        chat_template=options.chat_template,
    )


def _settings(base: TaskSettings, options: argparse.Namespace) -> TaskSettings:
    names = ("text", "window", "stride", "windows", "lambada", "passages", "haystack", "cases", "seed")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.lengths:
        changes["lengths"] = tuple(options.lengths)
    return replace(base, **changes)
