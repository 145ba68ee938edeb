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
from attnlab.measure import parameter_count
from attnlab.models import CausalLM, Transformer, named_config
from attnlab.training import Schedule
from attnlab.training.side_by_side import Fitted, fit
from papers.abc.dense_attention import dense_attention
from papers.abc.lm_config import CONFIGS, KEYS, NAME, NOTES, TABLES, AbcLmConfig, Variant, variants_of
from papers.abc.lm_differences import differences
from papers.abc.tables import Rows, curves, means, spread
from papers.common.compiling import compiled_on_gpu
from papers.common.row_store import Part
from papers.common.wiki_corpus import WikiCorpus
from papers.value_aware.causal_lm import Score, causal_loss, sliding_windows
from papers.value_aware.training import uncompiled

__all__ = [
    "CONFIGS",
    "KEYS",
    "NAME",
    "NOTES",
    "TABLES",
    "AbcLmConfig",
    "Batches",
    "LmRun",
    "LmTraining",
    "Variant",
    "build",
    "derived",
    "held_out_loss",
    "run_table",
    "start_from_trained",
]

# Updates between evaluations of the held-out loss.
CURVE = 250
# The share of the time for training; the rest is for the test set.
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
            final_norm=config.final_norm,
            dropout=config.dropout,
            activation_dropout=config.activation_dropout,
            max_length=config.length,
            causal_attention=variant.spec.format(length=config.length),
        )
    )


def run_table(
    table: str, config: AbcLmConfig, *, corpus: Path, part: Part, seconds: float, steps: int | None = None
) -> None:
    """Train the models of a table, all seeds side by side, so that they have equally many updates; then score them.

    ``seconds`` is for both. Models that start from another trained one follow when that one is trained.
    """
    began = time.monotonic()
    variants = variants_of(table, config)
    seeds = [s for s in config.seeds if not all(part.has(table, model=v.model, n=v.n, seed=s) for v in variants)]
    if not seeds:
        return
    training = LmTraining(table, config, part, WikiCorpus(corpus))
    runs = [training.run(v, seed) for seed in seeds for v in variants]
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(dense_attention(run.model))
        stack.enter_context(compiled_on_gpu((run.model for run in runs), wanted=config.compile))
        _train_in_turn(training, runs, steps=steps, ends=began + TRAINING * seconds)
        training.score(runs)


def _train_in_turn(training: LmTraining, runs: Sequence[LmRun], *, steps: int | None, ends: float) -> None:
    """Train the models that start from scratch, then those that start from one of them, until the time ``ends``."""
    from_scratch = [run for run in runs if run.variant.start is None]
    continued = [run for run in runs if run.variant.start is not None]
    share = training.config.t2r_updates
    seconds = (ends - time.monotonic()) / (1 + share * len(continued) / len(from_scratch))
    fitted = training.train(from_scratch, steps=steps, seconds=seconds)
    if continued:
        start_from_trained(continued, from_scratch)
        updates = max(1, round(share * fitted.steps))
        training.train(continued, steps=updates, seconds=ends - time.monotonic())


def start_from_trained(runs: Sequence[LmRun], trained: Sequence[LmRun]) -> None:
    """Give each model the weights of the trained one that it starts from, of its seed; those of its features stay."""
    states = {(run.variant.model, run.seed): run.model.state_dict() for run in trained}
    for run in runs:
        assert run.variant.start is not None
        unexpected = run.model.load_state_dict(states[run.variant.start, run.seed], strict=False).unexpected_keys
        assert not unexpected, unexpected


