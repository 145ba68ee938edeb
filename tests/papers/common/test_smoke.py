"""``--config smoke`` of every experiment, by the command line that its README lists, on small data as published."""

from __future__ import annotations

import io
import json
import random
import shlex
import tarfile
from pathlib import Path

import pytest

from attnlab.data import bundled_text
from papers.__main__ import main
from papers.common.folders import command_of, experiments_like
from tests.papers.value_aware.cases import write_language_model

EXPERIMENTS = experiments_like(None)
SMOKE = [name for name, experiment in EXPERIMENTS.items() if "smoke" in experiment.configs]
# These write folders that others read, in their whole form.
FIRST = {
    "wiki-corpus": "--enwik8 data/enwik8/enwik8 --wikitext data/wikitext-103 --out runs/wiki --vocab 8192",
    "wiki-corpus --byte-level": "--enwik8 data/enwik8/enwik8 --wikitext data/wikitext-103 --out runs/wiki-bytes --vocab 512",
    "ktiw-data": "--data data --only 20newsgroups,multi30k --into runs/ktiw-data --out runs/ktiw-data.json",
}
PAGE = '  <page>\n    <title>{}</title>\n    <revision>\n      <text xml:space="preserve">{}</text>\n    </revision>\n  </page>\n'


def passages(count: int) -> list[str]:
    """Sentences of words of the shipped text, drawn at random."""
    draw = random.Random(0)
    words = sorted({word for word in bundled_text().lower().split() if word.isalpha()})
    return [" ".join(draw.choices(words, k=draw.randint(20, 60))) + "." for _ in range(count)]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_wikipedia(data: Path) -> None:
    """enwik8 with pages that are longer than any experiment's rows, and WikiText-103's three files."""
    texts = passages(3380)
    pages = ["\n\n".join(texts[i : i + 80]) for i in range(0, 3200, 80)]
    write(
        data / "enwik8" / "enwik8", "<mediawiki>\n" + "".join(PAGE.format(f"Scene {i}", t) for i, t in enumerate(pages))
    )
    for split, some in (("train", texts[:200]), ("valid", texts[3200:3290]), ("test", texts[3290:])):
        write(data / "wikitext-103" / f"wiki.{split}.tokens", "".join(f" = Act = \n\n {t} \n\n" for t in some))


def write_pairs(data: Path) -> None:
    """Multi30k's files: the second language spells the first's words backwards.

    There are as many words as a vocabulary of 8,000 pieces needs, and enough pairs to validate on for a batch of some
    width, whatever the pieces: how long a pair is differs between processors.
    """
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 8))) for _ in range(9000)]
    for name, count in (("train", 5000), ("val", 100), ("test_2016_flickr", 24)):
        lines = [" ".join(draw.choices(words, k=draw.randint(3, 6))) for _ in range(count)]
        write(data / "multi30k" / f"{name}.en", "\n".join(lines) + "\n")
        backwards = (" ".join(word[::-1] for word in line.split()) for line in lines)
        write(data / "multi30k" / f"{name}.de", "\n".join(backwards) + "\n")


def write_glue(data: Path) -> None:
    texts = passages(120)
    heads = {
        "RTE": "index\tsentence1\tsentence2\tlabel",
        "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "SST-2": "sentence\tlabel",
    }
    for task, head in heads.items():
        for split, some in (("train", texts[:90]), ("dev", texts[90:])):
            lines = [head]
            for i, text in enumerate(some):
                first, second = text[:80].replace("\t", " "), text[-60:].replace("\t", " ")
                label = ("entailment", "not_entailment")[i % 2]
                lines.append({
                    "RTE": f"{i}\t{first}\t{second}\t{label}",
                    "MRPC": f"{i % 2}\t{i}\t{i}\t{first}\t{second}",
                    "SST-2": f"{first}\t{i % 2}",
                }[task])  # fmt: skip
            write(data / "glue" / task / f"{split}.tsv", "\n".join(lines) + "\n")


def write_treebank(data: Path) -> None:
    sentence = "".join(
        f"{i}\t{word}\t{word}\t{tag}\t_\t_\t0\troot\t_\t_\n"
        for i, (word, tag) in enumerate(
            (("The", "DET"), ("cat", "NOUN"), ("sees", "VERB"), ("her", "PRON"), (".", "PUNCT")), 1
        )
    )
    write(data / "ud-english-ewt" / "en_ewt-ud-train.conllu", f"{sentence}\n" * 200)


def write_newsgroups(data: Path) -> None:
    """The published archive, with two of its groups."""
    (data / "20newsgroups").mkdir(parents=True)
    with tarfile.open(data / "20newsgroups" / "20news-bydate.tar.gz", "w:gz") as out:
        for i, text in enumerate(passages(160)):
            group, split = ("baseball", "hockey")[i % 2], "train" if i < 120 else "test"
            content = f"{group} {group} {text}".encode()
            member = tarfile.TarInfo(f"20news-bydate-{split}/rec.sport.{group}/{i}")
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ as published, and runs/ with what the experiments read."""
    folder = tmp_path_factory.mktemp("home")
    for make in (write_wikipedia, write_pairs, write_glue, write_treebank, write_newsgroups):
        make(folder / "data")
    write(folder / "texts.txt", "\n".join(passages(16)) + "\n")
    write(folder / "wikitext103-test.txt", "\n".join(passages(16)) + "\n")
    write_language_model(folder / "language-model", ["king", "the", "of"])
    (folder / "papers" / "results").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, words in FIRST.items():
            assert main(shlex.split(f"{name} {words}")) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKE)
def test_smoke_runs_from_the_listed_command_to_its_results(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    words = shlex.split(command_of(name, EXPERIMENTS[name]).replace("data/enwik8/enwik8.xz", "data/enwik8/enwik8"))[3:]
    if name == "truth":
        # The other tasks' models are downloaded; those of recall are trained here.
        words[words.index("--on") + 1 : words.index("--work")] = ["recall:0", "recall:1"]
    if name == "value-aware-lm":
        words += ["--model", "language-model"]
    if name in ("wiki-corpus", "value-aware-words"):
        words[words.index("--out") + 1] = f"runs/{name}-smoke"
    assert main([*words, "--config", "smoke"]) == 0, capsys.readouterr().err[-2000:]
    written = [
        line.removeprefix("wrote ") for line in capsys.readouterr().out.splitlines() if line.startswith("wrote ")
    ]
    for path in written:
        if path.endswith(".json"):
            content = json.loads(Path(path).read_text())
            assert content["quick"] is True
            assert content["tables"]
    assert list((home / "papers" / "results").iterdir()) == []
