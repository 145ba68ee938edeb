"""Checkpoints: damaged ones, those of other versions and of other runs, and what a resumed run takes from them."""

import json

import pytest
import torch

from attnlab.training import (
    RunError,
    list_checkpoints,
    read_metrics,
)
from attnlab.training import checkpoints as on_disk
from attnlab.training.checkpoints import CorruptCheckpointError, read_checkpoint, write_checkpoint
from tests.training.jobs import (
    PowerCut,
    assert_ends_like,
    assert_same_parameters,
    job,
    resumed,
    stopped,
    without_seconds,
)


def rewrite(checkpoint, name, change):
    """Change a JSON file of a checkpoint, and sign it anew."""
    file = checkpoint / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    sign(checkpoint)


def sign(checkpoint):
    names = [path.name for path in checkpoint.iterdir() if path.name != "checksums.json"]
    (checkpoint / "checksums.json").write_text(json.dumps({name: on_disk._digest(checkpoint / name) for name in names}))


@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing file", "no checksums"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, capfd, whole, damage):
    run = tmp_path / "run"
    stopped(run)
    *_, before, newest = list_checkpoints(run)
    file = newest / "model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-3])
    elif damage == "one bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing file":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / "checksums.json").unlink()
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(newest)
    model, _ = resumed(run)
    said = capfd.readouterr().err
    assert newest.name in said
    assert "using the checkpoint before it" in said
    assert f"resuming from {before}" in said
    assert_ends_like(whole, model, run)


def test_all_checkpoints_damaged_means_starting_over(tmp_path, capfd, whole):
    run = tmp_path / "run"
    stopped(run)
    for path in list_checkpoints(run):
        (path / "state.json").write_text("{")
    model, _ = resumed(run)
    assert "starting from step 0" in capfd.readouterr().err
    assert_ends_like(whole, model, run)


def test_tied_and_sliced_tensors_survive_a_checkpoint(tmp_path):
    base = torch.arange(12.0)
    model = {
        "a": base,
        "tied": base,
        "half": base[6:],
        "across": base.view(3, 4).T,
        "empty": torch.zeros(0),
        "n": torch.tensor(3),
    }
    path = write_checkpoint(tmp_path, step=7, model=model, optimizer={}, state={"x": 1})
    saved = read_checkpoint(path)
    assert_same_parameters(dict(sorted(saved.model.items())), dict(sorted(model.items())))
    assert saved.model["tied"] is saved.model["a"]
    assert (saved.step, saved.state, saved.optimizer) == (7, {"x": 1}, {})


def test_checkpoints_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(on_disk.os, "rename", cut)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, step=1, model={"a": torch.zeros(2)}, optimizer={}, state={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["lost", "torn", "other bytes"])
def test_metrics_come_back_from_the_checkpoint(tmp_path, capfd, whole, damage):
    run = tmp_path / "run"
    stopped(run)
    file = run / "metrics.jsonl"
    content = file.read_bytes()
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(content[:40] if damage == "torn" else content.replace(b"loss", b"lass"))
    model, _ = resumed(run)
    assert "its lines up to the checkpoint are put back" in capfd.readouterr().err
    assert_ends_like(whole, model, run)


def test_lines_that_a_finished_run_has_not_written_are_not_taken_from_its_checkpoint(tmp_path):
    job(tmp_path)
    written = without_seconds(read_metrics(tmp_path))
    newest = list_checkpoints(tmp_path)[-1]
    (newest / "metrics.jsonl").write_text("{}")
    sign(newest)
    job(tmp_path, resume=True)
    assert without_seconds(read_metrics(tmp_path)) == written


def as_an_earlier_version_wrote_it(path):
    """The checkpoint without a version, a copy of the metrics, and a checksum of the run's settings."""
    (path / "metrics.jsonl").unlink()
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(
        json.dumps({k: v for k, v in state.items() if k not in ("version", "run", "metrics_sha256")})
    )
    sign(path)


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_of_an_earlier_version_goes_on(tmp_path, capfd, whole, lost):
    run = tmp_path / "run"
    stopped(run)
    for path in list_checkpoints(run):
        as_an_earlier_version_wrote_it(path)
    if lost:
        (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:40])
    described = json.loads((run / "run.json").read_text())
    training = {k: v for k, v in described["config"]["training"].items() if k != "checkpoint_seconds"}
    del described["checksum"]
    (run / "run.json").write_text(json.dumps(described | {"config": {"training": training}}))
    model, _ = resumed(run)
    assert ("the lines that are lost stay lost" in capfd.readouterr().err) == lost
    assert_same_parameters(model.state_dict(), whole[0].state_dict())
    if not lost:
        assert without_seconds(read_metrics(run)) == whole[1]


def test_a_checkpoint_of_a_later_version_is_kept_and_the_run_refused(tmp_path):
    run = tmp_path / "run"
    stopped(run)
    newest = list_checkpoints(run)[-1]
    rewrite(newest, "state.json", lambda state: state | {"version": 3})
    with pytest.raises(RunError, match=r"written by another version of attnlab .its state has version 3"):
        resumed(run)
    assert list_checkpoints(run)[-1] == newest


def test_a_checkpoint_keeps_the_keys_of_earlier_versions(tmp_path):
    """Runs that were begun by an earlier version are resumed, so state.json keeps its names."""
    job(tmp_path / "run", steps=4, checkpoint_every=4, evaluate_at=(), watch=None)
    state = json.loads((list_checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    earlier = {"step", "aliases", "progress", "metrics_bytes", "random", "callbacks"}
    assert set(state) == {*earlier, "version", "run", "metrics_sha256"}
    names = {"step", "seconds", "best_step", "best_value", "stale", "stopped", "evaluated", "window"}
    assert set(state["progress"]) == names


def test_a_checkpoint_that_is_whole_but_of_another_run_is_kept_and_refused(tmp_path):
    """To go back behind it, or to the start, would throw away what was trained."""
    run = tmp_path / "run"
    stopped(run)
    kept = list_checkpoints(run)
    with pytest.raises(RunError, match=r"holds another model: 0.weight is only in this one"):
        job(run, resume=True, model=torch.nn.Sequential(torch.nn.Embedding(13, 11)), callbacks=[PowerCut(at=None)])
    with pytest.raises(RunError, match="was saved with 1 callbacks and is resumed with 0"):
        job(run, resume=True)
    rewrite(kept[-1], "state.json", lambda state: state | {"run": "other"})
    with pytest.raises(RunError, match=r"trained with other settings than run.json holds"):
        resumed(run)
    assert list_checkpoints(run) == kept
