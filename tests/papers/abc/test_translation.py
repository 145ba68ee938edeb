"""Translators side by side: their batches, snapshots and windows, and the commands from one end to the other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from attnlab.data import Pairs, Specials
from papers.__main__ import main
from papers.abc import doc_mt, figures, mt
from papers.abc import run as commands
from papers.abc.differences import Comparison, differences, with_seeds
from papers.abc.tables import curve_ends, curves_of, sets_of, trained_apart, trained_longer, with_curves
from papers.abc.translators import average, hypotheses_in
from papers.common.translation import (
    TASKS,
    ShapedSource,
    bleu_counts,
    bleu_of,
    corpus_bleu,
    read_task,
    tokenised,
    write_lines,
)

SPECIALS = Specials(pad=1, bos=0, eos=2)
PAIRS = [np.arange(5, 5 + n) for n in (3, 5, 5, 2, 9, 4, 4, 6, 3, 30)]


def test_batches_have_few_shapes_and_hold_each_pair_once() -> None:
    # The longer sides with their ends: 4 7 6 5 10 5 6 7 4 31, so four are narrow, five wide, and one is left out.
    other = PAIRS[::-1][1:] + PAIRS[-1:]
    source = ShapedSource(PAIRS, other, specials=SPECIALS, tokens=20, widths=(5, 10), seed=3)
    assert source.left_out == 1
    assert source.steps_per_epoch == 1 + 2
    first = [source.batch(i) for i in range(source.steps_per_epoch)]
    assert sorted(tuple(b["input_ids"].shape) for b in first) == [(2, 10), (2, 10), (4, 5)]
    for batch in first:
        assert batch["input_ids"].shape == batch["labels"].shape == batch["decoder_input_ids"].shape
        assert torch.equal(batch["attention_mask"], batch["input_ids"] != 1)
        ends = (batch["labels"] == 2).int().argmax(1)
        for row, end in enumerate(ends.tolist()):
            shifted = batch["decoder_input_ids"][row, 1 : end + 1]
            assert torch.equal(shifted, batch["labels"][row, :end])
            assert (batch["labels"][row, end + 1 :] == -100).all()
    again = ShapedSource(PAIRS, other, specials=SPECIALS, tokens=20, widths=(5, 10), seed=3)
    for i in (source.steps_per_epoch + 1, 0):
        assert torch.equal(source.batch(i)["input_ids"], again.batch(i)["input_ids"])


def test_pairs_need_tokens_for_their_ends() -> None:
    with pytest.raises(ValueError, match="the vocabulary has no token for bos, eos"):
        ShapedSource(PAIRS, PAIRS, Specials(pad=1), tokens=20)


def test_only_the_last_sentence_of_a_window_counts() -> None:
    plain = tokenised({"train": Pairs(["one two", "three"], ["eins zwei", "drei"])}, vocab=270)
    separator = plain.tokeniser.specials.mask
    corpus = doc_mt._LastSentence(plain.tokeniser, plain.texts, plain.ids, separator)
    one, two = plain.tokeniser.encode_batch(["one two", "drei"])
    assert corpus.decode([*one, separator, *two, plain.tokeniser.specials.eos]) == "drei"


def test_snapshots_are_averaged() -> None:
    states = [{"w": torch.full((2,), float(i))} for i in (1, 2, 6)]
    assert average(states)["w"].tolist() == [3.0, 3.0]


def test_how_flat_a_curve_was_at_its_end() -> None:
    """Evaluations at 10, 20, ..., 90 and, at the end, 96: five sixths of it are 80."""
    rows = [{"data": "d", "variant": "a", "seed": 0, "step": s, "nll": 100.0 - s} for s in (*range(10, 100, 10), 96)]
    rows.append({"data": "d", "variant": "diverged", "seed": 0, "step": 91, "nll": None})
    first, second = curve_ends(rows)
    assert (first["step"], first["nll"], first["nll_before"], first["lowest"]) == (96, 4.0, pytest.approx(20), 4.0)
    assert first["fell"] == pytest.approx(80)
    assert second["nll"] is second["nll_before"] is second["lowest"] is second["fell"] is None


def test_rows_have_the_length_of_their_training() -> None:
    """Two seeds that fell by 1/2 and by 2 % in the last sixth: the curve is flat if that of every seed is."""
    ends = {"a": [(0, 1.99), (1, 1.96)], "b": [(0, 1.99)]}
    validation = [
        {"data": "d", "variant": v, "seed": seed, "step": step, "nll": nll}
        for v, seeds in ends.items()
        for seed, end in seeds
        for step, nll in ((100, 2.0), (120, end))
    ]
    a, b, c = with_curves([{"variant": v} for v in "abc"], validation, data="d")
    assert (a["updates"], a["fell"], a["flat"]) == (120, pytest.approx(1.25), False)
    assert (b["nll"], b["fell"], b["flat"]) == (1.99, pytest.approx(0.5), True)
    assert c == {"variant": "c"}


def test_the_curve_of_a_model_is_that_of_its_last_run() -> None:
    """The second run's evaluations are fewer: its curve has none of the first's."""
    first = [
        {"data": "d", "set": "a+b", "variant": "a", "seed": 0, "step": s, "nll": 3.0 - s / 100} for s in (100, 200)
    ]
    again = [{**first[0], "set": "a", "step": 150, "nll": 1.0}]
    assert curves_of([*first, *again]) == {"a": {0: {150: 1.0}}}
    assert curves_of(again + first) == {"a": {0: {100: 2.0, 200: 1.0}}}


def test_models_are_named_by_sets_and_by_themselves() -> None:
    assert {v.key for v in mt.variants_of("quarter+BASE")} == {v.key for v in mt.QUARTER}
    # Every row of every table is in a set, and in one only.
    sets = [v.key for name in ("3a", "quarter", "5", "7") for v in mt.SETS[name]]
    assert sorted(sets) == sorted(mt.BY_KEY)
    with pytest.raises(ValueError, match="no set or model is called 'ABC-8'"):
        mt.variants_of("3a+ABC-8")


def noisy(lines: list[str], share: float, seed: int) -> list[str]:
    """The lines with a share of their words replaced."""
    draw = np.random.default_rng(seed)
    return [" ".join("xx" if draw.random() < share else word for word in line.split()) for line in lines]


def test_which_differences_are_significant(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(["red", "dog", "man", "runs", "blue"], 8)) for _ in range(200)]
    hypotheses = {"good": noisy(lines, 0.05, 1), "alike": noisy(lines, 0.05, 2), "bad": noisy(lines, 0.3, 3)}
    for key, some in hypotheses.items():
        write_lines(tmp_path / "first" / "corpus" / f"{key}.0.beam.txt", some)
    # A seed that only one of a pair has is not compared; of two folders the later counts.
    write_lines(tmp_path / "first" / "corpus" / "bad.1.beam.txt", lines)
    write_lines(tmp_path / "first" / "corpus" / "bad.0.beam.txt", lines)
    write_lines(tmp_path / "second" / "corpus" / "bad.0.beam.txt", hypotheses["bad"])
    files = hypotheses_in([tmp_path / "first", tmp_path / "second"], "corpus")
    assert bleu_of(bleu_counts(hypotheses["bad"], lines).sum(0)) == pytest.approx(corpus_bleu(hypotheses["bad"], lines))
    claims = {
        "beats both": Comparison((("good", "bad"), ("good", "alike")), "t"),
        "beats the bad": Comparison((("good", "bad"),), "t"),
        "loses": Comparison((("bad", "good"), ("good", "alike")), "t"),
        "near": Comparison((("good", "bad"),), "t", within=0.5),
        "not there": Comparison((("good", "missing"),), "t"),
    }
    rows = with_seeds(differences(files, claims, {"beam": lines}, resamples=200))
    gap = corpus_bleu(hypotheses["good"], lines) - corpus_bleu(hypotheses["bad"], lines)
    assert rows[0]["difference"] == pytest.approx(gap)
    assert rows[0]["low"] < gap < rows[0]["high"]
    assert (rows[0]["seeds"], rows[0]["sentences"], rows[0]["deviation"]) == (1, 200, None)
    assert [row["low"] <= 0 <= row["high"] for row in rows] == [False, True, False, False, True, False]


def test_why_trainings_were_not_alike() -> None:
    row = {"first": "good", "second": "bad", "difference": 1.0}
    # A winner that was trained longer decides nothing, unless it was ahead after equally many updates.
    behind = {"good": {0: {100: 3.0, 200: 1.0}}, "bad": {0: {100: 2.0}}}
    assert trained_longer(row, behind, close=False) == "good had 200 updates and bad 100"
    ahead = {"good": {0: {100: 1.5, 200: 1.0}}, "bad": {0: {100: 2.0}}}
    assert trained_longer(row, ahead, close=False) is None
    assert trained_longer(row, ahead, close=True) == "good had 200 updates and bad 100"
    # Seeds of one of them alone are not compared.
    assert trained_longer(row, {"good": ahead["good"], "bad": {1: {100: 2.0}}}, close=True) is None
    apart = {"good": {0: "a run"}, "bad": {0: "another"}}
    assert trained_apart(row, apart) == "good and bad were trained in different runs"
    assert trained_apart(row, {**apart, "bad": {0: "a run", 1: "another"}}) is None


def test_seeds_that_disagree_widen_every_interval() -> None:
    """Differences of -1, 0, 1 and of 3, 3, 3: the pooled variance is (2 x 1 + 2 x 0) / 4, t of 4 degrees is 2.776.

    The first pair's own, 1, is larger.
    """
    pair = {"claim": "c", "difference": 0.0, "low": -0.3, "high": 0.4, "seeds": 3, "sentences": 9, "second": "z"}
    rows = [
        {**pair, "first": "a", "each": [-1.0, 0.0, 1.0]},
        {**pair, "first": "b", "each": [3.0, 3.0, 3.0], "difference": 3.0, "low": 3.0, "high": 3.0},
        # The same pair for another claim counts once.
        {**pair, "first": "a", "each": [-1.0, 0.0, 1.0], "claim": "d"},
        {**pair, "first": "c", "each": [2.0], "difference": 2.0, "low": 2.0, "high": 2.0, "seeds": 1},
    ]
    first, second, again, lone = with_seeds(rows)
    reach = 2.776 * 0.5**0.5
    assert (first["deviation"], second["deviation"]) == (1.0, pytest.approx(0.5**0.5))
    assert first["low"] == pytest.approx(-((0.3**2 + 2.776**2 / 3) ** 0.5), abs=1e-3)
    assert first["high"] == pytest.approx((0.4**2 + 2.776**2 / 3) ** 0.5, abs=1e-3)
    assert (first["least"], first["most"], again["low"]) == (-1.0, 1.0, first["low"])
    assert second["low"] == pytest.approx(3 - reach / 3**0.5, abs=1e-3)
    # A pair with one seed takes the spread of the other pairs.
    assert (lone["low"], lone["high"]) == (pytest.approx(2 - reach, abs=1e-3), pytest.approx(2 + reach, abs=1e-3))


def test_a_difference_is_the_mean_over_seeds() -> None:
    pytest.importorskip("sacrebleu")
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(["red", "dog", "man", "runs", "blue"], 8)) for _ in range(200)]
    share = {("a", 0): 0.1, ("a", 1): 0.1, ("c", 0): 0.0, ("c", 1): 0.2}
    hypotheses = {(key, seed, "beam"): noisy(lines, x, seed + 7) for (key, seed), x in share.items()}
    (row,) = differences(hypotheses, {"x": Comparison((("a", "c"),), "t")}, {"beam": lines}, resamples=200)
    gaps = [
        corpus_bleu(hypotheses["a", i, "beam"], lines) - corpus_bleu(hypotheses["c", i, "beam"], lines) for i in (0, 1)
    ]
    assert row["each"] == pytest.approx(gaps)
    assert row["difference"] == pytest.approx(np.mean(gaps))
    assert row["low"] < row["difference"] < row["high"]
    assert (row["seeds"], row["sentences"]) == (2, 200)


def test_seeds_are_begun_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 seconds, 40 for each: the third would end after 120, so it is not begun."""
    clock = [0.0]
    monkeypatch.setattr(commands.time, "monotonic", lambda: clock[0])
    runs = []
    for run in commands._in_time(["a", "b", "c"], 100):
        runs.append(run)
        clock[0] += 40
    assert runs == [("a", pytest.approx(90)), ("b", pytest.approx(54))]


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """Two toy languages in Multi30k's files: the second spells the first's words backwards."""
    draw = np.random.default_rng(0)
    words = ["red", "dog", "man", "runs", "blue", "house", "sees"]
    folder = tmp_path / "data" / "multi30k"
    folder.mkdir(parents=True)
    for name, n in (("train", 160), ("val", 24), ("test_2016_flickr", 6)):
        lines = [" ".join(draw.choice(words, draw.integers(3, 6))) for _ in range(n)]
        for suffix, some in (("en", lines), ("de", [" ".join(w[::-1] for w in x.split()) for x in lines])):
            with gzip.open(folder / f"{name}.{suffix}.gz", "wt") as file:
                file.write("\n".join(some) + "\n")
    return tmp_path / "data"


