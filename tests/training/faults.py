"""Runs in child processes that end at a chosen write, and runs resumed from damaged folders; see test_faults.py.

Usage: python -m tests.training.faults runs|conversions FOLDER SHARE. Children are forked after the imports and a first
run. A share of 1 tries every write and damage, 7 every seventh. Prints one JSON object: how many were tried, and what
went wrong in which.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import transformers

from attnlab.cli import main as attnlab_main
from attnlab.pretraining import CorpusConfig, PretrainConfig, resume_language_model, train_language_model
from attnlab.training import checkpoints as on_disk
from attnlab.training import list_checkpoints, read_metrics, read_result
from tests.pretraining import conversions

assert accelerate
assert transformers.LlamaConfig

TEXT = "\n\n".join(f"the {word} fox runs over bridge {i}." for i in range(12) for word in ("red", "old", "sly"))
CONFIG = PretrainConfig(
    model="bert-1x32", lengths=(8,), tokens=32, steps=6, warmup=2, evaluations=3, checkpoint_every=2, record=""
)
KILLED = 9


def train(text: Path, run_dir: Path) -> None:
    """The run; resumed where it was begun, and begun again where it was not."""
    if (run_dir / "run.json").exists():
        resume_language_model(run_dir)
    else:
        train_language_model(CorpusConfig(text=str(text), vocab=64), CONFIG, run_dir=run_dir)


def convert(text: Path, run_dir: Path) -> None:
    """A conversion on the model and the text beside ``text``; begun, or gone on with."""
    conversions.job(text.parent / "files", run_dir)


def conversion_outcome(run_dir: Path) -> dict[str, Any]:
    """The same as ``outcome`` for each stage of a conversion, and for what comes out of it."""
    stages = sorted((run_dir / "stages").iterdir())
    paths = [path for folder in ("model", "tokens") for path in sorted((run_dir / folder).rglob("*"))]
    for stage in stages:
        last = list_checkpoints(stage)[-1]
        paths += [last / "model.safetensors", last / "optimizer.safetensors"]
    return {
        "metrics": [[line["values"] for line in read_metrics(stage)] for stage in stages],
        "result": [(read_result(folder) or {}).get("metrics") for folder in (run_dir, *stages)],
        "unfinished": sorted(path.name for path in run_dir.rglob(".*") if path.name != ".lock"),
        **{str(path.relative_to(run_dir)): _sha256(path) for path in paths if path.is_file()},
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Writes:
    """Ends the process before the write number ``end``; otherwise counts them.

    A write is a file opened for writing, a folder made, a rename, a removal, a link, a truncation, or a flush to the disk.
    """

    EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")

    def __init__(self, folder: Path, end: int | None) -> None:
        self.folder, self.end, self.names = str(folder), end, []  # type: ignore[var-annotated]
        fsync = os.fsync

        def flush(handle: int) -> None:
            self.note("fsync", os.readlink(f"/proc/self/fd/{handle}"))
            fsync(handle)

        os.fsync = flush
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self.note("open", path)
        elif event in self.EVENTS:
            self.note(event, arguments[1] if event in ("os.rename", "os.link") else arguments[0])

    def note(self, event: str, path: Any) -> None:
        if event != "os.link" and not str(path).startswith(self.folder):
            return
        if len(self.names) == self.end:
            os._exit(KILLED)
        self.names.append(f"{event} {Path(str(path)).name}")


def in_child(work: Callable[[], int], errors: Path) -> int:
    """The exit code of ``work`` in a child process whose standard error goes to a file."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number in (1, 2):
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            status = work()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(run_dir: Path, *folders: str) -> dict[str, Any]:
    """What must be the same after an undisturbed run and after one that was killed, or damaged, and resumed."""
    last = list_checkpoints(run_dir)[-1]
    files = [last / "model.safetensors", last / "optimizer.safetensors", run_dir / "tokenizer" / "tokenizer.json"]
    for folder in ("model", "tokens", *folders):
        files += sorted(path for path in (run_dir / folder).rglob("*") if path.is_file())
    metrics = [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(run_dir)]
    return {
        "metrics": metrics,
        "result": (read_result(run_dir) or {}).get("metrics"),
        "unfinished": sorted(
            path.name for path in run_dir.rglob(".*") if path.suffix != ".lock" and path.name != ".lock"
        ),
        **{str(path.relative_to(run_dir)): _sha256(path) for path in files},
    }


def difference(run_dir: Path, whole: dict[str, Any], end_of: Callable[[Path], dict[str, Any]]) -> str | None:
    try:
        again = end_of(run_dir)
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    names = [name for name in sorted({*again, *whole}) if again.get(name) != whole.get(name)]
    return f"{', '.join(names)} differ" if names else None


