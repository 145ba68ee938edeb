"""Settings of ``python -m papers effective``, and what one of its processes leaves on disk."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.provenance import write_json
from papers.common.row_store import Part

__all__ = ["EffectiveConfig", "TaskPart", "encoder_folder"]


@dataclass(frozen=True)
class EffectiveConfig:
    """Section 3's settings: batches of 8, 128 tokens, 3 epochs; and how much of each data set is read.

    ``data`` is the folder of GLUE's tasks, ``model`` that of an encoder (the shipped masked LM by default), ``tagger``
    a saved ``PerceptronTagger``; without one, tags are learned from the CoNLL-U file ``treebank``.
    """

    data: str = "glue"
    model: str | None = None
    tagger: str | None = None
    treebank: str | None = None
    classifier: str | None = None
    tasks: tuple[str, ...] = ("RTE", "MRPC", "SST-2", "STS-B", "QNLI")
    batch_size: int = 8
    length: int = 128
    epochs: float = 3.0
    lr: float = 5e-5
    # Training examples at most, drawn at random: SST-2 is the only task that has more.
    train_limit: int | None = 6000
    # Dev examples whose maps are read, drawn at random.
    dev_limit: int = 400
    read_batch: int = 16
    # Dev examples of the faithfulness study, longer than a head is wide (on shorter ones effective attention is
    # attention), and the keys that are hidden in each (None: every one).
    study_texts: int = 40
    study_keys: int | None = None
    timing_repeats: int = 7
    # A randomly drawn BERT-base is timed too: the paper's size.
    timing_base: bool = True
    seed: int = 0
    # Tasks at once; None: all of them on a GPU, one on a CPU.
    jobs: int | None = None


def encoder_folder(config: EffectiveConfig) -> Path:
    """Where the encoder lies: as given, or the masked LM that comes with the package."""
    return Path(__file__).parents[1] / "shipped" / "mlm" if config.model is None else Path(config.model)


class TaskPart(Part):
    """A ``Part`` that takes whole tables, and in which a failed step costs only itself."""

    def tables(self, found: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Add rows to several tables at once."""
        for table, rows in found.items():
            # JSON has no NaN, which a type of token that never occurs would leave.
            kept = [
                {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()} for r in rows
            ]
            self.content["tables"].setdefault(table, []).extend(kept)
        write_json(self.path, self.content)
        print(f"{self.path.stem}: {', '.join(found)}", flush=True)

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table."""
        self.tables({table: [values]})

    def done(self, table: str) -> bool:
        """Whether an earlier run has made this table."""
        return table in self.content["tables"]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Note an error instead of ending the process."""
        try:
            yield
            self.content["facts"].pop(f"failed: {name}", None)
        except (RuntimeError, ValueError, AssertionError) as error:
            traceback.print_exc()
            self.fact(f"failed: {name}", str(error).strip().partition("\n")[0])
