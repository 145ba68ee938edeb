"""``python -m papers abc-lm``: Table 2, language models that differ in their attention only."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.data import IGNORED, Blocks, CausalSource
from attnlab.devices import best_device
from attnlab.models import CausalLM, Transformer, named_config
from attnlab.training import Schedule
from attnlab.training.side_by_side import Fitted, fit
from papers.abc.dense_attention import dense_attention
from papers.abc.lm_config import KEYS, NAME, NOTES, TABLES, AbcLmConfig, Variant
from papers.abc.lm_differences import differences, undecided
from papers.abc.tables import Rows, curves, means, spread
from papers.common.compiling import compiled_parts
from papers.common.row_store import Part
from papers.common.wiki_corpus import WikiCorpus
from papers.value_aware.causal_lm import Score, causal_loss, sliding_windows
from papers.value_aware.training import uncompiled

__all__ = ["KEYS", "NAME", "NOTES", "TABLES", "AbcLmConfig", "Variant", "build", "derived", "run_table", "untestable"]

# Updates between looks at the clock, and at the held-out loss.
CURVE = 250
# Of the time; the rest is for the test set.
TRAINING = 0.93


def build(config: AbcLmConfig, table: str, variant: Variant, *, vocab: int, seed: int) -> Transformer:
    """The untrained model of a row; all rows of a seed start from the same weights."""
    deep = table == "table_2b"
    torch.manual_seed(seed)
    return Transformer(
        replace(
            named_config("abc-lm-16"),
            vocab=vocab,
            # Adaptive embeddings serve a vocabulary of words; ours is of 8k pieces.
            cutoffs=(),
            adaptive_dropout=0.0,
            width=config.width,
            heads=config.heads,
            hidden=4 * config.width,
            layers=config.deep_layers if deep else config.layers,
            layer_dropout=config.layer_dropout if deep else 0.0,
            final_norm=True,
            dropout=config.dropout,
            activation_dropout=0.0,
            max_length=config.length,
            causal_attention=variant.spec.format(length=config.length),
        )
    )


def run_table(
    table: str, config: AbcLmConfig, *, corpus: Path, part: Part, seconds: float, steps: int | None = None
) -> None:
    """Train the models of a table, all seeds side by side, so that they have equally many updates; then score them.

    ``seconds`` is for both.
    """
    began = time.monotonic()
    rows = [v for v in TABLES[table] if config.models is None or v.key in config.models]
    seeds = [s for s in config.seeds if not all(part.has(table, model=v.model, n=v.n, seed=s) for v in rows)]
    if not seeds:
        return
    stores, device = WikiCorpus(corpus), best_device()
    tokeniser = stores.tokeniser()
    vocab = -(-tokeniser.vocab_size // 64) * 64
    runs = [_Run(v, seed, build(config, table, v, vocab=vocab, seed=seed).to(device)) for seed in seeds for v in rows]
    sources = {seed: _source(stores, config, seed) for seed in seeds}
    valid = _windows(stores, "valid", config, device, context=0)[0]

    def look(step: int) -> None:
        if step % CURVE == 0:
            for run in runs:
                _note_loss(table, part, run, valid, step)

    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(dense_attention(run.model))
        if config.compile and device.type == "cuda":
            stack.enter_context(compiled_parts(run.model for run in runs))
        found = fit(
            {run.key: run.model for run in runs},
            {run.key: sources[run.seed] for run in runs},
            term=CausalLM(),
            recipe=config.recipe,
            schedule=Schedule("cosine", warmup=config.warmup),
            steps=steps,
            seconds=TRAINING * seconds - (time.monotonic() - began),
            streams=min(config.streams, len(runs)),
            every=CURVE,
            on_pause=look,
        )
        for run in runs:
            _note_size(table, config, part, run, found)
            _note_loss(table, part, run, valid, found.steps)
        _score_all(table, config, part, runs, stores, device)


def _source(stores: WikiCorpus, config: AbcLmConfig, seed: int) -> CausalSource:
    specials = stores.tokeniser().specials
    blocks = Blocks(stores.store("train"), specials, length=config.length, form="stream", seed=seed)
    return CausalSource(blocks, config.batch, seed=seed)


def _score_all(
    table: str, config: AbcLmConfig, part: Part, runs: Sequence[_Run], stores: WikiCorpus, device: torch.device
) -> None:
    """The perplexities of all models, with every context that the table has."""
    shallow = table == "table_2a"
    for context in config.contexts if shallow else (config.deep_context,):
        windows, tokens_per_word = _windows(stores, "wikitext103-test", config, device, context=context)
        for run in runs:
            _score(table, part, run, windows, tokens_per_word, {"context": context} if shallow else {})


@dataclass(frozen=True, eq=False)
class _Run:
    variant: Variant
    seed: int
    model: Transformer

    @property
    def key(self) -> str:
        return f"{self.variant.key}/{self.seed}"

    @property
    def labels(self) -> dict[str, Any]:
        return {"model": self.variant.model, "n": self.variant.n, "seed": self.seed}


def _note_loss(table: str, part: Part, run: _Run, valid: _Batches, step: int) -> None:
    part.row("curves", setting=table, **run.labels, step=step, loss=_loss(run.model, valid).loss)


def _loss(model: Transformer, windows: _Batches) -> Score:
    training = model.training
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.device.type == "cuda"), uncompiled():
        found = causal_loss(model.eval(), windows)  # type: ignore[arg-type]
    model.train(training)
    return found


def _note_size(table: str, config: AbcLmConfig, part: Part, run: _Run, found: Fitted) -> None:
    tokens = found.steps * config.batch * config.length
    parameters = sum(p.numel() for p in run.model.parameters())
    inner = parameters - run.model.tokens.weight.numel()  # type: ignore[operator]
    part.row(
        "training", setting=table, **run.labels, steps=found.steps, tokens=tokens, seconds=round(found.seconds, 1),
        parameters=parameters, without_embeddings=inner, tokens_per_parameter=tokens / inner,
    )  # fmt: skip


def _score(
    table: str, part: Part, run: _Run, windows: _Batches, tokens_per_word: float, labels: Mapping[str, Any]
) -> None:
    found = _loss(run.model, windows)
    part.row(
        table,
        **run.labels,
        **labels,
        perplexity=math.exp(found.loss * tokens_per_word),
        perplexity_per_token=found.perplexity(),
        loss=found.loss,
        predicted=found.tokens,
    )


def _windows(
    stores: WikiCorpus, name: str, config: AbcLmConfig, device: torch.device, *, context: int
) -> tuple[_Batches, float]:
    """(the windows, tokens per word of the whole store); unknown words count on neither side."""
    specials, store = stores.tokeniser().specials, stores.store(name)
    assert specials.eos is not None
    tokens, labels = sliding_windows(
        store, specials.eos, length=config.length, context=max(1, context), unknown=specials.unk
    )
    words = store.meta["words"] - store.meta["unknown_words"] if "words" in store.meta else None
    ratio = 1.0 if words is None else int((labels[:, 1:] != IGNORED).sum()) / words
    every = config.eval_every if context > config.length // 2 else 1
    chosen = slice(None, None if config.eval_rows is None else every * config.eval_rows, every)
    return _Batches(tokens[chosen], labels[chosen], config.eval_batch, device), ratio


def untestable(tables: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Claims that seeds leave open, and those about a context where no model has learned to use it."""
    open_ = undecided(differences(tables))
    found: dict[int, list[float]] = {}
    for row in tables.get("table_2a", []):
        if row["model"] == "BASE":
            found.setdefault(row["context"], []).append(row["perplexity"])
    if 0 not in found or 480 not in found:
        return open_
    gain = 1 - (sum(found[480]) / len(found[480])) / (sum(found[0]) / len(found[0]))
    if gain > 0.02:
        return open_
    why = f"BASE itself gains {100 * gain:.1f} % of perplexity from a context of 480: too little training to use one"
    return open_ | {"abc-gap-grows-with-context": why, "abc-linformer-worsens-with-context": why}


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The tables with their seeds averaged, perplexities over BASE's, and how the models were trained."""
    found = {"differences": rows} if (rows := differences(tables)) else {}
    for table, keys in (("table_2a", ["model", "n", "context"]), ("table_2b", ["model", "n"])):
        rows, over = means(tables.get(table, []), keys, "perplexity"), _over_base(tables.get(table, []))
        times = {tuple(row[key] for key in keys): row["times_base"] for row in means(over, keys, "times_base")}
        for row in rows:
            row["times_base"] = times.get(tuple(row[key] for key in keys))
        if rows:
            found[f"{table}_means"] = rows
            found[f"{table}_training"] = _trained(tables, table)
            found[f"{table}_seeds"] = _by_seed(tables, table, over)
    return found


