"""What a step of distillation is said to hold is what a step's rows keep, in every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attnlab as al
from attnlab.adapters.distillation import memory
from attnlab.adapters.distillation.memory import saved_bytes, step_bytes
from tests.adapters.zoo import DECODERS, build

ROWS, LENGTH = 3, 40


def settings(rows: int, **changes: bool) -> al.Distillation:
    return al.Distillation(batch=rows, length=LENGTH, **changes)  # type: ignore[arg-type]


def of_rows(model: nn.Module) -> float:
    """What some more rows add."""
    return step_bytes(model, settings(1 + ROWS)) - step_bytes(model, settings(1))


@pytest.mark.parametrize("name", DECODERS)
def test_a_step_keeps_what_it_is_said_to(name: str) -> None:
    model = build(name)
    kept = saved_bytes(getattr(model, model.base_model_prefix), ROWS, LENGTH)
    # What does not grow with the rows (masks, tables) is not counted.
    assert 0.95 * kept < of_rows(model) < 1.02 * kept


def test_what_learns_and_what_is_computed_twice_is_counted() -> None:
    model = build("llama")
    own, of_row = 4 * sum(p.numel() for p in model.parameters()), of_rows(model) / ROWS
    assert step_bytes(model, settings(1)) == pytest.approx(5 * own + of_row)
    assert step_bytes(model, settings(1), weights=False) == pytest.approx(2 * own + of_row)
    assert step_bytes(model, al.Distillation(batch=1, length=LENGTH, lora=2)) == pytest.approx(2 * own + of_row)
    assert step_bytes(model, settings(ROWS), processes=ROWS) == pytest.approx(5 * own + of_row)
    assert step_bytes(model, settings(ROWS, checkpointing=True)) < step_bytes(model, settings(ROWS))
    half = al.Distillation(batch=1, length=LENGTH, precision="bf16")
    assert 4.5 * own < step_bytes(model, half) < step_bytes(model, settings(1))
    fused = al.Distillation(batch=1, length=LENGTH, compile=True, precision="no")
    assert step_bytes(model, fused, torch.device("cuda")) == pytest.approx(5 * own + of_row / 2)
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_takes_no_ids_keeps_the_inputs_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def refuse(*args: object, **kwargs: object) -> int:
        raise TypeError("no input_ids")

    monkeypatch.setattr(memory, "saved_bytes", refuse)
    assert of_rows(model) == 4 * model.config.num_hidden_layers * model.config.hidden_size * ROWS * LENGTH
