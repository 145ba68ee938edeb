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
from tests.papers.glue_files import write_mnli, write_qqp


def test_rows_of_both_kinds_of_label(glue: Path) -> None:
    assert [label for _, label in read_glue(glue, TASKS["RTE"], "dev")[:2]] == [1.0, 0.0]
    texts, label = read_glue(glue, TASKS["STS-B"], "train")[4]
    assert (texts[1], label) == ("a dog sees the cat .", 4.5)
    with pytest.raises(ValueError, match=r"MRPC holds no dev.tsv"):
        read_glue(glue, TASKS["MRPC"], "dev")


PAIRS = [("the cat sees her .", "a dog sees the cat ."), ('he said "no', "she did ."), ("a dog", "the dog .")] * 2


def test_mnli_has_three_classes_and_two_development_sets(tmp_path: Path) -> None:
    write_mnli(tmp_path, PAIRS)
    task = TASKS["MNLI"]
    matched, mismatched = (read_glue(tmp_path, task, split) for split in task.dev)
    # neutral, entailment, contradiction: by the gold label, not by an annotator's.
    assert [label for _, label in matched] == [2.0, 1.0, 0.0] * 2
    assert matched[1][0] == ('he said "no fiction', "she did .")
    assert mismatched[1][0] == ('he said "no letters', "she did .")
    assert read_glue(tmp_path, task, "dev") == matched
    assert len(read_glue(tmp_path, task, "train")) == 6
    assert read_splits(tmp_path, task, seed=0)[1] == "train.tsv and dev_matched.tsv"
    dev = tmp_path / "MNLI" / "dev_matched.tsv"
    dev.write_text(dev.read_text().replace("\tentailment\n", "\t-\n"))
    with pytest.raises(ValueError, match=r"line 3: '-' is not among MNLI's contradiction, entailment, neutral"):
        read_glue(tmp_path, task, "dev")
    dev.unlink()
    with pytest.raises(ValueError, match=r"MNLI holds no dev_matched.tsv"):
        read_glue(tmp_path, task, "dev")


def test_qqp_leaves_short_lines_out_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qqp(tmp_path, PAIRS)
    rows = read_glue(tmp_path, TASKS["QQP"], "train")
    assert rows[:2] == [(PAIRS[0], 0.0), (PAIRS[1], 1.0)]
    assert len(rows) == 6
    assert "1 malformed line skipped" in capsys.readouterr().err
    assert len(read_glue(tmp_path, TASKS["QQP"], "dev")) == 6
    assert capsys.readouterr().err == ""
    train = tmp_path / "QQP" / "train.tsv"
    train.write_text(train.read_text().replace("\t1\n", "\tyes\n"))
    with pytest.raises(ValueError, match=r"line 3: expected a number as is_duplicate, got 'yes'"):
        read_glue(tmp_path, TASKS["QQP"], "train")


def test_three_classes_are_scored_by_all_of_them() -> None:
    logits = torch.eye(3)[[0, 2, 2, 1]]
    assert effective_finetune.metrics(logits, torch.tensor([0, 2, 0, 1])) == {"accuracy": 0.75}
    two = effective_finetune.metrics(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 1, 0, 1]))
    assert two == {"accuracy": 0.75, "f1": pytest.approx(0.8)}


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


def test_padding_has_the_tokenizers_own_id(tokenizer: Any) -> None:
    """Padding inside V is what the authors' way reads, and MPNet's and RoBERTa's <s> has the id 0."""
    tokenizer.pad_token = "a"
    examples = encode([(("the cat",), 1.0)], tokenizer, length=8)
    assert examples.batch([0], length=6, segments=False, classes=2)["input_ids"].tolist() == [[2, 5, 6, 3, 10, 10]]
    assert examples.first(1).pad == 10


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