def kills(
    folder: Path,
    share: int,
    train: Callable[[Path, Path], None] = train,
    end_of: Callable[[Path], dict[str, Any]] = lambda run_dir: outcome(run_dir, "tokenizer", "steps"),
) -> dict[str, Any]:
    """End a run at its writes, one after another, and resume it."""
    text, errors, names = folder / "corpus.txt", folder / "errors.txt", folder / "writes.json"

    def counted() -> int:
        writes = Writes(folder / "whole", None)
        train(text, folder / "whole")
        noted = list(writes.names)
        names.write_text(json.dumps(noted))
        return 0

    assert in_child(counted, errors) == 0, errors.read_text()
    whole, noted = end_of(folder / "whole"), json.loads(names.read_text())
    wrong: dict[str, str] = {}
    tried = range(0, len(noted), share)
    for number in tried:
        run_dir = folder / f"run-{number}"

        def killed(run_dir: Path = run_dir, number: int = number) -> int:
            Writes(run_dir, number)
            train(text, run_dir)
            return 0

        def resumed(run_dir: Path = run_dir) -> int:
            train(text, run_dir)
            return 0

        place = f"{number}: {noted[number]}"
        status = in_child(killed, errors)
        if status != KILLED:
            wrong[place] = f"ended with {status}: {errors.read_text()}"
        elif in_child(resumed, errors) != 0:
            wrong[place] = errors.read_text()
        elif reason := difference(run_dir, whole, end_of):
            wrong[place] = reason
        shutil.rmtree(run_dir, ignore_errors=True)
    return {"writes": noted, "tried": len(tried), "wrong": wrong}


def flipped(content: bytes) -> bytes:
    """The content with one bit changed in its middle, and one near its end."""
    changed = bytearray(content)
    for place in (len(content) // 2, len(content) - 2):
        if 0 <= place < len(content):
            changed[place] ^= 1
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "flipped bytes": flipped,
    "a list": lambda _: b"[1, 2]",
    "an empty object": lambda _: b"{}",
    "numbers": lambda content: re.sub(rb": (\{|\[|\")", rb": 7, \1", content, count=1),
    "nulls": lambda content: re.sub(rb'(: )("[^"]*"|[0-9.]+)', rb"\1null", content),
    "another version": lambda content: re.sub(rb'"(version|layout|format)": [0-9]+', rb'"\1": 99', content),
    "not UTF-8": lambda _: b"\xff\xfe\x00{",
    "deep": lambda _: b"[" * 100_000,
}


def sign(file: Path) -> None:
    """Make the checksums beside a damaged file those of its new content."""
    if file.parent.name.startswith("step-") and file.name != "checksums.json":
        names = [path.name for path in file.parent.iterdir() if path.name != "checksums.json"]
        checksums = {name: on_disk._digest(file.parent / name) for name in names}
        (file.parent / "checksums.json").write_text(json.dumps(checksums))


def damage(folder: Path, share: int) -> dict[str, Any]:
    """Damage each file of an unfinished and of a finished run in each way, and resume."""
    whole = outcome(folder / "finished")
    shutil.copytree(folder / "finished", folder / "unfinished")
    shutil.rmtree(folder / "unfinished" / "model")
    (folder / "unfinished" / "result.json").unlink()
    shutil.rmtree(list_checkpoints(folder / "unfinished")[-1])
    wrong: dict[str, str] = {}
    ends = {"the same": 0, "refused": 0}
    number = 0
    for state in ("unfinished", "finished"):
        for file in sorted(path for path in (folder / state).rglob("*") if path.is_file() and path.name != ".lock"):
            for name, change in DAMAGES.items():
                # A changed bit with a checksum to match cannot be told from what a run has written.
                for signed in (False, True) if "step-" in file.parent.name and change is not flipped else (False,):
                    number += 1
                    if number % share:
                        continue
                    place = f"{state}: {file.relative_to(folder / state)}: {name}{', signed' if signed else ''}"
                    reason = _resumed_after(folder, state, file, change, signed, whole, ends)
                    if reason:
                        wrong[place] = reason
    return {"ends": ends, "tried": sum(ends.values()) + len(wrong), "wrong": wrong}


def _resumed_after(
    folder: Path, state: str, file: Path, change: Any, signed: bool, whole: dict[str, Any], ends: dict[str, int]
) -> str | None:
    """What is wrong with the run after the damage; None if it ends as it should or is refused in one line."""
    run_dir, errors = folder / "damaged", folder / "errors.txt"
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(folder / state, run_dir)
    target = run_dir / file.relative_to(folder / state)
    content = change(target.read_bytes())
    if content is None:
        target.unlink()
    else:
        target.write_bytes(content)
    if signed:
        sign(target)
    status = in_child(lambda: attnlab_main(["train", "--resume", str(run_dir)]), errors)
    said = errors.read_text(errors="replace")
    if status == 2 and "Traceback" not in said and said.splitlines()[-1].startswith("attnlab: "):
        ends["refused"] += 1
        return None
    if status != 0:
        return f"exit code {status}: {said[-600:]}"
    reason = difference(run_dir, whole, outcome)
    ends["the same"] += reason is None
    return reason


def of_runs(folder: Path, share: int) -> dict[str, Any]:
    """Kills and damages. The first run imports, before the first fork, what is imported late."""
    (folder / "corpus.txt").write_text(TEXT)
    train(folder / "corpus.txt", folder / "finished")
    return {"kills": kills(folder, share), "damage": damage(folder, share)}


def of_conversions(folder: Path, share: int) -> dict[str, Any]:
    """Kills of a conversion, likewise."""
    (folder / "corpus.txt").write_text(TEXT)
    conversions.files(folder / "files")
    convert(folder / "corpus.txt", folder / "finished")
    return kills(folder, share, convert, conversion_outcome)


if __name__ == "__main__":
    kinds = {"runs": of_runs, "conversions": of_conversions}
    print(json.dumps(kinds[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
