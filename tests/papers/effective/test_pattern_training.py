"""The pattern classifier's training: labelled maps, generated pictures, variations and scores."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch

from attnlab.reading.pattern_data import CLASSES, SIZE
from attnlab.reading.pattern_net import PatternNet
from papers.effective.labelled_maps import (
    LabelledMaps,
    collect_maps,
    contact_sheet,
    load_labelled,
    save_labelled,
    write_png,
)
from papers.effective.pattern_augment import varied
from papers.effective.pattern_generator import generated_pictures
from papers.effective.pattern_scores import confusion_rows
from papers.effective.pattern_training import cross_validated, leave_one_model_out, our_maps, scores, train_classifier


def test_a_sheet_is_a_png_that_pillow_reads(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    pictures = np.zeros((5, SIZE, SIZE), dtype=np.uint8)
    pictures[3, :, 0] = 255
    sheet = contact_sheet(pictures, first=17, columns=2, scale=2)
    path = write_png(tmp_path / "sheet.png", sheet)
    read = np.asarray(image.open(io.BytesIO(path.read_bytes())))
    assert np.array_equal(read, sheet)
    # Picture 3 is in the second row, second column: its first column of dots is black.
    cell = SIZE * 2
    assert (sheet[cell + 28 : 2 * cell + 28, cell + 8] == 0).all()


def test_labels_are_saved_loaded_and_checked(tmp_path) -> None:
    entries = [
        {"model": m, "layer": 0, "head": i, "reading": "standard", "text": 0, "label": "block"}
        for i, m in enumerate("aab")
    ]
    maps = LabelledMaps(np.arange(3 * SIZE * SIZE, dtype=np.uint8).reshape(3, SIZE, SIZE), entries)
    save_labelled(tmp_path, maps, made={"how": "by hand"})
    again = load_labelled(tmp_path)
    assert np.array_equal(again.pictures, maps.pictures)
    assert again.entries == entries
    assert [e["head"] for e in again.of(["b"]).entries] == [2]
    stored = json.loads((tmp_path / "labels.json").read_text())
    stored["maps"][0]["label"] = "zigzag"
    (tmp_path / "labels.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="zigzag"):
        load_labelled(tmp_path)
    stored["maps"] = entries[:-1]
    (tmp_path / "labels.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="maps but"):
        load_labelled(tmp_path)


def test_maps_are_collected_from_a_model_in_both_readings() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=6, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=50)
    texts = [{"input_ids": torch.arange(n)[None]} for n in (11, 17)]
    collected = collect_maps(BertModel(config).eval(), texts, name="tiny", count=6)
    assert collected.pictures.shape == (6, SIZE, SIZE)
    assert {e["reading"] for e in collected.entries} == {"standard", "effective"}
    assert all(e["tokens"] == (11, 17)[e["text"]] for e in collected.entries)


def test_generated_maps_are_reproducible_and_evenly_spread() -> None:
    pictures, labels = generated_pictures(20, seed=3)
    again, _ = generated_pictures(20, seed=3)
    assert torch.equal(pictures, again)
    assert torch.bincount(labels).tolist() == [4] * len(CLASSES)
    assert 0 <= pictures.min() <= pictures.max() <= 1


def test_training_on_generated_maps_beats_chance_on_others() -> None:
    net = train_classifier(None, generated=300, steps=25, members=1)
    pictures, labels = generated_pictures(100, seed=99)
    with torch.no_grad():
        right = (net(pictures).argmax(-1) == labels).float().mean()
    assert right > 0.4


def test_variations_keep_the_pattern() -> None:
    lines = torch.stack([torch.eye(SIZE), torch.zeros(SIZE, SIZE), torch.ones(SIZE, SIZE).tril()])
    lines[1, :, [0, -1]] = 1
    x = lines.repeat(7, 1, 1)
    changed = varied(x, torch.Generator().manual_seed(0))
    assert changed.shape == x.shape
    assert 0 <= changed.min() <= changed.max() <= 1
    again = varied(x, torch.Generator().manual_seed(0))
    assert torch.equal(changed, again)
    # A diagonal stays dark, and what is ahead of a causal map's queries stays blank.
    assert changed[0::3].diagonal(dim1=1, dim2=2).median(-1).values.min() > 0.5
    assert changed[2::3].triu(SIZE // 8).max() == 0


def test_held_out_models_and_maps() -> None:
    entries = [
        {"model": m, "family": "a" if m == "c" else m, "label": CLASSES[i % 5]} for i, m in enumerate("aabbcc" * 3)
    ]
    maps = LabelledMaps(np.random.default_rng(0).integers(0, 255, (18, SIZE, SIZE), dtype=np.uint8), entries)
    made = generated_pictures(5)
    by_family = leave_one_model_out(maps, made=made, steps=1)
    # A model that was continued from another is held out with it.
    assert {name: s["maps"] for name, s in by_family.items()} == {"a": 12, "b": 6}
    assert cross_validated(maps, folds=2, made=made, steps=1)["maps"] == 18


def test_scores_by_hand() -> None:
    class Fixed(PatternNet):
        def forward(self, x):
            return torch.nn.functional.one_hot(torch.tensor([0, 0, 1]), 5).float()

    entries = [{"model": "a", "label": name} for name in ("vertical", "diagonal", "diagonal")]
    result = scores(Fixed(), LabelledMaps(np.zeros((3, SIZE, SIZE), dtype=np.uint8), entries))
    assert result["confusion"][1][:2] == [1, 1]
    assert result["f1"]["vertical"] == pytest.approx(2 / 3)
    assert result["f1"]["diagonal"] == pytest.approx(2 / 3)
    assert result["f1"]["block"] is None
    assert result["accuracy"] == pytest.approx(2 / 3)
    assert confusion_rows(result)[1]["vertical"] == 1


def test_the_shipped_maps_are_many_and_of_several_models() -> None:
    maps = our_maps()
    assert len(maps.entries) >= 600
    assert sum(e["label"] == "block" for e in maps.entries) >= 50
    # Nearly all maps that were looked at twice got one answer.
    twice = [e["passes"] for e in maps.entries if len(e["passes"]) > 1]
    assert len(twice) >= 400
    assert sum(a == b for a, b, *_ in twice) > 0.8 * len(twice)
    assert len({e["model"] for e in maps.entries}) >= 3
    assert {e["reading"] for e in maps.entries} == {"standard", "effective"}
