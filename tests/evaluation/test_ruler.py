"""The generated tasks: lengths, answers that stand in the prompt, seeds, scores."""

from __future__ import annotations

import re

import pytest

from attnlab.evaluation.ruler import RULER_TASKS, make_cases, recall
from attnlab.evaluation.tasks import shipped_words


def count(prompt: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", prompt))


def cases_of(name: str, length: int = 800, **options):
    return make_cases(name, length=length, cases=5, count_tokens=count, words=shipped_words(), **options)


@pytest.mark.parametrize("name", RULER_TASKS)
@pytest.mark.parametrize("length", [700, 2000, 5000])
def test_prompts_fill_their_length(name, length):
    for case in cases_of(name, length):
        room = length - RULER_TASKS[name].new_tokens
        # One more sentence or word would not fit; the coded words come in steps of many words.
        assert 0.9 * room < count(case.prompt) <= room


@pytest.mark.parametrize("name", RULER_TASKS)
def test_answers_stand_in_the_prompt_and_score_one(name):
    for case in cases_of(name):
        assert len(case.answers) == len(set(case.answers)) == RULER_TASKS[name].answers
        assert all(answer in case.prompt for answer in case.answers)
        assert recall(f"They are {', '.join(case.answers)}.", case.answers) == 1
        assert recall("I do not know.", case.answers) == 0


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_case_depends_on_its_seed_and_number_only(name):
    assert cases_of(name) == cases_of(name)
    assert cases_of(name)[:2] == cases_of(name)[:2]
    assert {case.prompt for case in cases_of(name)}.isdisjoint(case.prompt for case in cases_of(name, seed=1))


def test_a_needle_stands_at_its_depth():
    haystack = " ".join(f"Sentence number {i} says nothing." for i in range(400))
    for case in cases_of("needle", haystack=haystack):
        text = case.prompt.partition("afterwards.\n")[2].rpartition("\nWhat is")[0]
        at = text.index("One of the special magic numbers") / len(text)
        assert at == pytest.approx(case.depth, abs=0.05)


def test_several_keys_have_their_own_numbers_and_one_is_asked_for():
    for case in cases_of("needle-multikey"):
        facts = dict(re.findall(r"numbers for ([a-z-]+) is: (\d+)", case.prompt))
        asked = re.search(r"What is the special magic number for ([a-z-]+) mentioned", case.prompt)
        assert len(facts) == 4
        assert facts[asked[1]] == case.answers[0]


def test_the_chain_of_variables_ends_in_its_value():
    for case in cases_of("variables"):
        assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", case.prompt))
        value = re.findall(r"assigned the value (\d+) in the text above", case.prompt)[-1]
        for name in case.answers:
            while not name.isdigit():
                name = assigned[name]
            assert name == value


def test_frequent_words_are_the_most_frequent():
    for case in cases_of("frequent-words"):
        words = re.findall(r"\b[a-z]{6}\b", case.prompt.partition("coded words. ")[2].partition("\nQuestion")[0])
        ranked = sorted(set(words), key=words.count, reverse=True)
        assert set(ranked[:3]) == set(case.answers)


def test_a_length_too_short_is_refused():
    with pytest.raises(ValueError, match="ask for a greater length"):
        cases_of("needle", 50)


def test_a_haystack_without_sentences_is_refused():
    with pytest.raises(ValueError, match="no sentence"):
        cases_of("needle", haystack="no full stop here")
