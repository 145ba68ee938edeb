"""How a result was made (versions, device, commit), and files that are never half-written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["check_writable", "command_line", "commit", "provenance", "write_atomic", "write_json"]

PACKAGES = ("attnlab", "torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy", "triton")


def provenance() -> dict[str, Any]:
    """Package versions, Python, the device and the commit of the source tree (None outside a checkout)."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "python": platform.python_version(), "device": _device(), "commit": commit()}


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
    """Write under a temporary name, flush to disk, then rename: readers see the old file or the new."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a result is as readable as any other file of the user's.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def check_writable(path: Path | str) -> None:
    """Raise before the work is done, not after it, if a file cannot be written at ``path``."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the file to write")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder, so {path.name} cannot be written there; make it first")
    # Root may write where the mode forbids it, so the test is to write a file.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
        pass


def write_json(path: Path | str, content: Any) -> Path:
    """``write_atomic`` of indented JSON; NaN and infinity are refused, since JSON has none."""
    return write_atomic(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _without_folders(option: str) -> str:
    name, equals, value = option.rpartition("=")
    return name + equals + (Path(value).name if Path(value).is_absolute() else value)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"
