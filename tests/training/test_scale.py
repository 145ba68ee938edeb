import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnlab.training import list_checkpoints, load_weights, map_runs, read_metrics, read_result
from attnlab.training.checkpoints import read_checkpoint
from tests.tolerance import assert_close
from tests.training.jobs import Model, assert_same_parameters, job

ROOT = Path(__file__).resolve().parents[2]
DDP = ("--multi_gpu",)
FSDP = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "NO_WRAP")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
CHANGES = {"dropout": 0.0, "log_every": 1, "keep": 9}
BOTH_KINDS = pytest.mark.parametrize("kind", [pytest.param(DDP, id="DDP"), pytest.param(FSDP, id="FSDP")])


def command(run_dir, kind, *, precision="no", **changes):
    """Two processes on the CPU, joined by gloo, as a user launches them."""
    options = ("--num_processes", "2", "--num_machines", "1", "--mixed_precision", precision, "--dynamo_backend", "no")
    # Port 0: any free one, so that tests side by side do not meet.
    start = [sys.executable, "-m", "accelerate.commands.launch", *kind, *options, "--main_process_port", "0"]
    return [*start, "-m", "tests.training.launched", str(run_dir), json.dumps({**CHANGES, **changes})]


def launch(run_dir, kind, **changes):
    done = subprocess.run(command(run_dir, kind, **changes), cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((run_dir / "run.json").read_text())["processes"] == 2


def assert_same_losses(one, two, *, relative=1e-5):
    a, b = read_metrics(one), read_metrics(two)
    assert [(x["kind"], x["step"]) for x in a] == [(x["kind"], x["step"]) for x in b]
    assert sum(x["kind"] == "train" for x in a) == 20
    for x, y in zip(a, b, strict=True):
        assert x["values"] == pytest.approx(y["values"], rel=relative), x


def forget_after(run_dir, step):
    """The folder as a kill after this checkpoint would leave it."""
    (run_dir / "result.json").unlink()
    for path in list_checkpoints(run_dir):
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "run"
    model, _ = job(path, **CHANGES)
    return model, path


@pytest.mark.parametrize("kind", [pytest.param(DDP, id="DDP"), pytest.param(FSDP, id="FSDP", marks=pytest.mark.slow)])
def test_two_processes_train_like_one_and_one_goes_on_from_their_checkpoint(tmp_path, alone, kind):
    model, path = alone
    two = tmp_path / "two"
    launch(two, kind)
    assert_same_losses(path, two)
    loaded = Model()
    assert load_weights(loaded, two) == 20
    for name, tensor in model.state_dict().items():
        assert_close(loaded.state_dict()[name], tensor, what=name)
    forget_after(two, 12)
    again, _ = job(two, resume=True, **CHANGES)
    assert_same_losses(path, two)
    for name, tensor in model.state_dict().items():
        assert_close(again.state_dict()[name], tensor, what=name)


@pytest.mark.slow
@BOTH_KINDS
def test_two_processes_go_on_from_the_checkpoint_of_one(tmp_path, alone, kind):
    _, path = alone
    two = tmp_path / "two"
    shutil.copytree(path, two)
    forget_after(two, 12)
    described = json.loads((two / "run.json").read_text())
    (two / "run.json").write_text(json.dumps({**described, "processes": 2}))
    launch(two, kind, resume=True)
    assert_same_losses(path, two)


@pytest.mark.slow
@BOTH_KINDS
def test_two_processes_resume_bit_for_bit_each_with_its_own_dropout(tmp_path, kind):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    launch(whole, kind, dropout=0.3)
    shutil.copytree(whole, cut)
    forget_after(cut, 12)
    launch(cut, kind, dropout=0.3, resume=True)
    assert_same_losses(whole, cut)
    a, b = (read_checkpoint(list_checkpoints(run)[-1]) for run in (whole, cut))
    assert a.step == b.step == 20
    assert_same_parameters(a.model, b.model)
    assert_same_parameters(a.optimizer, b.optimizer)
    first, second = a.state["random"]
    assert first["torch"] != second["torch"]


@pytest.mark.slow
def test_sharded_bf16_still_counts_exactly(tmp_path):
    launch(tmp_path / "two", FSDP, precision="bf16", rows=1000)
    job(tmp_path / "one", **CHANGES, precision="bf16", rows=1000)
    one, two = (read_metrics(tmp_path / name)[:2] for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        name = "valid/cross_entropy" if a["kind"] == "eval" else "cross_entropy"
        assert a["values"][name] == pytest.approx(b["values"][name], rel=1e-6)


@pytest.mark.slow
def test_two_processes_accumulate_like_one_that_does_not(tmp_path, alone):
    launch(tmp_path / "two", DDP, accumulate=3)
    assert_same_losses(alone[1], tmp_path / "two")


@pytest.mark.slow
def test_ctrl_c_stops_two_processes_at_the_same_step(tmp_path):
    run = tmp_path / "two"
    changes = {"steps": 5000, "evaluate_at": [], "watch": None, "checkpoint_every": None, "log_every": 5}
    group = subprocess.Popen(
        command(run, DDP, **changes), cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert group.poll() is None
        time.sleep(0.1)
    os.killpg(group.pid, signal.SIGINT)
    said = group.communicate(timeout=240)[1]
    assert f"a checkpoint is saved; resume {run} to go on" in said
    [checkpoint] = list_checkpoints(run)
    assert read_metrics(run)[-1]["step"] == int(checkpoint.name[-8:]) < 5000


@pytest.mark.slow
def test_a_process_that_stops_ends_the_run_with_a_message(tmp_path):
    """The other waits so long as the settings say, and says before that what it waits for."""
    run = tmp_path / "two"
    changes = {
        "steps": 100_000,
        "evaluate_at": [],
        "watch": None,
        "checkpoint_every": 10,
        "log_every": 5,
        "timeout": 12,
    }
    group = subprocess.Popen(
        command(run, DDP, **changes), cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    children: list[int] = []
    assert group.stderr is not None
    try:
        while not list_checkpoints(run):
            assert group.poll() is None
            time.sleep(0.1)
        # The launcher starts the processes in the order of their ranks.
        children = [int(pid) for pid in Path(f"/proc/{group.pid}/task/{group.pid}/children").read_text().split()]
        os.kill(children[-1], signal.SIGSTOP)
        said = ""
        while "has not answered for 12 s" not in said:
            said += (line := group.stderr.readline())
            assert line, said
    finally:
        # The launcher gives its processes sessions of their own, and a stopped one ends only by SIGKILL.
        group.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        group.wait()
        group.stderr.close()
    assert "no step has ended for 6 s" in said
    assert list_checkpoints(run)


def one_run(config, run_dir):
    """Trains, or fails if its config says so; leaves a mark at each call."""
    run_dir.mkdir(parents=True, exist_ok=True)
    calls = run_dir / "calls"
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    if config["fail"]:
        raise FloatingPointError("this seed always fails")
    job(run_dir, steps=2, evaluate_at=(2,), watch=None, seed=config["seed"])


CONFIGS = {f"seed-{s}": {"seed": s, "fail": s == 2} for s in (1, 2, 3)}


def check_many(root, backend):
    reports = map_runs(one_run, CONFIGS, root=root, jobs=2, backend=backend)
    assert {name: r.status for name, r in reports.items()} == {"seed-1": "done", "seed-2": "failed", "seed-3": "done"}
    assert "FloatingPointError: this seed always fails" in reports["seed-2"].error
    assert reports["seed-3"].result == read_result(root / "seed-3")
    assert reports["seed-1"].result["metrics"]["valid/loss"] > 0
    fixed = {**CONFIGS, "seed-2": {"seed": 2, "fail": False}}
    reports = map_runs(one_run, fixed, root=root, jobs=2, backend=backend)
    assert {name: r.status for name, r in reports.items()} == {
        "seed-1": "already",
        "seed-2": "done",
        "seed-3": "already",
    }
    assert [(root / name / "calls").read_text() for name in CONFIGS] == ["x", "xx", "x"]


@pytest.mark.slow
def test_many_runs_by_processes_of_this_machine(tmp_path, capfd):
    check_many(tmp_path, "loky")
    assert "run seed-2 failed" in capfd.readouterr().err


def deadly_run(config, run_dir):
    """Trains; a process that is to die does so, once or always, as the kernel ends one for want of memory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    died = run_dir / "died"
    if config["dies"] == "always" or (config["dies"] == "once" and not died.exists()):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (run_dir / "result.json").write_text("{}")


def test_a_process_that_dies_takes_no_other_run_with_it(tmp_path, capfd):
    configs = {name: {"dies": dies} for name, dies in (("a", "never"), ("b", "once"), ("c", "never"))}
    reports = map_runs(deadly_run, configs, root=tmp_path, jobs=2)
    assert {name: r.status for name, r in reports.items()} == {"a": "done", "b": "done", "c": "done"}
    assert "the process of run b died; the run is tried again" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_that_always_kills_its_process_has_failed(tmp_path, capfd):
    configs = {f"run-{i}": {"dies": "always" if i == 1 else "never"} for i in range(4)}
    reports = map_runs(deadly_run, configs, root=tmp_path, jobs=2)
    assert [r.status for r in reports.values()] == ["done", "failed", "done", "done"]
    assert "its process died 2 times" in reports["run-1"].error
    assert "run run-1 failed" in capfd.readouterr().err


class FakeRay:
    """The calls of Ray that many runs are made with, in this process."""

    class exceptions:  # noqa: N801 - a module's name
        class RayError(Exception):
            pass

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def cluster_resources():
        return {"CPU": 2.0}

    @staticmethod
    def remote(*, max_retries):
        assert max_retries == 1

        class Task:
            def __init__(self, function):
                self.function = function

            def remote(self, *arguments):
                return lambda: self.function(*arguments)

        return Task

    @staticmethod
    def get(task):
        report = task()
        if report.error:
            raise FakeRay.exceptions.RayError("the worker died")
        return report


@pytest.mark.parametrize("jobs", [2, -1])
def test_a_worker_of_ray_that_dies_is_one_failed_run(tmp_path, monkeypatch, jobs):
    monkeypatch.setitem(sys.modules, "ray", FakeRay)
    reports = map_runs(fails_if_told, {"a": False, "b": True, "c": False}, root=tmp_path, jobs=jobs, backend="ray")
    assert {name: r.status for name, r in reports.items()} == {"a": "done", "b": "failed", "c": "done"}
    assert reports["b"].error == "its process died 2 times: the worker died"


def fails_if_told(fail, run_dir):
    if fail:
        raise FloatingPointError


@pytest.mark.slow
def test_many_runs_by_a_ray_cluster_of_two_workers(tmp_path):
    ray = pytest.importorskip("ray")
    root = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": root}, logging_level="ERROR")
    try:
        check_many(tmp_path, "ray")
    finally:
        ray.shutdown()


def test_run_names_must_be_file_names(tmp_path):
    with pytest.raises(ValueError, match="plain file names, got \\['a/b', '\\.\\.'\\]"):
        map_runs(one_run, {"a/b": {}, "..": {}, "fine": {}}, root=tmp_path)
