"""A file of answers, one line each, written as they come: an evaluation that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["AnswerFile", "SubjectAnswers", "fingerprint"]


class AnswerFile:
    """The answers of all subjects, read once; ``of`` gives those of one subject.

    A line that a kill has torn is left out, and asked for again.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.known = _read(self.path)

    def of(self, subject: str) -> SubjectAnswers:
        """The answers of one subject."""
        return SubjectAnswers(self, subject)

    def add(self, key: str, answer: Any) -> None:
        """Keep an answer, unless there is one."""
        if key in self.known:
            return
        self.known[key] = answer
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "answer": answer}) + "\n")


class SubjectAnswers:
    """Answers of one subject (a model, and what was put into it) by request; lm-eval's cache hook."""

    def __init__(self, file: AnswerFile, subject: str) -> None:
        self.file, self.subject = file, subject
        # How many answers were taken from the file.
        self.taken = 0

    def get(self, kind: str, request: Any) -> Any:
        """The answer to a request; None where it is not known. lm-eval's answers of two parts are tuples."""
        answer = self.file.known.get(self._key(kind, request))
        self.taken += answer is not None
        return tuple(answer) if isinstance(answer, list) else answer

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Keep an answer; lm-eval calls this."""
        self.file.add(self._key(kind, request), answer)

    def _key(self, kind: str, request: Any) -> str:
        return hashlib.sha256(json.dumps([self.subject, kind, request], sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    known = {}
    lines = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            entry = json.loads(line)
            known[entry["key"]] = entry["answer"]
        except (ValueError, KeyError, TypeError):
            continue
    if lines[-1]:
        # Only a torn line has no end; the next answer must not continue it.
        with path.open("ab") as file:
            file.write(b"\n")
    return known


def fingerprint(model: nn.Module) -> str:
    """A digest of a model's tensors: names, shapes, types, and up to 1,024 numbers of each."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        part = tensor.detach().flatten()
        part = part[:: max(1, part.numel() // 1024)][:1024]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(part.double().cpu().numpy().tobytes())
    return digest.hexdigest()
