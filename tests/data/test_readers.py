import bz2
import gzip
import json
import lzma
import os
import sys
import threading
import types
import zipfile

import pytest

from attnlab.data import Malformed, hf_texts, read_text, readers, records, texts

POEM = "Now is the winter\n\nof our discontent\nmade glorious\n"


def zipped(path, *members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)


@pytest.fixture(params=["", ".gz", ".xz", ".bz2", ".zip"])
def poem(request, tmp_path):
    path = tmp_path / f"poem.txt{request.param}"
    data = POEM.encode()
    if request.param == ".zip":
        zipped(path, ("poem.txt", data))
    else:
        path.write_bytes(
            {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[request.param](data)
        )
    return path


def test_plain_text_by_line_paragraph_and_file(poem):
    assert read_text(poem) == POEM
    assert list(texts(poem)) == ["Now is the winter", "of our discontent", "made glorious"]
    assert list(texts(poem, unit="paragraph")) == ["Now is the winter", "of our discontent\nmade glorious"]
    assert list(texts(poem, unit="file")) == [POEM]


def test_unit_is_checked(tmp_path):
    with pytest.raises(ValueError, match="unit must be 'line', 'paragraph' or 'file', got 'page'"):
        list(texts(tmp_path / "x.txt", unit="page"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\x89PNG\x00\x01", r"looks binary \(a NUL byte at 4\)"),
        ("caf\xe9".encode("latin-1"), r"is not UTF-8 \(byte 0xe9 at 3\)"),
    ],
)
def test_a_file_without_text_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_text(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zip"])
def test_a_truncated_archive_is_an_error_not_a_short_text(tmp_path, suffix):
    path = tmp_path / f"cut.txt{suffix}"
    if suffix == ".zip":
        zipped(path, ("cut.txt", POEM * 100))
    else:
        path.write_bytes(
            {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix]((POEM * 100).encode())
        )
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"is not a whole {suffix} file"):
        read_text(path)


def test_not_an_archive(tmp_path):
    for suffix in (".gz", ".xz", ".bz2", ".zip"):
        path = tmp_path / f"plain.txt{suffix}"
        path.write_text(POEM)
        with pytest.raises(ValueError, match=f"is not a whole {suffix} file"):
            read_text(path)


def test_a_zip_of_several_files_names_them(tmp_path):
    path = tmp_path / "two.zip"
    zipped(path, ("a.txt", "a"), ("b.txt", "b"))
    with pytest.raises(ValueError, match=r"must hold one file, holds 2: \['a.txt', 'b.txt'\]"):
        read_text(path)


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "w.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert list(texts(path)) == ["one", "two"]
    assert read_text(path) == "one\ntwo\n"


def test_only_newlines_end_a_line(tmp_path):
    path = tmp_path / "u.txt"
    path.write_text("one\u2028still one\x0b\ntwo\n")
    assert len(list(texts(path))) == 2


def test_jsonl_bad_lines_are_fatal_with_their_number_or_skipped_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nnot json\n\n{"txt": "x"}\n[1]\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl line 2: not JSON .*; mend or remove the line"):
        list(texts(path))
    bad = Malformed("skip")
    assert list(texts(path, malformed=bad)) == ["one", "two"]
    assert bad.count == 3
    assert [line for _, line, _ in bad.lines] == [2, 4, 5]
    assert str(bad).startswith("3 malformed lines skipped: ")
    assert "no 'text' among ['txt']" in str(bad)


def test_lines_that_are_not_utf8_are_malformed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n\xff\xfe\nbad\x00bad\ngood too\n")
    bad = Malformed("skip")
    assert list(texts(path, malformed=bad)) == ["good", "good too"]
    assert [(line, why.split(" ")[0]) for _, line, why in bad.lines] == [(2, "not"), (3, "looks")]


def test_only_the_first_bad_lines_are_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("x\n" * 101 + '{"text": "y"}\n')
    bad = Malformed("skip")
    assert list(texts(path, malformed=bad)) == ["y"]
    assert (bad.count, len(bad.lines)) == (101, 20)
    assert str(bad).endswith("; and 81 more")


def test_malformed_refuses_an_unknown_action():
    with pytest.raises(ValueError, match="must be 'fail' or 'skip', got 'warn'"):
        Malformed("warn")


def test_csv_quotes_may_hold_commas_and_line_ends(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,label\n"a, b\nc",1\nplain,2\ntoo,many,fields\nlast,3\n')
    bad = Malformed("skip")
    rows = list(records(path, columns=["label", "text"], malformed=bad))
    assert rows == [
        (3, {"label": "1", "text": "a, b\nc"}),
        (4, {"label": "2", "text": "plain"}),
        (6, {"label": "3", "text": "last"}),
    ]
    assert bad.lines == [(str(path), 5, "expected 2 fields, got 3")]


def test_tsv_knows_no_quotes(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('sentence\tlabel\n" an open quote\t1\n')
    assert list(records(path, columns=["sentence"])) == [(2, {"sentence": '" an open quote'})]


def test_a_table_without_names(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"one\t1\ntwo\t2\n"))
    assert [row["x"] for _, row in records(path, columns=["x"], header=["x", "y"])] == ["one", "two"]
    with pytest.raises(
        ValueError, match=r"no column 'x'; its first line names \['one', '1'\]; if that line is data, pass header"
    ):
        list(records(path, columns=["x"]))


def test_numbers_in_jsonl_come_as_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x", "label": 3}))
    assert list(records(path, columns=["text", "label"])) == [(1, {"text": "x", "label": "3"})]


def test_plain_files_have_no_columns(tmp_path):
    with pytest.raises(ValueError, match="has no columns"):
        list(records(tmp_path / "a.txt", columns=["text"]))


def test_datasets_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        list(hf_texts("some/corpus"))


def test_datasets_by_a_stand_in(monkeypatch):
    def load_dataset(name, config, *, split, streaming):
        if name == "offline":
            raise ConnectionError("no route")
        assert (name, config, split, streaming) == ("some/corpus", None, "train", True)
        return iter([{"text": "one"}, {"text": "two"}])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert list(hf_texts("some/corpus")) == ["one", "two"]
    with pytest.raises(ValueError, match="are you online"):
        list(hf_texts("offline"))
    with pytest.raises(ValueError, match=r"no column 'words'; it has \['text'\]"):
        list(hf_texts("some/corpus", column="words"))


@pytest.mark.parametrize("read", [read_text, lambda path: list(texts(path))], ids=["whole", "lines"])
def test_a_text_that_does_not_end_is_read_up_to_a_limit(read, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MOST_BYTES", 1 << 22)
    bomb = tmp_path / "bomb.txt.gz"
    bomb.write_bytes(gzip.compress(b"a" * (1 << 24)))
    with pytest.raises(ValueError, match=r"bomb.txt.gz .*longer than 4.19 MB, the most that is read"):
        read(bomb)
    with pytest.raises(ValueError, match=r"/dev/zero .*binary"):
        read("/dev/zero")


def test_a_pipe_is_read_once_something_is_written(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(readers, "PIPE_SECONDS", 0.05)
    with pytest.raises(ValueError, match="pipe into which nothing was written"):
        read_text(pipe)
    monkeypatch.setattr(readers, "PIPE_SECONDS", 20.0)
    writer = threading.Thread(target=pipe.write_text, args=(POEM,))
    writer.start()
    assert read_text(pipe) == POEM
    writer.join()


def test_half_of_a_surrogate_pair_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "a \\ud800"}\n')
    with pytest.raises(ValueError, match=r"line 2: half of a surrogate pair \(U\+D800\) at 2"):
        list(texts(path))
    bad = Malformed("skip")
    assert list(texts(path, malformed=bad)) == ["good"]
    assert bad.count == 1
