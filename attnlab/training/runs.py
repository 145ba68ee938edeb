"""A run is a folder: run.json first, metrics.jsonl and checkpoints on the way, result.json last."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any

from attnlab.provenance import provenance, write_atomic, write_json

__all__ = ["RunError", "RunFolder", "lock_folder", "read_metrics", "read_result", "read_run", "say"]

# Settings that decide when something is saved or sent and not what is learned: a resumed run may have others.
CHANGEABLE = {
    *(f"config.training.{name}" for name in ("checkpoint_every", "checkpoint_seconds", "keep", "prefetch", "timeout")),
    "config.pretrain.checkpoint_every",
}


class RunError(RuntimeError):
    """A run that cannot start or go on; files written before stay as they are."""


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Create the folder and lock it; a second process on the same folder is an error, as is an unwritable one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "a+")  # noqa: SIM115 - held until the end
    except OSError as error:
        raise RunError(f"the folder {path} cannot be written: {error.strerror}; choose another") from error
    with lock:
        _lock(lock, path)
        yield


def say(message: str) -> None:
    """One line to standard error, so that standard output holds results only."""
    print(f"attnlab: {message}", file=sys.stderr, flush=True)


class RunFolder:
    """The files of one run, held by one process at a time."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._metrics: FileIO | None = None
        self._held = False
        # What run.json says, once this process has written or checked it.
        self._described: dict[str, Any] | None = None

    @contextmanager
    def hold(self) -> Iterator[RunFolder]:
        """Create the folder and lock it; a second process on the same folder is an error, as is an unwritable one.

        Inside the context the same object may be held again, as ``train`` does with a folder that its caller holds.
        """
        if self._held:
            yield self
            return
        with lock_folder(self.path):
            self.checkpoints.mkdir(exist_ok=True)
            self._held = True
            try:
                yield self
            finally:
                self._held = False
                if self._metrics is not None:
                    self._metrics.close()
                    self._metrics = None

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None while the run is not finished."""
        return read_result(self.path)

    def describe(
        self,
        *,
        name: str,
        seed: int,
        config: Mapping[str, Any],
        data: Mapping[str, Any] | None = None,
        processes: int = 1,
        resume: bool,
    ) -> None:
        """Write run.json; where it exists already, check that it says the same.

        ``data`` identifies what the run is trained on, such as checksums. It may be added once it is known.
        """
        try:
            requested = json.loads(json.dumps({"name": name, "config": config, "seed": seed}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"config must be what JSON can write ({error}); turn paths and dtypes into strings"
            ) from None
        environment = {**provenance(), "processes": processes}
        if not (self.path / "run.json").exists():
            self._write_run({**requested, **({"data": dict(data)} if data else {}), **environment})
            self._described = requested
            return
        if not resume and self._described != requested:
            raise RunError(f"{self.path} already holds a run; resume it, or choose another folder")
        recorded = read_run(self.path)
        # A folder may be renamed, and its name with it.
        changed = _differences(recorded, {k: v for k, v in requested.items() if k != "name"})
        if changed:
            raise RunError(
                f"{self.path} was started with other settings, so it cannot be resumed: {'; '.join(changed)}"
            )
        self._check_data(recorded, data)
        if self._described == requested:
            return
        self._described = requested
        for key in ("versions", "device", "processes"):
            if recorded.get(key) != environment[key]:
                say(f"{key} changed since {self.path} was started, so results may differ in the last bits")

    def _check_data(self, recorded: dict[str, Any], data: Mapping[str, Any] | None) -> None:
        """Raise if the run was begun on other data; where run.json does not know them yet, add them."""
        if not data:
            return
        if "data" not in recorded:
            self._write_run({**recorded, "data": dict(data)})
            return
        changed = _differences({"data": recorded["data"]}, json.loads(json.dumps({"data": data})))
        if changed:
            raise RunError(
                f"{self.path} was trained on other data, so it cannot be resumed: {'; '.join(changed)}; put the old "
                "data back, or start a new run"
            )

    def _write_run(self, content: dict[str, Any]) -> None:
        with self.explain("write run.json"):
            write_json(self.path / "run.json", {**content, "checksum": _checksum(content, "config", "seed", "data")})

    def identity(self) -> str:
        """A checksum of the run's settings; every checkpoint carries it."""
        return _checksum(read_run(self.path), "config", "seed")

    def start_metrics(self, kept: bytes = b"") -> None:
        """Open metrics.jsonl for appending after the lines ``kept``, which a checkpoint holds too.

        Later lines of a killed run are dropped; if the file does not begin with these lines, they are put back.
        """
        file = self.path / "metrics.jsonl"
        with self.explain("open metrics.jsonl"):
            present = file.read_bytes() if file.exists() else b""
            if not present.startswith(kept):
                say(f"{file} is damaged; its lines up to the checkpoint are put back")
                write_atomic(file, kept)
            # Unbuffered, so that a full disk is an error at the line's write and not once more when the file is closed.
            self._metrics = open(file, "ab", buffering=0)  # noqa: SIM115 - closed by hold
            self._metrics.truncate(len(kept))

    def record(self, *, step: int, kind: str, seconds: float, values: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl; a value that is not finite is written as null, since JSON has none."""
        assert self._metrics is not None
        finite = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        line = {"step": step, "kind": kind, "seconds": round(seconds, 3), "values": finite}
        with self.explain("write metrics.jsonl"):
            data = json.dumps(line, allow_nan=False).encode() + b"\n"
            if self._metrics.write(data) != len(data):
                raise OSError(errno.ENOSPC, "No space left on device")

    def sync_metrics(self) -> bytes:
        """Force metrics.jsonl to the disk and return its lines, which a checkpoint keeps."""
        assert self._metrics is not None
        with self.explain("write metrics.jsonl"):
            os.fsync(self._metrics.fileno())
            return (self.path / "metrics.jsonl").read_bytes()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write result.json: the run is done."""
        with self.explain("write result.json"):
            write_json(self.path / "result.json", result)

    @contextmanager
    def explain(self, doing: str) -> Iterator[None]:
        """Turn an error of the file system into a RunError that says what to do."""
        try:
            yield
        except Exception as error:
            # safetensors reports the operating system's error in words only.
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            if not full and not isinstance(error, OSError):
                raise
            cause = f"{error.strerror if isinstance(error, OSError) else error}"
            if full:
                free = shutil.disk_usage(self.path).free
                cause = f"the disk is full ({free / 2**20:.0f} MiB free); make room"
            raise RunError(
                f"cannot {doing} in {self.path}: {cause}, then resume the run; what was saved is kept"
            ) from error


def read_run(path: Path | str) -> dict[str, Any]:
    """The run.json of a run folder; a RunError where it is missing or damaged."""
    file = Path(path) / "run.json"
    content = _read_object(file)
    why = "it is not the JSON that was written"
    if content is not None:
        if not isinstance(content.get("config"), dict) or not isinstance(content.get("data", {}), dict):
            why = "it has no settings"
        elif content.get("checksum", expected := _checksum(content, "config", "seed", "data")) != expected:
            why = "its checksum differs"
        else:
            return content
    raise RunError(f"{file} is damaged ({why}); without its settings a run cannot go on: put the file back")


def read_result(path: Path | str) -> dict[str, Any] | None:
    """The result.json of a run folder; None where the run is not finished, or the file is damaged."""
    file = Path(path) / "result.json"
    if not file.exists():
        return None
    result = _read_object(file)
    if result is None:
        say(f"{file} is damaged, so the run counts as unfinished")
    return result


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]


def _lock(file: IO[str], path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            say(f"{path} is on a file system without locks; take care that only one process uses it")
            return
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise RunError(f"{path} is being written by {holder}; wait for it, or choose another folder") from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()}")
    file.flush()


def _read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _checksum(content: Mapping[str, Any], *keys: str) -> str:
    chosen = {key: content[key] for key in keys if key in content}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if path in CHANGEABLE:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = new if path == "" else sorted(set(old) | set(new))
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}" if path else k)]
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]
