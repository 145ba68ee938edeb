from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlab.cli import main
from attnlab.experiments import effective_finetune
from attnlab.experiments.effective import KEYS, collect, part_names, run
from attnlab.experiments.effective_config import EffectiveConfig, TaskPart
from attnlab.experiments.effective_figures import figures_page
from attnlab.experiments.effective_glue import (
    TASKS,
    Examples,
    GlueSource,
    encode,
    read_glue,
    read_splits,
    subset,
    tag_types,
)
from attnlab.experiments.effective_maps import write_maps_page
from attnlab.experiments.effective_patterns import evaluate_classifier, patterns_of_texts
from attnlab.experiments.effective_study import faithfulness_tables, short_input_rows, timing_rows
from attnlab.experiments.effective_tables import Similarity, Tally, artefact_rows, authors_way, read_maps
from attnlab.hf.load import load_model
from attnlab.reading.padded_effective import padded_effective_attention
from attnlab.reading.pattern_classifier import PatternNet
from attnlab.reading.pattern_data import CLASSES, LabelledMaps
from attnlab.reading.tagger import train_tagger
from attnlab.reports.claims import effective as claims

GOLD = [[("the", "DET"), ("cat", "NOUN"), ("sees", "VERB"), ("her", "PRON"), (".", "PUNCT")]] * 3
WORDS = ["the", "cat", "sees", "her", ".", "a", "dog"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers and two heads of 5, and a tokenizer of seven words."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=13,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RTE and STS-B with twelve examples a split."""
    folder = tmp_path_factory.mktemp("glue")
    text = ["the cat sees her .", "a dog sees the cat .", "the dog ."]
    for task, column in (("RTE", "label"), ("STS-B", "score")):
        (folder / task).mkdir()
        for split in ("train", "dev"):
            lines = ["\t".join(["index", "sentence1", "sentence2", column])]
            for i in range(12):
                label = ("entailment", "not_entailment")[i % 2] if task == "RTE" else f"{i % 6}.500"
                lines.append("\t".join([str(i), " ".join(text), text[i % 3], label]))
            (folder / task / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def tokenizer(encoder: Path) -> Any:
    return load_model(encoder).tokenizer


def test_rows_of_both_kinds_of_label(glue: Path) -> None:
    assert [label for _, label in read_glue(glue, TASKS["RTE"], "dev")[:2]] == [1.0, 0.0]
    texts, label = read_glue(glue, TASKS["STS-B"], "train")[4]
    assert (texts[1], label) == ("a dog sees the cat .", 4.5)
    with pytest.raises(ValueError, match=r"MRPC holds no dev.tsv"):
        read_glue(glue, TASKS["MRPC"], "dev")


def test_dev_is_shuffled_and_a_task_without_train_is_cut_in_two(glue: Path, tmp_path: Path) -> None:
    found, how = read_splits(glue, TASKS["STS-B"], seed=0)
    ordered = read_glue(glue, TASKS["STS-B"], "dev")
    assert found["dev"] != ordered
    assert sorted(found["dev"]) == sorted(ordered)
    assert how == "train.tsv and dev.tsv"
    (tmp_path / "QNLI").mkdir()
    lines = [f"{i}\tquestion {i}\tsentence {i % 10}\t{'entailment' if i % 2 else 'not_entailment'}" for i in range(30)]
    (tmp_path / "QNLI" / "dev.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *lines]) + "\n")
    found, how = read_splits(tmp_path, TASKS["QNLI"], seed=0)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 24, "dev": 6}
    assert not {texts[1] for texts, _ in found["train"]} & {texts[1] for texts, _ in found["dev"]}
    assert "no sentence on both sides" in how


def test_pairs_are_cut_from_the_longer_text(tokenizer: Any) -> None:
    found = encode([(("the cat sees her .", "a dog"), 1.0)], tokenizer, length=8)
    # [CLS] the cat sees [SEP] a dog [SEP]: five places for six words and a full stop.
    assert found.ids == [[2, 5, 6, 7, 3, 10, 11, 3]]
    assert found.segments == [[0, 0, 0, 0, 0, 1, 1, 1]]
    batch = found.batch([0], length=11, segments=True, classes=2)
    assert batch["attention_mask"].sum() == 8
    assert batch["labels"].tolist() == [1]


def test_every_epoch_sees_every_example_once() -> None:
    examples = Examples([[2, 5, 3]] * 6, [[0] * 3] * 6, [float(i) for i in range(6)], [("the",)] * 6)
    source = GlueSource(examples, batch_size=2, length=16, segments=False, classes=1, seed=3)
    epochs = [[x for s in range(3) for x in source.batch(s + 3 * e)["labels"].tolist()] for e in (0, 1)]
    assert [sorted(e) for e in epochs] == [[0, 1, 2, 3, 4, 5]] * 2
    assert epochs[0] != epochs[1]
    assert source.batch(4)["labels"].tolist() == source.batch(4)["labels"].tolist()


def test_subsets_are_drawn_once() -> None:
    assert subset(range(5), 7, seed=0) == [0, 1, 2, 3, 4]
    assert subset(range(50), 5, seed=1) == subset(range(50), 5, seed=1) != subset(range(50), 5, seed=2)


def test_tags_stand_at_their_words(tokenizer: Any) -> None:
    examples = encode([(("the cat sees her .", "a dog"), 0.0)], tokenizer, length=16)
    (types,) = tag_types(examples, tokenizer, train_tagger(GOLD), length=16)
    # [CLS] the cat sees her . [SEP] a dog [SEP]
    assert types.tolist()[:7] == [4, -1, 0, 2, 1, 5, 3]
    assert len(types) == 10
    assert types[-1] == 3


def test_the_authors_way_is_the_full_svd_and_breaks_the_identity_under_padding() -> None:
    torch.manual_seed(0)
    v = torch.randn(2, 3, 17, 5, dtype=torch.float64)
    w = torch.rand(2, 3, 17, 17, dtype=torch.float64)
    torch.testing.assert_close(authors_way(w, v), padded_effective_attention(w, v).weights)
    # With no padding it is exact.
    torch.testing.assert_close(authors_way(w, v) @ v, w @ v)
    w[..., 7:] = 0
    masked = authors_way(w, v)
    masked[..., 7:] = 0
    assert ((masked - w) @ v).norm() > 0.1 * (w @ v).norm()
    # Fewer rows than columns: nothing is projected away.
    torch.testing.assert_close(authors_way(w[..., :3], v[:, :, :3]), w[..., :3])


def test_maps_of_a_padded_batch(encoder: Path, glue: Path, tokenizer: Any) -> None:
    model = load_model(encoder).model
    batch = _batch(glue, tokenizer, 4, 29)
    maps, facts, layers = read_maps(model, batch, authors=True)
    assert {len(x) for x in maps.values()} == {2}
    assert facts["residual"].max() < 1e-5
    assert facts["trivial"].sum() == 0
    assert facts["authors_residual"].min() > 10 * facts["residual"].max()
    hidden = ~batch["attention_mask"].bool()
    for reading in maps:
        assert maps[reading][1].transpose(1, 3)[hidden].abs().max() == 0
    assert len(layers) == 2


def test_tallies_are_means_over_all_inputs(encoder: Path, glue: Path, tokenizer: Any) -> None:
    model = load_model(encoder).model
    net = PatternNet().eval()
    tallies = []
    for sizes in ([4], [3, 1]):
        tally, at = Tally(net), 0
        for size in sizes:
            batch = {k: t[at : at + size] for k, t in _batch(glue, tokenizer, 4, 29).items()}
            at += size
            maps, facts, _ = read_maps(model, batch, authors=True)
            real = batch["attention_mask"].bool()
            marked = {"cls": batch["input_ids"] == 2, "sep": batch["input_ids"] == 3}
            types = torch.where(batch["input_ids"] == 2, 4, torch.where(batch["input_ids"] == 6, 0, -1))
            tally.add(maps, facts, real=real, marked=marked, types=types)
        tallies.append(tally.tables("RTE"))
    whole, parted = tallies
    assert len(whole["table_2"]) == 3
    for row in whole["table_2"]:
        assert math.isclose(sum(v for k, v in row.items() if k not in ("task", "attention")), 100)
    # Only [CLS] and nouns occur.
    assert {row["token"] for row in whole["token_types"]} == {"cls", "noun"}
    for name, rows in whole.items():
        for a, b in zip(rows, parted[name], strict=True):
            assert a == {k: pytest.approx(v, abs=1e-6) if isinstance(v, float) else v for k, v in b.items()}


def test_a_model_is_similar_to_itself(encoder: Path, glue: Path, tokenizer: Any) -> None:
    batch = _batch(glue, tokenizer, 3, 29)
    maps, _, _ = read_maps(load_model(encoder).model, batch)
    found = Similarity()
    found.add(maps, maps, batch["attention_mask"].bool())
    tables = found.tables("RTE")
    assert [row["similarity"] for row in tables["finetuning"]] == [pytest.approx(1)] * 4
    assert len(tables["finetuning_heads"]) == 8


def test_the_artefact_is_what_padding_adds() -> None:
    def row(reading: str, vertical: float) -> dict[str, Any]:
        names = ("diagonal", "vertical_diagonal", "block", "heterogeneous")
        return {"task": "RTE", "attention": reading, "vertical": vertical, **dict.fromkeys(names, 0.0)}

    found = artefact_rows([row("standard", 50.0), row("effective", 40.0), row("authors", 10.0)])
    assert found[0] == {
        "task": "RTE",
        "pattern": "vertical",
        "standard": 50.0,
        "effective": 40.0,
        "authors": 10.0,
        "change": -10.0,
        "authors_change": -40.0,
        "artefact": -30.0,
    }
    assert artefact_rows([row("standard", 1.0)]) == []


def test_short_inputs_cannot_differ(encoder: Path, glue: Path, tokenizer: Any) -> None:
    model = load_model(encoder).model
    rows = short_input_rows(model, _batch(glue, tokenizer, 3, 29), lengths=[3, 5, 11], separator=3)
    assert [row["singular_share"] for row in rows] == [0, 0, 1]
    assert max(row["difference"] for row in rows[:2]) < 1e-5 < rows[2]["difference"]


def test_faithfulness_with_paired_differences(encoder: Path, glue: Path, tokenizer: Any) -> None:
    model, _ = effective_finetune.sequence_classifier(encoder, classes=2, seed=0)
    batch = _batch(glue, tokenizer, 2, 29)
    lengths = batch["attention_mask"].sum(-1).tolist()
    texts = [{k: t[i : i + 1, :n] for k, t in batch.items() if k != "labels"} for i, n in enumerate(lengths)]
    found = faithfulness_tables(model, texts, task="RTE", prediction=None, keys=5, seed=0)
    # Layers 0, 1 and all, three truths, eight readings.
    assert len(found["faithfulness"]) == 3 * 3 * 8
    by = {(r["layer"], r["against"], r["reading"]): r for r in found["faithfulness"]}
    for row in found["faithfulness_differences"]:
        first, second = (by[row["layer"], row["against"], row[name]]["spearman"] for name in ("first", "second"))
        assert row["spearman"] == pytest.approx(first - second, abs=1e-9)
    # What a head's output loses is nearly what the norm says, and noise says nothing.
    assert by["all", "head output", "norm"]["spearman"] > 0.5 > by["all", "head output", "random"]["spearman"]


def test_timing_is_against_the_eager_evaluation(encoder: Path, glue: Path, tokenizer: Any) -> None:
    model = load_model(encoder).model
    before = model.config._attn_implementation
    rows = list(timing_rows(model, _batch(glue, tokenizer, 2, 29), what="tiny", repeats=1))
    assert [row["way"] for row in rows] == ["standard", "ours", "full-svd"]
    assert rows[0]["ratio"] == 1
    assert model.config._attn_implementation == before


def test_scores() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert effective_finetune.metrics(logits, torch.tensor([1, 1, 0, 0])) == {"accuracy": 0.5, "f1": 0.5}
    assert effective_finetune.metrics(logits[:, :1], torch.tensor([2.0, 4.0, 2.0, 4.0]))["pearson"] == pytest.approx(1)


def test_parts() -> None:
    assert part_names(EffectiveConfig()) == ["timing", "RTE", "MRPC", "SST-2", "STS-B", "QNLI"]
    assert part_names(EffectiveConfig(), "STS-B,timing") == ["timing", "STS-B"]
    with pytest.raises(ValueError, match=r"only must name parts among timing, RTE.*got WNLI"):
        part_names(EffectiveConfig(), "WNLI")


def test_a_part_outlives_its_failures_and_nan(tmp_path: Path) -> None:
    part = TaskPart(tmp_path / "RTE.json")
    with part.step("maps"):
        raise ValueError("two\nlines")
    part.row("scores", task="RTE", pearson=math.nan)
    stored = json.loads(part.path.read_text())
    assert stored == {"tables": {"scores": [{"task": "RTE", "pearson": None}]}, "facts": {"failed: maps": "two"}}


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
        effective_finetune.run_task(name, config, TaskPart(tmp_path / f"{name}.json"), tmp_path / f"run-{name}")
    found = collect(config, tmp_path, names)
    # A resumed task makes only what it lacks, from the training that is there.
    part = TaskPart(tmp_path / "RTE.json")
    lacks = part.content["tables"].pop("alternative")
    effective_finetune.run_task("RTE", config, part, tmp_path / "run-RTE")
    assert part.content["tables"]["alternative"] == lacks
    assert not [fact for facts in found["parts"].values() for fact in facts if fact.startswith("failed")]
    assert set(found["tables"]) == set(KEYS) - {"timing", "timing_models"}
    assert set(claims.TABLES["effective"]) - {"timing"} <= set(found["tables"])
    rte = next(r for r in found["tables"]["table_2"] if (r["task"], r["attention"]) == ("RTE", "effective"))
    assert rte["vertical_paper"] == 11.5
    assert {row["text"] for row in found["tables"]["identity"]} == set(names)
    assert max(row["residual"] for row in found["tables"]["identity"]) < 1e-5
    # Every row is told apart by its keys.
    for table, rows in found["tables"].items():
        assert len({tuple(str(row[key]) for key in KEYS[table]) for row in rows}) == len(rows), table
    assert found["config"]["data"] == glue.name
    json.dumps(found, allow_nan=False)
    drawn = figures_page(found)
    for figure in ("Table 2", "Figure 1, RTE", "Figure 3, STS-B", "Figure 4, RTE", "Figures 5 and 6, STS-B"):
        assert figure in drawn


@pytest.mark.slow
def test_processes_merge_into_one_file(encoder: Path, glue: Path, tmp_path: Path) -> None:
    config = EffectiveConfig(
        data=str(glue), model=str(encoder), tasks=("RTE", "STS-B"), length=29, epochs=1, dev_limit=2, study_texts=1
    )
    out = tmp_path / "effective.json"
    run(config, only="RTE", out=out, work=tmp_path / "one")
    found = run(replace(config, seed=1), only=["STS-B"], out=out, work=tmp_path / "two")
    assert found["unfinished"] == {}
    stored = json.loads(out.read_text())
    assert {row["task"] for row in stored["tables"]["table_2"]} == {"RTE", "STS-B"}
    with pytest.raises(ValueError, match=r"holds an earlier run \(RTE.json\)"):
        run(config, only="RTE", out=out, work=tmp_path / "one")
    with pytest.raises(ValueError, match=r"begun with other settings \(seed\)"):
        run(replace(config, seed=2), only="RTE", out=out, work=tmp_path / "one", resume=True)
    again = run(config, only="RTE", out=out, work=tmp_path / "one", resume=True)
    assert again["unfinished"] == {}
    late = run(config, only="RTE", out=out, work=tmp_path / "three", seconds=0.1)
    assert late["unfinished"] == {"RTE": None}
    assert json.loads(out.read_text())["tables"]["scores"]


def test_patterns_of_any_encoder_and_texts(encoder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sees her .\ta dog sees the cat .\nthe dog .\n")
    out, drawn = tmp_path / "patterns.json", tmp_path / "patterns.html"
    command = ["reproduce", "effective-patterns", "--model", encoder, "--texts", texts, "--out", out, "--page", drawn]
    main([str(word) for word in command])
    tables = json.loads(out.read_text())["tables"]
    assert [row["attention"] for row in tables["table_2"]] == ["standard", "effective"]
    # Two layers, two readings.
    assert len(tables["figure_4"]) == 4
    assert tables["identity"][0]["inputs"] == 2
    assert "Figure 4" in drawn.read_text()
    with pytest.raises(ValueError, match="no text was given"):
        patterns_of_texts(load_model(encoder), [], name="tiny")


def test_the_classifier_s_result_averages_seeds_and_adds_up_confusions(tmp_path: Path) -> None:
    entries = [
        {"model": m, "label": name, "passes": [name, name if i % 4 else "block"]}
        for i, (m, name) in enumerate(zip("aabb" * 5, CLASSES * 4, strict=True))
    ]
    pictures = np.random.default_rng(0).integers(0, 255, (20, 48, 48), dtype=np.uint8)
    found = evaluate_classifier(LabelledMaps(pictures, entries), tmp_path / "c.json", seeds=2, steps=1, generated=5)
    rows = found["tables"]["held_out_scores"]
    assert [(row["split"], row["held_out"], row["maps"]) for row in rows] == [
        ("models", "a", 10),
        ("models", "b", 10),
        ("maps", "a fifth of all", 20),
    ]
    counts = [sum(row[name] for name in CLASSES) for row in found["tables"]["confusion"] if row["split"] == "maps"]
    assert sum(counts) == 2 * 20
    everything = found["tables"]["agreement"][0]
    # Of 20 maps, 5 got another answer, one of them the same by chance: block was its label.
    assert (everything["maps"], everything["agreement"]) == (20, 0.8)
    assert everything["kappa"] == pytest.approx((0.8 - 0.2) / (1 - 0.2))
    assert json.loads((tmp_path / "c.json").read_text())["tables"] == found["tables"]


def test_the_page_of_one_example(encoder: Path, tmp_path: Path) -> None:
    loaded = load_model(encoder)
    found = write_maps_page(loaded, "the cat sees her .", tmp_path / "maps.html", pair="a dog", layer=0, head=1)
    assert found["tokens"][:3] == ["[CLS]", "the", "cat"]
    w, e = (torch.tensor(found[reading]) for reading in ("standard", "effective"))
    assert w.shape == e.shape == (10, 10)
    torch.testing.assert_close(w.sum(-1), torch.ones(10))
    assert not found["trivial"]
    text = (tmp_path / "maps.html").read_text()
    assert "Layer 0, head 1" in text
    assert "[CLS]" in text
    assert write_maps_page(loaded, "the cat", tmp_path / "short.html")["trivial"]
    with pytest.raises(ValueError, match=r"layer 2, head 0: this model has 2 layers of 2 heads"):
        write_maps_page(loaded, "the cat", tmp_path / "maps.html", layer=2)


def _batch(glue: Path, tokenizer: Any, n: int, length: int) -> dict[str, Tensor]:
    examples = encode(read_glue(glue, TASKS["RTE"], "dev"), tokenizer, length=length)
    return examples.batch(range(n), length=length, segments=True, classes=2)