def _over_base(rows: Rows) -> Rows:
    """The rows with their perplexities over BASE's of the same seed: seeds differ more than models do."""
    base = {(row.get("context"), row["seed"]): row["perplexity"] for row in rows if row["model"] == "BASE"}
    return [
        {**row, "times_base": row["perplexity"] / base[place]}
        for row in rows
        if (place := (row.get("context"), row["seed"])) in base
    ]


def _by_seed(tables: dict[str, Rows], table: str, over: Rows) -> Rows:
    """For each seed how long it was trained, how flat its curves ended, and its perplexities over BASE's."""
    mine = {name: [row for row in tables.get(name, []) if row["setting"] == table] for name in ("training", "curves")}
    named = [{**row, "row": f"{row['model']}-{row['n']}"} for row in over if row["model"] != "BASE"]
    rows = spread(named, ["seed", "context"] if table == "table_2a" else ["seed"], "row", "times_base")
    return [{"seed": row["seed"], **_training_of_seed(mine, row["seed"]), **row} for row in rows]


def _training_of_seed(tables: Mapping[str, Rows], seed: int) -> dict[str, Any]:
    """How long the models of a seed were trained, and by how much their losses fell at the end."""
    trained = [row for row in tables["training"] if row["seed"] == seed]
    ends = curves([row for row in tables["curves"] if row["seed"] == seed], ["model", "n"])
    fell = [row["fell_in_last_quarter"] for row in ends if row["fell_in_last_quarter"] is not None]
    return {
        "steps": max((row["steps"] for row in trained), default=None),
        "tokens_per_parameter": min((row["tokens_per_parameter"] for row in trained), default=None),
        "fell_in_last_quarter": fmean(fell) if fell else None,
    }


