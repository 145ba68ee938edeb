"""Guidance under the Hugging Face Trainer: two lines, whatever else the trainer does, and a plain model afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from attnlab.guidance import Guidance, guide, guide_trainer
from tests.guidance.trained import HEADS, PLAIN, STILL, TOKENS, bert, guided_run, texts, trainer_of

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
LOGGED = 1e-4
CONSTANT = Guidance(heads=HEADS, alpha0=10, schedule="constant", reduction="row")


def test_two_lines_and_the_guidance_loss_falls(tmp_path: Path) -> None:
    guidance = Guidance(heads=HEADS, alpha0=10, hold=2 / 3, reduction="row")
    model, logs = guided_run(tmp_path, steps=31, lr=1e-2, model=STILL, guidance=guidance)
    assert min(line["guidance"] for line in logs) < 0.5 * logs[0]["guidance"]
    assert [line["alpha"] for line in logs[20:26:5]] == pytest.approx([10, 5])
    assert logs[-1]["alpha"] == 0
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_default_alpha_falls_to_zero_at_the_trainers_last_step(tmp_path: Path) -> None:
    """The two lines of docs/guidance.md: no hold and no steps are given."""
    model = {**STILL, "num_hidden_layers": 3}
    _, logs = guided_run(tmp_path, steps=11, model=model, guidance=Guidance(fraction=0.5, alpha0=10))
    alphas = [line["alpha"] for line in logs]
    assert alphas[:4] == [10] * 4
    assert alphas[4:] == pytest.approx([10 * (10 - t) / 7 for t in range(4, 11)])
    assert alphas[-1] == 0


def test_the_trainer_is_plain_again_also_after_an_error(tmp_path: Path) -> None:
    trainer = trainer_of(bert(), tmp_path)
    with pytest.raises(RuntimeError, match="stop"), guide_trainer(trainer, Guidance(heads=HEADS), tokens=TOKENS):
        raise RuntimeError("stop")
    assert {"compute_loss", "log"}.isdisjoint(vars(trainer))
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "how",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_accumulation_steps": 2, "batch": 2},
    ],
    ids=["checkpointing", "accumulation"],
)
def test_the_same_model_comes_out(tmp_path: Path, how: dict[str, Any]) -> None:
    plain, _ = guided_run(tmp_path, model=STILL, **PLAIN)
    other, _ = guided_run(tmp_path, model=STILL, **PLAIN, **how)
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dropped", [0.0, 0.5], ids=["no dropout", "attention dropout"])
def test_mixed_precision(tmp_path: Path, dropped: float) -> None:
    model = {"attention_probs_dropout_prob": dropped, "hidden_dropout_prob": 0.0}
    _, logs = guided_run(tmp_path, steps=15, lr=1e-2, bf16=True, model=model, guidance=CONSTANT)
    assert logs[-1]["guidance"] < logs[0]["guidance"]


def test_reentrant_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_reentrant"):
        guided_run(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


def test_evaluation_is_not_guided(tmp_path: Path) -> None:
    trainer = trainer_of(bert(**STILL), tmp_path)
    trainer.eval_dataset = texts(8)
    before = trainer.evaluate()["eval_loss"]
    with guide_trainer(trainer, Guidance(heads=HEADS, alpha0=1000, schedule="constant"), tokens=TOKENS):
        assert trainer.evaluate()["eval_loss"] == pytest.approx(before)


def test_a_translation_model_makes_its_decoder_inputs_from_the_labels() -> None:
    torch.manual_seed(0)
    config = tf.T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0
    )
    model = tf.T5ForConditionalGeneration(config).train()
    ids, labels = torch.randint(3, 31, (2, 7)), torch.randint(3, 31, (2, 5))
    for kind in ("encoder", "decoder", "cross"):
        with guide(model, Guidance(heads={"first": 1}, kind=kind, reduction="row")) as term:
            model(input_ids=ids, labels=labels)
            assert term.last_count() == (14 if kind == "encoder" else 10)
            term.total().backward()


def ended(tmp_path: Path, *command: str) -> tuple[dict[str, Any], Any, list[dict[str, float]]]:
    """(what a run in other processes left, the model and the logs of the same run in this one)."""
    # Without the shape checks that run under pytest, which torch.compile cannot read through.
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-m", *command], check=True, timeout=300, cwd=root, capture_output=True)
    return json.loads((tmp_path / "ended.json").read_text()), *guided_run(tmp_path, model=STILL, **PLAIN)


def assert_same(left: dict[str, Any], model: Any, logs: list[dict[str, float]]) -> None:
    """Parameters, and what was logged of guidance."""
    for name, p in model.named_parameters():
        weights = torch.tensor(left["weights"][name])
        torch.testing.assert_close(
            weights, p.detach().flatten()[:3], **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )
    for a, b in zip(left["logs"], logs, strict=True):
        assert (a["guidance"], a["alpha"]) == pytest.approx((b["guidance"], b["alpha"]), rel=LOGGED)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(tmp_path: Path, backend: str) -> None:
    assert_same(*ended(tmp_path, "tests.guidance.trained", str(tmp_path), "4", backend))


@pytest.mark.slow
def test_our_loop_compiled(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.guidance.trained", "own", str(tmp_path)]
    printed = subprocess.run(command, check=True, timeout=300, cwd=root, capture_output=True, text=True).stdout
    plain, compiled = json.loads(printed.splitlines()[-1])
    for a, b in zip(plain, compiled, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Two ranks of two texts a step end where one process of four ends; a rank logs its own texts' loss."""
    launch = ("torch.distributed.run", "--nproc-per-node=2", "--master-port=29517", "-m")
    left, model, _ = ended(tmp_path, *launch, "tests.guidance.trained", str(tmp_path), "2", "none")
    assert_same(left, model, left["logs"])
