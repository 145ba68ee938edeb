"""The cases of ``attnlab judge`` as tokens: a context that is compressed, a question, and what should follow.

All cases of a task and a length have contexts of one length, questions of one length and as many tokens to come, so
that a batch needs no padding. What a context lacks is filled in front with tokens of the text, what a question lacks
with line ends. Needles, variables and words are RULER's (Hsieh et al., 2024, arXiv:2404.06654; ``ruler``), LAMBADA's
passages those of Paperno et al. (2016, arXiv:1606.06031).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from attnlab.data import TextFile, bundled_text
from attnlab.evaluation.ruler import RULER_TASKS, RulerCase, make_cases
from attnlab.evaluation.tasks import LAMBADA, LOSS, TaskSettings, lambada_passages, shipped_words

__all__ = ["JUDGE_TASKS", "JudgeCase", "Tokens", "has_question", "judge_cases"]

JUDGE_TASKS = (*RULER_TASKS, LOSS, LAMBADA)
# Tokens of a continuation whose loss counts, at most a quarter of the length; the one before them is given.
CONTINUATION = 64
# Of a longer text only the beginning is used.
MOST_CHARACTERS = 2_000_000
# Where RULER's prompts pass from the context to the question.
QUESTIONS = ("\nQuestion:", "\nWhat ")
SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019]*\s+")


@dataclass(frozen=True)
class JudgeCase:
    """One case. Either ``answers`` should occur in the next ``new_tokens`` tokens, or ``target`` should follow."""

    task: str
    length: int
    context: tuple[int, ...]
    question: tuple[int, ...]
    answers: tuple[str, ...] = ()
    new_tokens: int = 0
    target: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> str:
        """A name that changes with anything in the case."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()[:24]


def has_question(task: str) -> bool:
    """Whether a task asks something that a policy may see before it compresses; a continuation has no question."""
    return task != LOSS


class Tokens:
    """A tokenizer over parts of a prompt, and the tokens of the text that fills contexts."""

    def __init__(self, tokenizer: Any, settings: TaskSettings) -> None:
        self.tokenizer = tokenizer
        given = settings.text
        self.text = bundled_text() if given is None else TextFile(given).beginning(MOST_CHARACTERS)[0]
        self.name = "the text shipped with attnlab" if given is None else str(given)
        if not self.of_text:
            raise ValueError(f"the model's tokenizer makes no token of {self.name}")
        # What the tokenizer puts before every text; some also put a token behind it, which would end the prompt.
        whole = tokenizer(self.text[:1000], verbose=False).input_ids
        self.start = whole[: whole.index(self.of_text[0])] if self.of_text[0] in whole else []
        # Not every tokenizer knows line ends.
        self.newline = (self.of("\n") or self.of_text)[-1]

    def of(self, text: str) -> list[int]:
        """The tokens of a part of a prompt."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    @cached_property
    def of_text(self) -> list[int]:
        """The tokens of the whole text."""
        return self.of(self.text)

    def filling(self, rng: random.Random, count: int) -> list[int]:
        """``count`` tokens of the text in their order, from a random one on and round the end."""
        first = rng.randrange(len(self.of_text))
        return [self.of_text[(first + i) % len(self.of_text)] for i in range(count)]


def judge_cases(task: str, length: int, settings: TaskSettings, tokens: Tokens) -> list[JudgeCase]:
    """The cases of a task whose context, question and what follows take exactly ``length`` tokens.

    A case depends on the seed, the task, the length, its number and how many there are, the text and the tokenizer.
    """
    if task == LOSS:
        return _continuations(length, settings, tokens)
    if task == LAMBADA:
        return _passages(length, settings, tokens)
    return _ruler_cases(task, length, settings, tokens)


def _ruler_cases(task: str, length: int, settings: TaskSettings, tokens: Tokens) -> list[JudgeCase]:
    new = RULER_TASKS[task].new_tokens
    # The questions do not depend on the filling, whose room depends on the longest question.
    short = _draw(task, length, settings, tokens, 0, filled=False)
    longest = max(len(tokens.of(_context_and_question(case.prompt)[1])) for case in short)
    drawn = _draw(task, length, settings, tokens, longest)
    parts = [[tokens.of(part) for part in _context_and_question(case.prompt)] for case in drawn]
    room = length - new - longest
    rngs = [random.Random(f"{settings.seed} filling {task} {length} {i}") for i in range(len(drawn))]
    return [
        JudgeCase(
            task,
            length,
            _filled(context, room, rng, tokens),
            _lengthened(question, longest, tokens),
            answers=case.answers,
            new_tokens=new,
        )
        for case, (context, question), rng in zip(drawn, parts, rngs, strict=True)
    ]


def _draw(
    task: str, length: int, settings: TaskSettings, tokens: Tokens, longest: int, *, filled: bool = True
) -> list[RulerCase]:
    """RULER's cases, in whose length every question counts as ``longest`` tokens."""

    def count(prompt: str) -> int:
        return len(tokens.start) + len(tokens.of(_context_and_question(prompt)[0])) + longest

    return make_cases(
        task,
        length=length,
        cases=settings.cases,
        count_tokens=count,
        haystack=tokens.text,
        words=shipped_words(),
        seed=settings.seed,
        filled=filled,
    )


