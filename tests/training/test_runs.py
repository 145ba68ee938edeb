import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from attnlab.training import (
    Callback,
    CrossEntropy,
    DivergedError,
    Interrupted,
    Loss,
    RunError,
    list_checkpoints,
    read_metrics,
    read_result,
)
from attnlab.training.checkpoints import newest_good, read_checkpoint
from attnlab.training.engine import RunState
from attnlab.training.runs import RunFolder
from tests.training.jobs import (
    PowerCut,
    Tokens,
    assert_ends_like,
    assert_same_parameters,
    job,
    resumed,
    stopped,
)

ROOT = Path(__file__).resolve().parents[2]


def test_a_finished_run_is_not_run_again(tmp_path, capfd, whole):
    run = tmp_path / "run"
    _, first = job(run)
    before = (run / "metrics.jsonl").read_bytes()

    class Untouched:
        def batch(self, step):
            raise AssertionError("a finished run asked for data")

    model, again = job(run, resume=True, source=Untouched())
    assert "is finished (step 20); nothing to do" in capfd.readouterr().err
    assert again == first
    assert (run / "metrics.jsonl").read_bytes() == before
    assert_same_parameters(model.state_dict(), whole[0].state_dict())


def test_a_folder_with_a_run_is_not_overwritten_and_other_settings_do_not_resume(tmp_path):
    run = tmp_path / "run"
    stopped(run)
    kept = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(RunError, match="already holds a run; resume it, or choose"):
        job(run)
    with pytest.raises(RunError, match=r"config.training.log_every was 3, now 4; config.training.seed was 5, now 6"):
        job(run, resume=True, log_every=4, seed=6)
    assert kept == {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_config_that_json_cannot_write_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.hold(), pytest.raises(ValueError, match="config must be what JSON can write"):
        folder.describe(name="a", seed=0, config={"dtype": torch.float32}, resume=False)


def test_a_second_process_on_the_same_folder_is_refused(tmp_path):
    script = (
        "import sys; from attnlab.training.runs import RunFolder\n"
        "with RunFolder(sys.argv[1]).hold(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"is being written by process {holder.pid}; wait for it"):
            job(tmp_path / "run", steps=2, evaluate_at=())
    finally:
        holder.communicate("")
    job(tmp_path / "run", steps=2, evaluate_at=())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written: Not a directory; choose another"):
        job(tmp_path / "file" / "run")


class DiskFull(Callback):
    """From one step on, the disk takes no more checkpoint files."""

    def __init__(self, monkeypatch, *, at, error):
        self.monkeypatch, self.at, self.error = monkeypatch, at, error

    def on_step(self, moment):
        if moment.step == self.at:

            def refuse(*_, **__):
                raise self.error

            self.monkeypatch.setattr("safetensors.torch.save_file", refuse)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device")]
)
def test_a_full_disk_stops_with_a_clear_error_and_loses_nothing(tmp_path, whole, error):
    run = tmp_path / "run"
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RunError, match=r"the disk is full .* make room, then resume"),
    ):
        job(run, callbacks=[DiskFull(patch, at=11, error=error)])
    assert [p.name for p in list_checkpoints(run)][-1] == "step-00000008"
    assert not list(run.glob("checkpoints/.step*"))
    model, _ = resumed(run)
    assert_same_parameters(model.state_dict(), whole[0].state_dict())


def small_disk(path):
    """A real disk of 1 MiB, where the machine lets us have one."""
    path.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("this machine does not let us mount a small disk")
    return path


class Ballast(Callback):
    """Fills the disk to the last byte after a step."""

    def __init__(self, path, *, at):
        self.path, self.at = path, at

    def on_step(self, moment):
        if moment.step == self.at:
            with open(self.path, "ab", buffering=0) as file:
                while True:
                    try:
                        file.write(bytes(1024))
                    except OSError:
                        break


