"""A language model's loss, recall and tasks under several kinds of attention, by lm-eval, in one run.

The model's own attention comes first; every other subject (a mechanism, a plan, a cache policy) is measured on the same
windows and cases, so that differences have paired intervals.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from attnlab.adapters import LoadedModel, Plan, load_model
from attnlab.adapters.load import max_length
from attnlab.caches.kv_policy import KVPolicy, cache_policy, policy_spec
from attnlab.evaluation.answers import AnswerFile, SubjectAnswers, fingerprint
from attnlab.evaluation.intervals import Interval, mean_interval, paired_interval, wilson
from attnlab.evaluation.ruler import RULER_TASKS
from attnlab.evaluation.tasks import LOSS, TaskSettings, fresh_tasks, task_data
from attnlab.fields import check_fields, check_int, expect
from attnlab.models import Transformer
from attnlab.pages.evaluate import evaluation_table
from attnlab.pages.notebook import Result
from attnlab.progress import Progress
from attnlab.provenance import command_line, provenance
from attnlab.registry import mechanism

__all__ = ["FULL", "QUICK", "EvaluateConfig", "EvaluationSubject", "evaluate", "subjects_of"]

OWN = "softmax"
QUICK = TaskSettings()
FULL = TaskSettings(windows=64, passages=None, lengths=(512, 1024, 2048), cases=100)


@dataclass(frozen=True)
class EvaluationSubject:
    """What is put into the model: at most one of a mechanism, a plan and a cache policy; none is the model itself."""

    name: str = OWN
    mechanism: str | None = None
    plan: Plan | None = None
    policy: KVPolicy | None = None


@dataclass(frozen=True)
class EvaluateConfig:
    """The tasks, what they are made from, and how many sequences make a batch."""

    tasks: tuple[str, ...] = (LOSS, "needle")
    settings: TaskSettings = QUICK
    batch: int = 4
    chat_template: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("batch", self.batch, least=1)
        expect("settings", self.settings, TaskSettings, "a TaskSettings")
        if not isinstance(self.tasks, tuple) or not self.tasks or not all(isinstance(t, str) for t in self.tasks):
            raise ValueError(f"tasks must be a tuple of names, such as ('loss', 'needle'), got {self.tasks!r}")


def subjects_of(
    mechanisms: Sequence[str] = (), plans: Sequence[Plan | Path | str] = (), policies: Sequence[KVPolicy | str] = ()
) -> list[EvaluationSubject]:
    """The model itself, then a subject for each mechanism, plan (or its file) and cache policy (or its spec)."""
    _expect_lists(mechanisms=(mechanisms, str), plans=(plans, (Plan, str, Path)), policies=(policies, (KVPolicy, str)))
    subjects = [EvaluationSubject()]
    subjects += [EvaluationSubject(spec, mechanism=spec) for spec in mechanisms if spec != OWN]
    for plan in plans:
        name = "plan" if isinstance(plan, Plan) else Path(plan).stem
        subjects.append(EvaluationSubject(f"plan {name}", plan=plan if isinstance(plan, Plan) else Plan.load(plan)))
    for policy in policies:
        made = cache_policy(policy)
        subjects.append(EvaluationSubject(f"cache {policy_spec(made)}", policy=made))
    for subject in subjects:
        if subject.mechanism is not None:
            mechanism(subject.mechanism)
    names = [subject.name for subject in subjects]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{min(twice)!r} is there twice")
    return subjects


def _expect_lists(**lists: tuple[Any, Any]) -> None:
    """Raise a ValueError unless each argument is a list of what it may hold."""
    for name, (items, kind) in lists.items():
        if isinstance(items, str) or not isinstance(items, Sequence) or not all(isinstance(i, kind) for i in items):
            wanted = {"mechanisms": "spec strings", "plans": "Plans or their files", "policies": "KVPolicies or specs"}
            raise ValueError(f"{name} is a list of {wanted[name]}, got {items!r}")


def evaluate(
    model: LoadedModel | str | Path,
    *,
    mechanisms: Sequence[str] = (),
    plans: Sequence[Plan | Path | str] = (),
    policies: Sequence[KVPolicy | str] = (),
    config: EvaluateConfig | None = None,
    name: str | None = None,
    answers: Path | str | None = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Evaluate a causal language model, itself and with each subject, by lm-eval; the result as JSON.

    ``answers`` is a file that keeps every answer: the same call goes on where another was stopped. ``on_result`` gets
    the result so far after each subject. Needs the package lm-eval.

    >>> result = evaluate("smollm2", mechanisms=["window:r=124,sinks=4"])  # doctest: +SKIP
    """
    _require_lm_eval()
    config = EvaluateConfig() if config is None else config
    _check_arguments(model, config, name, answers, on_result)
    subjects = subjects_of(mechanisms, plans, policies)
    loaded = load_model(model) if isinstance(model, (str, Path)) else model
    _check_model(loaded)
    limit = max_length(loaded.model) or max(config.settings.window, *config.settings.lengths)
    data = task_data(config.tasks, config.settings, loaded.tokenizer, limit=limit)
    file, digest = (None, "") if answers is None else (AnswerFile(answers), fingerprint(loaded.model))
    shown = name or (Path(model).name if isinstance(model, (str, Path)) else type(loaded.model).__name__)
    result = _nothing_measured(loaded, shown, config)
    own: dict[str, list[float]] = {}
    progress = Progress("evaluating", plain=True)
    progress.expect(len(subjects))
    for number, subject in enumerate(subjects, 1):
        progress.stage(subject.name)
        kept = None if file is None else file.of(f"{digest} {_identity(subject)}")
        try:
            row, values = _row(loaded, subject, config, kept, data, window=min(config.settings.window, limit))
        except ValueError as error:
            if number == 1:
                raise
            row, values = {"subject": subject.name, "refused": str(error), "tasks": {}}, {}
        own = values if number == 1 else own
        _add_differences(row, values, own)
        result["rows"].append(row)
        result["tables"] = {"scores": evaluation_table(result, seconds=False)}
        progress.step()
        progress.finished(f"{subject.name} ({number} of {len(subjects)})")
        if on_result is not None:
            on_result(result)
    progress.close()
    return Result(result)


