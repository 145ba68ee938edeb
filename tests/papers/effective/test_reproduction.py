"""``python -m papers effective`` from its data to its pages, and the commands beside it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlab.adapters.load import load_model
from attnlab.pages.numbers import number
from attnlab.reading.pattern_data import CLASSES
from attnlab.reading.pattern_net import PatternNet
from papers.__main__ import main
from papers.common.ledger_page import tables_wanted
from papers.common.row_store import Part
from papers.effective import finetune as effective_finetune
from papers.effective import pattern_training
from papers.effective.config import KEYS, EffectiveConfig
from papers.effective.figures import figures_page
from papers.effective.labelled_maps import LabelledMaps
from papers.effective.maps import write_maps_page
from papers.effective.parts import collect, part_names, run_parts
from papers.effective.patterns import evaluate_classifier, patterns_of_texts
from papers.effective.tables import read_maps
from papers.effective.tagger import train_tagger
from papers.effective.timing import run_timing
from tests.papers.effective.cases import GOLD


def test_parts() -> None:
    assert part_names(EffectiveConfig()) == ["timing", "RTE", "MRPC", "SST-2", "STS-B", "QNLI"]
    assert part_names(EffectiveConfig(), "STS-B,timing") == ["timing", "STS-B"]
    with pytest.raises(ValueError, match=r"only must name parts among timing, RTE.*got WNLI"):
        part_names(EffectiveConfig(), "WNLI")


def test_a_part_notes_failures_and_stores_nan_as_null(tmp_path: Path) -> None:
    part = Part(tmp_path / "RTE.json", keys=KEYS)
    with part.step("maps"):
        raise ValueError("two\nlines")
    part.row("scores", task="RTE", pearson=math.nan)
    stored = json.loads(part.path.read_text())
    assert stored["tables"] == {"scores": [{"task": "RTE", "pearson": None}]}
    assert stored["facts"] == {"failed: maps": "two"}


def test_a_task_from_its_data_to_its_last_table(encoder: Path, glue: Path, tmp_path: Path) -> None:
    tagger = train_tagger(GOLD).save(tmp_path / "tagger.json")
    config = EffectiveConfig(
        data=str(glue),
        model=str(encoder),
        tagger=str(tagger),
        tasks=("RTE", "STS-B"),
        length=29,
        epochs=1,
        dev_limit=3,
        study_texts=2,
        study_keys=4,
    )
    names = ["RTE", "STS-B"]
    for name in names:
        effective_finetune.run_task(name, config, Part(tmp_path / f"{name}.json", keys=KEYS), tmp_path / f"run-{name}")
    result = collect(config, tmp_path, names)
    # A resumed task makes only the missing tables, from the finished training.
    part = Part(tmp_path / "RTE.json", keys=KEYS)
    removed = part.content["tables"].pop("alternative")
    del part.content["made_by"]["alternative"]
    effective_finetune.run_task("RTE", config, part, tmp_path / "run-RTE")
    assert part.content["tables"]["alternative"] == removed
    assert not [fact for facts in result["parts"].values() for fact in facts if fact.startswith("failed")]
    assert set(result["tables"]) == set(KEYS) - {"timing", "timing_models", "table_3"}
    assert set(tables_wanted()["effective"]) - {"timing"} <= set(result["tables"])
    rte = next(r for r in result["tables"]["table_2"] if (r["task"], r["attention"]) == ("RTE", "effective"))
    assert rte["vertical_paper"] == 11.5
    assert {row["text"] for row in result["tables"]["identity"]} == set(names)
    assert max(row["residual"] for row in result["tables"]["identity"]) < 1e-5
    # The keys of a table identify its rows.
    for table, rows in result["tables"].items():
        assert len({tuple(str(row[key]) for key in KEYS[table]) for row in rows}) == len(rows), table
    assert result["config"]["data"] == glue.name
    json.dumps(result, allow_nan=False)
    drawn = figures_page(result)
    for figure in ("Table 2", "Figure 1, RTE", "Figure 3, STS-B", "Figure 4, RTE", "Figures 5 and 6, STS-B"):
        assert figure in drawn
    # Figures 1, 5 and 6 have a cell for each head; the colours of effective attention end at its own extremes.
    assert "noun" in drawn
    for figure in ("Figure 1, RTE: weight of each head", "Figure 5, RTE: ", "Figure 6, STS-B: "):
        assert figure in drawn
    effective = next(r for r in result["tables"]["weight_range"] if (r["task"], r["attention"]) == ("RTE", "effective"))
    assert number(effective["least"]) in drawn
    assert number(effective["largest"]) in drawn


def test_an_encoder_is_read_as_it_was_pretrained(encoder: Path, glue: Path, tmp_path: Path) -> None:
    tagger = train_tagger(GOLD).save(tmp_path / "tagger.json")
    config = EffectiveConfig(
        data=str(glue), model=str(encoder), tagger=str(tagger), tasks=("RTE",), length=29, dev_limit=3, finetune=False
    )
    work = tmp_path / "work"
    work.mkdir()
    effective_finetune.run_task("RTE", config, Part(work / "RTE.json", keys=KEYS), work / "run-RTE")
    result = collect(config, work, ["RTE"])
    assert result["name"] == "effective-pretrained"
    assert not (work / "run-RTE").exists()
    (tmp_path / "effective-pretrained.json").write_text(json.dumps(result))
    tables = result["tables"]
    # No row of a fine-tuned model.
    assert not {"table_2", "finetuning", "scores", "faithfulness"} & set(tables)
    assert {row["inputs"] for row in tables["identity"]} == {3}
    row = next(r for r in tables["table_2_pretrained"] if r["attention"] == "effective")
    assert row["vertical_paper"] == 11.5
    assert {row["attention"] for row in tables["segments_pretrained"]} == {"standard", "effective", "authors"}
    assert {row["task"] for row in tables["artefact"]} == {"RTE"}
    pictures = tmp_path / "pictures"
    assert main(["effective-figures", "--results", str(tmp_path), "--out", str(pictures)]) == 0
    drawn = {path.name: path.read_text() for path in pictures.iterdir()}
    assert set(drawn) == {f"effective-figure-{number}.svg" for number in (1, 4, 5, 6)}
    # A cell for each of two layers and two heads, in three readings.
    assert drawn["effective-figure-5.svg"].count("<rect") == 12
    assert "Figure 6, RTE, to [SEP]: effective, with padding" in drawn["effective-figure-6.svg"]


def test_training_has_the_defaults_of_transformers() -> None:
    """The paper says so; issue 20, point 10."""
    import transformers

    defaults = transformers.TrainingArguments(output_dir="unused", use_cpu=True)
    settings = effective_finetune._settings(EffectiveConfig(), steps=100)
    assert settings.recipe.lr == defaults.learning_rate
    assert settings.recipe.weight_decay == defaults.weight_decay == 0
    assert settings.schedule.kind == defaults.lr_scheduler_type.value
    assert settings.schedule.warmup == defaults.get_warmup_steps(100) == 0
    assert settings.recipe.betas == (defaults.adam_beta1, defaults.adam_beta2)
    assert (settings.recipe.eps, settings.recipe.clip) == (defaults.adam_epsilon, defaults.max_grad_norm)


def test_timing_has_a_row_for_each_task(encoder: Path, glue: Path, tmp_path: Path) -> None:
    config = EffectiveConfig(
        data=str(glue), model=str(encoder), tasks=("RTE", "STS-B"), length=29, timing_repeats=1, timing_base=False
    )
    part = Part(tmp_path / "timing.json", keys=KEYS)
    run_timing(config, part)
    assert not part.content["facts"]
    rows = collect(config, tmp_path, ["timing"])["tables"]["table_3"]
    assert [(row["task"], row["examples"], row["svd_ratio_paper"]) for row in rows] == [
        ("RTE", 12, 2.0),
        ("STS-B", 12, 2.03),
    ]


@pytest.mark.slow
def test_processes_merge_into_one_file(encoder: Path, glue: Path, tmp_path: Path) -> None:
    config = EffectiveConfig(
        data=str(glue), model=str(encoder), tasks=("RTE", "STS-B"), length=29, epochs=1, dev_limit=2, study_texts=1
    )
    out = tmp_path / "effective.json"
    run_parts(config, only="RTE", out=out, work=tmp_path / "one")
    second = run_parts(replace(config, seed=1), only=["STS-B"], out=out, work=tmp_path / "two")
    assert second["unfinished"] == {}
    stored = json.loads(out.read_text())
    assert {row["task"] for row in stored["tables"]["table_2"]} == {"RTE", "STS-B"}
    with pytest.raises(ValueError, match=r"holds an earlier run \(RTE.json\)"):
        run_parts(config, only="RTE", out=out, work=tmp_path / "one")
    with pytest.raises(ValueError, match=r"begun with other settings \(seed\)"):
        run_parts(replace(config, seed=2), only="RTE", out=out, work=tmp_path / "one", resume=True)
    again = run_parts(config, only="RTE", out=out, work=tmp_path / "one", resume=True)
    assert again["unfinished"] == {}
    late = run_parts(config, only="RTE", out=out, work=tmp_path / "three", seconds=0.1)
    assert late["unfinished"] == {"RTE": None}
    assert json.loads(out.read_text())["tables"]["scores"]


def test_patterns_of_any_encoder_and_texts(encoder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sees her .\ta dog sees the cat .\nthe dog .\n")
    out, drawn = tmp_path / "patterns.json", tmp_path / "patterns.html"
    command = ["effective-patterns", "--model", encoder, "--texts", texts, "--out", out, "--page", drawn]
    main([str(word) for word in command])
    tables = json.loads(out.read_text())["tables"]
    assert [row["attention"] for row in tables["table_2"]] == ["standard", "effective"]
    # Two layers, two readings.
    assert len(tables["figure_4"]) == 4
    assert tables["identity"][0]["inputs"] == 2
    assert "Figure 4" in drawn.read_text()
    with pytest.raises(ValueError, match="no text to read"):
        patterns_of_texts(load_model(encoder), [], name="tiny")


@pytest.mark.slow
def test_scores_are_averaged_over_seeds_and_confusions_are_summed(tmp_path: Path) -> None:
    entries = [
        {"model": m, "label": name, "passes": [name, name if i % 4 else "block"]}
        for i, (m, name) in enumerate(zip("aabb" * 5, CLASSES * 4, strict=True))
    ]
    pictures = np.random.default_rng(0).integers(0, 255, (20, 48, 48), dtype=np.uint8)
    result = evaluate_classifier(LabelledMaps(pictures, entries), tmp_path / "c.json", seeds=2, steps=1, generated=5)
    rows = result["tables"]["held_out_scores"]
    assert [(row["split"], row["held_out"], row["maps"]) for row in rows] == [
        ("models", "a", 10),
        ("models", "b", 10),
        ("maps", "a fifth of all", 20),
    ]
    counts = [sum(row[name] for name in CLASSES) for row in result["tables"]["confusion"] if row["split"] == "maps"]
    assert sum(counts) == 2 * 20
    all_models = result["tables"]["agreement"][0]
    # The second pass says block for 5 of 20 maps; for one of them that is the label too.
    assert (all_models["maps"], all_models["agreement"]) == (20, 0.8)
    assert all_models["kappa"] == pytest.approx((0.8 - 0.2) / (1 - 0.2))
    assert json.loads((tmp_path / "c.json").read_text())["tables"] == result["tables"]


def test_the_page_of_one_example(encoder: Path, tmp_path: Path) -> None:
    loaded = load_model(encoder)
    shown = write_maps_page(loaded, "the cat sees her .", tmp_path / "maps.html", pair="a dog", layer=0, head=1)
    assert shown["tokens"][:3] == ["[CLS]", "the", "cat"]
    w, e = (torch.tensor(shown[reading]) for reading in ("standard", "effective"))
    assert w.shape == e.shape == (10, 10)
    torch.testing.assert_close(w.sum(-1), torch.ones(10))
    assert not shown["trivial"]
    text = (tmp_path / "maps.html").read_text()
    assert "Layer 0, head 1" in text
    assert "[CLS]" in text
    # The colours end at the extremes over all heads, not at those of the head that is drawn.
    inputs = {name: torch.tensor([row]) for name, row in loaded.tokenizer("the cat sees her .", "a dog").items()}
    weights = torch.stack(read_maps(loaded.model, inputs)[0]["effective"])
    assert shown["range"] == pytest.approx((weights.min().item(), weights.max().item()), abs=1e-6)
    assert shown["range"][0] < e.min() or shown["range"][1] > e.max()
    assert number(shown["range"][0]) in text
    assert write_maps_page(loaded, "the cat", tmp_path / "short.html")["trivial"]
    with pytest.raises(ValueError, match=r"layer 2, head 0: this model has 2 layers of 2 heads"):
        write_maps_page(loaded, "the cat", tmp_path / "maps.html", layer=2)


@pytest.mark.parametrize(
    ("model", "maps", "learned"),
    [
        (None, "own", ("attnlab-mlm", "attnlab-pairs")),
        ("models/all-MiniLM-L6-v2", "own", ("all-MiniLM-L6-v2",)),
        # Of other encoders there are no labelled maps, and the shipped classifier learned from all.
        ("models/bert-base-uncased", "own", ("all-MiniLM-L6-v2", "attnlab-mlm", "attnlab-pairs", "stories15M")),
        (None, "all", ("all-MiniLM-L6-v2", "attnlab-mlm", "attnlab-pairs", "stories15M")),
    ],
)
def test_the_classifier_learns_from_maps_of_the_encoder_itself(
    model: str | None, maps: str, learned: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[set[str]] = []

    def train(real: LabelledMaps, **_: Any) -> PatternNet:
        trained.append({entry["model"] for entry in real.entries})
        return PatternNet(1)

    monkeypatch.setattr(pattern_training, "train_classifier", train)
    config = pattern_training.with_classifier(EffectiveConfig(model=model, classifier_maps=maps), tmp_path)
    assert config.learned_from == learned
    assert trained == ([set(learned)] if config.classifier is not None else [])
    assert (config.classifier is not None) == (len(learned) < 4)
