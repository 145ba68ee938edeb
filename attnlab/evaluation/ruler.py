"""Synthetic tasks of any length after RULER's definitions (Hsieh et al., 2024, arXiv:2404.06654), seeded.

Needles: sentences with a magic number stand in a haystack, of an essay or of noise, and the question asks for one
number (``needle``), for one of several keys' (``needle-multikey``), for all of one key's (``needle-multivalue``) or for
those of several keys (``needle-multiquery``). ``variables`` asks for all variables of a chain of assignments,
``common-words`` for the ten words that a list repeats, ``frequent-words`` for the three most frequent of coded words
drawn by Zipf's law. A case is scored by the share of its answers that the model's text contains.

RULER's prompts and counts are kept; two things differ. Depths of needles are spread evenly over the cases, so that a
table of length and depth has no empty cell, and only as many tokens are generated as the answers need.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["RULER_TASKS", "RulerCase", "RulerTask", "make_cases", "recall"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# The words of keys: an adjective and a noun.
WORDS_OF_KEYS = (
    "amber ancient brave bright calm clever cold crimson curious damp eager early faint fancy gentle golden grand "
    "happy hollow honest humble icy jolly keen kind late lively lonely loud lucky mellow mighty misty modern noble odd "
    "pale patient plain polite proud quiet rapid rare rough royal rusty shy silent silver smooth stern strange sunny "
    "swift tall tender tidy vivid warm wild wise young",
    "anchor apple arrow badge basket beacon bell bridge candle canyon castle cloud compass copper cradle desert dragon "
    "engine feather ferry flute forest fountain garden glacier hammer harbor island jacket kettle ladder lantern lemon "
    "marble market meadow mirror mountain needle ocean orchard otter palace pepper piano pillow planet prairie river "
    "rocket saddle shadow shelter signal spider station temple thunder tunnel valley violin wagon window winter",
)
ADJECTIVES, NOUNS = (words.split() for words in WORDS_OF_KEYS)
# From this length on RULER repeats the words of its list more often.
LONG = 4096
# Tokens that an answer of one number or name takes, and those of a sentence around it.
ANSWER_TOKENS, SENTENCE_TOKENS = 12, 16


@dataclass(frozen=True)
class RulerCase:
    """One prompt, the answers that its continuation must contain, and where they stand (0: first, 1: last)."""

    prompt: str
    answers: tuple[str, ...]
    length: int
    depth: float | None = None


@dataclass(frozen=True)
class RulerTask:
    """How a task makes a case with ``amount`` of filling text, and how many answers it asks for."""

    make: Callable[[random.Random, int, float, _Haystack], tuple[str, list[str]]]
    answers: int
    has_depth: bool = False

    @property
    def new_tokens(self) -> int:
        """How many tokens are generated."""
        return SENTENCE_TOKENS + ANSWER_TOKENS * self.answers


@dataclass(frozen=True)
class _Haystack:
    """Sentences that fill a prompt, the words of ``common-words``, and whether RULER counts its length as long."""

    sentences: Sequence[str]
    words: Sequence[str]
    long: bool

    def take(self, rng: random.Random, amount: int) -> list[str]:
        """``amount`` sentences in their order, from a random one on and round the end."""
        first = rng.randrange(len(self.sentences))
        return [self.sentences[(first + i) % len(self.sentences)] for i in range(amount)]


def recall(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that a text contains, whatever their case.

    >>> recall("They are 12 and 7.", ["12", "34"])
    0.5
    """
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def make_cases(
    name: str,
    *,
    length: int,
    cases: int,
    count_tokens: Callable[[str], int],
    haystack: str | None = None,
    words: Sequence[str] = (),
    seed: int = 0,
    filled: bool = True,
) -> list[RulerCase]:
    """Cases whose prompt and answer together take at most ``length`` tokens, and nearly as many.

    Without ``filled`` they have no filling: the same questions, made quickly. ``haystack`` is a text; None means noise.
    ``words`` are those of ``common-words``. A case depends on the seed, its length, its number and how many cases there
    are.
    """
    task = RULER_TASKS[name]
    hay = _Haystack(_sentences(haystack), words, long=length >= LONG)
    room = length - task.new_tokens
    drawn, amount = [], 0
    for i in range(cases):
        depth = i / max(cases - 1, 1)
        draw = f"{seed} {name} {length} {i}"

        def tokens(n: int, draw: str = draw, depth: float = depth) -> int:
            return count_tokens(task.make(random.Random(draw), n, depth, hay)[0])

        # Cases of a length need about as much filling.
        amount = _largest_that_fits(tokens, room, amount) if filled else 0
        prompt, answers = task.make(random.Random(draw), amount, depth, hay)
        drawn.append(RulerCase(prompt, tuple(answers), length, round(depth, 3) if task.has_depth else None))
    return drawn