def test_later_test_sets_follow_the_first(captions: Path) -> None:
    texts = read_task(TASKS["multi30k-en-de"], captions)
    assert texts["tests"] == texts["test"]
    for side, line in (("en", "a cat"), ("de", "eine Katze")):
        (captions / "multi30k" / f"test_2018_flickr.{side}").write_text(f"{line}\n")
    more = read_task(TASKS["multi30k-en-de"], captions)
    assert more["tests"].target == [*texts["test"].target, "eine Katze"]
    assert more["test"] == texts["test"]


def test_a_model_of_two_tables_has_the_seeds_of_each_table(captions: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    references = read_task(TASKS[mt.PRIMARY], captions)["tests"].target
    trained = {0: ("BASE", "ABC_MLP-8-8", "Window-8-8"), 10: ("BASE", "ABC_MLP-32-8", "Linformer-64-64")}
    for seed, keys in trained.items():
        for key in keys:
            write_lines(tmp_path / f"run-{seed}" / mt.PRIMARY / f"{key}.{seed}.beam.txt", references)
    tables = mt.score([tmp_path / "run-0", tmp_path / "run-10"], captions)
    places = {name: [(r["variant"], r["seed"]) for r in tables[name]] for name in ("table_3a", "table_3a_quarter")}
    assert places["table_3a_quarter"] == [("BASE", 0), ("ABC_MLP-8-8", 0), ("Window-8-8", 0)]
    assert places["table_3a"] == [("BASE", 10), ("Linformer-64-64", 10), ("ABC_MLP-32-8", 10)]
    assert all(r["bleu"] == pytest.approx(100) for r in tables["table_3a"])
    assert [(r["first"], r["second"], r["difference"]) for r in tables["differences"]] == [
        ("ABC_MLP-32-8", "BASE", 0), ("ABC_MLP-32-8", "Linformer-64-64", 0), ("ABC_MLP-8-8", "BASE", 0),
        ("ABC_MLP-8-8", "Window-8-8", 0),
    ]  # fmt: skip


def test_the_curves_drawn_are_of_the_seed_trained_longest() -> None:
    data, keys = next(iter(figures.TRANSLATORS.values()))
    # Seed 3 is of a training that shares one model, and seed 1 has also seen other data.
    validation = [
        {"data": source, "variant": key, "seed": seed, "step": step, "nll": 2.0 + 0.1 * i}
        for source, seed, last, some in (
            (data, 0, 200, keys), (data, 1, 700, keys), (data, 3, 9000, keys[:1]), ("another", 1, 8000, keys)
        )
        for i, key in enumerate(some)
        for step in (100, last)
    ]  # fmt: skip
    drawn = figures.translation({"validation": validation})
    assert all(drawn.count(f">{key}<") == 1 for key in keys)
    assert ">700<" in drawn or ">600<" in drawn
    assert not any(far in drawn for far in ("9,000", "9k", "8,000", "8k"))


@pytest.mark.slow
def test_translation_from_the_command_line(captions: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    out, work = tmp_path / "abc-mt.json", tmp_path / "work"
    small = (
        "vocab=280", "width=16", "heads=2", "layers=2", "hidden=16", "tokens=128", "widths=[16,24]", "steps=3",
        "streams=1", "decode_batch=3",
    )  # fmt: skip
    arguments = ("--data", str(captions), "--work", str(work), "--out", str(out), "--set", *small)
    assert main(["abc-mt", *arguments]) == 0
    result = json.loads(out.read_text())
    assert not any(result["parts"].values())
    tables = result["tables"]
    assert [len(tables[t]) for t in ("table_3a", "table_5", "table_7")] == [7, 10, 10]
    assert [r["variant"] for r in tables["table_3a_quarter"]] == [v.key for v in mt.QUARTER]
    # One evaluation, at the end of the training, and each row of Table 5 translates the validation set.
    assert {r["step"] for r in tables["validation"]} == {3}
    assert all(r["sentences"] == 24 for r in tables["table_5"])
    assert [(r["model"], r["updates"]) for r in tables["table_3a_means"]] == [(v.model, 3) for v in mt.TABLE_3A]
    square = {r["causal"]: {n for n in ("8", "16", "32", "64") if n in r} for r in tables["table_5_square"]}
    assert square == {8: {"8", "16", "32", "64"}, 16: {"16", "32", "64"}, 32: {"32", "64"}, 64: {"64"}}
    assert all("bleu_paper" in row or row["model"] == "MLP-ReLU" for row in tables["table_7"])
    # Nothing is trained again; scores come from the files.
    with gzip.open(captions / "multi30k" / "test_2016_flickr.de.gz", "rt") as file:
        (work / "multi30k-en-de" / "BASE.0.beam.txt").write_text(file.read())
    assert main(["abc-mt", *arguments, "--collect"]) == 0
    tables = json.loads(out.read_text())["tables"]
    assert next(r for r in tables["table_3a"] if r["model"] == "BASE")["bleu"] == pytest.approx(100)


def test_translators_trained_alone_are_compared(captions: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    out = tmp_path / "abc-mt.json"
    small = (
        "vocab=280", "width=16", "heads=2", "layers=2", "hidden=16", "tokens=128", "widths=[16,24]", "steps=3",
        "streams=1", "decode_batch=3",
    )  # fmt: skip
    places = ("--data", str(captions), "--work", str(tmp_path / "work"), "--out", str(out), "--alone")
    for variant in ("BASE", "ABC_MLP-32-32"):
        assert main(["abc-mt", "--variants", variant, "--seed", "4", *places, "--set", *small]) == 0
    tables = json.loads(out.read_text())["tables"]
    assert [(row["model"], row["seed"]) for row in tables["table_3a"]] == [("BASE", 4), ("ABC_MLP", 4)]
    assert {row["set"] for row in tables["training"]} == {"alone: BASE", "alone: ABC_MLP-32-32"}
    assert trained_apart({"first": "BASE", "second": "ABC_MLP-32-32"}, sets_of(tables["validation"])) is None
    assert main(["abc-mt", "--variants", "3a", *places, "--set", *small]) == 2


def test_models_that_are_trained_later_are_another_run(captions: Path, tmp_path: Path) -> None:
    """A run that was ended goes on with the models that it lacks; its schedule is not that of the others."""
    pytest.importorskip("sacrebleu")
    out, work = tmp_path / "abc-mt.json", tmp_path / "work"
    small = ("vocab=280", "width=16", "heads=2", "layers=1", "hidden=16", "tokens=128", "widths=[16,24]", "streams=1")
    arguments = ("--data", str(captions), "--work", str(work), "--out", str(out), "--set", *small)
    assert main(["abc-mt", "--variants", "BASE+ABC_MLP-8-8", *arguments, "steps=3"]) == 0
    for path in (work / mt.PRIMARY).glob("ABC_MLP-8-8.*"):
        path.unlink()
    assert main(["abc-mt", "--variants", "BASE+ABC_MLP-8-8", *arguments, "steps=2"]) == 0
    validation = json.loads(out.read_text())["tables"]["validation"]
    assert {(row["set"], row["variant"], row["step"]) for row in validation} == {
        ("BASE+ABC_MLP-8-8", "BASE", 3), ("BASE+ABC_MLP-8-8", "ABC_MLP-8-8", 3), ("ABC_MLP-8-8", "ABC_MLP-8-8", 2),
    }  # fmt: skip
    apart = trained_apart({"first": "ABC_MLP-8-8", "second": "BASE"}, sets_of(validation))
    assert apart == "ABC_MLP-8-8 and BASE were trained in different runs"


def test_some_models_of_documents_are_a_run_of_their_own(captions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    monkeypatch.setattr(doc_mt, "run_variants", lambda _variants, training, **_: labels.append(training.label))
    config = doc_mt.AbcDocMtConfig(translation=mt.AbcMtConfig(vocab=280))
    for wanted in (tuple(doc_mt.BY_KEY), ("BASE", "ABC_RD-128-64")):
        doc_mt.run_documents(config, root=captions, part=None, out=captions, seconds=1.0, wanted=wanted)
    assert labels == ["3b", "BASE+ABC_RD-128-64"]


def test_the_papers_translators_from_the_command_line(captions: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    out, work = tmp_path / "abc-mt.json", tmp_path / "work"
    small = ("vocab=280", "width=16", "heads=2", "layers=1", "hidden=16", "tokens=128", "widths=[16,24]", "steps=2")
    assert main(["abc-mt", "--config", "paper", "--variants", "BASE+ABC_MLP-8-2", "--seed", "0", "1", "--data",
                 str(captions), "--work", str(work), "--out", str(out), "--set", *small]) == 0  # fmt: skip
    result = json.loads(out.read_text())
    assert not any(result["parts"].values())
    settings = {name: result["config"][name] for name in ("norm", "activation", "affine", "schedule", "warmup")}
    assert settings == {
        "norm": "post", "activation": "relu", "affine": True, "schedule": "inverse_sqrt", "warmup": 6000,
    }  # fmt: skip
    assert {(r["variant"], r["seed"]) for r in result["tables"]["table_3a_quarter"]} == {
        (key, seed) for key in ("BASE", "ABC_MLP-8-2") for seed in (0, 1)
    }


@pytest.mark.slow
def test_documents_from_the_command_line(captions: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    out, work = tmp_path / "abc-doc-mt.json", tmp_path / "work"
    small = (
        "vocab=280", "width=16", "heads=2", "layers=1", "hidden=16", "tokens=256", "widths=[64,128]", "steps=2",
        "streams=1", "decode_batch=3",
    )  # fmt: skip
    settings = [f"translation.{s}" for s in small]
    arguments = ("--data", str(captions), "--work", str(work), "--out", str(out))
    assert main(["abc-doc-mt", *arguments, "--set", *settings]) == 0
    tables = json.loads(out.read_text())["tables"]
    assert {(r["model"], r["cross"], r["causal"]) for r in tables["table_3b"]} == {
        (v.model, v.cross, v.causal) for v in doc_mt.VARIANTS
    }
    # A window of up to four sentences has about four times the tokens of one.
    alone = tokenised(read_task(TASKS["multi30k-en-de"], captions), vocab=280).ids["train"][1]
    assert tables["training"][0]["target_tokens"] > 3 * np.mean([len(row) for row in alone])
    # A sentence of each window is scored, and no window is lost.
    assert len((work / "multi30k-en-de" / "BASE.0.beam.txt").read_text().splitlines()) == 6
