"""Checkpoints on disk: safetensors and JSON with checksums, in a folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnlab.provenance import file_sha256, sync_folder, write_json
from attnlab.summaries import short_repr
from attnlab.training.runs import RunError, say

__all__ = [
    "Checkpoint",
    "CorruptCheckpointError",
    "average_checkpoints",
    "best_checkpoint",
    "discard",
    "list_checkpoints",
    "load_weights",
    "newest_good",
    "prune",
    "read_checkpoint",
    "sweep",
    "write_checkpoint",
]

Tensors = dict[str, Tensor]


# Of state.json. The first had no number, and no metrics.jsonl beside it.
VERSION = 2
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
METRICS = "metrics.jsonl"


class CorruptCheckpointError(RunError):
    """A checkpoint whose files are missing, truncated or changed."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: the model's and the optimiser's tensors by name, and the rest as JSON."""

    path: Path
    step: int
    model: Tensors
    optimizer: Tensors
    state: dict[str, Any]
    # The run's metrics.jsonl up to this step; None in a checkpoint of an earlier version.
    metrics: bytes | None

    __repr__ = short_repr


def write_checkpoint(
    folder: Path,
    *,
    step: int,
    model: Tensors,
    optimizer: Tensors,
    state: Mapping[str, Any],
    metrics: bytes = b"",
) -> Path:
    """Write ``folder``/step-XXXXXXXX under a temporary name, flush it to the disk, then rename it."""
    from safetensors.torch import save_file

    target = folder / f"step-{step:08d}"
    draft = folder / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        kept, aliases = _unshared(model)
        save_file(kept, draft / "model.safetensors", metadata={"format": "pt"})
        save_file(_unshared(optimizer)[0], draft / "optimizer.safetensors")
        (draft / METRICS).write_bytes(metrics)
        write_json(draft / "state.json", {"version": VERSION, "step": step, "aliases": aliases, **state})
        write_json(draft / "checksums.json", {file.name: _digest(file) for file in sorted(draft.iterdir())})
        _flush(draft)
        discard(target)
        os.rename(draft, target)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, each file checked against its checksum first.

    One that is damaged is a ``CorruptCheckpointError``, one of a version that is not known another RunError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        checksums = _json_object(path / "checksums.json")
        for name in (*FILES, *(name for name in (METRICS,) if name in checksums)):
            if checksums[name] != _digest(path / name):
                raise CorruptCheckpointError(f"{path / name} is not what was written (its checksum differs)")
        state = _json_object(path / "state.json")
        version = _state_version(path, state.pop("version", 1))
        metrics = None if version == 1 else (path / METRICS).read_bytes()
        if metrics is not None and METRICS not in checksums:
            raise CorruptCheckpointError(f"{path / METRICS} has no checksum")
        # A trainer that keeps its metrics elsewhere saves none with the state.
        if metrics is not None and state.get("metrics_sha256") not in (None, hashlib.sha256(metrics).hexdigest()):
            raise CorruptCheckpointError(f"{path / METRICS} is not the one that was saved with it")
        step = state.pop("step")
        if path.name != f"step-{step:08d}":
            raise CorruptCheckpointError(f"{path} holds step {step}")
        model = load_file(path / "model.safetensors")
        optimizer = load_file(path / "optimizer.safetensors")
        model.update({alias: model[name] for alias, name in state.pop("aliases").items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return Checkpoint(path=path, step=step, model=model, optimizer=optimizer, state=state, metrics=metrics)


def _state_version(path: Path, version: Any) -> int:
    if not isinstance(version, int):
        raise CorruptCheckpointError(f"{path} has no version, but {version!r}")
    if not 1 <= version <= VERSION:
        # Not damage: to go back to an earlier checkpoint would throw away what the other version has trained.
        raise RunError(
            f"{path} was written by another version of attnlab (its state has version {version}, this one reads up to "
            f"{VERSION}); go on with that version, or remove the checkpoint to go back to the one before it"
        )
    return version


def list_checkpoints(run_dir: Path | str) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((Path(run_dir) / "checkpoints").glob("step-" + "[0-9]" * 8))


def newest_good(run_dir: Path | str, *, check: Callable[[Checkpoint], None] | None = None) -> Checkpoint | None:
    """The newest checkpoint that can be read; damaged ones, also by ``check``, are reported and skipped."""
    for path in reversed(list_checkpoints(run_dir)):
        try:
            saved = read_checkpoint(path)
            if check is not None:
                check(saved)
            return saved
        except CorruptCheckpointError as error:
            say(f"{error}; using the checkpoint before it")
    return None


def prune(run_dir: Path | str, *, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints and the best checkpoints that these refer to."""
    paths = list_checkpoints(run_dir)
    wanted = {path.name for path in paths[-keep:]}
    for path in paths[-keep:]:
        best = _best_step(path)
        if best is not None:
            wanted.add(f"step-{best:08d}")
    for path in paths:
        if path.name not in wanted:
            discard(path)


def discard(path: Path) -> None:
    """Delete a checkpoint if it exists; it is renamed first, so that a kill cannot leave half of it under its name."""
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    if path.exists():
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(run_dir: Path | str) -> None:
    """Delete the unfinished files of killed processes."""
    for path in (Path(run_dir) / "checkpoints").glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in [*Path(run_dir).glob(".*.tmp"), *Path(run_dir).glob("*/.*.tmp")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def best_checkpoint(run_dir: Path | str) -> Path:
    """The checkpoint with the best value of the run's ``watch``; the last checkpoint holds its step."""
    for path in reversed(list_checkpoints(run_dir)):
        best = _best_step(path)
        if best is not None:
            return path.with_name(f"step-{best:08d}")
    raise RunError(f"{run_dir} has no best checkpoint; train with watch='valid/loss' or another evaluation value")


def load_weights(model: nn.Module, run_dir: Path | str, *, which: str | int = "last") -> int:
    """Load the parameters of a run's ``last``, ``best`` or numbered checkpoint; returns its step."""
    if which == "best":
        saved: Checkpoint | None = read_checkpoint(best_checkpoint(run_dir))
    elif which == "last":
        saved = newest_good(run_dir)
    elif isinstance(which, int):
        saved = read_checkpoint(Path(run_dir) / "checkpoints" / f"step-{which:08d}")
    else:
        raise ValueError(f"which must be 'last', 'best' or a step, got {which!r}")
    if saved is None:
        raise RunError(f"{run_dir} has no readable checkpoint")
    model.load_state_dict(saved.model)
    return saved.step


def average_checkpoints(paths: Iterable[Path | str]) -> Tensors:
    """The mean of the checkpoints' parameters, taken in float64, as a state dict; integers come from the last."""
    sums: Tensors = {}
    last: Tensors = {}
    count = 0
    for path in paths:
        last = read_checkpoint(Path(path)).model
        sums = {name: t.double() + sums.get(name, 0) for name, t in last.items() if t.is_floating_point()}
        count += 1
    if count == 0:
        raise ValueError("no checkpoints to average; train with keep= at least the number to average")
    return last | {name: (total / count).to(last[name].dtype) for name, total in sums.items()}


def _unshared(tensors: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, str]]:
    """The tensors ready for safetensors, which refuses shared memory; tied ones are kept once, with their aliases."""
    kept: Tensors = {}
    aliases: dict[str, str] = {}
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        t = tensor.detach()
        storage = t.untyped_storage().data_ptr()
        owner, first = owners.get(storage, (name, t)) if t.numel() else (name, t)
        same = (first.data_ptr(), first.shape, first.stride(), first.dtype) == (
            t.data_ptr(),
            t.shape,
            t.stride(),
            t.dtype,
        )
        if owner != name and same:
            aliases[name] = owner
            continue
        owners.setdefault(storage, (name, t))
        whole = t.numel() * t.element_size() == t.untyped_storage().nbytes()
        on_cpu = t.cpu().contiguous()
        kept[name] = on_cpu if whole or on_cpu.data_ptr() != t.data_ptr() else on_cpu.clone()
    return kept, aliases


def _best_step(path: Path) -> int | None:
    """The best step so far by a checkpoint's state; None where it has none or is damaged."""
    try:
        best = _json_object(path / "state.json")["progress"]["best_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return best if isinstance(best, int) else None


def _json_object(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return content


def _digest(path: Path) -> dict[str, Any]:
    return {"sha256": file_sha256(path), "bytes": path.stat().st_size}


def _flush(folder: Path) -> None:
    """Force a folder's files and entries to the disk, so that a rename is never on the disk before its content."""
    for path in folder.iterdir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