def test_a_really_full_disk(tmp_path, whole):
    disk = small_disk(tmp_path / "disk")
    try:
        with pytest.raises(RunError, match=r"cannot save the checkpoint of step 12 .* the disk is full"):
            job(disk / "run", callbacks=[Ballast(disk / "ballast", at=11)])
        assert newest_good(disk / "run").step == 8
        assert not list(disk.glob("run/checkpoints/.step*"))
        (disk / "ballast").unlink()
        model, _ = resumed(disk / "run")
        assert_ends_like(whole, model, disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_named_when_a_line_of_metrics_is_written(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.hold(), open("/dev/full", "ab", buffering=0) as full:
        folder._metrics = full
        with pytest.raises(RunError, match=r"cannot write metrics.jsonl in .* the disk is full"):
            folder.record(step=1, kind="train", seconds=0.0, values={"loss": 1.0})


def test_values_that_are_not_finite_are_written_as_null(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.hold():
        folder.start_metrics()
        folder.record(step=1, kind="eval", seconds=0.5, values={"a": math.nan, "b": -math.inf, "c": 2.0})
    assert read_metrics(tmp_path / "run")[0]["values"] == {"a": None, "b": None, "c": 2.0}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_naming_step_term_and_checkpoint(tmp_path, value):
    class Explodes:
        name = "guide"

        def __call__(self, model, output, batch, step):
            total = output["logits"].square().sum()
            return Loss(total * value if step == 9 else total, 1)

        def weight(self, step):
            return 1e-3

    with pytest.raises(
        DivergedError, match=r"guide is not finite at step 10; the last good checkpoint is .*step-00000008"
    ) as e:
        job(tmp_path / "run", terms=[CrossEntropy(), Explodes()], checkpoint_every=4, evaluate_at=(0,), log_every=7)
    assert (e.value.step, e.value.term, e.value.checkpoint.name) == (10, "guide", "step-00000008")
    assert all(t.isfinite().all() for t in read_checkpoint(e.value.checkpoint).model.values())
    assert read_result(tmp_path / "run") is None


def test_a_gradient_that_is_not_finite_is_named_too(tmp_path):
    class Cusp:
        name = "cusp"

        def __call__(self, model, output, batch, step):
            # sqrt at zero: a finite value with an infinite slope.
            return Loss((output["logits"].sum() * 0).sqrt(), 1)

    with pytest.raises(DivergedError, match="the gradient is not finite at step 1; no checkpoint had been written"):
        job(tmp_path / "run", terms=[CrossEntropy(), Cusp()], evaluate_at=(), watch=None)


class PressCtrlC(Callback):
    def __init__(self, *, at):
        self.at = at

    def on_step(self, moment):
        if moment.step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_resume(tmp_path, whole):
    run = tmp_path / "run"
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=f"interrupted at step 10; a checkpoint is saved; resume {run}"):
        job(run, callbacks=[PressCtrlC(at=10)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert list_checkpoints(run)[-1].name == "step-00000010"
    assert not [t.name for t in threading.enumerate() if t.name.startswith("attnlab")]
    model, _ = resumed(run)
    assert_ends_like(whole, model, run)


def test_other_data_are_refused(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="power cut"):
        job(run, data={"corpus": "a"}, callbacks=[PowerCut(at=11)])
    with pytest.raises(RunError, match=r"was trained on other data.* data.corpus was 'a', now 'b'"):
        job(run, data={"corpus": "b"}, resume=True, callbacks=[PowerCut(at=None)])
    job(run, data={"corpus": "a"}, resume=True, callbacks=[PowerCut(at=None)])


def test_a_changed_run_file_is_refused(tmp_path):
    run = tmp_path / "run"
    stopped(run)
    file = run / "run.json"
    for text in (file.read_text().replace('"seed": 5', '"seed": 6'), "", "[]", "{}", '{"config": 3}', "\xff"):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(RunError, match=r"run.json is damaged"):
            resumed(run)


def test_how_often_it_is_saved_may_change(tmp_path, whole):
    run = tmp_path / "run"
    stopped(run)
    model, _ = job(run, resume=True, callbacks=[PowerCut(at=None)], checkpoint_every=7, keep=5, checkpoint_seconds=None)
    assert_same_parameters(model.state_dict(), whole[0].state_dict())


def test_a_run_is_saved_by_time(tmp_path, monkeypatch):
    """Without improvements and without checkpoint_every, a kill loses no more than the seconds of the settings."""
    now = 0.0
    monkeypatch.setattr("attnlab.training.engine.time", types.SimpleNamespace(perf_counter=lambda: now))

    class Minutes(PowerCut):
        def on_step(self, moment):
            nonlocal now
            now += 60
            super().on_step(moment)

    with pytest.raises(RuntimeError, match="power cut"):
        job(tmp_path / "run", checkpoint_every=None, evaluate_at=(), watch=None, callbacks=[Minutes(at=11)])
    # By default after more than three minutes.
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000004", "step-00000008"]


def test_output_is_one_line_for_each_evaluation_and_a_moving_line_on_a_terminal(tmp_path, capfd, monkeypatch):
    job(tmp_path / "a", steps=4, evaluate_at=(0, 4))
    plain = capfd.readouterr().err
    assert [line.split()[:2] for line in plain.splitlines()] == [["step", "0/4"], ["step", "4/4"]]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    job(tmp_path / "b", steps=4, evaluate_at=(0, 4))
    live = capfd.readouterr().err
    assert "\rstep 4/4" in live.replace("\x1b[K", "")
    assert "steps/s  0:00:00 left" in live


def test_result_says_how_time_was_spent(tmp_path):
    _, outcome = job(tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metrics"] == outcome.metrics
    assert 0 <= result["timing"]["waiting_share"] < 1
    assert result["timing"]["steps_per_second"] > 0


def test_a_source_that_fails_is_reported_as_it_is(tmp_path):
    class Broken(Tokens):
        def batch(self, step):
            if step == 3:
                raise OSError("corpus on fire")
            return super().batch(step)

    with pytest.raises(OSError, match="corpus on fire"):
        job(tmp_path / "run", source=Broken())


def test_a_run_state_is_read_back_with_values_that_are_not_finite():
    state = RunState(step=7, seconds=1.5, evaluated={"a": 1.0, "b": float("nan")}, pending=[[1.0, 2.0]])
    fields = state.as_json()
    assert fields["evaluated"] == {"a": 1.0, "b": None}
    assert fields["window"] == [[1.0, 2.0]]
    again = RunState.from_json(fields)
    assert math.isnan(again.evaluated.pop("b"))
    assert again == dataclasses.replace(state, evaluated={"a": 1.0})
