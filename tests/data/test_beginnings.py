"""Of a large text only as much is read and tokenised as is needed."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnlab.adapters.load import SHIPPED
from attnlab.cli import main
from attnlab.data import (
    TextFile,
    beginnings,
    bundled_text,
    read_parallel,
    train_bpe,
    train_sentencepiece,
    train_wordpiece,
)
from attnlab.data.beginnings import BLOCK, first_tokens
from attnlab.data.tokenisers import Tokeniser

GIGABYTE = 1 << 30


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many bytes ``TextFile`` has read since the test began."""
    sizes: list[int] = []
    original = TextFile._text

    def counting(self: TextFile, decoder: Any, block: bytes, read: int) -> str:
        sizes.append(len(block))
        return original(self, decoder, block, read)

    monkeypatch.setattr(beginnings.TextFile, "_text", counting)
    return lambda: sum(sizes)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of a gigabyte that takes little room: words, then a hole that reads as zero bytes."""
    path = tmp_path / "large.txt"
    path.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 2000)
    os.truncate(path, GIGABYTE)
    return path


def test_compare_reads_what_its_tokens_need(large: Path, bytes_read: Callable[[], int], tmp_path: Path) -> None:
    """Zeros further on are not text, so whatever reads them fails."""
    words = ["--tokens", "60", "--length", "32", "-m", "softmax", "-o", str(tmp_path / "page.html")]
    assert main(["compare", str(SHIPPED), "--text", str(large), *words]) == 0
    assert bytes_read() == BLOCK


def test_explore_refuses_a_file_that_fits_no_page(
    tmp_path: Path, bytes_read: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 2_000_000)
    assert main(["explore", str(SHIPPED), "--file", str(path), "-o", str(tmp_path / "page.html")]) == 2
    assert "has more than 1,048,576 characters" in capsys.readouterr().err
    assert bytes_read() <= (1 << 20) + 2 * BLOCK


def test_diagnose_reads_the_lines_it_was_asked_for(tmp_path: Path) -> None:
    for side in "ab":
        (tmp_path / side).write_text("one two\n" * 50)
        os.truncate(tmp_path / side, GIGABYTE)
    assert len(read_parallel(tmp_path / "a", tmp_path / "b", most=40).source) == 40
    assert main(["diagnose", str(tmp_path / "a"), str(tmp_path / "b"), "--lines", "40"]) == 0


def tokenisers() -> dict[str, Callable[[list[str]], Tokeniser]]:
    return {
        "wordpiece": lambda texts: train_wordpiece(texts, vocab_size=500),
        "bpe": lambda texts: train_bpe(texts, vocab_size=500),
        "sentencepiece": lambda texts: train_sentencepiece(texts, vocab_size=300),
    }


@pytest.mark.parametrize("kind", tokenisers())
@pytest.mark.parametrize("most", [1, 100, 997])
def test_the_tokens_are_those_of_the_whole_text(kind: str, most: int, tmp_path: Path) -> None:
    text = bundled_text()[:60_000]
    if kind == "sentencepiece":
        pytest.importorskip("sentencepiece")
    tokeniser = tokenisers()[kind](text.splitlines())
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    whole = tokeniser.encode_batch([text])[0]
    for source in (text, TextFile(path)):
        assert first_tokens(source, most, lambda part: tokeniser.encode_batch([part])[0]) == whole[:most]
    assert first_tokens(TextFile(path), None, lambda part: tokeniser.encode_batch([part])[0]) == whole


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = " ".join(map(str, range(40_000)))
    writer = threading.Thread(target=lambda: pipe.write_text(words), daemon=True)
    writer.start()
    file = TextFile(pipe)
    assert file.beginning(1)[0].startswith("0 1 2 ")
    assert file.beginning(None) == (words, True)
    writer.join(10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"word " * 20_000 + b"\0", "a NUL byte at 100000"),
        (b"word " * 20_000 + b"\xff!", "byte 0xff at 100000"),
        ("é".encode() * BLOCK + b"\xc3", f"byte 0xc3 at {2 * BLOCK}"),
    ],
)
def test_what_is_no_text_is_said(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TextFile(tmp_path / "file").beginning(None)


def test_windows_line_ends_and_marks(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfone\r\ntwo three")
    assert TextFile(tmp_path / "file").beginning(None) == ("one\ntwo three", True)


def test_a_text_of_spaces_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("word" + " " * 3_000_000 + "end")
    with pytest.raises(ValueError, match=r"characters hold 1 tokens .* ask for fewer tokens"):
        first_tokens(TextFile(tmp_path / "file"), 3, lambda part: [0] * len(part.split()))


def test_one_endless_word_is_refused_long_before_its_end() -> None:
    tried: list[int] = []

    def encode(part: str) -> list[int]:
        tried.append(len(part))
        return [0]

    with pytest.raises(ValueError, match=r"characters hold 1 tokens for this tokenizer, and 8192 are to be read"):
        first_tokens("a" * (8 << 20), 8192, encode)
    assert sum(tried) < 6 << 20
