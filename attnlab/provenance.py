"""How a result was made (versions, device, commit), and files that are never half-written."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_writable",
    "command_line",
    "commit",
    "device_name",
    "file_sha256",
    "provenance",
    "saved_folder",
    "sync_folder",
    "write_atomic",
    "write_json",
]

PACKAGES = ("attnlab", "torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy", "triton")


def provenance() -> dict[str, Any]:
    """Package versions, Python, the device and the commit of the source tree (None outside a checkout)."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "python": platform.python_version(), "device": device_name(), "commit": commit()}


@cache
def commit() -> str | None:
    """The commit of the source tree, or None where it is unknown; ``-changed`` behind it where files differ from it.

    A copy without git, or whose git is not at its own commit, carries it in the file COMMIT beside the package
    (``git rev-parse HEAD > COMMIT``) or in the variable ATTNLAB_COMMIT; these count only where git cannot tell.
    """
    return commit_of(Path(__file__).resolve().parent.parent)


def commit_of(root: Path) -> str | None:
    """The commit of the tree at ``root``."""
    head = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if head and not _git(root, "status", "--porcelain", "--untracked-files=no"):
        return head
    file = root / "COMMIT"
    carried = file.read_text(encoding="utf-8").strip() if file.exists() else os.environ.get("ATTNLAB_COMMIT")
    return carried or (f"{head}-changed" if head else None)


def _git(root: Path, *words: str) -> str | None:
    """What git prints; None where it fails or is not installed."""
    try:
        git = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() if git.returncode == 0 else None


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command that runs this process, as it would be typed; of absolute paths only the last part is kept.

    >>> command_line(["/home/me/papers/__main__.py", "abc-mt", "--data", "/data/pairs", "--set", "lr=0.1"])
    'python -m papers abc-mt --data pairs --set lr=0.1'
    """
    program, *options = sys.argv if arguments is None else arguments
    path = Path(program)
    started = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    if path.suffix == ".py" and path.name != "__main__.py":
        started = ["python", f"{path.resolve().parent.name}/{path.name}"]
    return shlex.join([*started, *map(_without_folders, options)])


def write_atomic(path: Path | str, content: bytes | str) -> Path:
    """Write a file without a name, flush it to the disk, then give it its name: readers see the old file or the new.

    A link stays a link and an existing file keeps its permissions. A device, a pipe or ``/dev/stdout`` is written to.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    if _is_stream(path):
        _write_stream(path, data)
        return path
    target = Path(os.path.realpath(path))
    # Temporary files are private; a new result is as readable as any other file of the user's.
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    handle, name = _temporary(target)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.chmod(file.fileno() if name is None else name, mode)
            os.fsync(file.fileno())
            if name is None:
                name = _give_name(file.fileno(), target)
        os.replace(name, target)
    except BaseException:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
    return path


def file_sha256(path: Path | str) -> str:
    """The SHA-256 of a file's bytes, however large the file is."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, so that a renamed file keeps its new name after a power cut."""
    if os.name == "nt":
        # Windows cannot open a folder, and needs no such call.
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path | str) -> None:
    """Raise before the work is done, not after it, if a file cannot be written at ``path``."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file to write")
    if _is_stream(path):
        if _descriptor(path) is None and not os.access(path, os.W_OK):
            raise ValueError(f"{path} cannot be written; choose another file")
        return
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder, so {path.name} cannot be written there; make it first")
    # Root may write where the mode forbids it, so the test is to write a file.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
        pass


def _descriptor(path: Path) -> int | None:
    """The number of the open file that a path such as /dev/stdout names; None for any other path."""
    names = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
    if str(path) in names:
        return names[str(path)]
    folder, _, number = str(path).rpartition("/")
    return int(number) if folder in ("/dev/fd", "/proc/self/fd") and number.isdigit() else None


def _is_stream(path: Path) -> bool:
    """Whether ``path`` is there and no regular file, so that a new file in its place would not be what is meant."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file() and not path.is_dir())


def _write_stream(path: Path, data: bytes) -> None:
    number = _descriptor(path)
    if number is None:
        path.write_bytes(data)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Opening the path anew would begin at the start of a file that the shell writes this output to.
    with os.fdopen(os.dup(number), "wb") as file:
        file.write(data)


def _temporary(target: Path) -> tuple[int, str | None]:
    """(handle, name) of a new file beside ``target``; on Linux it has no name, so that a kill leaves nothing behind."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        try:
            return os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o600), None
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    return tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")


def _give_name(handle: int, target: Path) -> str:
    """A temporary name beside ``target`` for the file that is open as ``handle``."""
    name = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        # With a folder's handle Python calls linkat, which follows the link in /proc.
        os.link(f"/proc/self/fd/{handle}", name.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return str(name)


def saved_folder(folder: Path | str, files: Sequence[str], what: str) -> Path:
    """The folder as a path; a ValueError if one of the files of ``what`` was to be saved there is missing."""
    folder = Path(folder)
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no saved {what}: {name} is missing")
    return folder


def write_json(path: Path | str, content: Any) -> Path:
    """``write_atomic`` of indented JSON; NaN and infinity are refused, since JSON has none."""
    return write_atomic(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _without_folders(option: str) -> str:
    # --out=/home/me/r.json, and a task with its folder: translation:/home/me/data
    before = re.match(r"(?:.*=|[\w.-]+:)(?=/[^/])|", option)
    assert before is not None
    value = option[before.end() :]
    return before.group() + (Path(value).name if Path(value).is_absolute() else value)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def device_name(device: torch.device | None = None) -> str:
    """The GPU's name, or the CPU and its threads; without a device, that of the GPU wherever there is one.

    >>> import torch
    >>> device_name(torch.device("cpu")).endswith(("thread", "threads"))
    True
    """
    import torch

    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"
