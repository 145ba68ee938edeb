"""The tasks of ``attnlab evaluate`` as lm-eval tasks: those whose data is a file or is generated, and lm-eval's own."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnlab.adapters.load import SHIPPED
from attnlab.data import TextFile, bundled_text
from attnlab.data.readers import numbered_lines
from attnlab.errors import first_line
from attnlab.evaluation.ruler import RULER_TASKS, make_cases, recall
from attnlab.fields import check_fields, check_int, expect

__all__ = [
    "LAMBADA",
    "LOSS",
    "OWN_TASKS",
    "TaskData",
    "TaskSettings",
    "fresh_tasks",
    "lambada_passages",
    "shipped_words",
    "task_data",
]

LOSS, LAMBADA = "loss", "lambada"
OWN_TASKS = (LOSS, LAMBADA, *RULER_TASKS)


@dataclass(frozen=True)
class TaskSettings:
    """What the tasks are made from.

    ``text`` is the file of ``loss`` (None: the text shipped with attnlab), cut into at most ``windows`` windows of
    ``window`` tokens that score ``stride`` new tokens each (None: all of them). ``lambada`` is a file of JSON lines
    with a field ``text``, of which the first ``passages`` count. The generated tasks have ``cases`` cases of each of
    ``lengths`` tokens; ``haystack`` is the file of a text for them (None: noise).
    """

    text: Path | None = None
    window: int = 1024
    stride: int | None = None
    windows: int | None = 8
    lambada: Path | None = None
    passages: int | None = 100
    haystack: Path | None = None
    lengths: tuple[int, ...] = (512,)
    cases: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        expect("lengths", self.lengths, tuple, "a tuple of ints")
        for length in self.lengths:
            check_int("a length", length, least=1)
        for name in ("text", "lambada", "haystack"):
            expect(name, getattr(self, name), (Path, type(None)), "a path, or None")
        stride = self.window if self.stride is None else self.stride
        for name, value in (("windows", self.windows), ("passages", self.passages)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.window < 2 or not 1 <= stride <= self.window:
            raise ValueError(
                f"a window has at least 2 tokens and a stride of 1 to its length, got {self.window}, {stride}"
            )
        if self.cases < 1 or not self.lengths:
            raise ValueError(f"there is at least one length and one case, got {self.lengths} and {self.cases}")


@dataclass(frozen=True)
class TaskData:
    """A task's documents and lm-eval's settings of it; ``fresh`` makes the task, which holds one subject's answers."""

    name: str
    documents: _Documents
    config: Mapping[str, Any]

    def fresh(self) -> Any:
        """lm-eval's task over the documents."""
        from lm_eval.api.task import ConfigurableTask

        source = {"test_split": "test", "custom_dataset": lambda **_: {"test": self.documents}}
        return ConfigurableTask(config={"task": self.name, **source, **self.config})


def task_data(names: Sequence[str], settings: TaskSettings, tokenizer: Any, *, limit: int) -> dict[str, TaskData | str]:
    """The tasks' data by name; a generated task has one for each length, one of lm-eval's own stays its name.

    ``limit`` is the model's length.
    """
    makers: dict[str, Callable[[], list[TaskData]]] = {
        LOSS: lambda: [_loss(settings, tokenizer, limit)],
        LAMBADA: lambda: [_lambada(settings)],
        **{name: partial(_generated, name, settings, tokenizer, limit) for name in RULER_TASKS},
    }
    tasks: dict[str, TaskData | str] = {}
    for name in dict.fromkeys(names):
        if name in makers:
            tasks |= {data.name: data for data in makers[name]()}
        else:
            tasks[name] = _known_to_lm_eval(name)
    return tasks


def fresh_tasks(data: Mapping[str, TaskData | str]) -> dict[str, Any]:
    """lm-eval's task objects, without answers yet."""
    tasks: dict[str, Any] = {}
    for name, one in data.items():
        tasks |= {name: one.fresh()} if isinstance(one, TaskData) else _of_lm_eval(one)
    return tasks


class _Documents(list[Mapping[str, Any]]):
    """Documents as lm-eval asks a dataset for them, without the hashing and copying of the package datasets."""

    @property
    def features(self) -> dict[str, type]:
        """The names of a document's fields."""
        return {name: type(value) for name, value in self[0].items()}


def _metric(name: str, aggregation: str, *, higher: bool) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher}


