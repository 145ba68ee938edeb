"""The reproduction of attention guidance, small: every part runs, results grow, and the tables say what the curves do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from attnlab.data import bundled_text, train_bpe, write_store
from attnlab.models import named_config
from papers.guidance import curves, tables
from papers.guidance.assemble import assemble
from papers.guidance.config import PAPER_SETTINGS, Arm, MlmConfig, ablations, arms
from papers.guidance.electra import ElectraConfig
from papers.guidance.figure4 import write_patterns_page
from papers.guidance.figures import figures_page
from papers.guidance.finetune import TuneConfig
from papers.guidance.study import Places, StudyConfig, run_parts
from papers.guidance.translation import TranslationConfig

MLM = MlmConfig(layers=2, width=16, heads=4, length=16, batch=4, steps=5, looks=1, eval_tokens=64)
CONFIG = StudyConfig(
    mlm=MLM,
    tune=TuneConfig(tasks=("RTE",), length=16, batch=4, limit=8, epochs=(("RTE", 1),)),
    electra=ElectraConfig(base=MLM, generator_width=8, generator_heads=2),
    translation=TranslationConfig(
        vocab=300, width=16, heads=4, layers=1, hidden=16, tokens=64, widths=(16, 32), steps=2, looks=1, held_out=2
    ),
    lrs=(1e-3, 5e-4),
    warmups=(0.1,),
    seeds=(0, 1),
    depths=(1,),
    low_resource_vocab=300,
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("data")
    lines = [line for line in bundled_text().splitlines() if line.strip()]
    tokeniser = train_bpe(lines[:400], vocab_size=300)
    tokeniser.save(root / "corpus" / "tokenizer")
    for name, some in {"train": lines[:200], "valid": lines[200:260]}.items():
        write_store(root / "corpus" / name, some, tokeniser)
    pairs = root / "translation" / "multi30k"
    pairs.mkdir(parents=True)
    for split, count in {"train": 60, "val": 20, "test_2016_flickr": 4}.items():
        for side in ("en", "de"):
            with gzip.open(pairs / f"{split}.{side}.gz", "wt", encoding="utf-8") as file:
                file.writelines(f"{line[:20]}\n" for line in lines[:count])
    rte = root / "glue" / "RTE"
    rte.mkdir(parents=True)
    rows = [
        f"{i}\t{a}\t{b}\t{('entailment', 'not_entailment')[i % 2]}"
        for i, (a, b) in enumerate(zip(lines, lines[9:], strict=False))
    ]
    for split in ("train", "dev"):
        (rte / f"{split}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "\n".join(rows[:8]) + "\n")
    oromo = root / "oromo"
    oromo.mkdir()
    for split in ("train", "dev"):
        (oromo / f"{split}.tsv").write_text("category\ttext\n" + "".join(f"a\t{line}\n" for line in lines[:40]))
    tagalog = root / "tagalog"
    tagalog.mkdir()
    (tagalog / "Tagalog.txt").write_text("\n".join(lines[:200]))
    return Places(root / "corpus", root / "glue", root / "translation", oromo, tagalog)


def test_every_part_and_results_that_grow(tmp_path: Path, places: Places) -> None:
    out = tmp_path / "guidance.json"
    first = run_parts(CONFIG, ["a", "b"], places=places, work=tmp_path / "one", out=out)
    assert {"tuning", "convergence", "ag_loss"} <= set(first["tables"])
    # What (a) trained is fine-tuned as it is at the end, and as it was after half of the updates.
    assert [(row["training"], row["steps"]) for row in first["raw"]["finetuned_runs"]][::2] == 2 * [
        ("long", 5), ("short", 2)]  # fmt: skip
    assert {run["part"] for run in first["raw"]["runs"]} == {"a"}
    # Two rates, with and without guidance, on the first seed; the best two arms on the second.
    assert len(first["tables"]["tuning"]) == 4 + 2
    assert {row["seed"] for row in first["tables"]["convergence"]} == {0, 1}
    assert json.loads((tmp_path / "one" / "timeline" / "steps" / "index.json").read_text())["steps"]
    # Another machine's parts join what the result held.
    result = run_parts(CONFIG, list("bcdefg"), places=places, work=tmp_path / "two", out=out)
    grown = result["tables"]
    assert grown["tuning"] == first["tables"]["tuning"]
    assert {row["training"] for row in grown["finetuned"]} == {"short", "long"}
    assert {row["guided"] for row in grown["electra"]} == {True, False}
    assert [row["model"] for row in grown["translation"]][:3] == ["BASE", "AG", "Gaussian"]
    assert {row["language"] for row in grown["low_resource"]} == {"oromo", "tagalog"}
    assert any(row["bias"] for row in grown["ablations"])
    json.loads(out.read_text())
    assert "Figure 7" in figures_page(result)


def test_a_part_names_the_missing_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"part \(a\) needs --corpus"):
        run_parts(CONFIG, ["a"], places=Places(), work=tmp_path, out=tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"part \(f\) needs --oromo"):
        run_parts(CONFIG, ["f"], places=Places(), work=tmp_path, out=tmp_path / "x.json")
    with pytest.raises(ValueError, match="no part z; the parts are a, b"):
        run_parts(CONFIG, ["z"], places=Places(), work=tmp_path, out=tmp_path / "x.json")


CURVE = {
    "at": list(range(1, 1001)),
    # Down to guessing (7) in 50 updates, there until 300, then down to 4.
    "task": [9 - 2 * min(1, t / 50) - 3 * max(0, min(1, (t - 300) / 300)) for t in range(1, 1001)],
    "guidance": [1 - 0.99 * min(1, t / 280) for t in range(1, 1001)],
}


def test_readings_of_a_curve() -> None:
    assert curves.converged_at(CURVE) == pytest.approx(0.95 * 280, abs=8)
    # Half a nat of three nats in 300 updates.
    assert curves.drops_at(CURVE, 7.0) == pytest.approx(350, abs=8)
    assert curves.drops_at(CURVE, 4.0) is None
    assert curves.reaches_at(CURVE, 5.5) == pytest.approx(450, abs=12)
    assert curves.converged_at({**CURVE, "guidance": [0.0] * 1000}) is None
    made = {"runs": [{"part": "a", "depth": 12, "arm": "MLM", "seed": 0, "guided": False, "steps": 1000}],
              "curves": [{"part": "a", "depth": 12, "arm": "MLM", "seed": 0, **CURVE}]}  # fmt: skip
    assert tables.guessing(made) == pytest.approx(7.0, abs=0.1)


def test_no_time_no_runs(tmp_path: Path, places: Places) -> None:
    result = run_parts(CONFIG, ["e"], places=places, work=tmp_path / "work", out=tmp_path / "x.json", seconds=1e-6)
    assert set(result["tables"]) <= {"settings"}


def test_no_parts_no_tables(tmp_path: Path) -> None:
    assert assemble(tmp_path, None, config={})["tables"] == {}
    assert tables.guessing({}) is None


def test_the_papers_settings() -> None:
    assert len(PAPER_SETTINGS) == 3 * 3 * 2
    row = PAPER_SETTINGS["english-roberta-8-ag"]
    assert (row.lr, row.warmup, row.batch, row.alpha0, row.fraction) == (1e-4, 0, 120, 100, 0.5)
    assert PAPER_SETTINGS["english-roberta-12-mlm"].guidance(steps=10) is None
    assert (PAPER_SETTINGS["oromo-roberta-16-mlm"].lr, PAPER_SETTINGS["oromo-roberta-16-mlm"].warmup) == (1e-5, 1000)
    assert PAPER_SETTINGS["filipino-roberta-12-ag"].batch == 28
    guidance = PAPER_SETTINGS["filipino-roberta-16-ag"].guidance(steps=100_000)
    assert guidance is not None
    assert sum(map(len, guidance.assign(named_config("roberta-16").heads).values())) == 8
    assert guidance.weight(20_000) == 10
    assert {named_config(s.model).layers for s in PAPER_SETTINGS.values()} == {8, 12, 16}


def test_arms_have_names_of_their_own() -> None:
    every = [*arms((1e-3, 5e-4), (0.0, 0.1)), *ablations(Arm(True, 1e-3, 0.1))]
    assert len({arm.name for arm in every}) == len(every)


def test_figure_4(tmp_path: Path) -> None:
    maps = write_patterns_page(tmp_path / "patterns.html")
    assert list(maps) == ["next", "prev", "first", "period", "delim", "same"]
    assert maps["period"][0] == [0, 0, 0, 0, 1, 0]
    assert maps["delim"][2] == [0.5, 0, 0, 0, 0, 0.5]
    assert maps["next"][5] == pytest.approx([1 / 6] * 6)
    assert "Welcome" in (tmp_path / "patterns.html").read_text(encoding="utf-8")
    # No full stop and no delimiters: these two are left out.
    assert list(write_patterns_page(tmp_path / "p.html", text="a b a")) == ["next", "prev", "first", "same"]
    with pytest.raises(ValueError, match="at least one word"):
        write_patterns_page(tmp_path / "p.html", text=" ")
