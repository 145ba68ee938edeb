"""Stages of distillation: what each trains, how layers run, run folders that are resumed, and rows of several lengths."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attnlab as al
from attnlab.adapters.distillation import HeldOut, TokenRows, row_shape
from attnlab.adapters.distillation.losses import Predictions, StageLoss
from attnlab.adapters.distillation.rows import DrawnRows
from attnlab.adapters.distillation.student import fast_layers, layers_of
from attnlab.training import list_checkpoints, read_metrics
from attnlab.training.checkpoints import read_checkpoint
from tests.adapters import zoo as hf_zoo
from tests.adapters.test_distill import Tokens, sharpened

SPEC = "abc-mlp:slots=3"
TOKENS = Tokens(masked=False)
SHORT = al.Distillation(heads_steps=2, hidden_steps=2, logits_steps=2, every=1, evaluations=2, logits_lr=3e-3)


@pytest.fixture
def teacher() -> Any:
    return sharpened("llama")


def taught(teacher: Any, settings: al.Distillation, **more: Any) -> Any:
    student = al.convert(teacher, SPEC, copy=True)
    al.distill(teacher, student, TOKENS, settings=settings, **more)
    return student


def changed(teacher: Any, student: Any) -> set[str]:
    """The parts of the student's parameters' names that are not what they were."""
    before = al.convert(teacher, SPEC, copy=True).state_dict()
    after = student.state_dict()
    assert before.keys() == after.keys()
    return {name.split(".")[-2] for name in after if not torch.equal(before[name], after[name])}


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"heads_steps": 2}, {"decoder"}),
        ({"logits_steps": 2, "train": "attention"}, {"decoder", *ATTENTION}),
        ({"logits_steps": 2, "lora": 2}, {"decoder", *ATTENTION}),
        ({"hidden_steps": 2, "lora": 2}, {"decoder", *ATTENTION}),
    ],
    ids=["heads", "attention", "lora", "hidden, lora"],
)
def test_a_stage_trains_what_it_says(teacher: Any, settings: dict[str, Any], trained: set[str]) -> None:
    student = taught(teacher, al.Distillation(**{"heads_steps": 0, "logits_steps": 0, **settings}))
    assert changed(teacher, student) == trained
    assert all(p.requires_grad for p in student.parameters())
    assert not any(type(module).__name__.startswith("Parametrized") for module in student.modules())


def test_all_parameters_are_trained_unless_something_else_is_said(teacher: Any) -> None:
    everything = changed(teacher, taught(teacher, al.Distillation(heads_steps=0, logits_steps=2)))
    assert everything > {"decoder", "embed_tokens", "norm", "down_proj", *ATTENTION}
    hidden = changed(teacher, taught(teacher, al.Distillation(heads_steps=0, hidden_steps=2, logits_steps=0)))
    # What lies before and after the layers has no part in their states.
    assert everything - hidden == {"embed_tokens", "norm", "lm_head"}


def test_a_change_of_low_rank_is_of_low_rank(teacher: Any) -> None:
    student = taught(teacher, al.Distillation(heads_steps=0, logits_steps=3, lora=2))
    for own, other in zip(student.model.layers, teacher.model.layers, strict=True):
        difference = own.self_attn.q_proj.weight - other.self_attn.q_proj.weight
        assert torch.linalg.matrix_rank(difference.detach(), rtol=1e-3) == 2
    with pytest.raises(ValueError, match="rank 1000 is more than a matrix of the attention has"):
        taught(teacher, al.Distillation(lora=1000))


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_hidden_states_come_nearer(name: str) -> None:
    teacher, source = sharpened(name), Tokens(masked=name == "bert")
    student = al.convert(teacher, SPEC, copy=True)
    loss, batch = StageLoss(teacher, student, "hidden"), source.batch(99)
    before = loss.mean(student.eval(), batch)
    settings = al.Distillation(heads_steps=0, hidden_steps=30, logits_steps=0, every=10, hidden_lr=3e-3)
    history = al.distill(teacher, student, source, settings=settings)
    assert [x.stage for x in history] == ["hidden"] * 3
    assert loss.mean(student.eval(), batch) < 0.9 * before


def test_the_hidden_loss_is_the_mean_over_layers_and_tokens(teacher: Any) -> None:
    student, batch = al.convert(teacher, SPEC, copy=True), TOKENS.batch(0)
    with torch.no_grad():
        states = [model(**batch, output_hidden_states=True).hidden_states[1:-1] for model in (teacher, student)]
        loss = StageLoss(teacher, student, "hidden").forward(student, batch)["hidden"]
        # The last of transformers' hidden states is normalised, so that layers but the last are compared.
        names = list(layers_of(teacher))
    errors = [(a - b).square().sum(-1) / a.square().sum(-1) for a, b in zip(*states, strict=True)]
    assert len(names) == len(errors) + 1
    assert float(loss.count) == batch["input_ids"].numel()
    assert float(loss.total) * len(names) > float(sum(e.sum() for e in errors))


@pytest.mark.parametrize("change", [{"checkpointing": True}, {"compile": True}], ids=str)
def test_how_layers_run_changes_nothing(teacher: Any, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def compiled(function: Any, **options: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            called.append("compiled")
            return function(*args, **kwargs)

        return run

    # The compiler itself cannot read through the shape checks that run under pytest.
    monkeypatch.setattr(torch, "compile", compiled)
    plain, other = taught(teacher, SHORT), taught(teacher, replace(SHORT, **change))
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, msg=name)
    assert ("compiled" in called) == ("compile" in change)
    assert "forward" not in teacher.model.layers[0].__dict__
    assert other.config.use_cache


def test_layers_that_cannot_be_compiled_run_as_they_are_with_one_warning(
    teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise InternalTorchDynamoError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    batch = TOKENS.batch(0)
    expected = teacher(**batch).logits
    with fast_layers(teacher, compile=True):
        with pytest.warns(RuntimeWarning, match="run uncompiled, and slower .*no compiler here") as warned:
            assert torch.equal(teacher(**batch).logits, expected)
        assert torch.equal(teacher(**batch).logits, expected)
    assert len(warned) == 1


def test_an_error_of_a_layer_is_no_error_of_the_compiler(teacher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with fast_layers(teacher, compile=True), pytest.raises(IndexError):
        teacher(input_ids=torch.tensor([[10**6]]))


def test_the_teacher_runs_once_for_a_batch(teacher: Any) -> None:
    calls: list[int] = []
    student = al.convert(teacher, SPEC, copy=True)
    teacher.model.register_forward_hook(lambda *_: calls.append(1))
    for stage in ("heads", "hidden", "logits"):
        loss = StageLoss(teacher, student, stage)
        calls.clear()
        loss.mean(student, TOKENS.batch(0)).backward()
        assert len(calls) == 1, stage


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5", "marian", "bart"])
@pytest.mark.parametrize("hard", [0.0, 0.4])
def test_predictions_in_chunks_are_those_of_the_logits(name: str, hard: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    teacher, student = hf_zoo.build(name).eval(), hf_zoo.build(name).eval()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    batch = Tokens(masked=name == "bert").batch(0)
    if teacher.config.is_encoder_decoder:
        batch["labels"] = batch["input_ids"].flip(1)
    both = Predictions(teacher, student)
    result, targets = both(batch, hard=hard)
    # Models that add to the logits after the layer over the vocabulary have none that could be left out.
    assert (both.heads[0] is None) == (name in ("marian", "bart"))
    monkeypatch.setattr(both, "heads", (None, None))
    expected, same = both(batch, hard=hard)
    assert torch.equal(targets, same)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_text_itself_is_learned_where_it_has_a_weight(teacher: Any) -> None:
    batch = TOKENS.batch(0)
    student = al.convert(teacher, SPEC, copy=True)
    StageLoss(teacher, student, "logits", hard=1.0).mean(student, batch).backward()
    other = al.convert(teacher, SPEC, copy=True)
    loss = other(**batch, labels=batch["input_ids"]).loss
    # The mean is over all positions, of which the last predicts nothing.
    (loss * 12 / 13).backward()
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(gradient, gradients(other)[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.fixture
def run(teacher: Any, tmp_path: Path) -> tuple[Any, Path]:
    settings = replace(SHORT, checkpoint_every=1, lora=2)
    return taught(teacher, settings, run_dir=tmp_path / "run", held_out=[TOKENS.batch(99)]), tmp_path / "run"


def test_a_run_folder_holds_a_run_for_each_stage(teacher: Any, run: Any) -> None:
    student, folder = run
    assert sorted(path.name for path in folder.iterdir()) == ["1-heads", "2-hidden", "3-logits"]
    lines = read_metrics(folder / "3-logits")
    evaluated = [line["values"] for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 1, 2]
    for values in evaluated:
        above = values["held-out/loss"] - values["held-out/teacher"]
        assert values["held-out/above teacher"] == pytest.approx(above)
    nearest = HeldOut(Predictions(teacher, student), [TOKENS.batch(99)]).losses()
    assert nearest["held-out/kl"] == pytest.approx(min(values["held-out/kl"] for values in evaluated), rel=1e-4)
    assert evaluated[0]["held-out/teacher"] == evaluated[-1]["held-out/teacher"]
    [first, *_] = [line["values"] for line in read_metrics(folder / "1-heads") if line["kind"] == "train"]
    assert first["loss"] == pytest.approx(sum(first[f"decoder-{i}"] for i in range(3)) / 3)


@pytest.mark.parametrize("stage", ["1-heads", "2-hidden", "3-logits"])
def test_a_stage_that_was_cut_off_ends_bit_for_bit(teacher: Any, run: Any, stage: str) -> None:
    whole, folder = run
    for later in sorted(folder.iterdir()):
        if later.name > stage:
            shutil.rmtree(later)
    (folder / stage / "result.json").unlink()
    last = list_checkpoints(folder / stage)[-1]
    assert read_checkpoint(last).step == 2
    shutil.rmtree(last)
    again = taught(teacher, replace(SHORT, lora=2), run_dir=folder, held_out=[TOKENS.batch(99)])
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("in_folder", [False, True])
def test_products_of_bfloat16_teach_nearly_the_same_and_leave_float32(
    teacher: Any, tmp_path: Path, in_folder: bool
) -> None:
    """On a CPU as on a GPU; the student's weights, which small steps add up in, are never rounded."""
    seen: set[torch.dtype] = set()

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        # A single row is the one by which the head of the predictions is found.
        if len(output) > 1:
            seen.add(output.dtype)

    students = {}
    for precision in ("no", "bf16"):
        student = al.convert(teacher, SPEC, copy=True)
        hook = student.model.layers[0].mlp.down_proj.register_forward_hook(note)
        folder = {"run_dir": tmp_path / precision, "held_out": [TOKENS.batch(99)]} if in_folder else {}
        al.distill(teacher, student, TOKENS, settings=replace(SHORT, precision=precision), **folder)
        hook.remove()
        assert seen == {torch.float32 if precision == "no" else torch.bfloat16}
        seen.clear()
        students[precision] = student.state_dict()
    before = al.convert(teacher, SPEC, copy=True).state_dict()
    assert all(weight.dtype == torch.float32 for weight in students["bf16"].values())
    exact, half = (torch.cat([(w[name] - before[name]).flatten() for name in before]) for w in students.values())
    # Adam moves a weight whose gradient is rounding as far as any other, so ways are compared, not weights.
    assert torch.cosine_similarity(exact, half, dim=0) > 0.8


