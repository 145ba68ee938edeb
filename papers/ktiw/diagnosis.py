"""KTIW's toy tasks and data sets by ``attnlab diagnose``: is word translation learnable from their counts?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.dynamics import Bitext, bitext
from attnlab.evaluation.diagnose import diagnose
from attnlab.progress import each
from papers.common.row_store import make_results, write_results
from papers.ktiw.assemble import PAPER
from papers.ktiw.corpora import TITLES, Corpus
from papers.ktiw.synthetic import FixedPermutation, MixtureOfPermutations, PermutationCopying

__all__ = ["write_diagnosis"]


def write_diagnosis(corpora: Sequence[Corpus], out: Path | str, *, pairs: int = 5000) -> dict[str, Any]:
    """papers/results/ktiw-diagnosis.json: the toy tasks of KTIW, and the translations among ``corpora``."""
    tasks: dict[str, Any] = {
        "permutations of 40 words": PermutationCopying(),
        "mixture of permutations": MixtureOfPermutations(),
        "40 of 60 words": PermutationCopying(words=60),
        "a fixed permutation, 40 of 60 words": FixedPermutation(),
    }
    rows = [diagnose(_sampled(tasks[name], pairs), name=name) for name in each(list(tasks))]
    for corpus in each([corpus for corpus in corpora if corpus.kind == "translation"], lambda corpus: corpus.name):
        rows.append(diagnose(bitext(*corpus.train), name=TITLES[corpus.name]))
    config = {"toy_pairs": pairs, "draws": 3}
    return write_results(out, make_results("ktiw-diagnosis", PAPER, {"diagnosis": rows}, config=config))


def _sampled(task: Any, pairs: int) -> Bitext:
    batches = [task.batch(step) for step in range(-(-pairs // task.batch_size))]
    sides = [[row for batch in batches for row in batch[name].numpy()][:pairs] for name in ("input_ids", "labels")]
    return bitext(*sides)
