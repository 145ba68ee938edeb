"""The translators of Tables 3, 5 and 7: their settings, how they are built and trained, and the files they write."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnlab.devices import best_device
from attnlab.models import Transformer, named_config
from attnlab.training import Recipe, Schedule
from attnlab.training.side_by_side import fit
from papers.abc.dense_attention import short_attention
from papers.abc.stacked import Stacked, StackedLearner, StackedSource, StackedTranslation
from papers.common.row_store import Part
from papers.common.translation import Corpus, ShapedSource, mean_loss, translate, write_lines

__all__ = [
    "CONFIGS",
    "LONGEST",
    "SEARCHES",
    "AbcMtConfig",
    "Place",
    "Training",
    "Variant",
    "average",
    "build",
    "hypotheses_file",
    "hypotheses_in",
    "in_order",
    "run_variants",
    "split_of",
]

# N of Linformer: the longest sequence in training and in decoding.
LONGEST = 128


@dataclass(frozen=True)
class Variant:
    """A row: its name, the slots of cross and causal attention, and the specs that make them."""

    model: str
    cross: int | None = None
    causal: int | None = None
    cross_spec: str = "softmax"
    causal_spec: str = "softmax"
    self_spec: str = "softmax"

    @property
    def key(self) -> str:
        """A name for the row, such as ABC_MLP-32-8; its files begin with it."""
        sizes = (self.cross, self.causal) if self.cross is not None else ()
        return "-".join(str(part) for part in (self.model, *sizes))


@dataclass(frozen=True)
class AbcMtConfig:
    """Table 10's settings, scaled down. ``CONFIGS["paper"]`` has the paper's.

    The vocabulary is small on purpose: it makes captions about as long as the paper's sentences, in tokens. Products
    have no biases and norms no gains (``affine``): of updates as small as these they are a quarter.
    """

    vocab: int = 1000
    width: int = 128
    heads: int = 4
    layers: int = 2
    hidden: int = 512
    dropout: float = 0.1
    # The paper's models, on Vaswani et al. (2017), are post-norm with ReLU; small ones learn faster as these.
    norm: str = "pre"
    activation: str = "gelu"
    affine: bool = False
    tokens: int = 2048
    # At most; the schedule ends where the time does. Models that are compared learn side by side, equally long.
    steps: int = 6000
    widths: tuple[int, ...] = (24, 32, 48)
    lr: float = 2.5e-3
    warmup: int = 400
    # The paper's is "inverse_sqrt"; this one ends at zero, which suits a short training.
    schedule: str = "cosine"
    label_smoothing: float = 0.1
    weight_decay: float = 0.01
    clip: float | None = 1.0
    # On a GPU updates are computed in bfloat16, from weights of float32.
    half: bool = True
    beams: int = 5
    penalty: float = 0.6
    # The last so many snapshots are averaged.
    averaged: int = 5
    snapshots_per_epoch: int = 2
    # Snapshots from one evaluation on the validation set to the next.
    snapshots_per_evaluation: int = 3
    # Tokens of the validation set that an evaluation takes in, at most.
    tokens_held_out: int = 65536
    # Outputs are cut there.
    longest: int = LONGEST
    streams: int = 12
    decode_batch: int = 3100
    # Sentences of the held-out sets; None: all.
    held_out: int | None = None


# Table 10's left column. Batches, updates and the rate (1 / sqrt(width x warm-up)) are those of Vaswani et al. (2017).
CONFIGS = {
    "small": AbcMtConfig(),
    "paper": AbcMtConfig(
        vocab=32768,
        width=512,
        heads=8,
        layers=6,
        hidden=2048,
        norm="post",
        activation="relu",
        affine=True,
        tokens=25_000,
        steps=100_000,
        widths=(16, 32, 48, 64, 96, LONGEST),
        lr=5.7e-4,
        warmup=6000,
        schedule="inverse_sqrt",
        weight_decay=0.0,
        clip=None,
        snapshots_per_epoch=1,
        streams=1,
        decode_batch=256,
    ),
}


def build(config: AbcMtConfig, variant: Variant, *, vocab: int, seed: int) -> Transformer:
    """The untrained model of a row; all rows of a seed start from the same weights, but for those of their control."""
    torch.manual_seed(seed)
    model = Transformer(
        replace(
            named_config("attnlab-translation"),
            vocab=-(-vocab // 8) * 8,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
            hidden=config.hidden,
            dropout=config.dropout,
            self_attention=_seeded(variant.self_spec, seed),
            causal_attention=_seeded(variant.causal_spec, seed),
            cross_attention=_seeded(variant.cross_spec, seed),
            norm=config.norm,
            activation=config.activation,
            bias=config.affine,
        )
    )
    if not config.affine:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                for name in ("weight", "bias"):
                    module.register_parameter(name, None)
    return model


def _seeded(spec: str, seed: int) -> str:
    """The spec with a seed for what is learned; that of random control stays, so that seeds can be stacked."""
    return f"{spec},seed={seed}" if spec.startswith(("abc-mlp", "abc-linformer")) else spec


Split = TypeVar("Split")
# A variant's key, its seed, and its search.
Place = tuple[str, int, str]
# Searches, and the set that each translates: greedily by the last weights, or with beams by averaged ones.
SEARCHES = {"greedy": "valid", "beam": "tests"}


def split_of(splits: Mapping[str, Split], search: str) -> Split:
    """What is translated by this search: all of the test sets where there are several."""
    return splits[SEARCHES[search] if SEARCHES[search] in splits else "test"]


def hypotheses_file(out: Path, data: str, v: Variant, seed: int, search: str) -> Path:
    """Where a variant's translations lie."""
    return out / data / f"{v.key}.{seed}.{search}.txt"


