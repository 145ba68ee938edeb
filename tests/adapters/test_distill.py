"""distill: the new parameters learn the teacher's outputs layer by layer, then the model its predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attnlab as al
from attnlab.adapters.distillation import Distillation, StageProgress, TokenRows, layer_error
from tests.adapters import zoo as hf_zoo
from tests.quick_cases import in_turn


class Tokens:
    """Rows of random tokens with some structure: each is its predecessor plus one, now and then a jump."""

    def __init__(self, *, masked: bool) -> None:
        self.masked = masked

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        start = torch.randint(3, 50, (5, 1), generator=draw)
        ids = 3 + (start + torch.arange(13)) % 50
        if not self.masked:
            return {"input_ids": ids}
        hidden = torch.rand(ids.shape, generator=draw) < 0.3
        return {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)}


def sharpened(name: str) -> Any:
    """A random model whose attention is not nearly uniform, so that there is something to imitate."""
    torch.manual_seed(0)
    model = hf_zoo.build(name)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if p.dim() == 2 and ("query" in parameter or "q_proj" in parameter or "c_attn" in parameter):
                p.mul_(8)
    for module in model.modules():
        # So few steps would drown in the noise.
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def errors(teacher: Any, student: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(value-aware error of the student's attention on the teacher's calls, distance of their predictions)."""
    inputs = {"input_ids": batch["input_ids"]}
    with torch.no_grad(), al.record(teacher) as trace, al.record(student) as own:
        expected, predicted = teacher(**inputs).logits, student.eval()(**inputs).logits
    mechanisms = {(layer.kind, layer.layer): layer.mechanism for layer in own}
    learned = batch.get("labels", inputs["input_ids"]) != -100
    distance = (expected.softmax(-1) - predicted.softmax(-1)).abs()[learned].sum()
    return float(layer_error(trace, mechanisms).detach()), float(distance)


@pytest.mark.parametrize(("name", "masked"), [("bert", True), ("llama", False)])
def test_each_stage_brings_the_student_nearer(name: str, masked: bool) -> None:
    teacher, source = sharpened(name), Tokens(masked=masked)
    student = al.convert(teacher, "abc-mlp:slots=3", copy=True)
    before = {n: p.detach().clone() for n, p in teacher.named_parameters()}
    reports: list[StageProgress] = []
    distances = [errors(teacher, student, source.batch(99))]
    for steps in ((40, 0), (0, 60)):
        settings = al.Distillation(heads_steps=steps[0], logits_steps=steps[1], every=20, heads_lr=0.03, logits_lr=3e-3)
        history = al.distill(teacher, student, source, settings=settings, on_progress=lambda x: reports.append(x))
        assert history == reports[-len(history) :]
        distances.append(errors(teacher, student, source.batch(99)))
    assert [(x.stage, x.step) for x in reports] == [
        ("heads", 20), ("heads", 40), ("logits", 20), ("logits", 40), ("logits", 60),
    ]  # fmt: skip
    assert distances[1][0] < 0.9 * distances[0][0]
    assert distances[2][1] < distances[1][1]
    assert all(torch.equal(before[n], p) for n, p in teacher.named_parameters())
    assert all(p.requires_grad for p in student.parameters())


def test_the_first_stage_changes_the_new_parameters_only() -> None:
    teacher = sharpened("bert")
    student = al.convert(teacher, "abc-mlp:slots=3", copy=True)
    before = {n: p.detach().clone() for n, p in student.named_parameters()}
    al.distill(teacher, student, Tokens(masked=True), settings=al.Distillation(heads_steps=2, logits_steps=0))
    changed = {n for n, p in student.named_parameters() if not torch.equal(before[n], p)}
    assert changed == {"attnlab.encoder.weight"}


def test_the_error_of_the_same_attention_is_zero_and_of_none_is_one() -> None:
    teacher = sharpened("llama")
    with torch.no_grad(), al.record(teacher) as trace:
        teacher(**Tokens(masked=False).batch(0))
    same = layer_error(trace, {("decoder", i): al.Softmax() for i in range(3)})
    assert float(same) < 1e-10

    class Nothing(al.Mechanism):
        def forward(self, call: al.AttentionCall) -> torch.Tensor:
            return torch.zeros_like(al.Softmax()(call))

    assert float(layer_error(trace, {("decoder", 1): Nothing()})) == pytest.approx(1.0)


