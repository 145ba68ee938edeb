"""Lines that cannot be read: counted, reported with their numbers, and skipped or fatal as the caller chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from attnlab.errors import PythonRemedyError

__all__ = ["Malformed"]

KEEP = 20


@dataclass
class Malformed:
    """Pass one to a reader to have bad lines skipped and counted; without one the first bad line is a ValueError.

    >>> bad = Malformed("skip")
    >>> bad.add("a.jsonl", 3, "not JSON")
    >>> print(bad)
    1 malformed line skipped: a.jsonl line 3: not JSON
    """

    action: Literal["fail", "skip"] = "skip"
    count: int = 0
    # Only the first few, so that a file of bad lines does not fill the memory.
    lines: list[tuple[str, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.action not in ("fail", "skip"):
            raise ValueError(f"what to do with malformed lines must be 'fail' or 'skip', got {self.action!r}")

    def add(self, path: Path | str, line: int, why: str) -> None:
        """Count one bad line, or raise if such lines are fatal."""
        if self.action == "fail":
            raise PythonRemedyError(
                f"{path} line {line}: {why}; mend or remove the line",
                remedy="or leave such lines out with malformed=Malformed('skip')",
            )
        self.count += 1
        if len(self.lines) < KEEP:
            self.lines.append((str(path), line, why))

    def __str__(self) -> str:
        if not self.count:
            return "no malformed lines"
        plural = "" if self.count == 1 else "s"
        shown = "; ".join(f"{path} line {line}: {why}" for path, line, why in self.lines)
        more = f"; and {self.count - len(self.lines)} more" if self.count > len(self.lines) else ""
        return f"{self.count} malformed line{plural} skipped: {shown}{more}"