def _context_and_question(prompt: str) -> tuple[str, str]:
    at = max(prompt.rfind(marker) for marker in QUESTIONS)
    assert at > 0, "every prompt of RULER ends in a question"
    return prompt[:at], prompt[at:]


def _continuations(length: int, settings: TaskSettings, tokens: Tokens) -> list[JudgeCase]:
    """Stretches of the text: the model's loss on their last tokens."""
    inside, scored = length - len(tokens.start), min(CONTINUATION, length // 4)
    starts = len(tokens.of_text) - inside + 1
    if scored < 1:
        raise ValueError("a continuation and its context have at least 4 tokens: ask for a greater length")
    if starts < 1:
        raise ValueError(
            f"{tokens.name} has {len(tokens.of_text)} tokens, and the task loss reads {inside} of them: give a longer "
            "one with --text, or a smaller length"
        )
    cases = []
    for i in range(settings.cases):
        first = random.Random(f"{settings.seed} {LOSS} {length} {i}").randrange(starts)
        ids = [*tokens.start, *tokens.of_text[first : first + inside]]
        cut = length - scored - 1
        cases.append(JudgeCase(LOSS, length, tuple(ids[:cut]), tuple(ids[cut : cut + 1]), target=tuple(ids[cut + 1 :])))
    return cases


def _passages(length: int, settings: TaskSettings, tokens: Tokens) -> list[JudgeCase]:
    """Unrelated text, a passage's beginning; the question is its last sentence, the target its last word."""
    passages = lambada_passages(settings)
    chosen = random.Random(f"{settings.seed} {LAMBADA}").sample(passages, min(len(passages), settings.cases))
    parts = [[tokens.of(part) for part in _of_passage(passage)] for passage in chosen]
    asked, written = (max(len(part[i]) for part in parts) for i in (1, 2))
    room = length - asked - written
    rngs = [random.Random(f"{settings.seed} {LAMBADA} {length} {i}") for i in range(len(parts))]
    return [
        JudgeCase(
            LAMBADA,
            length,
            _filled(opening, room, rng, tokens),
            _lengthened(question, asked, tokens),
            # The room of the longest target, so that contexts are of one length.
            new_tokens=written,
            target=tuple(word),
        )
        for (opening, question, word), rng in zip(parts, rngs, strict=True)
    ]


def _of_passage(passage: str) -> tuple[str, str, str]:
    """(all sentences but the last, the last without its last word, that word); one sentence is cut in its middle."""
    before, _, word = passage.rpartition(" ")
    ends = [match.end() for match in SENTENCE_END.finditer(before)]
    at = ends[-1] if ends else before.find(" ", len(before) // 2) + 1
    # A space belongs to the word behind it, as most tokenizers want it.
    opening, sentence = before[:at].rstrip(), before[at:]
    return opening, f"{before[len(opening) : at] or ' '}{sentence}", f" {word}"


def _filled(context: Sequence[int], room: int, rng: random.Random, tokens: Tokens) -> tuple[int, ...]:
    """A context of ``room`` tokens: what a text starts with, filling, and the context's own tokens."""
    missing = room - len(tokens.start) - len(context)
    if missing < 0:
        raise ValueError(
            f"a case needs {-missing} more tokens than it may have before any filling: ask for a greater length"
        )
    filling = [*tokens.filling(rng, missing - 1), tokens.newline] if missing else []
    return (*tokens.start, *filling, *context)


def _lengthened(question: Sequence[int], length: int, tokens: Tokens) -> tuple[int, ...]:
    return (*([tokens.newline] * (length - len(question))), *question)