def test_padding_does_not_count() -> None:
    teacher = sharpened("bert")
    ids, mask = torch.randint(3, 61, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    errors = []
    for filler in (5, 17):
        with torch.no_grad(), al.record(teacher) as trace:
            teacher(ids.masked_fill(mask == 0, filler), attention_mask=mask)
        errors.append(layer_error(trace, {("encoder", 0): al.mechanism("abc-random:slots=2")}))
    torch.testing.assert_close(errors[0], errors[1])


def test_a_model_without_new_parameters_begins_with_the_second_stage() -> None:
    teacher = sharpened("llama")
    student = al.convert(teacher, "abc-random:slots=2", copy=True)
    settings = al.Distillation(heads_steps=3, logits_steps=2)
    history = al.distill(teacher, student, Tokens(masked=False), settings=settings, on_progress=lambda progress: True)
    assert [(x.stage, x.step) for x in history] == [("logits", 2)]


class Pairs:
    """One batch of sources, and of targets that are the sources backwards, with padding."""

    def __init__(self, *, labels: bool) -> None:
        self.labels = labels

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        ids = Tokens(masked=False).batch(0)["input_ids"]
        targets = ids.flip(1)[:, :7].clone()
        if self.labels:
            targets[:, 5:] = -100
            return {"input_ids": ids, "labels": targets}
        return {"input_ids": ids, "decoder_input_ids": targets, "decoder_attention_mask": (targets > 9).long()}


@pytest.mark.parametrize(("name", "labels"), in_turn(["marian", "bart", "t5"], [False, True]))
def test_encoder_decoders_learn_from_pairs(name: str, labels: bool) -> None:
    bias = "drop" if name == "t5" else "refuse"
    teacher = sharpened(name)
    student = al.convert(teacher, "abc-mlp:slots=3", bias=bias, copy=True)
    settings = al.Distillation(heads_steps=20, logits_steps=20, every=5, logits_lr=1e-3)
    history = al.distill(teacher, student, Pairs(labels=labels), settings=settings)
    for stage in ("heads", "logits"):
        first, *_, last = [x.loss for x in history if x.stage == stage]
        assert last < first


def test_encoder_decoders_do_not_learn_from_texts() -> None:
    teacher = hf_zoo.build("bart")
    student = al.convert(teacher, "abc-mlp:slots=3", copy=True)
    with pytest.raises(ValueError, match="learns from pairs, not from texts"):
        al.distill(teacher, student, ["a b"], tokenizer=object())
    with pytest.raises(ValueError, match="need labels or decoder_input_ids"):
        al.distill(teacher, student, Tokens(masked=False))


def test_strings_are_enough_with_the_models_tokenizer() -> None:
    from attnlab.adapters.load import SHIPPED

    loaded = al.load_model(SHIPPED)
    student = al.convert(loaded.model, "abc-mlp:slots=4", copy=True)
    settings = al.Distillation(heads_steps=2, logits_steps=1, batch=2, length=11)
    texts = ["The old man went to the sea and came back with a fish.", "It rained."]
    history = al.distill(loaded.model, student, texts, tokenizer=loaded.tokenizer, settings=settings)
    assert [(x.stage, x.step) for x in history] == [("heads", 2), ("logits", 1)]


def test_bad_arguments_are_refused() -> None:
    teacher = hf_zoo.build("bert")
    student = al.convert(teacher, "abc-mlp:slots=2", copy=True)
    with pytest.raises(ValueError, match="wants the model as it was"):
        al.distill(teacher, teacher, Tokens(masked=True))
    with pytest.raises(ValueError, match="tokenizer= is needed"):
        al.distill(teacher, student, ["a text"])
    with pytest.raises(ValueError, match="one stage must have some"):
        al.Distillation(heads_steps=0, logits_steps=0)


def test_no_texts_are_refused() -> None:
    model = hf_zoo.build("llama")
    converted = al.convert(model, "abc-mlp:slots=3", copy=True)
    with pytest.raises(ValueError, match="texts is empty: there is nothing to learn from"):
        al.distill(model, converted, [], tokenizer=al.shipped_model().tokenizer)


def test_a_terminal_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = hf_zoo.build("llama")
    converted = al.convert(model, "abc-mlp:slots=3", copy=True)
    settings = al.Distillation(heads_steps=2, logits_steps=3)
    al.distill(model, converted, Tokens(masked=False), settings=settings)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    al.distill(model, converted, Tokens(masked=False), settings=settings)
    shown = capsys.readouterr().err
    assert "distilling, heads: 100%" in shown
    assert "3/3" in shown


def test_our_own_masked_language_model_learns_from_texts() -> None:
    from attnlab.models import Transformer, TransformerConfig

    loaded = al.shipped_model()
    config = TransformerConfig(
        kind="encoder", vocab=len(loaded.tokenizer), width=12, heads=3, layers=1, head="mlm", max_length=40
    )
    model = Transformer(config).eval()
    converted = al.convert(model, "abc-mlp:slots=3", copy=True)
    settings = al.Distillation(heads_steps=1, logits_steps=1, batch=2, length=11)
    history = al.distill(
        model, converted, ["long live the king and queen"] * 3, tokenizer=loaded.tokenizer, settings=settings
    )
    assert [progress.stage for progress in history] == ["heads", "logits"]


def test_repeated_passages_stand_twice_in_a_share_of_the_rows_and_nowhere_else():
    settings = Distillation(heads_steps=0, logits_steps=4, batch=64, length=40, repeats=0.25)
    rows = TokenRows(np.arange(64 * 40 * 2), settings).batch(0)["input_ids"]
    plain = TokenRows(np.arange(64 * 40 * 2), replace(settings, repeats=0.0)).batch(0)["input_ids"]
    # All tokens of the stream differ, so a row with a repeat has an eighth fewer.
    distinct = torch.tensor([len(set(row.tolist())) for row in rows])
    assert set(distinct.tolist()) == {35, 40}
    assert 8 <= int((distinct == 35).sum()) <= 24
    assert torch.equal(rows[distinct == 40], plain[distinct == 40])
    assert torch.equal(rows, TokenRows(np.arange(64 * 40 * 2), settings).batch(0)["input_ids"])
