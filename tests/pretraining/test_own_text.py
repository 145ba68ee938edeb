"""Text that a model writes itself: what is kept of it, how a folder goes on, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.adapters import LoadedModel
from attnlab.pretraining import own_text
from attnlab.pretraining.own_text import OwnText, repeated_share, write_own_text
from tests.adapters.test_load import save

SETTINGS = OwnText(tokens=60, temperatures=(0.5, 1.5), length=11, batch=33, seed=3)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return al.load_model(save("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True)
def every_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model of six words repeats itself."""
    monkeypatch.setattr(own_text, "MOST_REPEATED", 1.0)


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "texts.jsonl").read_text().splitlines()]


def test_there_are_as_many_tokens_as_asked_for_and_the_folder_says_so(loaded: LoadedModel, tmp_path: Path) -> None:
    state = write_own_text(loaded, tmp_path, SETTINGS, model="tiny")
    texts = written(tmp_path)
    assert sum(text["tokens"] for text in texts) == state["tokens"] >= 60
    assert len(texts) == state["texts"]
    assert state["texts"] + sum(state["dropped"].values()) == 3 * state["batches"]
    assert json.loads((tmp_path / "sampling.json").read_text()) == state
    # Batches of three texts take the temperatures in turn.
    assert {text["temperature"] for text in texts} == {0.5, 1.5}
    assert all(0 < len(text["text"].split()) <= text["tokens"] <= 11 for text in texts)