def hypotheses_in(outs: Sequence[Path], data: str) -> dict[Place, list[str]]:
    """The translations of a corpus, by variant, seed and search; those of later folders win."""
    hypotheses = {}
    for path in (path for out in outs for path in sorted((out / data).glob("*.txt"))):
        key, seed, search, _ = path.name.rsplit(".", 3)
        hypotheses[key, int(seed), search] = path.read_text(encoding="utf-8").splitlines()
    return hypotheses


def in_order(hypotheses: Mapping[Place, list[str]], variants: Iterable[str]) -> list[tuple[Place, list[str]]]:
    """Translations in the order of the variants' keys, and of the seeds."""
    order = {key: i for i, key in enumerate(variants)}
    return sorted(hypotheses.items(), key=lambda item: (order[item[0][0]], item[0][1]))


@dataclass(frozen=True, eq=False)
class Training:
    """Models that learn side by side: their corpus, settings and seeds, and where their rows go.

    ``data`` names the corpus and ``label`` the set of models.
    """

    data: str
    corpus: Corpus
    config: AbcMtConfig
    part: Part
    label: str
    seeds: Sequence[int]

    def build(self, v: Variant, seed: int) -> Transformer:
        """An untrained model on the device."""
        return build(self.config, v, vocab=self.corpus.tokeniser.vocab_size, seed=seed).to(best_device())


def run_variants(variants: Mapping[Variant, Sequence[str]], training: Training, *, out: Path, seconds: float) -> None:
    """Train the variants that lack a file of hypotheses, then let each translate by its searches (greedy, beam).

    The seeds of a variant are one stacked model. They start from weights of their own and see the pairs in orders of
    their own, in batches of the same widths.
    """
    missing = {
        v: searches
        for v, searches in variants.items()
        if not all(
            hypotheses_file(out, training.data, v, seed, search).exists()
            for search in searches
            for seed in training.seeds
        )
    }
    if not missing:
        return
    if len(missing) < len(variants):
        # Models that are trained later than the others of their set have another run's schedule.
        training = replace(training, label="+".join(v.key for v in missing))
    snapshots = _train(list(missing), training, seconds=seconds)
    for v, searches in missing.items():
        weights = {"greedy": snapshots[v.key][-1], "beam": average(snapshots[v.key])}
        for i, seed in enumerate(training.seeds):
            of_seed = {search: {name: t[i] for name, t in weights[search].items()} for search in searches}
            _translate_held_out(v, seed, of_seed, training, out)


def _translate_held_out(
    v: Variant, seed: int, weights: Mapping[str, Mapping[str, Tensor]], training: Training, out: Path
) -> None:
    """Write what a model translates by each search with its weights; a model that diverged is noted as failed."""
    config, started = training.config, time.monotonic()
    model = training.build(v, seed)
    try:
        for search, state in weights.items():
            _put_weights(model, state)
            hypotheses = translate(
                model,
                training.corpus,
                split_of(training.corpus.ids, search)[0][: config.held_out],
                beams=1 if search == "greedy" else config.beams,
                longest=config.longest,
                penalty=config.penalty,
                batch=config.decode_batch,
            )
            write_lines(hypotheses_file(out, training.data, v, seed, search), hypotheses)
    except (RuntimeError, ValueError) as error:
        training.part.fact(f"failed: {v.key}, seed {seed}", str(error).strip().partition("\n")[0])
    took = round(time.monotonic() - started, 1)
    training.part.row("translating", data=training.data, variant=v.key, seed=seed, seconds=took)


