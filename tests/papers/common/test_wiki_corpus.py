"""The corpus of the shipped model, made from a small dump and two small WikiText files."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlab.data import load_store, load_tokeniser
from papers.common.wiki_corpus import prepare_wiki_corpus, wikitext_articles

WIKITEXT = """
 = Robert <unk> =

 Robert is a film @-@ maker , who earned 1 @,@ 000 pounds .

 = = Career = =

 He was seen in the <unk> .
"""


def test_wikitext_as_plain_articles(tmp_path: Path) -> None:
    path = tmp_path / "wiki.valid.tokens"
    path.write_text(WIKITEXT)
    (article,), counts = wikitext_articles(path)
    assert article.splitlines() == [
        "Robert [UNK]",
        "Robert is a film-maker , who earned 1,000 pounds .",
        "Career",
        "He was seen in the [UNK] .",
    ]
    assert counts == {"words": 2 + 14 + 1 + 7, "unknown_words": 2}


def page(title: str, text: str) -> str:
    return f'  <page>\n    <title>{title}</title>\n    <revision>\n      <text xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    prose = (
        "The {} is a small animal that lives in the woods of the north, where winters are long and summers short. " * 4
    )
    pages = [page(f"Animal {n}", prose.replace("{}", f"creature number {n}")) for n in range(12)]
    pages.append(
        page(
            "Borrowed",
            "He said that " + "the quick brown fox jumps over the lazy dog while the cat sleeps all day long. " * 5,
        )
    )
    dump = tmp_path / "enwik8"
    dump.write_text("<mediawiki>\n" + "".join(pages) + "</mediawiki>\n")
    folder = tmp_path / "wikitext"
    folder.mkdir()
    (folder / "wiki.valid.tokens").write_text(WIKITEXT)
    test = "\n = Fox = \n\n the quick brown fox jumps over the lazy dog while the cat sleeps all day long .\n"
    (folder / "wiki.test.tokens").write_text(test)
    return dump, folder


def test_stores_and_tokeniser(sources: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "stores"
    counts = prepare_wiki_corpus(*sources, out, vocab=120, held_out=0.25)
    assert counts["train"]["documents"] == 9
    assert counts["valid"]["documents"] == 3
    assert counts["wikitext103-test"]["words"] == 1 + 17
    tokeniser = load_tokeniser(out / "tokenizer")
    words = [tokeniser.tokenizer.decode(load_store(out / "train")[i].tolist()) for i in range(9)]
    # Texts of the test set are not in the training set, under any title.
    assert not any("fox" in text for text in words)
    with pytest.raises(ValueError, match="is not empty"):
        prepare_wiki_corpus(*sources, out)


def test_a_missing_file_is_named(sources: tuple[Path, Path], tmp_path: Path) -> None:
    (sources[1] / "wiki.test.tokens").unlink()
    with pytest.raises(ValueError, match=r"holds no wiki\.test\.tokens"):
        prepare_wiki_corpus(*sources, tmp_path / "stores")