def _trained(tables: dict[str, Rows], table: str) -> Rows:
    """Sizes, the fewest tokens that a seed of a model saw for each of its parameters, and the curves' ends."""
    mine = {name: [row for row in tables.get(name, []) if row["setting"] == table] for name in ("training", "curves")}
    ends = {(row["model"], row["n"]): row for row in curves(mine["curves"], ["model", "n"])}
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for row in mine["training"]:
        key = row["model"], row["n"]
        shown = found.setdefault(
            key,
            {
                "model": key[0], "n": key[1], "parameters": row["parameters"],
                "without_embeddings": row["without_embeddings"], "seeds": 0, "tokens_per_parameter": math.inf,
                **{name: value for name, value in ends.get(key, {}).items() if name not in ("model", "n")},
            },
        )  # fmt: skip
        shown["seeds"] += 1
        shown["tokens_per_parameter"] = min(shown["tokens_per_parameter"], row["tokens_per_parameter"])
    return list(found.values())


@dataclass(frozen=True, eq=False)
class _Batches:
    tokens: np.ndarray
    labels: np.ndarray
    size: int
    device: torch.device

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for lo in range(0, len(self.tokens), self.size):
            rows = slice(lo, lo + self.size)
            yield {
                "input_ids": torch.from_numpy(self.tokens[rows]).to(self.device),
                "labels": torch.from_numpy(self.labels[rows]).to(self.device),
            }