def test_a_killed_call_goes_on_with_the_same_texts(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_own_text(loaded, whole, SETTINGS, model="tiny")
    write_json, calls = own_text.write_json, []

    def dies(path: Path, what: Any) -> None:
        """The third batch is in the file, and not yet counted."""
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write_json(path, what)

    with monkeypatch.context() as patch:
        patch.setattr(own_text, "write_json", dies)
        with pytest.raises(KeyboardInterrupt):
            write_own_text(loaded, killed, SETTINGS, model="tiny")
    assert len(written(killed)) > json.loads((killed / "sampling.json").read_text())["texts"]
    write_own_text(loaded, killed, SETTINGS, model="tiny")
    assert (killed / "texts.jsonl").read_bytes() == (whole / "texts.jsonl").read_bytes()


def test_more_tokens_are_added_and_as_many_change_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    write_own_text(loaded, tmp_path, SETTINGS, model="tiny")
    first = (tmp_path / "texts.jsonl").read_bytes()
    write_own_text(loaded, tmp_path, SETTINGS, model="tiny")
    assert (tmp_path / "texts.jsonl").read_bytes() == first
    write_own_text(loaded, tmp_path, replace(SETTINGS, tokens=120), model="tiny")
    longer = (tmp_path / "texts.jsonl").read_bytes()
    assert longer.startswith(first)
    assert len(longer) > len(first)


def test_another_machine_goes_on_with_the_batch_that_the_folder_was_begun_with(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    write_own_text(loaded, tmp_path, SETTINGS, model="tiny")
    state = write_own_text(loaded, tmp_path, replace(SETTINGS, tokens=90, batch=None), model="tiny")
    assert state["settings"]["batch"] == 33
    with pytest.raises(ValueError, match="was begun with batch 33, not 44"):
        write_own_text(loaded, tmp_path, replace(SETTINGS, batch=44), model="tiny")


def test_texts_continue_the_beginnings_of_paragraphs(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a b b a a\n\nb\n\nb b a a a\n\n")
    settings = replace(SETTINGS, begin=(str(tmp_path / "book.txt"),), begin_tokens=3)
    write_own_text(loaded, tmp_path / "own", settings, model="tiny")
    begun = [" ".join(text["text"].split()[:3]) for text in written(tmp_path / "own")]
    # In turn; a paragraph of one word begins nothing.
    assert set(begun) == {"a b b", "b b a"}


def test_the_model_is_sampled_as_it_is(loaded: LoadedModel, tmp_path: Path) -> None:
    """A folder's settings for generation, such as the most probable tokens alone, would change what is written."""
    write_own_text(loaded, tmp_path / "own", SETTINGS, model="tiny")
    config = loaded.model.generation_config
    before = config.top_k, config.top_p, config.repetition_penalty
    try:
        config.top_k, config.top_p, config.repetition_penalty = 1, 0.1, 5.0
        write_own_text(loaded, tmp_path / "again", SETTINGS, model="tiny")
    finally:
        config.top_k, config.top_p, config.repetition_penalty = before
    assert written(tmp_path / "own") == written(tmp_path / "again")


def rows_of(*rows: list[int]) -> Any:
    return lambda loaded, begin, **settings: torch.tensor(rows)


def test_loops_and_texts_that_end_at_once_are_left_out(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "MOST_REPEATED", 0.4)
    rows = (
        [2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4],
        [2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [2, 4, 5, 5, 4, 4, 4, 5, 2, 0, 0],
    )
    monkeypatch.setattr(own_text, "sample_rows", rows_of(*rows))
    state = write_own_text(loaded, tmp_path, replace(SETTINGS, tokens=8), model="tiny")
    assert state["dropped"] == {"loops": 1, "short": 1}
    # The end and what fills the row up are no part of the text.
    assert written(tmp_path) == [{"text": "a b b a a a b", "temperature": 0.5, "tokens": 8}]


def test_a_model_that_writes_nothing_of_use_is_given_up(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "sample_rows", rows_of([2, 2, *[0] * 9]))
    with pytest.raises(ValueError, match="of the last 20 batches no text was kept"):
        write_own_text(loaded, tmp_path, SETTINGS, model="tiny")


def test_repeated_share() -> None:
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([1, 2, 3, 4, 5, 6]) == 0
    # Runs: 1212 2121 1212 2121 1212, of which two are new.
    assert repeated_share([1, 2] * 4) == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 10_000}, "longer than the model's"),
        ({"length": 40}, "a batch of 33 tokens has no room for one text"),
        ({"temperatures": (0.0,)}, "temperatures must be numbers above 0"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"seed": 10**20}, "seed must lie between 0 and"),
        ({"batch": 10**12}, "texts would take"),
    ],
)
def test_settings_that_cannot_be_honoured(
    loaded: LoadedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    batch = {"batch": None} if changes.get("length") == 10_000 else {}
    with pytest.raises(ValueError, match=message):
        write_own_text(loaded, tmp_path / "own", replace(SETTINGS, **batch, **changes), model="tiny")
    assert not (tmp_path / "own").exists()


def test_folders_of_something_else_are_left_as_they_are(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        write_own_text(loaded, tmp_path, SETTINGS, model="tiny")
    own = tmp_path / "own"
    write_own_text(loaded, own, SETTINGS, model="tiny")
    with pytest.raises(ValueError, match="was begun with seed 3, not 4"):
        write_own_text(loaded, own, replace(SETTINGS, seed=4), model="tiny")
    with pytest.raises(ValueError, match="was begun with model tiny, not other"):
        write_own_text(loaded, own, SETTINGS, model="other")
    half = al.load_model(save("llama", tmp_path / "llama"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"was begun with dtype torch\.float32, not torch\.bfloat16"):
        write_own_text(half, own, SETTINGS, model="tiny")
    (own / "texts.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="shorter than when it was written"):
        write_own_text(loaded, own, SETTINGS, model="tiny")


def test_what_is_no_causal_language_model_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no causal language model"):
        write_own_text(al.load_model(save("bert", tmp_path / "bert")), tmp_path / "own", SETTINGS, model="bert")


def test_a_model_of_our_own_writes_too(tmp_path: Path) -> None:
    shipped = al.shipped_model("lm")
    settings = OwnText(tokens=100, length=48, batch=96)
    state = write_own_text(shipped, tmp_path, settings, model="shipped-lm")
    assert state["tokens"] >= 100