def test_a_run_folder_of_other_settings_is_refused(teacher: Any, run: Any) -> None:
    with pytest.raises(RuntimeError, match="was started with other settings"):
        taught(teacher, replace(SHORT, hard=0.5), run_dir=run[1], held_out=[TOKENS.batch(99)])


def test_what_a_run_folder_cannot_honour_is_refused(teacher: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keeps its progress in metrics\.jsonl"):
        taught(teacher, SHORT, run_dir=tmp_path, on_progress=lambda progress: None)
    with pytest.raises(ValueError, match="held_out is evaluated in a run folder"):
        taught(teacher, SHORT, held_out=[TOKENS.batch(99)])
    with pytest.raises(ValueError, match="a source makes rows of its own"):
        taught(teacher, replace(SHORT, lengths=((4, 1.0),)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hard": 1.5}, r"hard must lie in \[0, 1\]"),
        ({"train": "some"}, "train must be one of all, attention"),
        ({"precision": "fp8"}, "precision must be one of auto, bf16, no"),
        ({"lora": -1}, "lora must be a rank"),
        ({"hidden_steps": -1}, "steps must be at least 0"),
        ({"lengths": ((1, 0.5),)}, "a length of at least 2"),
        ({"lengths": ((8, 0.0),)}, "a share above 0"),
        ({"batch": 0}, "must be at least 1"),
        ({"logits_lr": 1e39}, "logits_lr must be a number above 0"),
        ({"seed": -1}, "seed must lie between 0"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        al.Distillation(**change)


GROWING = al.Distillation(
    heads_steps=2, logits_steps=8, batch=6, length=16, lengths=((8, 1.0), (16, 2.0), (32, 2.0)), seed=3
)


def test_rows_grow_and_a_step_keeps_its_tokens() -> None:
    shapes = [row_shape(GROWING, step) for step in range(10)]
    assert [shape.length for shape in shapes] == [8] * 2 + [16] * 4 + [32] * 4
    assert {shape.length * shape.rows for shape in shapes} == {96}
    assert [shape.step for shape in shapes] == [0, 1, 0, 1, 2, 3, 0, 1, 2, 3]


def test_rows_of_a_stream_are_a_pure_function_of_seed_and_step() -> None:
    stream = np.arange(1000, 2000, dtype=np.uint16)
    rows = TokenRows(stream, GROWING, first=(7,))
    batch = rows.batch(5)["input_ids"]
    assert batch.shape == (6, 16)
    assert torch.equal(batch, TokenRows(stream, GROWING, first=(7,)).batch(5)["input_ids"])
    assert (batch[:, 0] == 7).all()
    assert (batch[:, 2:] - batch[:, 1:-1] == 1).all()
    assert not torch.equal(batch, TokenRows(stream, replace(GROWING, seed=4), first=(7,)).batch(5)["input_ids"])


def test_rows_of_a_stream_come_once_before_any_comes_again() -> None:
    settings = al.Distillation(heads_steps=0, logits_steps=5, batch=5, length=8)
    rows = TokenRows(np.arange(200), settings)
    first = torch.cat([rows.batch(step)["input_ids"][:, 0] for step in range(5)])
    assert sorted(first.tolist()) == list(range(0, 200, 8))
    with pytest.raises(ValueError, match="holds 7 tokens, fewer than one row of 8"):
        TokenRows(np.arange(7), settings)


def test_rows_drawn_from_strings_grow_too() -> None:
    tokenizer = al.shipped_model().tokenizer
    rows = DrawnRows(["long live the king and the queen "] * 20, tokenizer, GROWING, hf_zoo.build("llama"))
    assert [tuple(rows.batch(step)["input_ids"].shape) for step in (0, 3, 9)] == [(12, 8), (6, 16), (3, 32)]