@dataclass(frozen=True, eq=False)
class LmTraining:
    """The models of a table: how they are trained and scored, and where their rows go."""

    table: str
    config: AbcLmConfig
    part: Part
    stores: WikiCorpus

    def run(self, v: Variant, seed: int) -> LmRun:
        """An untrained model of the table, on the device."""
        vocab = -(-self.stores.tokeniser().vocab_size // 64) * 64
        return LmRun(v, seed, build(self.config, self.table, v, vocab=vocab, seed=seed).to(best_device()))

    def train(self, runs: Sequence[LmRun], *, steps: int | None, seconds: float) -> Fitted:
        """Train models side by side, with their held-out losses during training and their sizes at the end."""
        valid = self.windows("valid", context=0)[0]

        def on_pause(step: int) -> None:
            if step % CURVE == 0:
                for run in runs:
                    self.note_loss(run, valid, step)

        sources = {seed: self.source(seed) for seed in dict.fromkeys(run.seed for run in runs)}
        fitted = fit(
            {run.key: run.model for run in runs},
            {run.key: sources[run.seed] for run in runs},
            term=CausalLM(),
            recipe=self.config.recipe,
            schedule=Schedule("cosine", warmup=self.config.warmup),
            steps=steps,
            seconds=seconds,
            streams=min(self.config.streams, len(runs)),
            every=CURVE,
            on_pause=on_pause,
        )
        for run in runs:
            self.note_size(run, steps=fitted.steps, seconds=fitted.seconds)
            self.note_loss(run, valid, fitted.steps)
        return fitted

    def score(self, runs: Sequence[LmRun]) -> None:
        """The perplexities of all models on both held-out sets, with every context that the table has."""
        shallow = self.table == "table_2a"
        for context in self.config.contexts if shallow else (self.config.deep_context,):
            test, tokens_per_word = self.windows("wikitext103-test", context=context)
            dev, dev_tokens_per_word = self.windows("wikitext103-valid", context=context)
            for run in runs:
                score = held_out_loss(run.model, test)
                self.part.row(
                    self.table,
                    **run.labels,
                    **({"context": context} if shallow else {}),
                    perplexity=math.exp(score.loss * tokens_per_word),
                    perplexity_dev=math.exp(held_out_loss(run.model, dev).loss * dev_tokens_per_word),
                    perplexity_per_token=score.perplexity(),
                    loss=score.loss,
                    predicted=score.tokens,
                )

    def source(self, seed: int) -> CausalSource:
        """The batches of a seed."""
        specials = self.stores.tokeniser().specials
        blocks = Blocks(self.stores.store("train"), specials, length=self.config.length, form="stream", seed=seed)
        return CausalSource(blocks, self.config.batch, seed=seed)

    def windows(self, name: str, *, context: int) -> tuple[Batches, float]:
        """(the windows of a store, its tokens per word); unknown words count on neither side."""
        config, specials, store = self.config, self.stores.tokeniser().specials, self.stores.store(name)
        assert specials.eos is not None
        tokens, labels = sliding_windows(
            store, specials.eos, length=config.length, context=max(1, context), unknown=specials.unk
        )
        words = store.meta["words"] - store.meta["unknown_words"] if "words" in store.meta else None
        ratio = 1.0 if words is None else int((labels[:, 1:] != IGNORED).sum()) / words
        every = config.eval_every if context > config.length // 2 else 1
        chosen = slice(None, None if config.eval_rows is None else every * config.eval_rows, every)
        return Batches(tokens[chosen], labels[chosen], config.eval_batch, best_device()), ratio

    def note_loss(self, run: LmRun, valid: Batches, step: int) -> None:
        """A point of a model's curve."""
        self.part.row("curves", setting=self.table, **run.labels, step=step, loss=held_out_loss(run.model, valid).loss)

    def note_size(self, run: LmRun, *, steps: int, seconds: float) -> None:
        """The row of a trained model: how large it is, and how long it learned."""
        tokens = steps * self.config.batch * self.config.length
        parameters = parameter_count(run.model)
        inner = parameters - run.model.tokens.weight.numel()  # type: ignore[operator]
        self.part.row(
            "training", setting=self.table, **run.labels, steps=steps, tokens=tokens,
            seconds=round(seconds, 1), parameters=parameters, without_embeddings=inner,
            tokens_per_parameter=tokens / inner, **({"start": run.variant.start} if run.variant.start else {}),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class LmRun:
    """A model of a table, and its seed."""

    variant: Variant
    seed: int
    model: Transformer

    @property
    def key(self) -> str:
        """A name for the model among those of all seeds."""
        return f"{self.variant.key}/{self.seed}"

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name it."""
        return {"model": self.variant.model, "n": self.variant.n, "seed": self.seed}


def held_out_loss(model: Transformer, windows: Batches) -> Score:
    """The model's loss on held-out windows."""
    training = model.training
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.device.type == "cuda"), uncompiled():
        score = causal_loss(model.eval(), windows)  # type: ignore[arg-type]
    model.train(training)
    return score


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The tables with their seeds averaged, perplexities over BASE's, and how the models were trained."""
    made = {"differences": rows} if (rows := differences(tables)) else {}
    for table, keys in (("table_2a", ["model", "n", "context"]), ("table_2b", ["model", "n"])):
        all_rows = tables.get(table, [])
        dev = ("perplexity_dev",) if all("perplexity_dev" in row for row in all_rows) else ()
        rows, over = means(all_rows, keys, "perplexity", also=dev), _over_base(all_rows)
        times = {tuple(row[key] for key in keys): row["times_base"] for row in means(over, keys, "times_base")}
        for row in rows:
            row["times_base"] = times.get(tuple(row[key] for key in keys))
        if rows:
            made[f"{table}_means"] = rows
            made[f"{table}_training"] = _trained(tables, table)
            made[f"{table}_seeds"] = _by_seed(tables, table, over)
    return made


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
    by_model: dict[tuple[str, int | None], dict[str, Any]] = {}
    for row in mine["training"]:
        key = row["model"], row["n"]
        shown = by_model.setdefault(
            key,
            {
                "model": key[0], "n": key[1], "parameters": row["parameters"],
                "without_embeddings": row["without_embeddings"], "seeds": 0, "tokens_per_parameter": math.inf,
                **{name: value for name, value in ends.get(key, {}).items() if name not in ("model", "n")},
            },
        )  # fmt: skip
        shown["seeds"] += 1
        shown["tokens_per_parameter"] = min(shown["tokens_per_parameter"], row["tokens_per_parameter"])
    return list(by_model.values())


@dataclass(frozen=True, eq=False)
class Batches:
    """Windows of tokens with their labels, some at once, on a device."""

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
