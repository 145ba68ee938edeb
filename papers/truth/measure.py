"""One task with one model: cases, readings and scores in chunks on the disk, so that a run that was ended goes on."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from attnlab.adapters import load_model
from attnlab.data.bundled import bundled_text
from attnlab.devices import to_device
from attnlab.progress import note
from attnlab.provenance import device_name, write_atomic, write_json
from papers.truth.cases import Case, Target, copy_cases, facts_cases, inputs_of, needle_cases, recall_cases
from papers.truth.chemistry import Reaction, chemistry_cases, mapped_right, read_reactions
from papers.truth.config import SPREAD, TASKS, TruthConfig
from papers.truth.readings import Batch, log_probability, read_batch
from papers.truth.recall_model import recall_model
from papers.truth.scores import area_under_curve, precision_at, spread
from papers.truth.translation import quality, read_corpus, translation_cases, translator

__all__ = ["Measured", "Subject", "measure", "scores_of_item"]

T = TypeVar("T")
# Where a forward pass for each position is cheap, and one layer, or one kind of layer, finds the answer.
PROBED = ("recall", "translation")
# Half of the cases choose a head for the other half.
LEAST = 4
UNKNOWN = "unknown"
TEXT_TASKS: dict[str, Callable[[Any, str, TruthConfig], list[Case]]] = {
    "needle": needle_cases,
    "needles": partial(needle_cases, task="needle-multikey"),
    "copy": copy_cases,
    "facts": facts_cases,
}


@dataclass(frozen=True, eq=False)
class Subject:
    """A task and its model: ``Subject.of("needle:smollm2", ...)``."""

    task: str
    name: str
    model: nn.Module
    cases: list[Case]
    # What the cases of chemistry were made from.
    reactions: list[Reaction] | None = None
    # How good the model is at its own task, where that is measured.
    quality: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, words: str, config: TruthConfig, *, work: Path, text: str | None, device: str, as_trained: bool = False
    ) -> Subject:
        """The subject that the command line names: a task, a colon, and a model, its folder or a seed."""
        task, _, where = words.partition(":")
        if task not in TASKS or not where:
            raise ValueError(f"{words!r} is no TASK:MODEL; the tasks are {', '.join(TASKS)}")
        name, reactions = Path(where).name, None
        good: dict[str, float] = {}
        model: nn.Module
        if task == "recall":
            if not where.isdigit():
                raise ValueError(f"{words!r}: recall takes a seed, such as recall:0, and trains its model")
            model, cases = (
                recall_model(config, int(where), work / f"training-{where}"),
                recall_cases(config, int(where)),
            )
        elif task == "translation":
            corpus, name = read_corpus(Path(where), config), "multi30k"
            folder = work / "training-multi30k"
            model, updates = translator(corpus, config, folder, as_trained=as_trained)
            cases, good = translation_cases(corpus, config), quality(model, updates, corpus, folder)
        elif task.endswith("chemistry"):
            model, reactions = load_model(where).model, read_reactions()
            masked = task == "masked-chemistry"
            cases = chemistry_cases(reactions, _vocabulary(Path(where)), config, masked=masked)
        else:
            model, cases = _of_text(task, where, config, text)
        return cls(task, name, to_device(device, model).eval().requires_grad_(False), cases, reactions, good)


def _of_text(task: str, where: str, config: TruthConfig, text: str | None) -> tuple[nn.Module, list[Case]]:
    """A causal language model, and the cases of a task that is made of text."""
    model, tokenizer, kind = load_model(where)
    if kind != "causal":
        raise ValueError(f"{task}:{where}: {task} needs a causal language model, and {where} is none")
    return model, TEXT_TASKS[task](tokenizer, bundled_text() if text is None else text, config)


@dataclass(frozen=True, eq=False)
class Measured:
    """Every score of every case that counts, (cases, ...), by name; how many cases were made, and on what devices."""

    scores: dict[str, Tensor]
    made: int
    devices: tuple[str, ...]


def measure(
    subject: Subject, config: TruthConfig, folder: Path, *, batch: int, minutes: float = float("inf")
) -> Measured:
    """Read the cases in chunks; chunks that ``folder`` has are not made again, and none is begun after ``minutes``."""
    until = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    _check_settings(folder, {"task": subject.task, "model": subject.name, **asdict(config), **subject.quality})
    device = next(subject.model.parameters()).device
    parts: list[dict[str, Tensor]] = []
    devices: list[str] = []
    counted = made = 0
    size = min(config.chunk, config.cases)
    for number, lo in enumerate(range(0, len(subject.cases), size)):
        if counted >= config.cases or (counted >= LEAST and time.monotonic() > until):
            break
        path = folder / f"part-{number:05d}.safetensors"
        if not path.exists():
            read = _chunk(subject, lo, lo + size, config, batch=batch)
            # What measured it travels with it: another machine may collect it.
            of = {"device": device_name(device)}
            write_atomic(path, save({name: t.contiguous() for name, t in read.items()}, of))
        part = load_file(path)
        parts.append(part)
        devices.append(_device_of(path))
        counted += len(part["case"])
        made = min(lo + size, len(subject.cases))
        note(f"{subject.task} {subject.name}: {counted} of {config.cases} cases")
    if not counted:
        raise ValueError(f"{subject.name} answers none of {len(subject.cases)} cases of {subject.task} right")
    full = [part for part in parts if len(part["case"])]
    scores = {name: torch.cat([part[name] for part in full])[: config.cases] for name in full[0]}
    if counted >= config.cases:
        made = int(scores["case"].max()) + 1
    return Measured(scores, made, tuple(dict.fromkeys(devices)))


def _device_of(path: Path) -> str:
    with safe_open(path, "pt") as file:
        return str((file.metadata() or {}).get("device", UNKNOWN))


class _Item(NamedTuple):
    """A prediction that is read: the number of its case, the case, the target."""

    number: int
    case: Case
    target: Target


def _chunk(subject: Subject, lo: int, hi: int, config: TruthConfig, *, batch: int) -> dict[str, Tensor]:
    """The scores of those cases lo to hi that the model answers right."""
    items: list[_Item] = []
    for group in _groups(range(lo, min(hi, len(subject.cases))), batch):
        answered = _answered(subject.model, [subject.cases[i] for i in group])
        items += [_Item(i, subject.cases[i], target) for i, own in zip(group, answered, strict=True) for target in own]
    # Inputs of like length share a batch.
    items.sort(key=lambda item: len(item.case.ids))
    rows = [row for group in _groups(items, batch) for row in _scored(subject, group, config)]
    by_case: dict[int, list[dict[str, Tensor]]] = {}
    for item, row in zip(items, rows, strict=True):
        by_case.setdefault(item.number, []).append(row)
    kept = sorted(by_case)
    names = list(rows[0]) if rows else []
    merged = {
        name: torch.stack([torch.stack([row[name] for row in by_case[i]]).nanmean(0) for i in kept]) for name in names
    }
    return merged | _product(subject, kept, batch) | {"case": torch.tensor(kept, dtype=torch.long)}


def _product(subject: Subject, kept: Sequence[int], batch: int) -> dict[str, Tensor]:
    """What rxnmapper's own mapping makes of the readings, where the model sees whole reactions."""
    if subject.reactions is None or subject.task != "chemistry":
        return {}
    parts = [
        mapped_right(subject.model, [subject.reactions[i] for i in group], [subject.cases[i].ids for i in group])
        for group in _groups(kept, batch)
    ]
    return {f"product/{name}": torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _groups(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for lo in range(0, len(items), size):
        yield list(items[lo : lo + size])


@torch.no_grad()
def _answered(model: nn.Module, cases: Sequence[Case]) -> list[list[Target]]:
    """The targets of each case that the model predicts; none if it fails at what the case requires."""
    device = next(model.parameters()).device
    logits = model(**inputs_of(cases, device)).logits
    answered = []
    for case, said in zip(cases, logits.argmax(-1).tolist(), strict=True):
        whole = all(said[query] == answer for query, answer in case.required)
        answered.append([t for t in case.targets if said[t.query] == t.answer] if whole else [])
    return answered


def _scored(subject: Subject, group: Sequence[_Item], config: TruthConfig) -> list[dict[str, Tensor]]:
    """The scores of a batch of targets, one by one."""
    device = next(subject.model.parameters()).device
    inputs = inputs_of([item.case for item in group], device)
    query = torch.tensor([item.target.query for item in group], device=device)
    answer = torch.tensor([item.target.answer for item in group], device=device)
    noise = torch.Generator().manual_seed(config.seed + group[0].number)
    read = read_batch(subject.model, Batch(inputs, query, answer), probe=subject.task in PROBED, noise=noise)
    n = inputs["input_ids"].shape[1]
    true, candidates = torch.zeros(2, len(group), n, dtype=torch.bool, device=device)
    for i, item in enumerate(group):
        true[i, list(item.target.sources)] = True
        candidates[i, list(item.target.candidates)] = True
    count = torch.tensor([item.target.count for item in group], device=device)
    scores = scores_of_item(read.heads, read.whole, true, candidates, count)
    scores |= {f"fact/{name}": t for name, t in read.facts.items()}
    for reading in SPREAD:
        scores |= {f"spread/{reading}/{name}": t for name, t in spread(read.heads[reading], true).items()}
    scores |= _changes(subject.model, group, inputs, Batch(inputs, query, answer), config)
    scores = {name: t.cpu() for name, t in scores.items()}
    return [{name: t[i] for name, t in scores.items()} for i in range(len(group))]


def scores_of_item(
    heads: dict[str, Tensor], whole: dict[str, Tensor], true: Tensor, candidates: Tensor, count: Tensor
) -> dict[str, Tensor]:
    """Both scores of each head, of the mean over all heads, of the last layer's mean, and of whole readings."""
    readings = {}
    for name, t in heads.items():
        readings[f"{name}/heads"] = t
        readings[f"{name}/all heads"] = t.mean((1, 2))
        readings[f"{name}/last layer"] = t[:, -1].mean(1)
    readings |= {f"{name}/whole": t for name, t in whole.items()}
    scores = {}
    for name, t in readings.items():
        shape = t.shape[:-1]

        def like(flags: Tensor, t: Tensor = t) -> Tensor:
            return flags.reshape(len(flags), *[1] * (t.dim() - 2), flags.shape[-1]).expand_as(t)

        many = count.reshape(len(count), *[1] * (len(shape) - 1)).expand(shape)
        scores[f"{name}/precision"] = precision_at(t, like(true), like(candidates), many)
        scores[f"{name}/auc"] = area_under_curve(t, like(true), like(candidates))
    return scores


@torch.no_grad()
def _changes(
    model: nn.Module, group: Sequence[_Item], inputs: dict[str, Tensor], batch: Batch, config: TruthConfig
) -> dict[str, Tensor]:
    """The answer's log-probability after the sources, and after as many other candidates, are replaced."""
    changed = {}
    for name in ("sources", "others"):
        ids = inputs["input_ids"].clone()
        for i, (number, case, target) in enumerate(group):
            draw = random.Random(f"{config.seed} {number} {target.query} {name}")
            rest = [at for at in target.candidates if at not in target.sources and at != target.query]
            places = target.sources if name == "sources" else draw.sample(rest, min(len(rest), len(target.sources)))
            for at in places:
                ids[i, at] = draw.choice([token for token in case.substitutes if token != case.ids[at]])
        logits = model(**{**inputs, "input_ids": ids}).logits
        changed[f"change/{name}"] = log_probability(logits, batch.query, batch.answer)
    return changed


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "settings.json"
    settings = json.loads(json.dumps(settings))
    # More cases of the same kind go on with a folder only where the cases themselves are the same.
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != settings:
        raise ValueError(f"{folder} holds cases of other settings; name another --work, or remove it")
    write_json(path, settings)


def _vocabulary(folder: Path) -> dict[str, int]:
    path = folder / "vocab.txt"
    if not path.is_file():
        raise ValueError(f"{folder} has no vocab.txt; name the folder that python -m papers truth-rxnmapper wrote")
    return {token: i for i, token in enumerate(path.read_text(encoding="utf-8").splitlines())}
