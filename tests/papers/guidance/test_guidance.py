"""The reproduction of attention guidance, small: every part runs, results grow, and the tables say what the curves do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from attnlab.data import Blocks, bundled_text, train_bpe, write_store
from attnlab.models import named_config
from papers.__main__ import main
from papers.common.claims import HELD, NOT_HELD, NOT_TESTABLE, judge
from papers.common.ledger_page import claims_in
from papers.common.row_store import Part
from papers.guidance import curves, tables
from papers.guidance.assemble import KEYS, assemble
from papers.guidance.config import PAPER_SETTINGS, Arm, MlmConfig, ablations, arms
from papers.guidance.electra import ElectraConfig
from papers.guidance.figure4 import write_patterns_page
from papers.guidance.figures import figures_page
from papers.guidance.finetune import TuneConfig, fine_tune
from papers.guidance.mlm import Key, build
from papers.guidance.study import Places, StudyConfig, run_parts, wiki_stores
from papers.guidance.table_11 import RunSizes, pretrain_config, run_settings
from papers.guidance.translation import TranslationConfig
from tests.papers.glue_files import write_mnli, write_qqp

# Three layers with a quarter of 8 heads guided are the least that has a head for each of five patterns.
MLM = MlmConfig(layers=3, width=16, heads=8, length=16, batch=4, steps=5, looks=1, eval_tokens=64)
CONFIG = StudyConfig(
    mlm=MLM,
    tune=TuneConfig(tasks=("RTE",), length=16, batch=4, limit=8, epochs=(("RTE", 1),)),
    electra=ElectraConfig(base=MLM, generator_width=8, generator_heads=4),
    translation=TranslationConfig(
        vocab=300, width=16, heads=8, layers=1, hidden=16, tokens=64, widths=(16, 32), steps=2, looks=1, held_out=2
    ),
    lrs=(1e-3, 5e-4),
    warmups=(0.1,),
    seeds=(0, 1),
    depths=(2,),
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


@pytest.mark.slow
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
    made = result["tables"]
    assert made["tuning"] == first["tables"]["tuning"]
    assert {row["training"] for row in made["finetuned"]} == {"short", "long"}
    assert {row["guided"] for row in made["electra"]} == {True, False}
    assert [row["model"] for row in made["translation"]][:3] == ["BASE", "AG", "Gaussian"]
    assert {row["language"] for row in made["low_resource"]} == {"oromo", "tagalog"}
    assert any(row["bias"] for row in made["ablations"])
    # Each pattern alone, [Delim] too; an unguided model follows none.
    assert {"next", "prev", "first", "period", "delim", None} < {row["patterns"] for row in made["ablations"]}
    assert {(row["guided"], row["patterns"]) for row in made["convergence"]} == {
        (True, "next+prev+first+period+delim"), (False, None)}  # fmt: skip
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
    filipino = PAPER_SETTINGS["filipino-roberta-16-ag"]
    guidance = filipino.guidance(steps=100_000)
    assert guidance is not None
    assert sum(map(len, guidance.assign(named_config("roberta-16").heads).values())) == 8
    # 20,000 steps of the authors' code, and then down to the last.
    assert [guidance.weight(t) for t in (20_000, 99_999)] == [10, 0]
    assert guidance.weight(20_001) < 10
    short = filipino.guidance(steps=1000)
    assert short is not None
    assert [short.weight(t) for t in (0, 999)] == [10, 0]
    english = PAPER_SETTINGS["english-roberta-12-mlm"]
    assert [english.warmup_over(steps) for steps in (500_000, 1000)] == [10_000, 100]
    assert {named_config(s.model).layers for s in PAPER_SETTINGS.values()} == {8, 12, 16}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("english-roberta-8-ag", marks=pytest.mark.slow),
        pytest.param("filipino-roberta-12-mlm", marks=pytest.mark.slow),
        pytest.param("oromo-roberta-16-ag", marks=pytest.mark.slow),
    ],
)
def test_a_row_of_table_11_runs(row: str, places: Places, tmp_path: Path) -> None:
    """At a tiny width, with the layers and heads of Table 10."""
    setting, out = PAPER_SETTINGS[row], tmp_path / "guidance.json"
    folders = {"--corpus": places.corpus, "--oromo": places.oromo, "--tagalog": places.tagalog}
    given = [str(part) for option in folders.items() for part in option]
    command = [
        "guidance",
        "--config",
        "paper",
        "--rows",
        row,
        *given,
        "--width",
        "48",
        "--length",
        "16",
        "--batch",
        "2",
        "--steps",
        "3",
    ]
    assert main([*command, "--work", str(tmp_path / "work"), "--out", str(out)]) == 0
    (made,) = json.loads(out.read_text())["tables"]["table_11"]
    model = named_config(setting.model)
    assert (made["layers"], made["heads"], made["lr"], made["steps"]) == (model.layers, model.heads, setting.lr, 3)
    assert made["patterns"] == ("next+prev+first+period+delim" if setting.guided else None)
    assert made["loss"] > 0
    run = json.loads((tmp_path / "work" / "runs" / f"{row}-0" / "run.json").read_text())["config"]["pretrain"]
    # alpha0 of Table 11 belongs to 512 tokens.
    alpha0 = run["guidance"]["alpha0"] if setting.guided else None
    assert alpha0 == (None if setting.alpha0 is None else setting.alpha0 * 16 / 512)
    # A second time nothing is left to do.
    assert main([*command, "--work", str(tmp_path / "work"), "--out", str(out)]) == 0


def test_a_row_of_table_11_asks_for_its_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row of Table 11 named english; they are english-roberta-8-mlm"):
        run_settings(["english"], RunSizes(), places=Places(), work=tmp_path, out=tmp_path / "x.json")
    with pytest.raises(ValueError, match="roberta-8 in Filipino needs --tagalog"):
        run_settings(["filipino-roberta-8-ag"], RunSizes(), places=Places(), work=tmp_path, out=tmp_path / "x.json")


def test_a_row_of_table_11_makes_seven_passes(places: Places) -> None:
    setting = PAPER_SETTINGS["english-roberta-12-ag"]
    tokeniser, stores = wiki_stores(places, "a")
    config = pretrain_config(setting, RunSizes(), tokeniser, stores["train"], seed=0)
    texts = len(Blocks(stores["train"], tokeniser.specials, length=512))
    assert (config.steps, config.tokens) == (max(1, 7 * texts // 84), 84 * 512)


def test_table_9_scores_both_development_sets_of_mnli(tmp_path: Path, places: Places) -> None:
    pairs = [(line, line[::-1]) for line in bundled_text().splitlines()[:9] if line.strip()]
    write_mnli(tmp_path, pairs)
    write_qqp(tmp_path, pairs)
    tokeniser, _ = wiki_stores(places, "b")
    encoder = build(MLM, vocab=tokeniser.vocab_size)
    part = Part(tmp_path / "b.json", keys=KEYS)
    config = TuneConfig(tasks=("MNLI", "QQP"), length=16, batch=4)
    fine_tune({Key("AG", 0, 3): encoder}, config, tokeniser=tokeniser, glue=tmp_path, part=part, label={})
    rows = {row["task"]: row for row in part.content["tables"]["finetuned_runs"]}
    assert list(rows) == ["MNLI-m", "MNLI-mm", "QQP"]
    assert [("f1" in row) for row in rows.values()] == [False, False, True]
    assert all(0 <= row["accuracy"] <= 100 for row in rows.values())
    with pytest.raises(ValueError, match="no classification task named STS-B; they are RTE"):
        TuneConfig(tasks=("STS-B",))


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


@pytest.mark.parametrize(("guided", "state"), [(60.0, HELD), (53.0, NOT_TESTABLE), (40.0, NOT_HELD)])
def test_single_runs_of_fine_tuning_are_judged_by_their_examples(guided: float, state: str) -> None:
    """Of RTE's 277 examples half are right without guidance: 1.96 sqrt((0.24 + 0.25) / 277) is 8.2 points or so."""
    [claim] = [claim for claim in claims_in("guidance") if claim.name == "ag-finetuned-short"]
    rows = [
        {"task": "RTE", "training": "short", "guided": on, "seed": 0, "accuracy": accuracy}
        for on, accuracy in ((True, guided), (False, 50.0))
    ]
    verdict = judge(claim, {"guidance": {"tables": {"finetuned": rows}}})
    assert verdict.state == state
    [part] = verdict.parts
    assert part.interval == pytest.approx((guided - 50 - 8.3, guided - 50 + 8.3), abs=0.1)
    assert part.seeds == 1
