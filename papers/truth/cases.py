"""Cases whose truth is known: for a prediction, the positions of the input that it came from."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.data.recall import RecallTask
from attnlab.evaluation.ruler import make_cases
from attnlab.loss import IGNORED
from papers.truth.config import TruthConfig

__all__ = [
    "Case",
    "Target",
    "copy_cases",
    "earlier_target",
    "facts_cases",
    "inputs_of",
    "needle_cases",
    "padded",
    "recall_cases",
    "recall_task",
    "some_of",
]


@dataclass(frozen=True)
class Target:
    """A prediction: where it is made (the query of a map), what is predicted, and the positions that it came from."""

    query: int
    answer: int
    sources: tuple[int, ...]
    # The positions among which the sources are to be found.
    candidates: tuple[int, ...]
    # How many of the sources are true at once: all of them, or one of several that are alike.
    count: int


@dataclass(frozen=True)
class Case:
    """An input and its targets; every generator of cases is a pure function of its seed."""

    ids: tuple[int, ...]
    targets: tuple[Target, ...]
    # Tokens that can stand in the place of a source, for the causal check.
    substitutes: tuple[int, ...]
    # (query, answer) that the model must predict, besides a target itself, for the case to count.
    required: tuple[tuple[int, int], ...] = ()
    # What the decoder of an encoder-decoder reads; the queries are then positions of it.
    decoder: tuple[int, ...] = ()


def earlier_target(query: int, answer: int, source: int) -> Target:
    """A target of a causal model with one source among all the tokens that the query sees."""
    return Target(query, answer, (source,), tuple(range(query + 1)), 1)


def needle_cases(tokenizer: Any, text: str, config: TruthConfig, *, task: str = "needle") -> list[Case]:
    """RULER's needle: each token of the number that the model says is that token of the needle's number."""
    made = make_cases(
        task,
        length=config.length,
        # Most of them are answered, and a long prompt takes its time to make.
        cases=2 * config.cases if task != "needle" else config.cases + config.cases // 4,
        count_tokens=lambda prompt: len(tokenizer(prompt)["input_ids"]),
        haystack=text,
        seed=config.seed,
    )
    # Depths grow with a case's number, and the first cases that are answered count.
    random.Random(config.seed).shuffle(made)
    digits = tuple(tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)]))
    cases = []
    for number, case in enumerate(made):
        prompt = tokenizer(case.prompt)["input_ids"]
        ids = tokenizer(f"{case.prompt} {case.answers[0]}")["input_ids"]
        answer = [i for i in range(len(prompt), len(ids)) if tokenizer.decode([ids[i]]).strip()]
        first = _place_of([ids[i] for i in answer], prompt)
        if ids[: len(prompt)] != prompt or first is None:
            continue
        targets = [earlier_target(at - 1, ids[at], first + i) for i, at in enumerate(answer)]
        required = tuple((target.query, target.answer) for target in targets)
        chosen = some_of(targets, config.targets, f"{config.seed} {task} {number}")
        cases.append(Case(tuple(ids), chosen, digits, required))
    if not cases:
        raise ValueError("this model's tokenizer cuts a number in another way after the question than in the text")
    return cases


def copy_cases(tokenizer: Any, text: str, config: TruthConfig) -> list[Case]:
    """Words of a text in random order, said twice; only tokens that stand once in the list are targets."""
    words = sorted(set(re.findall(r"\b[a-z]{3,9}\b", text)))
    if len(words) < config.words:
        raise ValueError(f"copy needs {config.words} different words, and the text has {len(words)}: name a longer one")
    plain = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in words]
    single = tuple(sorted({token for tokens in plain for token in tokens}))
    start = _start(tokenizer)
    stop = tokenizer(".", add_special_tokens=False)["input_ids"]
    cases = []
    for number in range(config.cases * config.spare):
        draw = random.Random(f"{config.seed} copy {number}")
        said = tokenizer(" ".join(draw.sample(words, config.words)), add_special_tokens=False)["input_ids"]
        ids = [*start, *said, *stop, *said]
        again, counts = len(start) + len(said) + len(stop), Counter(said)
        targets = [
            earlier_target(again + i - 1, said[i], len(start) + i)
            for i in range(4, len(said))
            if counts[said[i]] == counts[said[i - 1]] == 1
        ]
        cases.append(Case(tuple(ids), some_of(targets, config.targets, f"{config.seed} copied {number}"), single))
    return cases


OWNERS, TOYS, COLOURS = (
    words.split()
    for words in (
        "Lily Tim Tom Max Anna Ben Mia Sam Lucy Jack Amy Bob Sue Mary John Jane Joe Kate Emma",
        "ball car doll book cake boat hat drum train bike toy truck plane flower apple bear fish bird cat dog",
        "red blue green yellow pink purple black white orange brown",
    )
)
BETWEEN = (
    "The sun was warm. The sky was blue. It was a nice day. They were very happy. The birds sang in the trees. They "
    "liked to play. The park was big. They ran and jumped. Mom and Dad were at home. There was a big tree."
)


def facts_cases(tokenizer: Any, text: str, config: TruthConfig) -> list[Case]:
    """Three friends with a toy each, in the words of children's stories; one of them plays with the toy again."""
    start, between = _start(tokenizer), re.findall(r"[^.]+\.", BETWEEN)
    toys = {toy: _last_tokens(tokenizer, toy) for toy in TOYS}
    usable = [toy for toy in TOYS if len(toys[toy]) == 1]
    substitutes = tuple(toys[toy][0] for toy in usable)
    cases = []
    for number in range(config.cases * config.spare):
        draw = random.Random(f"{config.seed} facts {number}")
        owners, had, colours = draw.sample(OWNERS, 3), draw.sample(usable, 3), draw.sample(COLOURS, 3)
        facts = [f" {o} had a {c} {t}." for o, c, t in zip(owners, colours, had, strict=True)]
        sentences = [" " + draw.choice(between).strip() for _ in range(config.sentences)]
        for fact, place in zip(facts, sorted(draw.sample(range(config.sentences + 1), 3), reverse=True), strict=True):
            sentences.insert(place, fact)
        asked = draw.randrange(3)
        story = "Once upon a time, there were some friends." + "".join(sentences)
        story += f" {owners[asked]} played with the {colours[asked]}"
        ids = [*start, *tokenizer(story, add_special_tokens=False)["input_ids"]]
        answer = toys[had[asked]][0]
        if ids.count(answer) == 1:
            cases.append(Case(tuple(ids), (earlier_target(len(ids) - 1, answer, ids.index(answer)),), substitutes))
    return cases