def _loss(settings: TaskSettings, tokenizer: Any, limit: int) -> TaskData:
    """The loss of a text: lm-eval's rolling log likelihood, whose windows ``AttnlabLM`` cuts."""
    if settings.window > limit:
        raise ValueError(
            f"a window of {settings.window} tokens is longer than the model's {limit}; ask for a shorter one"
        )
    stride = settings.stride or settings.window
    name = "the shipped text" if settings.text is None else str(settings.text)
    most = None if settings.windows is None else settings.window + (settings.windows - 1) * stride
    text, tokens = _cut(bundled_text() if settings.text is None else TextFile(settings.text), most, tokenizer)
    if tokens < settings.window:
        raise ValueError(f"{name} has {tokens} tokens, fewer than one window of {settings.window}")
    return TaskData(
        LOSS,
        _Documents([{"text": text}]),
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [_metric("bits_per_byte", "bits_per_byte", higher=False)],
        },
    )


def _cut(source: str | TextFile, most: int | None, tokenizer: Any) -> tuple[str, int]:
    """The beginning of a text that has ``most`` tokens, or all of it, and how many tokens it has."""
    from attnlab.data.beginnings import first_tokens

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False, verbose=False).input_ids

    ids = first_tokens(source, most, encode)
    text = source if isinstance(source, str) else source.beginning(None if most is None else 0)[0]
    if most is None or len(ids) < most:
        return text, len(ids)
    # The characters of so many tokens, found by halving: not every tokenizer says where its tokens stand.
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(text[:middle])) <= most else (low, middle - 1)
    return text[:low], most


def _lambada(settings: TaskSettings) -> TaskData:
    """LAMBADA's last word given its passage: lm-eval's own task ``lambada_openai``, from a file."""
    documents = [{"text": passage} for passage in lambada_passages(settings)]
    return TaskData(
        LAMBADA,
        _Documents(documents),
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [_metric("perplexity", "perplexity", higher=False), _metric("acc", "mean", higher=True)],
        },
    )


def lambada_passages(settings: TaskSettings) -> list[str]:
    """LAMBADA's passages from its file, as many as the settings ask for."""
    if settings.lambada is None:
        raise ValueError('the task lambada needs its file, JSON lines of {"text": ...}: give it with --lambada')
    passages: list[str] = []
    for number, line in numbered_lines(settings.lambada):
        if settings.passages is not None and len(passages) == settings.passages:
            break
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            assert isinstance(text, str)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise ValueError(
                f'{settings.lambada}, line {number}: expected JSON such as {{"text": "a passage"}}'
            ) from None
        if " " not in text.strip():
            raise ValueError(f"{settings.lambada}, line {number}: a passage has at least two words")
        passages.append(text.strip())
    if not passages:
        raise ValueError(f"{settings.lambada} holds no passage")
    return passages


def _generated(name: str, settings: TaskSettings, tokenizer: Any, limit: int) -> list[TaskData]:
    """One task of the generator for each length."""
    too_long = [length for length in settings.lengths if length > limit]
    if too_long:
        raise ValueError(f"{name} at {too_long[0]} tokens is longer than the model's {limit}; ask for shorter ones")
    haystack = None if settings.haystack is None else TextFile(settings.haystack).beginning(None)[0]
    config = {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answers}}",
        "process_results": lambda document, texts: {"recall": recall(texts[0], document["answers"])},
        "metric_list": [_metric("recall", "mean", higher=True)],
        "generation_kwargs": {"do_sample": False, "max_gen_toks": RULER_TASKS[name].new_tokens, "until": []},
    }

    def documents(length: int) -> _Documents:
        cases = make_cases(
            name,
            length=length,
            cases=settings.cases,
            count_tokens=lambda prompt: len(tokenizer(prompt, verbose=False).input_ids),
            haystack=haystack,
            words=shipped_words(),
            seed=settings.seed,
        )
        return _Documents(map(asdict, cases))

    return [TaskData(f"{name} {length}", documents(length), config) for length in settings.lengths]


@functools.cache
def shipped_words() -> list[str]:
    """Words of the vocabulary that is shipped with attnlab, the same for every model that is evaluated."""
    vocabulary = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return sorted(word for word in vocabulary if re.fullmatch("[a-z]{4,10}", word))


@functools.cache
def _task_manager() -> Any:
    """lm-eval's list of its tasks, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _known_to_lm_eval(name: str) -> str:
    if not _task_manager().match_tasks([name]):
        raise ValueError(
            f"there is no task named {name!r}: here are {', '.join(OWN_TASKS)}, and lm-eval's own "
            "(`lm_eval ls tasks` lists them)"
        )
    return name


def _of_lm_eval(name: str) -> dict[str, Any]:
    """A task of lm-eval by its name; its data must be at hand."""
    from lm_eval.tasks import get_task_dict

    try:
        return dict(get_task_dict([name], _task_manager()))
    except Exception as error:
        raise ValueError(f"lm-eval's task {name}: its data is not at hand ({first_line(error)})") from None