def _check_arguments(model: Any, config: Any, name: Any, answers: Any, on_result: Any) -> None:
    expect("model", model, (str, Path, LoadedModel), "what load_model returns, or what it takes")
    expect("config", config, EvaluateConfig, "an EvaluateConfig")
    expect("name", name, (str, type(None)), "a string")
    expect("answers", answers, (str, Path, type(None)), "the path of a file")
    if on_result is not None and not callable(on_result):
        raise ValueError(f"on_result is called with the result so far, got {type(on_result).__name__}")


def _check_model(loaded: LoadedModel) -> None:
    if loaded.task != "causal" or isinstance(loaded.model, Transformer):
        raise ValueError(
            f"evaluate takes a causal language model of transformers, and this is a {type(loaded.model).__name__}; "
            "`attnlab compare` judges other models"
        )
    if loaded.tokenizer.eos_token_id is None:
        raise ValueError(
            "this model's tokenizer names no token that ends a text, which lm-eval's tasks need; name it in "
            "tokenizer_config.json (eos_token)"
        )


def _nothing_measured(loaded: LoadedModel, name: str, config: EvaluateConfig) -> dict[str, Any]:
    """The result before the first subject: what is evaluated, how and where."""
    model = {
        "name": name,
        "parameters": loaded.model.num_parameters(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
    }
    settings = _jsonable(asdict(config))
    return {
        "name": "evaluate",
        "model": model,
        "config": settings,
        "rows": [],
        "command": _jsonable(command_line()),
        **provenance(),
    }


def _row(
    loaded: LoadedModel,
    subject: EvaluationSubject,
    config: EvaluateConfig,
    answers: SubjectAnswers | None,
    data: Mapping[str, Any],
    *,
    window: int,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """One subject's scores, and the values of its single windows and cases by task."""
    from lm_eval.evaluator import evaluate as run_tasks

    from attnlab.evaluation.harness import AttnlabLM

    with _quiet_lm_eval():
        lm = AttnlabLM(
            loaded.model,
            tokenizer=loaded.tokenizer,
            mechanism=subject.mechanism,
            plan=subject.plan,
            policy=subject.policy,
            window=window,
            stride=config.settings.stride,
            answers=answers,
            batch_size=config.batch,
        )
        began = time.perf_counter()
        measured = run_tasks(
            lm,
            fresh_tasks(data),
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=config.chat_template,
            verbosity="ERROR",
        )
    assert measured is not None, "one process"
    # Answers that were in the file took no time.
    seconds = None if answers is not None and answers.taken else time.perf_counter() - began
    row: dict[str, Any] = {
        "subject": subject.name,
        "refused": None,
        "seconds": seconds,
        "tasks": {},
    }
    values: dict[str, list[float]] = {}
    for name, metrics in measured["results"].items():
        samples = measured["samples"].get(name, [])
        if name == LOSS:
            row["tasks"][name], values[name] = _loss_scores(lm.windows[0], metrics)
        elif name.split()[0] in RULER_TASKS:
            row["tasks"][name], values[name] = _recall_scores(samples)
        else:
            row["tasks"][name], values[name] = _other_scores(metrics, samples)
    return row, values


def _loss_scores(
    windows: Sequence[tuple[float, int]], metrics: Mapping[str, Any]
) -> tuple[dict[str, Any], list[float]]:
    """Nats a token over windows; a window weighs as many tokens as it scores."""
    losses = [-likelihood / tokens for likelihood, tokens in windows]
    loss = mean_interval(losses, [tokens for _, tokens in windows])
    scores = {
        **_interval("loss", loss),
        "perplexity": math.exp(loss.value),
        "bits_per_byte": metrics.get("bits_per_byte,none"),
        "tokens": sum(tokens for _, tokens in windows),
        "windows": len(windows),
        "weights": [tokens for _, tokens in windows],
        "values": losses,
    }
    return scores, losses


def _recall_scores(samples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[float]]:
    """The share of answers found, with Wilson's interval, and each case with its depth."""
    recalls = [float(sample["recall"]) for sample in samples]
    cases = [
        {"depth": sample["doc"]["depth"], "recall": value, "text": sample["resps"][0][0][:200]}
        for sample, value in zip(samples, recalls, strict=True)
    ]
    return {**_interval("recall", wilson(sum(recalls), len(recalls))), "cases": cases}, recalls


def _other_scores(
    metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[float]]:
    """lm-eval's own numbers of a task; an accuracy has Wilson's interval."""
    scores: dict[str, Any] = {
        key.split(",")[0]: value
        for key, value in metrics.items()
        if isinstance(value, (int, float)) and "stderr" not in key
    }
    right = [float(sample["acc"]) for sample in samples if "acc" in sample]
    if right:
        scores |= _interval("acc", wilson(sum(right), len(right))) | {"values": right}
    return scores, right


def _interval(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.value, "low": interval.low, "high": interval.high, "n": interval.n}


def _add_differences(row: dict[str, Any], values: Mapping[str, list[float]], own: Mapping[str, list[float]]) -> None:
    """To each task, how far the subject is from the model's own attention on the same cases."""
    for name, task in row["tasks"].items():
        if values.get(name) and len(values[name]) == len(own.get(name, [])):
            difference = paired_interval(values[name], own[name], task.get("weights"))
            task["over_own"] = {"value": difference.value, "low": difference.low, "high": difference.high}


def _identity(subject: EvaluationSubject) -> str:
    plan = None if subject.plan is None else subject.plan.to_json()
    return repr((subject.mechanism, plan, subject.policy))


def _jsonable(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _jsonable(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_jsonable(value) for value in content]
    # The name of a file may be of bytes that are no text.
    return str(content).encode(errors="backslashreplace").decode() if isinstance(content, (str, Path)) else content


def _require_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ValueError(
            "evaluate runs its tasks by the package lm-eval, which is missing: pip install lm-eval"
        ) from None


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """lm-eval warns of what is on purpose here: a model that is no path, a dataset that is no name.

    Its progress bars are for terminals.
    """
    from tqdm import tqdm

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with mock.patch("lm_eval.api.task.tqdm", partial(tqdm, disable=None)):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
