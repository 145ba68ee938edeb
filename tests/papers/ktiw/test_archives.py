"""KTIW's classifications from archives as they are published, packed and unpacked."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from papers.ktiw.corpora import prepare

REVIEW = "<review>\n<title>\n{title}\n</title>\n<review_text>\n{text}\n</review_text>\n</review>\n"
PUBLISHED = {
    "imdb": (
        "aclImdb_v1.tar.gz",
        {
            f"aclImdb/{split}/{label}/{i}_{score}.txt": f"a {word} film"
            for split in ("train", "test")
            for label, score, word in (("neg", 2, "bad"), ("pos", 9, "good"))
            for i in range(3)
        }
        | {"aclImdb/train/unsup/0_0.txt": "no label", "aclImdb/README": "about"},
    ),
    "20newsgroups": (
        "20news-bydate.tar.gz",
        {
            f"20news-bydate-{split}/{group}/{i}": f"From: x@y\n\nthe {word} caf\u00e9"
            for split in ("train", "test")
            for group, word in (("rec.sport.baseball", "bat"), ("rec.sport.hockey", "puck"), ("sci.med", "pill"))
            for i in range(3)
        },
    ),
    "amazon": (
        "domain_sentiment_data.tar.gz",
        {
            f"sorted_data_acl/{domain}/{label}.review": REVIEW.format(title=word, text=f"a {word} thing") * 12
            for domain in ("books", "kitchen_&_housewares")
            for label, word in (("negative", "poor"), ("positive", "fine"))
        },
    ),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_archive_is_read_as_published(name: str, packed: bool, tmp_path: Path) -> None:
    archive, files = PUBLISHED[name]
    folder = tmp_path / name
    folder.mkdir()
    # Messages of 1993 are not UTF-8.
    contents = {path: text.encode("latin-1") for path, text in files.items()}
    if packed:
        with tarfile.open(folder / archive, "w:gz") as out:
            for path, content in contents.items():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                out.addfile(member, io.BytesIO(content))
    else:
        for path, content in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    corpus = prepare(name, tmp_path)
    words = {"imdb": ("bad", "good"), "20newsgroups": ("bat", "puck"), "amazon": ("poor", "fine")}[name]
    assert set(words) <= set(corpus.words)
    assert "pill" not in corpus.words
    for rows, labels in (corpus.train, corpus.valid):
        for row, label in zip(rows, labels, strict=True):
            assert corpus.words.index(words[label]) in row


def test_a_folder_without_the_archive_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "imdb").mkdir()
    with pytest.raises(ValueError, match=r"papers/DATA\.md has its address"):
        prepare("imdb", tmp_path)
    with tarfile.open(tmp_path / "imdb" / "other.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match="another archive"):
        prepare("imdb", tmp_path)


def test_files_of_zhang_et_al_and_of_the_treebank_are_found_where_they_unpack(tmp_path: Path) -> None:
    polarity = tmp_path / "yelp" / "yelp_review_polarity_csv"
    polarity.mkdir(parents=True)
    for split in ("train", "test"):
        (polarity / f"{split}.csv").write_text('"1","bad bad bad food"\n"2","good good good food"\n')
    yelp = prepare("yelp", tmp_path)
    assert [yelp.words[row[0]] for row in yelp.train[0]] == ["bad", "good"]
    assert yelp.train[1].tolist() == [0, 1]
    trees = tmp_path / "sst-trees" / "trees"
    trees.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        (trees / f"{split}.txt").write_text("(3 (2 a) (3 fun))\n(1 (2 a) (1 bore))\n")
    assert prepare("sst-trees", tmp_path).train[1].tolist() == [1, 0]