def _largest_that_fits(tokens: Callable[[int], int], room: int, guess: int) -> int:
    """The largest amount of filling whose prompt fits into ``room`` tokens, looked for around a guess."""
    if tokens(0) > room:
        raise ValueError(
            f"a case needs {tokens(0)} tokens before any filling, and {room} are left beside the answer: ask for a "
            "greater length"
        )
    # An interval around the guess that holds the answer: low fits, high does not.
    low, high, step = 0, guess + 1, 1
    if guess and tokens(guess) <= room:
        low = guess
        while tokens(high) <= room:
            low, high, step = high, high + 2 * step, 2 * step
    elif guess:
        high = guess
        while high - step > 0 and tokens(high - step) > room:
            high, step = high - step, 2 * step
        low = max(0, high - step)
    else:
        while tokens(high) <= room:
            low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= room else (low, middle)
    return low


def _sentences(text: str | None) -> list[str]:
    """The sentences of a text; those of the noise for None."""
    sentences = re.findall(r"[^.!?]+[.!?]+", re.sub(r"\s+", " ", NOISE if text is None else text))
    if not sentences:
        raise ValueError("the haystack has no sentence (nothing ends with a full stop)")
    return [sentence.strip() for sentence in sentences]


def _keys(rng: random.Random, count: int) -> list[str]:
    pairs = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[pair % len(ADJECTIVES)]}-{NOUNS[pair // len(ADJECTIVES)]}" for pair in pairs]


def _needle(keys: int, values: int, asked: int) -> Callable[..., tuple[str, list[str]]]:
    """The maker of a needle task: ``keys`` keys with ``values`` numbers each, of which ``asked`` keys are asked for."""

    def make(rng: random.Random, amount: int, depth: float, hay: _Haystack) -> tuple[str, list[str]]:
        names = _keys(rng, keys)
        numbers = {name: [str(rng.randrange(1_000_000, 10_000_000)) for _ in range(values)] for name in names}
        wanted = names[:asked]
        facts = [(name, number) for name in names for number in numbers[name]]
        # The first needle stands at the case's depth, the others anywhere.
        depths = [depth, *(rng.random() for _ in facts[1:])]
        sentences = hay.take(rng, amount)
        for (name, number), at in sorted(zip(facts, depths, strict=True), key=lambda item: -item[1]):
            sentences.insert(round(at * amount), f"One of the special magic numbers for {name} is: {number}.")
        answers = [number for name in wanted for number in numbers[name]]
        query = wanted[0] if asked == 1 else ", ".join(wanted[:-1]) + f", and {wanted[-1]}"
        one = len(answers) == 1
        what, verb = ("number", "is") if one else ("numbers", "are")
        intro = "A special magic number is" if one else "Some special magic numbers are"
        question = "What is the special magic number" if one else "What are all the special magic numbers"
        return (
            f"{intro} hidden within the following text. Make sure to memorize it. I will quiz you about the {what} "
            f"afterwards.\n{' '.join(sentences)}\n{question} for {query} mentioned in the provided text? The special "
            f"magic {what} for {query} mentioned in the provided text {verb}"
        ), answers

    return make


def _variables(rng: random.Random, amount: int, depth: float, hay: _Haystack) -> tuple[str, list[str]]:
    """One chain of five assignments; a short example shows the form of the answer."""
    example, _ = _chain(rng, hay, 5)
    prompt, names = _chain(rng, hay, amount)
    return f"{example}\n{prompt}", names


def _chain(rng: random.Random, hay: _Haystack, amount: int, hops: int = 4) -> tuple[str, list[str]]:
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(hops + 1)]
    value = rng.randrange(10_000, 100_000)
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {later} = VAR {earlier}" for earlier, later in itertools.pairwise(names)]
    sentences = hay.take(rng, amount)
    places = sorted((rng.randint(0, amount) for _ in lines), reverse=True)
    for line, at in zip(reversed(lines), places, strict=True):
        sentences.insert(at, f"{line}.")
    question = (
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
        f"chain(s) of variable assignment in the text above, {len(names)} variables are assigned the value {value}, "
        "they are:"
    )
    text = " ".join(sentences)
    return (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{text}\n{question}",
        names,
    )


def _common_words(rng: random.Random, amount: int, depth: float, hay: _Haystack) -> tuple[str, list[str]]:
    """Ten words among words that stand more seldom; a short example shows the form of the answer."""
    example, shown = _word_list(rng, hay, others=10, repeats=(3, 1))
    prompt, common = _word_list(rng, hay, others=amount, repeats=(30, 3) if hay.long else (6, 1))
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(shown, 1))
    return f"{example} {listed}\n{prompt}", common


