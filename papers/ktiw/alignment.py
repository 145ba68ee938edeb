"""One sentence of a translation run: attention, lexical probe and IBM Model 1's alignment side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnlab.dynamics import bitext, fit_ibm, ibm_alpha
from attnlab.progress import note
from papers.common.row_store import make_results, write_results
from papers.ktiw.assemble import PAPER
from papers.ktiw.corpora import Corpus
from papers.ktiw.readings import as_read

__all__ = ["write_alignment"]


def write_alignment(corpus: Corpus, folder: Path, out: Path | str, *, steps: int = 10) -> dict[str, Any]:
    """The sentence of the reference's timeline at its best evaluation, and ``steps`` of EM on the training pairs."""
    from safetensors.numpy import load_file

    run = folder / "reference"
    index = json.loads((run / "steps" / "index.json").read_text(encoding="utf-8"))
    entry = max(index["steps"], key=lambda one: one["scalars"]["valid/accuracy"])
    maps = load_file(run / "steps" / entry["file"])
    source, target = index["sequences"]["source"], index["sequences"]["target"]
    known = {word: i for i, word in enumerate(corpus.words)}
    note("fitting IBM Model 1")
    model = fit_ibm(bitext(*as_read(corpus, "train")), steps=steps)
    ibm, _ = ibm_alpha(model.trans, bitext([[known[w] for w in source]], [[known[w] for w in target]]))
    rows = []
    for t, word in enumerate(target):
        row: dict[str, Any] = {"target": word, "source": source}
        for name, values in (("alpha", maps["cross.0"]), ("beta", maps["cross.1"]), ("ibm", ibm.numpy()[None])):
            row[name] = [round(float(value), 4) for value in values[0][t]]
        rows.append(row)
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    config = {"em_steps": model.steps, "step": entry["step"]}
    result = make_results("ktiw-alignment", PAPER, {"alignment": rows}, config=config, seed=facts["seed"], made=facts)
    return write_results(out, result)
