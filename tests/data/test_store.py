import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from attnlab.data import Malformed, TokenStore, WordTokeniser, load_store, tokenise, train_words, write_store
from attnlab.data import store as store_module

WORDS = WordTokeniser(words=("to", "be", "or", "not"))


@pytest.fixture
def hamlet(tmp_path):
    path = tmp_path / "hamlet.txt"
    path.write_text("To be or\n\nnot to be\nwhat\n")
    return path


class Counting:
    """The tokeniser WORDS, counting its calls."""

    vocab_size, specials = WORDS.vocab_size, WORDS.specials
    decode, fingerprint, save = WORDS.decode, WORDS.fingerprint, WORDS.save

    def __init__(self):
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return WORDS.encode_batch(texts)


def test_documents_come_back_and_the_second_time_nothing_is_tokenised(hamlet, tmp_path):
    counting = Counting()
    for _ in range(2):
        store = tokenise(hamlet, counting, cache=tmp_path / "cache")
        assert [store[i].tolist() for i in range(len(store))] == [[4, 5, 6], [7, 4, 5], [1]]
        assert isinstance(store.tokens, np.memmap)
        assert (store.tokens.dtype, store.offsets.tolist()) == (np.uint16, [0, 3, 6, 7])
    assert counting.calls == 1


def test_another_content_tokeniser_or_way_of_reading_is_another_store(hamlet, tmp_path):
    cache = tmp_path / "cache"
    tokenise(hamlet, WORDS, cache=cache)
    assert len(tokenise(hamlet, WORDS, cache=cache, unit="paragraph")) == 2
    assert tokenise(hamlet, WordTokeniser(words=("be",)), cache=cache)[0].tolist() == [1, 4, 1]
    stamp = hamlet.stat()
    hamlet.write_text("To be or\n\nnot to BE\nwhen\n"[: stamp.st_size])
    os.utime(hamlet, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    tokenise(hamlet, WORDS, cache=cache)
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 4


def test_chunks_do_not_show(hamlet, tmp_path, monkeypatch):
    whole = tokenise(hamlet, WORDS, cache=tmp_path / "a")
    monkeypatch.setattr(store_module, "CHUNK", 5)
    pieces = tokenise(hamlet, Counting(), cache=tmp_path / "b")
    np.testing.assert_array_equal(whole.tokens, pieces.tokens)
    np.testing.assert_array_equal(whole.offsets, pieces.offsets)


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    words = WordTokeniser(words=tuple(str(i) for i in range(1 << 16)))
    store = write_store(tmp_path / "s", ["65535 0"], words)
    assert store.tokens.dtype == np.uint32
    assert store[0].tolist() == [65539, 4]


def test_malformed_lines_are_reported_again_from_the_cache(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "to be"}\noops\n')
    for _ in range(2):
        bad = Malformed("skip")
        assert len(tokenise(path, WORDS, cache=tmp_path / "cache", malformed=bad)) == 1
        assert bad.count == 1
        assert bad.lines[0][1] == 2
    other = tmp_path / "b.jsonl"
    other.write_text('oops\n{"text": "to"}\n')
    tokenise(other, WORDS, cache=tmp_path / "cache", malformed=bad)
    tokenise(other, WORDS, cache=tmp_path / "cache", malformed=bad)
    assert [line for _, line, _ in bad.lines] == [2, 1, 1]
    with pytest.raises(ValueError, match="line 2"):
        tokenise(path, WORDS, cache=tmp_path / "cache")


def test_an_error_leaves_nothing_behind(tmp_path):
    def documents():
        yield "to be"
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_store(tmp_path / "s", documents(), WORDS)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="the corpus holds no tokens in 0 documents"):
        write_store(tmp_path / "s", [], WORDS)
    with pytest.raises(ValueError, match="the corpus holds no tokens in 2 documents"):
        write_store(tmp_path / "s", ["", " "], WORDS)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_store_is_not_overwritten(tmp_path):
    write_store(tmp_path / "s", ["to be"], WORDS)
    with pytest.raises(ValueError, match="exists; load it with load_store"):
        write_store(tmp_path / "s", ["or not"], WORDS)
    assert load_store(tmp_path / "s")[0].tolist() == [4, 5]


def test_a_store_of_another_layout_is_not_read(tmp_path):
    write_store(tmp_path / "store", ["to be"], WORDS)
    file = tmp_path / "store" / "meta.json"
    file.write_text(file.read_text().replace('"layout": 2', '"layout": 99'))
    with pytest.raises(
        ValueError, match=r"no token store \(meta\.json says layout 99, and this attnlab reads layouts 1 and 2\)"
    ):
        load_store(tmp_path / "store")
    assert not store_module.undamaged(tmp_path / "store")
    # The first one is read still.
    file.write_text(file.read_text().replace('"layout": 99', '"layout": 1'))
    assert load_store(tmp_path / "store")[0].tolist() == [4, 5]


def test_a_damaged_store_is_recognised(tmp_path):
    write_store(tmp_path / "s", ["to be", "or not"], WORDS)
    np.save(tmp_path / "s" / "tokens.npy", np.array([4, 5], np.uint16))
    with pytest.raises(ValueError, match="is damaged: 2 tokens in 2 documents, expected 4 in 2"):
        load_store(tmp_path / "s")
    (tmp_path / "s" / "tokens.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="is no token store"):
        load_store(tmp_path / "s")
    with pytest.raises(ValueError, match="is no token store"):
        load_store(tmp_path / "nothing")


SLOW = """
import sys, time
from attnlab.data import WordTokeniser, store, tokenise
store.CHUNK = 1
class Slow(WordTokeniser):
    def encode_batch(self, texts):
        time.sleep(float(sys.argv[3]))
        return super().encode_batch(texts)
print(len(tokenise(sys.argv[1], Slow(words=("to", "be")), cache=sys.argv[2])), flush=True)
"""


def test_killed_half_way_nothing_looks_finished_and_the_next_run_does_it_all(tmp_path):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("to be\n" * 101)
    # It is killed long before the 101 lines are done, also by a busy machine.
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(path), str(cache), "1"])
    while not any(p.suffix == ".tmp" and (p / "tokens.npy").exists() for p in cache.glob(".*")):
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [p for p in cache.iterdir() if p.is_dir() and not p.name.startswith(".")] == []
    store = tokenise(path, WordTokeniser(words=("to", "be")), cache=cache)
    assert len(store) == 101
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 1


def test_of_two_processes_one_does_the_work(tmp_path):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("to be\n" * 23)
    command = [sys.executable, "-c", SLOW, str(path), str(cache), "0.05"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=120)[0].strip() for p in both] == ["23", "23"]
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 1


MEMORY = """
import resource, sys
from attnlab.data import load_tokeniser, tokenise
t = load_tokeniser(sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenise(sys.argv[1], t, cache=sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    train_words(["to be or not"], min_count=1).save(tmp_path / "t")
    peaks = []
    for megabytes in (10, 40):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text("to be or not to be that is the question\n" * (megabytes * 25_000))
        command = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "cache"), str(tmp_path / "t")]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024)
    assert peaks[1] < peaks[0] + 30, f"{peaks} MB at 10 and 40 MB"


def test_lengths():
    assert TokenStore(np.arange(5), np.array([0, 0, 2, 5])).lengths.tolist() == [0, 2, 3]
