"""KTIW's experiments end to end on tiny sizes: trainings, comparison, tables, pictures, commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlab.dynamics import ProxyConfig, agreement, train_proxy
from attnlab.training import load_weights
from papers.__main__ import main
from papers.ktiw.comparison import compare_runs, run_chosen
from papers.ktiw.config import HeadsConfig, StudyConfig, study_config
from papers.ktiw.corpora import Corpus, save_corpus
from papers.ktiw.figures import write_pictures
from papers.ktiw.models.lstm import Classifier, Translator
from papers.ktiw.models.lstm_config import ClassifierConfig, TranslatorConfig
from papers.ktiw.optimal import optimal_agreement
from papers.ktiw.readings import examples, read, saliency
from papers.ktiw.study import run_study
from papers.ktiw.tables import Study, run_sizes, table_2, table_10, table_11
from papers.ktiw.transformers import run_heads

TINY = StudyConfig(
    steps=3, batch=4, evaluate=(0, 2), evaluate_every=1, count=12, tau_rows=8, proxy=ProxyConfig(epochs=1)
)


def classification(n: int = 24) -> Corpus:
    rng = np.random.default_rng(0)
    rows = [rng.integers(4, 17, rng.integers(2, 8)) for _ in range(n)]
    labels = np.arange(n) % 2
    return Corpus("sst-trees", "classification", tuple(map(str, range(17))), (rows, labels), (rows, labels))


def translation(n: int = 14) -> Corpus:
    rng = np.random.default_rng(0)
    x = [rng.integers(4, 17, rng.integers(2, 6)) for _ in range(n)]
    words = ("<pad>", "<unk>", "<s>", "</s>", *(f"▁w{i}" for i in range(13)))
    return Corpus("multi30k", "translation", words, (x, [row[::-1].copy() for row in x]), (x, x))


def test_the_papers_settings() -> None:
    config = study_config(classification())
    assert config.evaluate_at()[:9] == (0, 10, 50, 100, 150, 200, 250, 500, 750)
    assert (config.steps, config.batch, config.evaluate_at()[-1], config.proxy.lr) == (4000, 32, 4000, 1.5e-4)
    config = study_config(translation(160))
    assert (config.steps, config.batch, config.lr, config.proxy.lr) == (200, 16, 1e-3, 1e-3)
    assert replace(config, steps=6000).evaluate_at() == (0, 50, 100, 500, 1000, 1500, 3500, 5500, 6000)


def test_readings_are_the_models_own_numbers() -> None:
    corpus = translation()
    on = examples(corpus, "valid", count=5, device=torch.device("cpu"), batch=2)
    torch.manual_seed(0)
    model = Translator(TranslatorConfig(vocab=17, width=6)).eval()
    reading = read(model, on)
    assert len(on.lengths) == sum(int((b["labels"] >= 0).sum()) for b in on.batches) == len(reading.alpha)
    first = on.batches[0]
    y, length = int(first["labels"][0, 1]), int(on.lengths[1])
    out = model(
        first["input_ids"], decoder_input_ids=first["decoder_input_ids"], attention_mask=first["attention_mask"]
    )
    p = model.predict(out.source.hidden[0, :length], out.states[0, 1].expand(length, -1)).log_softmax(-1)[:, y]
    torch.testing.assert_close(reading.beta[1, :length], p.detach())
    delta = saliency(model, on)
    assert delta.shape == reading.alpha.shape
    assert not model.encoder.training
    # A little more of a word changes the loss by -Delta.
    scale = torch.ones(first["input_ids"].shape)
    scale[0, 1] += 1e-2
    nll = []
    for factor in (torch.ones_like(scale), scale):
        source = model.encode(
            model.tokens(first["input_ids"]) * factor.unsqueeze(2), attention_mask=first["attention_mask"]
        )
        s, _ = model.decode(first["decoder_input_ids"], source.state)
        logits = model.predict(model.attention(s, source=source), s)
        nll.append(float(-logits[0, 1].log_softmax(-1)[y].detach()))
    assert float(delta[1, 1]) == pytest.approx(-(nll[1] - nll[0]) / 1e-2, rel=0.05, abs=1e-4)


@pytest.mark.parametrize("kind", ["classification", "translation"])
def test_the_proxy_learns_the_rows_that_it_is_scored_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 20, point 7: with </s> on both sides of a translation, so that no scored word is untrained."""
    corpus = classification() if kind == "classification" else translation()
    folder = run_study(corpus, tmp_path, config=TINY, runs=("reference", "uniform"))
    trained_on: list[Any] = []

    def recorded(train: Any, valid: Any, **settings: Any) -> Any:
        trained_on.append((train, valid))
        return train_proxy(train, valid, **settings)

    monkeypatch.setattr("papers.ktiw.comparison.train_proxy", recorded)
    compare_runs(corpus, folder, config=TINY)
    [splits] = trained_on
    for (sources, targets), split in zip(splits, ("train", "valid"), strict=True):
        on = examples(corpus, split, count=10_000, device=torch.device("cpu"))
        scored_sources, scored_targets = [], []
        for batch in on.batches:
            for i, length in enumerate(batch["attention_mask"].sum(1)):
                scored_sources.append(batch["input_ids"][i, :length].tolist())
                labels = batch["labels"][i]
                scored_targets.append([t for t in np.atleast_1d(labels.numpy()).tolist() if t >= 0])
        assert sorted(row.tolist() for row in sources) == sorted(scored_sources)
        assert sorted(np.atleast_1d(row).tolist() for row in targets) == sorted(scored_targets)


