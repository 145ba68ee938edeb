"""The tables of Effective from maps: tallies, the artefact of padding, short inputs, faithfulness, time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.adapters.load import load_model
from attnlab.reading.pattern_net import PatternNet
from papers.effective import finetune as effective_finetune
from papers.effective.padded_effective import padded_effective_attention
from papers.effective.study import faithfulness_tables, short_input_rows
from papers.effective.tables import Similarity, Tally, artefact_rows, authors_way, read_maps
from papers.effective.timing import task_row, timing_rows
from tests.papers.effective.cases import first_batch


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
    batch = first_batch(glue, tokenizer, 4, 29)
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
            batch = {k: t[at : at + size] for k, t in first_batch(glue, tokenizer, 4, 29).items()}
            at += size
            maps, facts, _ = read_maps(model, batch, authors=True)
            real = batch["attention_mask"].bool()
            marked = {"cls": batch["input_ids"] == 2, "sep": batch["input_ids"] == 3}
            types = torch.where(batch["input_ids"] == 2, 4, torch.where(batch["input_ids"] == 6, 0, -1))
            tally.add(maps, facts, real=real, marked=marked, types=types, segments=batch["token_type_ids"])
        tallies.append(tally.tables("RTE"))
    whole, parted = tallies
    assert len(whole["table_2"]) == 3
    assert [row["attention"] for row in whole["segments"]] == ["standard", "effective", "authors"]
    for row in whole["table_2"]:
        assert math.isclose(sum(v for k, v in row.items() if k not in ("task", "attention")), 100)
    # Figures 1, 5 and 6 have a row for each of two heads; their mean is the row without heads.
    for table, heads in (("token_types", "token_types_heads"), ("to_token_layers", "to_token_heads")):
        for row in whole[table]:
            labels = {name: row[name] for name in ("attention", "token", "layer") if name in row}
            weights = [r["weight"] for r in whole[heads] if all(r[name] == label for name, label in labels.items())]
            assert len(weights) == 2
            assert sum(weights) / 2 == pytest.approx(row["weight"])
    ranges = {row["attention"]: (row["least"], row["largest"]) for row in whole["weight_range"]}
    real = first_batch(glue, tokenizer, 4, 29)["attention_mask"].bool()
    maps, _, _ = read_maps(model, first_batch(glue, tokenizer, 4, 29))
    weights_of_real_tokens = torch.cat(
        [w[i][:, :n, :n].flatten() for w in maps["effective"] for i, n in _lengths(real)]
    )
    assert ranges["effective"] == pytest.approx(
        (weights_of_real_tokens.min().item(), weights_of_real_tokens.max().item()), abs=1e-6
    )
    # Only [CLS] and nouns occur.
    assert {row["token"] for row in whole["token_types"]} == {"cls", "noun"}
    for name, rows in whole.items():
        for a, b in zip(rows, parted[name], strict=True):
            assert a == {k: pytest.approx(v, abs=1e-6) if isinstance(v, float) else v for k, v in b.items()}


def _lengths(real: torch.Tensor) -> list[tuple[int, int]]:
    return list(enumerate(real.sum(-1).tolist()))


def test_a_model_is_similar_to_itself(encoder: Path, glue: Path, tokenizer: Any) -> None:
    batch = first_batch(glue, tokenizer, 3, 29)
    maps, _, _ = read_maps(load_model(encoder).model, batch)
    similarity = Similarity()
    similarity.add(maps, maps, batch["attention_mask"].bool())
    tables = similarity.tables("RTE")
    assert [row["similarity"] for row in tables["finetuning"]] == [pytest.approx(1)] * 4
    assert len(tables["finetuning_heads"]) == 8


def test_the_artefact_is_what_padding_adds() -> None:
    def row(reading: str, vertical: float) -> dict[str, Any]:
        names = ("diagonal", "vertical_diagonal", "block", "heterogeneous")
        return {"task": "RTE", "attention": reading, "vertical": vertical, **dict.fromkeys(names, 0.0)}

    rows = artefact_rows([row("standard", 50.0), row("effective", 40.0), row("authors", 10.0)])
    assert rows[0] == {
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
    rows = short_input_rows(model, first_batch(glue, tokenizer, 3, 29), lengths=[3, 5, 11], separator=3)
    assert [row["singular_share"] for row in rows] == [0, 0, 1]
    assert max(row["difference"] for row in rows[:2]) < 1e-5 < rows[2]["difference"]


def test_faithfulness_with_paired_differences(encoder: Path, glue: Path, tokenizer: Any) -> None:
    model, _ = effective_finetune.sequence_classifier(encoder, classes=2, seed=0)
    batch = first_batch(glue, tokenizer, 2, 29)
    lengths = batch["attention_mask"].sum(-1).tolist()
    texts = [{k: t[i : i + 1, :n] for k, t in batch.items() if k != "labels"} for i, n in enumerate(lengths)]
    tables = faithfulness_tables(model, texts, task="RTE", prediction=None, keys=5, seed=0)
    # Layers 0, 1 and all, three truths, eight readings.
    assert len(tables["faithfulness"]) == 3 * 3 * 8
    by = {(r["layer"], r["against"], r["reading"]): r for r in tables["faithfulness"]}
    for row in tables["faithfulness_differences"]:
        first, second = (by[row["layer"], row["against"], row[name]]["spearman"] for name in ("first", "second"))
        assert row["spearman"] == pytest.approx(first - second, abs=1e-9)
    # The norms nearly predict what a head's output loses, and random numbers predict nothing.
    assert by["all", "head output", "norm"]["spearman"] > 0.5 > by["all", "head output", "random"]["spearman"]


def test_timing_is_against_the_eager_evaluation(encoder: Path, glue: Path, tokenizer: Any) -> None:
    model = load_model(encoder).model
    before = model.config._attn_implementation
    rows = list(timing_rows(model, first_batch(glue, tokenizer, 2, 29), what="tiny", repeats=1))
    assert [row["way"] for row in rows] == ["standard", "ours", "full-svd"]
    assert rows[0]["ratio"] == 1
    assert model.config._attn_implementation == before


def test_table_3_times_the_whole_dev_set(encoder: Path, glue: Path, tokenizer: Any) -> None:
    """Issue 20, point 10: a row for each task."""
    model = load_model(encoder).model
    batch = {name: t for name, t in first_batch(glue, tokenizer, 4, 29).items() if name != "labels"}
    batches = [{name: t[:2] for name, t in batch.items()}, {name: t[2:] for name, t in batch.items()}]
    row = task_row(model, batches, task="RTE", svd_batches=1)
    assert (row["task"], row["examples"], row["svd_batches"]) == ("RTE", 4, 1)
    assert row["ratio"] == pytest.approx(row["effective_seconds"] / row["standard_seconds"])
    assert row["svd_ratio"] > 0
