"""GLUE as the reproduction of Effective reads it: labels, splits, cuts, tags, scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from papers.effective import finetune as effective_finetune
from papers.effective.glue import (
    TASKS,
    Examples,
    GlueSource,
    encode,
    read_glue,
    read_splits,
    subset,
    tag_types,
)
from papers.effective.tagger import train_tagger
from tests.papers.effective.cases import GOLD


def test_rows_of_both_kinds_of_label(glue: Path) -> None:
    assert [label for _, label in read_glue(glue, TASKS["RTE"], "dev")[:2]] == [1.0, 0.0]
    texts, label = read_glue(glue, TASKS["STS-B"], "train")[4]
    assert (texts[1], label) == ("a dog sees the cat .", 4.5)
    with pytest.raises(ValueError, match=r"MRPC holds no dev.tsv"):
        read_glue(glue, TASKS["MRPC"], "dev")


def test_dev_is_shuffled_and_a_task_without_train_is_cut_in_two(glue: Path, tmp_path: Path) -> None:
    splits, how = read_splits(glue, TASKS["STS-B"], seed=0)
    ordered = read_glue(glue, TASKS["STS-B"], "dev")
    assert splits["dev"] != ordered
    assert sorted(splits["dev"]) == sorted(ordered)
    assert how == "train.tsv and dev.tsv"
    (tmp_path / "QNLI").mkdir()
    lines = [f"{i}\tquestion {i}\tsentence {i % 10}\t{'entailment' if i % 2 else 'not_entailment'}" for i in range(30)]
    (tmp_path / "QNLI" / "dev.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *lines]) + "\n")
    splits, how = read_splits(tmp_path, TASKS["QNLI"], seed=0)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 24, "dev": 6}
    assert not {texts[1] for texts, _ in splits["train"]} & {texts[1] for texts, _ in splits["dev"]}
    assert "no sentence on both sides" in how


def test_pairs_are_cut_from_the_longer_text(tokenizer: Any) -> None:
    examples = encode([(("the cat sees her .", "a dog"), 1.0)], tokenizer, length=8)
    # [CLS] the cat sees [SEP] a dog [SEP]: five places for six words and a full stop.
    assert examples.ids == [[2, 5, 6, 7, 3, 10, 11, 3]]
    assert examples.segments == [[0, 0, 0, 0, 0, 1, 1, 1]]
    batch = examples.batch([0], length=11, segments=True, classes=2)
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


def test_a_word_has_its_tag_at_its_first_token(tokenizer: Any) -> None:
    examples = encode([(("the cat sees her .", "a dog"), 0.0)], tokenizer, length=16)
    (types,) = tag_types(examples, tokenizer, train_tagger(GOLD), length=16)
    # [CLS] the cat sees her . [SEP] a dog [SEP]
    assert types.tolist()[:7] == [4, -1, 0, 2, 1, 5, 3]
    assert len(types) == 10
    assert types[-1] == 3


def test_scores() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert effective_finetune.metrics(logits, torch.tensor([1, 1, 0, 0])) == {"accuracy": 0.5, "f1": 0.5}
    assert effective_finetune.metrics(logits[:, :1], torch.tensor([2.0, 4.0, 2.0, 4.0]))["pearson"] == pytest.approx(1)