def test_a_classification_from_training_to_tables(tmp_path: Path) -> None:
    corpus = classification()
    folder = run_study(corpus, tmp_path, config=TINY)
    assert not (folder / "linear").exists()
    compare_runs(corpus, folder, config=TINY)
    study = Study(folder)
    [row] = table_2([study])
    for name in ("a_alpha_uf", "a_uf_px", "a_delta_uf", "a_alpha_beta", "a_random", "xi_alpha_uf", "xi_star"):
        assert 0 <= row[name] <= 100, name
    assert row["a_alpha_uf_paper"] == 19.85
    assert row["a_alpha_uf"] == max(round(value, 2) for _, value in study.curve("uniform", "valid/alpha_uf"))
    assert set(table_10([study])[0]) >= {"a_alpha_frozen", "a_alpha_uf", "a_alpha_frozen_paper"}
    assert set(table_11([study])[0]) >= {"a_uf_px", "a_uf_log"}
    [size] = run_sizes([study])
    assert (size["updates"], size["batch"], size["epochs"], size["measured_on"]) == (3, 4, 0.5, 12)
    [tau] = table_2([study], tau=True, results="ktiw-tau", table="table_3")
    assert -100 <= tau["a_alpha_uf"] <= 100
    # What is finished is not trained again.
    finished = (folder / "reference" / "metrics.jsonl").read_bytes()
    run_study(corpus, tmp_path, config=TINY)
    assert (folder / "reference" / "metrics.jsonl").read_bytes() == finished