def _train(variants: Sequence[Variant], training: Training, *, seconds: float) -> dict[str, list[dict[str, Tensor]]]:
    """The last snapshots of each variant, with a leading axis for its seeds."""
    config = training.config
    sources = [_training_pairs(training, seed) for seed in training.seeds]
    steps_per_epoch = sources[0].steps_per_epoch
    every = max(1, steps_per_epoch // config.snapshots_per_epoch)
    with ExitStack() as stack:
        models = {v.key: _stacked(v, training, stack) for v in variants}
        watcher = _Watcher(models, training, every=every)
        fitted = fit(
            models,
            StackedSource(sources),
            term=StackedTranslation(label_smoothing=config.label_smoothing),
            recipe=Recipe(lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay, clip=config.clip),
            schedule=Schedule(config.schedule, warmup=config.warmup),
            steps=config.steps,
            seconds=seconds,
            streams=config.streams,
            half=config.half,
            every=every,
            on_pause=watcher.on_pause,
            learner_class=StackedLearner,
        )
        watcher.finish(fitted.steps)
    source_ids, target_ids = training.corpus.ids["train"]
    for seed in training.seeds:
        training.part.row(
            "training", data=training.data, seed=seed, set=training.label, steps=fitted.steps,
            epochs=fitted.steps / steps_per_epoch, tokens_a_step=config.tokens, schedule=config.schedule,
            seconds=round(fitted.seconds, 1), models=len(models),
            parameters=max(sum(p[0].numel() for p in model.parameters()) for model in models.values()),
            pairs=len(source_ids) - sources[0].left_out,
            source_tokens=_mean_length(source_ids), target_tokens=_mean_length(target_ids),
        )  # fmt: skip
    return watcher.snapshots()


def _stacked(v: Variant, training: Training, stack: ExitStack) -> Stacked:
    """The seeds of a variant as one model, with attention in its short form until the stack of contexts ends."""
    models = [training.build(v, seed) for seed in training.seeds]
    for model in models:
        stack.enter_context(short_attention(model))
    return Stacked(models)


class _Watcher:
    """Keeps the last snapshots of models in training, and notes their losses on the validation set."""

    def __init__(self, models: Mapping[str, Stacked], training: Training, *, every: int) -> None:
        self.models, self.training = models, training
        self.evaluate_every = every * training.config.snapshots_per_evaluation
        self.last = {key: deque[dict[str, Tensor]](maxlen=training.config.averaged) for key in models}
        held_out = _first_pairs(training)
        self.held_out = {name: t.expand(len(training.seeds), *t.shape) for name, t in held_out.items()}
        self.began = time.monotonic()

    def on_pause(self, step: int) -> None:
        """Take a snapshot; evaluate after every so many of them."""
        for key, model in self.models.items():
            self.last[key].append(model.snapshot())
        if step % self.evaluate_every == 0:
            self._evaluate(step)

    def finish(self, step: int) -> None:
        """Evaluate at the end, unless the last pause did."""
        if step % self.evaluate_every:
            self._evaluate(step)

    def snapshots(self) -> dict[str, list[dict[str, Tensor]]]:
        """The last snapshots by the parameters' names outside ``short_attention``, which wraps mechanisms."""
        return {
            key: [{name.replace(".inner", ""): t for name, t in snapshot.items()} for snapshot in snapshots]
            for key, snapshots in self.last.items()
        }

    def _evaluate(self, step: int) -> None:
        term = StackedTranslation(label_smoothing=0.0)
        seconds = round(time.monotonic() - self.began, 1)
        labels = {"data": self.training.data, "set": self.training.label, "step": step, "seconds": seconds}
        losses = {key: mean_loss(model, [self.held_out], term).tolist() for key, model in self.models.items()}
        rows = [
            {**labels, "variant": key, "seed": seed, "nll": nll if math.isfinite(nll) else None}
            for key, by_seed in losses.items()
            for seed, nll in zip(self.training.seeds, by_seed, strict=True)
        ]
        self.training.part.extend("validation", rows)


def _training_pairs(training: Training, seed: int) -> ShapedSource:
    """The batches of a seed; all seeds have batches of the same width at a step."""
    config, order = training.config, training.seeds[0]
    source, target = training.corpus.ids["train"]
    specials = training.corpus.tokeniser.specials
    return ShapedSource(source, target, specials, tokens=config.tokens, widths=config.widths, seed=seed, order=order)


def _first_pairs(training: Training) -> dict[str, Tensor]:
    """One batch of the validation set: as many of its first pairs as an evaluation may take in."""
    config, width = training.config, training.config.widths[-1]
    pairs = [pair for pair in zip(*training.corpus.ids["valid"], strict=True) if max(map(len, pair)) < width]
    pairs = pairs[: max(1, config.tokens_held_out // width)]
    source, target = ([pair[i] for pair in pairs] for i in (0, 1))
    specials = training.corpus.tokeniser.specials
    return ShapedSource(source, target, specials, tokens=width * len(pairs), widths=(width,)).batch(0)


def _put_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, p in own.items():
        p.data.copy_(weights[name])


def average(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several states of one model."""
    return {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}


def _mean_length(rows: Sequence[Any]) -> float:
    return sum(len(row) for row in rows) / len(rows)
