"""Texts out of files and folders as one stream of tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from attnlab.data import WordTokeniser
from attnlab.data.overlap import Passages
from attnlab.data.text_folders import PIECE, stream_of_texts, text_files, token_stream

WORDS = WordTokeniser(words=("the", "ferry", "stayed", "in", "harbour"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    (folder / "b.txt").write_text("The ferry.\n\nThe harbour.\n")
    (folder / "deeper" / "a.txt.gz").write_bytes(gzip.compress(b"stayed in"))
    (folder / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("the ferry", "the harbour")))
    (folder / "picture.png").write_bytes(b"\0")
    return folder


def test_a_folder_stands_for_the_texts_in_it(corpus: Path) -> None:
    names = [str(file.relative_to(corpus)) for file in text_files([corpus])]
    assert names == ["b.txt", "c.jsonl", "deeper/a.txt.gz"]
    assert text_files([corpus / "b.txt", corpus, corpus / "b.txt"])[0] == corpus / "b.txt"
    assert len(text_files([corpus / "b.txt", corpus])) == 3


def test_what_is_no_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no text: no file in it ends in"):
        text_files([tmp_path / "empty"])
    with pytest.raises(ValueError, match="is no regular file"):
        text_files(["/dev/zero"])
    with pytest.raises(ValueError, match="at least one file or folder"):
        text_files([])


def test_the_text_stays_as_it_is_and_documents_end(corpus: Path) -> None:
    assert list(stream_of_texts(text_files([corpus]), end="|")) == [
        "The ferry.\n\nThe harbour.|",
        "the ferry|",
        "the harbour|",
        "stayed in|",
    ]


@pytest.mark.parametrize("text", ["word " * 20_000, "a line\n" * 9_000, "x" * 50_000, "a\n\nparagraph\n\n" * 5_000])
def test_long_texts_come_in_pieces_that_make_the_whole(tmp_path: Path, text: str) -> None:
    (tmp_path / "long.txt").write_text(text)
    pieces = list(stream_of_texts([tmp_path / "long.txt"]))
    assert "".join(pieces) == text.rstrip("\n")
    assert len(pieces) > 2
    assert max(map(len, pieces)) <= 2 * PIECE


def test_paragraphs_that_evaluation_texts_share_are_left_out(tmp_path: Path) -> None:
    held = "It is a truth that the old ferry has always stayed in the harbour on Sundays, as they say."
    (tmp_path / "a.txt").write_text(f"One.\n\nBefore. {held.upper()} After.\n\nTwo.\n")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in (held, "Three.")))
    pieces = list(stream_of_texts(text_files([tmp_path]), leave_out=Passages([held])))
    assert pieces == ["One.\n\nTwo.", "Three."]


def test_tokens_are_stored_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, cache = text_files([corpus / "b.txt"]), tmp_path / "tokens"
    store, sums = token_stream(files, WORDS, cache=cache)
    assert store.tokens.tolist() == [4, 5, 1, 4, 8, 1]
    assert len(sums) == 1
    monkeypatch.setattr("attnlab.data.text_folders.write_store", None)
    again, _ = token_stream(files, WORDS, cache=cache)
    assert again.tokens.tolist() == store.tokens.tolist()
    assert len(list(cache.iterdir())) == 1


def test_a_damaged_stream_is_made_again_and_another_text_is_another_stream(corpus: Path, tmp_path: Path) -> None:
    files, cache = text_files([corpus / "b.txt"]), tmp_path / "tokens"
    store, _ = token_stream(files, WORDS, cache=cache)
    expected = store.tokens.tolist()
    [folder] = cache.iterdir()
    content = bytearray((folder / "tokens.npy").read_bytes())
    content[-1] ^= 1
    (folder / "tokens.npy").write_bytes(content)
    assert token_stream(files, WORDS, cache=cache)[0].tokens.tolist() == expected
    (corpus / "b.txt").write_text("in the harbour")
    assert token_stream(files, WORDS, cache=cache)[0].tokens.tolist() == [7, 4, 8]
    left_out = tmp_path / "held.txt"
    left_out.write_text("nothing shared")
    token_stream(files, WORDS, cache=cache, leave_out=[left_out])
    assert len(list(cache.iterdir())) == 3
