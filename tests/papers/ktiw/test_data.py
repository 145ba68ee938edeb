"""KTIW's data sets read from files as a user has them, and the diagnosis before training."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from attnlab.cli import main
from papers.__main__ import main as papers_main
from papers.ktiw.corpora import load_corpus, prepare, save_corpus, statistics

SENTENCES = [
    ("a man rides a bike", "ein mann fährt ein rad"),
    ("a dog runs", "ein hund rennt"),
    ("the woman sits", "die frau sitzt"),
    ("the man runs", "der mann rennt"),
    ("a woman rides", "eine frau fährt"),
]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes({".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(data))


def jsonl(rows: list[tuple[str, str | int]]) -> str:
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)


def test_words_seen_three_times_are_known(tmp_path: Path) -> None:
    rows: list[tuple[str, str | int]] = [
        ("good film<br />good", 1),
        ("bad film", 0),
        ("Good bad film 1994", 1),
        ("bad x", 0),
    ]
    for split in ("train", "test"):
        write(tmp_path / "imdb" / f"{split}.jsonl.xz", jsonl(rows))
    corpus = prepare("imdb", tmp_path)
    assert corpus.words == ("<pad>", "<unk>", "<s>", "</s>", "bad", "film", "good")
    assert [row.tolist() for row in corpus.train[0]] == [[6, 5, 6], [4, 5], [6, 4, 5, 1], [4, 1]]
    assert corpus.train[1].tolist() == [1, 0, 1, 0]


def test_newsgroups_split_underscores_and_drop_numbers(tmp_path: Path) -> None:
    rows: list[tuple[str, str | int]] = [("the_puck 42 42 42 7 7 7 the", "hockey"), ("the_bat puck puck", "baseball")]
    for split in ("train", "test"):
        write(tmp_path / "20newsgroups" / f"{split}.jsonl", jsonl(rows))
    corpus = prepare("20newsgroups", tmp_path)
    assert corpus.words[4:] == ("7", "puck", "the")
    assert corpus.train[0][0].tolist() == [6, 5, 1, 1, 1, 4, 4, 4, 6]
    # baseball is 0, hockey 1, in the order of their names.
    assert corpus.train[1].tolist() == [1, 0]


def test_the_other_classifications(tmp_path: Path) -> None:
    write(tmp_path / "ag-news" / "train.tsv", "oil price\tBusiness\nwar talks\tWorld\nnew phone\tSci/Tech\n")
    write(tmp_path / "ag-news" / "test.csv", '"1","T","war"\n"3","T","oil"\n"2","T","goal"\n')
    corpus = prepare("ag-news", tmp_path)
    assert corpus.train[1].tolist() == [1, 0]
    assert corpus.valid[1].tolist() == [0, 1]
    # One of the files has no titles, so that neither split has them, and the corpus says so.
    assert [len(row) for row in corpus.valid[0]] == [1, 1]
    assert corpus.remark == "descriptions only: train.tsv has no titles"
    assert load_corpus(save_corpus(corpus, tmp_path / "ag-news.npz.xz")).remark == corpus.remark
    write(tmp_path / "sst-trees" / "train.txt", "(3 (2 a) (3 fun))\n(1 (2 a) (1 bore))\n(2 (2 a) (2 film))\n")
    write(tmp_path / "sst-trees" / "test.txt", "(4 (2 so) (3 fun))\n(0 (2 so) (1 bad))\n")
    assert prepare("sst-trees", tmp_path).train[1].tolist() == [1, 0]
    stars = "".join(f"good food,Restaurants,Review Stars: {n}.0\n" for n in (1, 2, 3, 4, 5) for _ in range(4))
    write(tmp_path / "yelp" / "dev.csv", "text,label1,label2\n" + stars)
    yelp = prepare("yelp", tmp_path)
    assert len(yelp.train[0]) + len(yelp.valid[0]) == 16
    write(tmp_path / "sms" / "SMSSpamCollection", "ham\tsee you\nspam\twin money\n" * 20 + "not a message\n")
    sms = prepare("sms", tmp_path)
    assert (len(sms.train[0]), len(sms.valid[0])) == (32, 8)
    write(tmp_path / "amazon" / "labelled.jsonl", jsonl([("fine", 1), ("poor", 0)] * 20 + [("word " * 400, 1)]))
    amazon = prepare("amazon", tmp_path)
    assert len(amazon.train[0]) + len(amazon.valid[0]) == 40


def test_ag_news_keeps_its_titles(tmp_path: Path) -> None:
    """Issue 20, point 9."""
    rows = '"1","Peace plan","war talks"\n"3","Crude jumps","oil price rises"\n'
    for split in ("train", "test"):
        write(tmp_path / "ag-news" / f"{split}.csv", rows)
    corpus = prepare("ag-news", tmp_path)
    assert [len(row) for row in corpus.train[0]] == [4, 5]
    assert corpus.train[1].tolist() == [0, 1]
    assert corpus.remark == ""


def test_a_remark_reaches_the_statistics(tmp_path: Path) -> None:
    write(tmp_path / "data" / "ag-news" / "train.tsv", "oil price\tBusiness\nwar talks\tWorld\n")
    write(tmp_path / "data" / "ag-news" / "test.csv", '"1","T","war"\n"3","T","oil"\n')
    out = tmp_path / "ktiw-data.json"
    folders = ["--data", str(tmp_path / "data"), "--into", str(tmp_path / "into")]
    assert papers_main(["ktiw-data", *folders, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["remarks"] == {"AG News": "descriptions only: train.tsv has no titles"}


def test_translation_shares_one_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    for split in ("train", "val"):
        for side, i in (("en", 0), ("de", 1)):
            write(tmp_path / "multi30k" / f"{split}.{side}.gz", "".join(pair[i] + "\n" for pair in SENTENCES))
    corpus = prepare("multi30k", tmp_path, vocab=36)
    assert corpus.vocab == 36
    assert "".join(corpus.words[i] for i in corpus.train[1][1]).replace("▁", " ").strip() == "ein hund rennt"
    row = statistics(corpus)
    assert (row["dataset"], row["train_count"], row["vocabulary"]) == ("Multi30k", 5, 36)
    again = load_corpus(save_corpus(corpus, tmp_path / "multi30k.npz.xz"))
    assert again.words == corpus.words
    for side in (0, 1):
        assert all(np.array_equal(a, b) for a, b in zip(again.train[side], corpus.train[side], strict=True))


def test_news_commentary_leaves_numbers_out(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    lines = [f"{x}\t{y}" for x, y in SENTENCES * 4] + ["1994\t1994", "\t", "only one side\t"]
    write(tmp_path / "news-en-nl" / "news-commentary-v14.en-nl.tsv.gz", "\n".join(lines) + "\n")
    corpus = prepare("news-en-nl", tmp_path, vocab=36)
    assert (len(corpus.train[0]), len(corpus.valid[0])) == (18, 2)


def test_bad_data_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data set named 'imbd'"):
        prepare("imbd", tmp_path)
    with pytest.raises(ValueError, match="is no folder; put the files of IMDB there"):
        prepare("imdb", tmp_path)
    (tmp_path / "imdb").mkdir()
    with pytest.raises(ValueError, match="holds neither the published archive nor its files"):
        prepare("imdb", tmp_path)
    for split in ("train", "test"):
        write(tmp_path / "imdb" / f"{split}.jsonl", jsonl([("good", 1), ("fine", 1)]))
    with pytest.raises(ValueError, match="the train examples are all of one class"):
        prepare("imdb", tmp_path)


def test_diagnose_distinguishes_translation_from_permutations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(6)]
    shuffled = [" ".join(rng.permutation(words)) for _ in range(60)]
    chosen = [" ".join(rng.choice(words, 3, replace=False)) for _ in range(60)]
    for name, lines in (("permutations", shuffled), ("subsets", chosen)):
        write(tmp_path / f"{name}.src", "\n".join(lines) + "\n")
        write(tmp_path / f"{name}.tgt", "\n".join(lines).upper() + "\n")
    diagnoses = {}
    for name in ("permutations", "subsets"):
        assert main(["diagnose", str(tmp_path / f"{name}.src"), str(tmp_path / f"{name}.tgt"), "--json"]) == 0
        diagnoses[name] = json.loads(capsys.readouterr().out)
    assert diagnoses["permutations"]["verdict"] == "hopeless"
    assert diagnoses["permutations"]["excess"] == 0
    assert diagnoses["subsets"]["verdict"] == "fine"
    assert diagnoses["subsets"]["excess"] > 0.05
    assert main(["diagnose", str(tmp_path / "subsets.src"), str(tmp_path / "subsets.tgt")]) == 0
    assert capsys.readouterr().out.startswith("fine: ")
    write(tmp_path / "short.tgt", "w1\n")
    assert main(["diagnose", str(tmp_path / "subsets.src"), str(tmp_path / "short.tgt")]) != 0
    assert "line 2" in capsys.readouterr().err
