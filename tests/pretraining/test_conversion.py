"""attnlab convert from a model and a text to a folder: what it leaves, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.pretraining import conversion
from attnlab.pretraining.conversion import ConversionConfig, fitted_lengths
from attnlab.training import RunError, list_checkpoints, read_metrics, read_result
from tests.pretraining.conversions import SETTINGS, SPEC, config, files, halves, job
from tests.training.jobs import without_seconds

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("1-heads", "2-hidden", "3-logits")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("converted") / "run"
    job(folder, run_dir)
    return run_dir


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return al.load_model(run_dir).model.state_dict()


def test_the_result_loads_and_generates(converted: Path) -> None:
    model, tokenizer, task = al.load_model(converted)
    assert task == "causal"
    assert al.is_converted(model)
    prompt = tokenizer("a b", return_tensors="pt")["input_ids"]
    assert model.generate(prompt, max_new_tokens=5, do_sample=False).shape[1] > prompt.shape[1]


def test_the_folder_says_what_was_done(converted: Path) -> None:
    assert sorted(path.name for path in (converted / "stages").iterdir()) == list(STAGES)
    steps = json.loads((converted / "run.json").read_text())["data"]["steps"]
    assert steps == {"heads": 3, "hidden": 3, "logits": 6}
    result = read_result(converted)
    assert result is not None
    assert result["metrics"]["held-out/above teacher"] == pytest.approx(
        result["metrics"]["held-out/loss"] - result["metrics"]["held-out/teacher"]
    )
    assert result["tokens"] == 12 * 32
    assert all(0 < row["bytes"] < row["softmax_bytes"] for row in result["cache"])
    saved = result["saved"]
    folders = [folder for folder in (converted / "stages").iterdir() if folder.name.endswith(saved["stage"])]
    evaluated = {x["step"]: x["values"] for x in read_metrics(folders[0]) if x["kind"] == "eval"}
    assert evaluated[saved["step"]]["held-out/loss"] == pytest.approx(result["metrics"]["held-out/loss"], rel=1e-6)
    assert result["metrics"]["held-out/kl"] == pytest.approx(saved["kl"], rel=1e-6)
    assert set(result["learning_rates"]) == {"heads", "hidden", "logits"}


def distances(run_dir: Path) -> list[float]:
    """KL on held-out text at all evaluations."""
    lines = [line for stage in STAGES if (run_dir / "stages" / stage).exists() for line in
             read_metrics(run_dir / "stages" / stage)]  # fmt: skip
    return [line["values"]["held-out/kl"] for line in lines if line["kind"] == "eval"]


def test_the_student_with_the_least_distance_is_saved(converted: Path) -> None:
    result = read_result(converted)
    assert result is not None
    assert result["saved"]["kl"] == min(distances(converted))
    assert result["saved"]["kl_at_start"] == distances(converted)[0]


def test_a_student_that_only_gets_worse_is_saved_as_it_began(folder: Path, tmp_path: Path) -> None:
    far = replace(SETTINGS, heads_lr=3.0, logits_lr=3.0)
    result = job(folder, tmp_path / "run", settings=far, stages=(("heads", 1.0), ("logits", 1.0)))
    assert result["saved"] == {
        "stage": "heads",
        "step": 0,
        "of": 6,
        "kl": distances(tmp_path / "run")[0],
        "kl_at_start": distances(tmp_path / "run")[0],
    }
    assert max(distances(tmp_path / "run")) > 2 * result["saved"]["kl"]
    assert result["metrics"]["held-out/kl"] == pytest.approx(result["saved"]["kl"], rel=1e-6)
    # Every stage goes on from the best of the one before.
    assert distances(tmp_path / "run").count(result["saved"]["kl"]) == 2


def test_a_near_student_has_a_lower_rate_and_goes_on_with_it(folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"settings": replace(SETTINGS, scale_lr=True), "stages": (("logits", 1.0),)}
    result = job(folder, tmp_path / "run", **changes)
    kl = distances(tmp_path / "run")[0]
    assert 0 < kl < 1
    expected = SETTINGS.logits_lr * (kl * 32 / 32768) ** 0.5
    assert result["learning_rates"]["logits"] == pytest.approx(expected, rel=0.01)
    logits = tmp_path / "run" / "stages" / "3-logits"
    for path in (tmp_path / "run" / "result.json", logits / "result.json"):
        path.unlink()
    shutil.rmtree(list_checkpoints(logits)[-1])
    before = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    assert job(folder, tmp_path / "run", **changes)["saved"] == result["saved"]
    for name, tensor in weights(tmp_path / "run").items():
        assert torch.equal(before[name], tensor), name
    # The text itself is as far from a student that is near its teacher.
    hard = replace(SETTINGS, scale_lr=True, hard=0.5)
    result = job(folder, tmp_path / "hard", settings=hard, stages=(("logits", 1.0),), tokens=64)
    assert result["learning_rates"]["logits"] == SETTINGS.logits_lr


def test_a_finished_conversion_is_not_made_again(
    folder: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlab.pretraining.conversion.load_model", None)
    assert job(folder, converted) == read_result(converted)


@pytest.mark.parametrize(
    "lost",
    [
        "stages/3-logits",
        *(pytest.param(part, marks=pytest.mark.slow) for part in ("stages/2-hidden", "tokens", "model")),
    ],
)
def test_what_is_lost_is_made_again_bit_for_bit(folder: Path, converted: Path, tmp_path: Path, lost: str) -> None:
    run_dir = Path(shutil.copytree(converted, tmp_path / "run"))
    for path in (run_dir / "result.json", run_dir / "model", run_dir / lost):
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True) if not path.is_dir() else None
    job(folder, run_dir)
    for name, tensor in weights(converted).items():
        assert torch.equal(weights(run_dir)[name], tensor), name
    for stage in STAGES:
        metrics = [without_seconds(read_metrics(run / "stages" / stage)) for run in (run_dir, converted)]
        assert metrics[0] == metrics[1]


def test_a_plan_is_kept_and_not_made_twice(folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"mechanism": None, "budget": 0.5, "stages": (("logits", 1.0),), "tokens": 64}
    job(folder, tmp_path / "run", **changes)
    assert al.Plan.load(tmp_path / "run" / "plan.json") == halves(None, None)
    assert json.loads((tmp_path / "run" / "plan-report.json").read_text()) == {"by": "the first half"}
    model = al.load_model(tmp_path / "run").model
    assert [conversion["layers"] for conversion in model.config.attnlab["groups"].values()] == [
        ["decoder 0"],
        ["decoder 2"],
    ]
    shutil.rmtree(tmp_path / "run" / "model")
    from attnlab.pretraining.conversion import convert_model

    # Without a planner: the plan is in the folder.
    convert_model(config(folder, **changes), run_dir=tmp_path / "run")


def test_the_control_keeps_softmax_and_sees_the_same_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    from attnlab.adapters.distillation import TokenRows

    batch = TokenRows.batch

    def watched(self: Any, step: int) -> Any:
        seen.append(batch(self, step)["input_ids"])
        return {"input_ids": seen[-1]}

    monkeypatch.setattr(TokenRows, "batch", watched)
    stages = (("heads", 1.0), ("logits", 3.0))
    job(folder, tmp_path / "softmax", mechanism=None, softmax_control=True, stages=stages)
    control, _ = seen[1:], seen.clear()
    job(folder, tmp_path / "other", stages=stages)
    assert not al.is_converted(al.load_model(tmp_path / "softmax").model)
    assert len(control) == 9
    # Batches are drawn ahead, in order.
    learned = [t for t in seen if any(t.shape == c.shape and torch.equal(t, c) for c in control)]
    assert len(learned) >= 9


def test_minutes_are_turned_into_steps_once(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"minutes": 0.01, "stages": (("logits", 1.0),), "tokens": 10**9}
    job(folder, tmp_path / "run", **changes)
    steps = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["steps"]
    assert 1 <= steps["logits"] < 10**5
    assert f"{steps['logits']} steps in 0.01 minutes" in capfd.readouterr().err
    shutil.rmtree(tmp_path / "run" / "model")
    job(folder, tmp_path / "run", **changes)
    assert "in 0.01 minutes" not in capfd.readouterr().err


def refused(folder: Path, run_dir: Path, **changes: Any) -> str:
    """What is said; nothing is left behind."""
    before = sorted(run_dir.rglob("*")) if run_dir.exists() else None
    with pytest.raises((ValueError, OSError)) as error:
        job(folder, run_dir, **changes)
    assert (sorted(run_dir.rglob("*")) if run_dir.exists() else None) == before
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ("no/such.txt",)}, "No such file"),
        ({"mechanism": "abc-mlp:slots=x"}, "slots"),
        ({"mechanism": None, "plan": {"layers": {"7": SPEC}}}, "no layer"),
        (
            {"mechanism": None, "plan": {
                "layers": {"0": SPEC}, "planned_for": {"layers": 9, "key_value_heads": 2, "head_size": 6}}},
            "this plan is for 9 layers",
        ),
        ({"settings": replace(SETTINGS, lengths=((64, 1.0),), batch=8)}, "too few for rows of 64"),
        ({"settings": replace(SETTINGS, lengths=((4096, 1.0),), batch=512)}, "longer than the 64 positions"),
        ({"settings": replace(SETTINGS, batch=10**12)}, "would take"),
        ({"settings": replace(SETTINGS, lora=1000)}, "rank 1000 is more than"),
    ],
    ids=range(8),
)  # fmt: skip
def test_bad_input_leaves_nothing(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run_dir = tmp_path / "run"
    assert message in refused(folder, run_dir, **changes)
    assert not run_dir.exists()


def test_memory_that_may_not_do_is_said_before_the_first_step(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "memory_bytes", lambda device: 1000)
    assert "no layer" in refused(folder, tmp_path / "run", mechanism=None, plan={"layers": {"7": SPEC}})
    assert "of memory or more; to take less, make the batch smaller, or use checkpointing" in capfd.readouterr().err


def test_rows_are_cut_to_the_models_positions_where_no_lengths_were_asked_for(folder: Path, tmp_path: Path) -> None:
    asked = config(folder, settings=replace(SETTINGS, lengths=((8, 0.5), (4096, 0.25), (2048, 0.25))), fit_lengths=True)
    fitted = fitted_lengths(asked, 64).settings
    assert fitted.lengths == ((8, 0.5), (64, 0.5))
    assert (fitted.length, fitted.batch) == (SETTINGS.length, SETTINGS.batch)
    assert fitted_lengths(asked, 4).settings.batch * 4 == SETTINGS.batch * SETTINGS.length
    assert fitted_lengths(asked, None) is asked


def test_an_empty_folder_stays_one_after_bad_input(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert "rank 1000" in refused(folder, tmp_path / "run", settings=replace(SETTINGS, lora=1000))
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds something else than a conversion (notes.txt)" in refused(folder, tmp_path)
    assert "is a file" in refused(folder, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_another_conversion_in_the_same_folder_is_refused(folder: Path, converted: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"was started with other settings.*mechanism"):
        job(folder, converted, mechanism="abc-mlp:slots=3")
    run_dir = Path(shutil.copytree(converted, tmp_path / "run"))
    (run_dir / "result.json").unlink()
    other = files(tmp_path / "files")
    (other / "text.txt").write_text("b a . b b\n\n" * 90)
    with pytest.raises(RunError, match="was trained on other data"):
        job(other, run_dir, model=str(folder / "llama"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": None}, "say what the model is to attend by"),
        ({"budget": 0.5}, "say what the model is to attend by"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"minutes": -1.0}, "minutes must be above 0"),
        ({"stages": (("layers", 1.0),)}, "a stage is one of heads, hidden, logits"),
        ({"stages": (("heads", 0.0),)}, "one stage must have a share"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConversionConfig(**{"model": "m", "text": ("t",), "mechanism": SPEC, **changes})


@pytest.mark.slow
def test_two_processes_convert_like_one(folder: Path, converted: Path, tmp_path: Path) -> None:
    options = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
    start = [sys.executable, "-m", "accelerate.commands.launch", *options, "--dynamo_backend", "no"]
    words = [
        *start,
        "--main_process_port",
        "0",
        "-m",
        "tests.pretraining.conversions",
        str(folder),
        str(tmp_path / "two"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    one, two = (read_result(run) or {} for run in (converted, tmp_path / "two"))
    assert [one["saved"][name] for name in ("stage", "step")] == [two["saved"][name] for name in ("stage", "step")]
    for stage in STAGES:
        lines = [read_metrics(run / "stages" / stage) for run in (converted, tmp_path / "two")]
        assert len({tuple((x["kind"], x["step"]) for x in of_run) for of_run in lines}) == 1
        for x, y in zip(*lines, strict=True):
            assert x["values"] == pytest.approx(y["values"], rel=1e-4, abs=1e-5), x
    for name, tensor in weights(converted).items():
        difference = (weights(tmp_path / "two")[name] - tensor).abs()
        # Adam moves a parameter whose gradient is rounding by as much as any other: up to its rate.
        assert (difference > 1e-5 + 1e-4 * tensor.abs()).float().mean() < 0.005, name
        assert difference.max() < SETTINGS.logits_lr, name