def _word_list(rng: random.Random, hay: _Haystack, *, others: int, repeats: tuple[int, int]) -> tuple[str, list[str]]:
    """A list in which ten words stand ``repeats[0]`` times each, ``others`` words ``repeats[1]`` times."""
    if len(hay.words) < 10 + others:
        raise ValueError(
            f"common-words needs {10 + others} different words at this length, and has {len(hay.words)}: ask for a "
            "shorter one"
        )
    drawn = rng.sample(list(hay.words), 10 + others)
    common = drawn[:10]
    words = common * repeats[0] + drawn[10:] * repeats[1]
    rng.shuffle(words)
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{listed}\nQuestion: What are the 10 most common words in the above list? Answer: The top "
        "10 words that appear most often in the list are:"
    ), common


def _frequent_words(rng: random.Random, amount: int, depth: float, hay: _Haystack) -> tuple[str, list[str]]:
    """Coded words of which the k-th stands 1 / k^2 of the time; the most frequent is a row of dots to be ignored."""
    # The sum of all 1 / k^2.
    total = 1.6449
    # Three words must lead clearly even in the shortest text.
    draws = 60 + amount
    distinct = math.isqrt(int(draws / total)) + 1
    coded = ["..."] + ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(max(3, distinct))]
    words = [word for k, word in enumerate(coded, 1) for _ in range(int(draws / (total * k * k)))]
    rng.shuffle(words)
    return (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(words)}\nQuestion: Do not provide any explanation. Please ignore the dots "
        "'....'. What are the three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    ), coded[1:4]


RULER_TASKS: dict[str, RulerTask] = {
    "needle": RulerTask(_needle(1, 1, 1), 1, has_depth=True),
    "needle-multikey": RulerTask(_needle(4, 1, 1), 1, has_depth=True),
    "needle-multivalue": RulerTask(_needle(1, 4, 1), 4),
    "needle-multiquery": RulerTask(_needle(4, 1, 4), 4),
    "variables": RulerTask(_variables, 5),
    "common-words": RulerTask(_common_words, 10),
    "frequent-words": RulerTask(_frequent_words, 3),
}
