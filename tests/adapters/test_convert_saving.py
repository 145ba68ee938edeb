"""A converted model is saved, loaded and trained like any other; a folder that lacks something says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import attnlab as al
from attnlab.adapters import reconvert
from tests.adapters.converted import GAINED, converted
from tests.adapters.test_load import write_tokenizer
from tests.adapters.zoo import build, inputs, padding, real_logits
from tests.tolerance import assert_close


@pytest.mark.parametrize("name", GAINED)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model = converted(name)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    again = al.load_model(tmp_path).model
    assert al.is_converted(again)
    given = inputs(model, padding("mixed"))
    assert torch.equal(real_logits(again, given), real_logits(model, given))


def test_partial_conversions_and_shards_come_back(tmp_path: Path) -> None:
    model = converted("bart", {"causal": "abc-mlp:slots=3,tied=false", "cross": "rfa:features=7"}, layers=["decoder"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    write_tokenizer(tmp_path)
    again = al.load_model(tmp_path, dtype=torch.float64).model
    given = inputs(model)
    assert next(again.attnlab.parameters()).dtype == torch.float64
    assert_close(real_logits(again, given).float(), real_logits(model, given))


def test_another_head_on_a_converted_body(tmp_path: Path) -> None:
    model = converted("roberta")
    model.save_pretrained(tmp_path)
    classifier = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2).eval()
    assert not al.is_converted(classifier)
    reconvert(classifier, tmp_path)
    given = inputs(model, padding("right"))
    bodies = [m.roberta(**given).last_hidden_state for m in (model, classifier)]
    assert_close(*bodies)
    with pytest.raises(ValueError, match="is converted already"):
        reconvert(classifier, tmp_path)
    with pytest.raises(ValueError, match="says nothing of a conversion"):
        reconvert(build("roberta"), tmp_path)


def saved(tmp_path: Path) -> Path:
    converted("bert").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    return tmp_path


def edit(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_folder_without_the_conversions_section(tmp_path: Path) -> None:
    edit(saved(tmp_path) / "config.json", lambda content: content.pop("attnlab"))
    with pytest.raises(ValueError, match=r"parameters of a conversion \(attnlab.encoder.weight\), but its config.json"):
        al.load_model(tmp_path)


def test_a_folder_without_the_conversions_parameters(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = saved(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["attnlab.encoder.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"parameters do not fit its config: 1 differ, such as attnlab.encoder.weight"):
        al.load_model(tmp_path)


def test_a_folder_whose_config_asks_for_other_slots(tmp_path: Path) -> None:
    edit(
        saved(tmp_path) / "config.json",
        lambda content: content["attnlab"]["groups"]["encoder"].update(mechanism="abc-mlp:slots=9"),
    )
    with pytest.raises(ValueError, match=r"parameters do not fit its config: 1 differ, such as attnlab.encoder.weight"):
        al.load_model(tmp_path)


def test_a_section_that_cannot_be_read(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["attnlab"]["groups"]["encoder"]["layers"] = ["encoder 7"]

    edit(saved(tmp_path) / "config.json", change)
    with pytest.raises(ValueError, match="conversion in this model's config cannot be read"):
        al.load_model(tmp_path)


# Training


class Rows(torch.utils.data.Dataset):
    """Eight sentences that repeat two tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.tensor([3 + i, 20 + i] * 8)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("name", ["gpt2", "roberta"])
def test_the_trainer_trains_saves_and_resumes(name: str, tmp_path: Path) -> None:
    # With the family's own dropout of attention weights, which a converted layer leaves out.
    model = converted(name)
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 5,
        "logging_steps": 5,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    start = {key: t.clone() for key, t in model.attnlab.state_dict().items()}
    trainer = tf.Trainer(model=model, args=tf.TrainingArguments(**settings, max_steps=10), train_dataset=Rows())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    for key, t in model.attnlab.state_dict().items():
        assert not torch.equal(t, start[key])
    folder = tmp_path / "checkpoint-10"
    write_tokenizer(folder)
    again = al.load_model(folder).model
    given = inputs(model)
    assert_close(real_logits(again, given), real_logits(model.eval(), given))
    resumed = tf.Trainer(
        model=converted(name), args=tf.TrainingArguments(**settings, max_steps=10), train_dataset=Rows()
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.state.global_step == 10


def test_our_engine_trains_it(tmp_path: Path) -> None:
    from attnlab.training import CrossEntropy, Recipe, Schedule, Settings, read_metrics, train

    class Source:
        def batch(self, step: int) -> dict[str, Tensor]:
            rows = Rows()
            batch = [rows[(2 * step + i) % 8] for i in range(4)]
            return {key: torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels")}

    model = converted("llama")
    start = model.attnlab.decoder.weight.detach().clone()
    settings = Settings(
        steps=10, recipe=Recipe(lr=0.03), schedule=Schedule("constant"), seed=0, device="cpu", log_every=1
    )
    train(model, Source(), terms=[CrossEntropy()], settings=settings, run_dir=tmp_path)
    losses = [line["values"]["loss"] for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(model.attnlab.decoder.weight, start)


# Refusals