def recall_task(config: TruthConfig, seed: int, *, rows: int = 32, pairs: int | None = None) -> RecallTask:
    """Batches of the task; fewer ``pairs`` make an easier task of the same vocabulary, with questions everywhere."""
    base = RecallTask(
        pairs=config.pairs, length=config.recall_length, apart=config.recall_length // 4, keys=2 * config.pairs,
        values=2 * config.pairs, rows=rows, seed=seed,
    )  # fmt: skip
    if pairs is None or pairs >= config.pairs:
        return base
    length, apart = (n * pairs // config.pairs for n in (base.length, base.apart))
    return replace(base, pairs=pairs, length=length, apart=apart, drawn=2 * pairs, dense=True)


def recall_cases(config: TruthConfig, seed: int) -> list[Case]:
    """Sequences that the LM has not seen in training: the value of a key that is asked for."""
    # Training and evaluation draw from seeds below 20,000.
    task = recall_task(config, 20_000 + seed, rows=config.cases * config.spare)
    batch = task.batch(0)
    values = tuple(range(1 + task.keys, task.vocab))
    cases = []
    for number, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        pairs = {int(key): 2 * i for i, key in enumerate(ids[: 2 * task.pairs : 2])}
        asked = (labels != IGNORED).nonzero()[:, 0].tolist()
        targets = [earlier_target(at, int(labels[at]), pairs[int(ids[at])] + 1) for at in asked]
        chosen = some_of(targets, config.targets, f"{seed} recall {number}")
        cases.append(Case(tuple(ids.tolist()), chosen, values))
    return cases


def inputs_of(cases: Sequence[Case], device: torch.device) -> dict[str, Tensor]:
    """The model's inputs for cases of several lengths, padded on the right."""
    inputs = padded([case.ids for case in cases])
    if cases[0].decoder:
        inputs["decoder_input_ids"] = padded([case.decoder for case in cases])["input_ids"]
    return {name: t.to(device) for name, t in inputs.items()}


def padded(rows: Sequence[Sequence[int]], pad: int = 0) -> dict[str, Tensor]:
    """Rows of several lengths as a batch."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    seen = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], seen[i, : len(row)] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": seen}


def some_of(targets: Sequence[Target], count: int, seed: str) -> tuple[Target, ...]:
    """``count`` of the targets at random, in their order; all of them where there are fewer."""
    chosen = random.Random(seed).sample(range(len(targets)), min(count, len(targets)))
    return tuple(targets[i] for i in sorted(chosen))


def _place_of(part: Sequence[int], whole: Sequence[int]) -> int | None:
    """Where ``part`` stands in ``whole``, if it stands there once."""
    size = len(part)
    places = [i for i in range(len(whole) - size + 1) if list(whole[i : i + size]) == list(part)]
    return places[0] if part and len(places) == 1 else None


def _start(tokenizer: Any) -> list[int]:
    """The token that a model's texts begin with, where there is one."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _last_tokens(tokenizer: Any, word: str) -> list[int]:
    """The tokens of a word after another word."""
    before, both = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("a", f"a {word}"))
    return both[len(before) :]