def test_a_translation_from_training_to_results(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    corpus = translation()
    work, prepared = tmp_path / "work", tmp_path / "prepared"
    prepared.mkdir()
    save_corpus(corpus, prepared / "multi30k.npz.xz")
    folder = run_study(corpus, work, config=TINY)
    compare_runs(corpus, folder, config=TINY)
    agreements = optimal_agreement(corpus, folder, sentences=3)
    assert agreements["solved"] == 1
    assert 0 <= agreements["a_opt_beta"] <= 100
    for name, tables in {
        "ktiw-table2": {"table_2", "table_6", "curve", "second", "runs"},
        "ktiw-tau": {"table_3", "table_4"},
        "ktiw-train": {"table_7", "table_8"},
        "ktiw-optimal": {"appendix_a1"},
    }.items():
        out = tmp_path / f"{name}.json"
        arguments = ["--prepared", str(prepared), "--work", str(work), "--out", str(out), "--tables-only"]
        assert main([name, *arguments]) == 0
        result = json.loads(out.read_text())
        assert set(result["tables"]) == tables
        assert result["device"]
        assert result["config"]["Multi30k"]["steps"] == 3
        _data_sets_trained_again_replace_their_rows(out, result, [name, *arguments])
    out = tmp_path / "ktiw-alignment.json"
    arguments = [
        "--prepared",
        str(prepared),
        "--work",
        str(work),
        "--out",
        str(out),
        "--page",
        str(tmp_path / "p.html"),
    ]
    assert main(["ktiw-alignment", *arguments]) == 0
    assert "<svg" in (tmp_path / "p.html").read_text()
    rows = json.loads(out.read_text())["tables"]["alignment"]
    assert sum(rows[0]["alpha"]) == pytest.approx(1, abs=0.01)
    assert sum(rows[0]["ibm"]) == pytest.approx(1, abs=0.01)
    written = write_pictures(tmp_path, tmp_path)
    assert {path.name for path in written} >= {
        "dynamics-counts.svg",
        "dynamics-alignment.svg",
        "dynamics-agreement.svg",
    }


def _data_sets_trained_again_replace_their_rows(out: Path, result: dict[str, Any], again: list[str]) -> None:
    """An earlier file has other steps of Multi30k, and a data set without runs in this folder, which it keeps."""
    other = {"dataset": "SST", "model": "other", "step": 7}
    old = {name: [*({**row, "step": 99} for row in rows), other] for name, rows in result["tables"].items()}
    config = {"Multi30k": {"steps": 99}, "SST": {"steps": 7}}
    out.write_text(json.dumps({**result, "tables": old, "config": config}))
    assert main(again) == 0
    merged = json.loads(out.read_text())
    assert merged["config"] == {**result["config"], "SST": {"steps": 7}}
    for name, rows in result["tables"].items():
        assert [row for row in merged["tables"][name] if row.get("dataset") != "SST"] == rows
        assert other in merged["tables"][name]
    out.write_text(json.dumps(result))


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    """Vectors of width 300 for the words 4 and 7 of ``classification``, and for one that it does not have."""
    path = tmp_path / "glove.300d.txt"
    path.write_text("".join(f"{word} " + " ".join(["0.25"] * 300) + "\n" for word in ("7", "4", "film")))
    return path


@pytest.mark.parametrize("stacked", [False, True])
def test_classifiers_start_from_glove_by_a_command(tmp_path: Path, glove: Path, stacked: bool) -> None:
    """Issue 20, point 9."""
    prepared, work, out = tmp_path / "prepared", tmp_path / "work", tmp_path / "table2.json"
    prepared.mkdir()
    save_corpus(classification(), prepared / "sst-trees.npz.xz")
    sizes = ["--steps", "1", "--batch", "4", "--work", str(work), "--out", str(out)]
    command = ["ktiw-table2", "--prepared", str(prepared), *sizes, *(["--stacked"] if stacked else [])]
    assert main([*command, "--glove", str(glove)]) == 0
    model = Classifier(ClassifierConfig(vocab=17))
    load_weights(model, work / "sst-trees" / "reference", which="best")
    # One update moves a weight by at most the rate of 1e-3.
    near = ((model.tokens.weight - 0.25).abs() < 2e-3).all(1)
    assert near.nonzero().flatten().tolist() == [4, 7]
    assert json.loads(out.read_text())["config"]["SST"]["glove"] == "glove.300d.txt"
    # Finished runs are not passed off as runs that started elsewhere.
    assert main(command) == 2


def test_seeds_are_added_one_by_one(tmp_path: Path) -> None:
    prepared, work, out = tmp_path / "prepared", tmp_path / "work", tmp_path / "table2.json"
    prepared.mkdir()
    save_corpus(classification(), prepared / "sst-trees.npz.xz")
    sizes = ["--steps", "1", "--batch", "4", "--work", str(work), "--out", str(out)]
    command = ["ktiw-table2", "--prepared", str(prepared), *sizes]
    assert main(command) == 0
    # A row of an earlier version, which had no seeds, is of the first one.
    result = json.loads(out.read_text())
    first = dict(result["tables"]["table_2"][0])
    assert first.pop("seed") == 0
    out.write_text(json.dumps(result | {"tables": {**result["tables"], "table_2": [first]}, "made_by": {}}))
    assert main([*command, "--seed", "1"]) == 0
    tables = json.loads(out.read_text())["tables"]
    assert [(row["dataset"], row["seed"]) for row in tables["table_2"]] == [("SST", 0), ("SST", 1)]
    assert {row["seed"] for row in tables["curve"]} == {0, 1}
    facts = [json.loads((work / at / "sst-trees/second/run.json").read_text()) for at in ("", "seed-1")]
    assert [fact["seed"] for fact in facts] == [1, 11]


def test_word_vectors_are_for_classifiers(tmp_path: Path, glove: Path) -> None:
    with pytest.raises(ValueError, match="multi30k is a translation"):
        run_chosen([translation()], tmp_path, runs=("reference",), steps=1, batch=4, glove=glove)


def test_the_proxy_nears_logistic_regression_at_a_higher_rate(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    # A word of each class among others.
    rows = [np.append(rng.integers(6, 17, 5), 4 + label) for label in labels]
    data = Corpus("sst-trees", "classification", tuple(map(str, range(17))), (rows, labels), (rows, labels))
    prepared, out = tmp_path / "prepared", tmp_path / "rates.json"
    prepared.mkdir()
    save_corpus(data, prepared / "sst-trees.npz.xz")
    assert main(["ktiw-proxy-rates", "--prepared", str(prepared), "--out", str(out)]) == 0
    slow, fast = json.loads(out.read_text())["tables"]["rates"]
    assert fast["loss"] < slow["loss"]
    assert fast["a_px_log"] > 90


def test_comparison_needs_a_reference(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no reference run"):
        compare_runs(classification(), tmp_path, config=TINY)
    with pytest.raises(ValueError, match="unknown runs thrid"):
        run_study(classification(), tmp_path, config=TINY, runs=("thrid",))


@pytest.mark.parametrize("family", ["attnlab", "bart"])
def test_heads_of_transformers(tmp_path: Path, family: str) -> None:
    size = {"width": 8, "heads": 2, "layers": 1, "steps": 2, "batch": 4, "sentences": 3, "evaluate": (0, 2)}
    run_heads(translation(), tmp_path, config=HeadsConfig(family=family, **size))  # type: ignore[arg-type]
    out = tmp_path / "heads.json"
    assert main(["ktiw-transformers", "--tables-only", "--work", str(tmp_path), "--out", str(out)]) == 0
    tables = json.loads(out.read_text())["tables"]
    assert [row["head"] for row in tables["heads"]] == ["layer 0 head 0", "layer 0 head 1"]
    for row in tables["heads"]:
        assert all(0 <= row[name] <= 100 for name in ("a_alpha_beta", "a_alpha_uf", "a_own", "a_own_alone"))
    with pytest.raises(ValueError, match="family must be attnlab or bart"):
        run_heads(translation(), tmp_path, config=HeadsConfig(family="t5"))


def test_agreement_of_length_one_is_one() -> None:
    """A sentence of one word: there is nothing to choose, so A is 1."""
    assert agreement(torch.rand(3, 1), torch.rand(3, 1)).tolist() == [1, 1, 1]
