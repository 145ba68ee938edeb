"""The translators of Tables 3, 5 and 7: their settings, how they are built and trained, and the files they write."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnlab.data import Specials
from attnlab.devices import best_device
from attnlab.models import Transformer, named_config
from attnlab.training import Recipe, Schedule
from attnlab.training.side_by_side import fit
from papers.abc.dense_attention import short_attention
from papers.abc.stacked import Stacked, StackedLearner, StackedSource, StackedTranslation
from papers.common.row_store import Part
from papers.common.translation import Corpus, ShapedSource, mean_loss, translate, write_lines

__all__ = [
    "LONGEST",
    "SEARCHES",
    "AbcMtConfig",
    "Place",
    "Variant",
    "average",
    "build",
    "hypotheses_file",
    "hypotheses_in",
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
        """The row in one word, which is also the name of its file."""
        sizes = (self.cross, self.causal) if self.cross is not None else ()
        return "-".join(str(part) for part in (self.model, *sizes))


@dataclass(frozen=True)
class AbcMtConfig:
    """Table 10's settings, scaled down; the paper's are 6 layers of width 512 and 32k pieces on 4.5 M pairs.

    The vocabulary is small on purpose: it makes captions about as long as the paper's sentences, in tokens. Products
    have no biases and norms no gains: of updates as small as these they are a quarter.
    """

    vocab: int = 1000
    width: int = 128
    heads: int = 4
    layers: int = 2
    hidden: int = 512
    dropout: float = 0.1
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
    clip: float = 1.0
    # On a GPU updates are computed in bfloat16, from weights of float32.
    half: bool = True
    beams: int = 5
    penalty: float = 0.6
    # The last so many snapshots are averaged.
    averaged: int = 5
    snapshots_per_epoch: int = 2
    # Snapshots from one look at the validation set to the next.
    look: int = 3
    # Tokens of the validation set that a look takes in, at most.
    tokens_held_out: int = 65536
    # Outputs are cut there.
    longest: int = LONGEST
    streams: int = 12
    decode_batch: int = 3100
    # Sentences of the held-out sets; None: all.
    held_out: int | None = None


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
            bias=False,
        )
    )
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for name in ("weight", "bias"):
                module.register_parameter(name, None)
    return model


def _seeded(spec: str, seed: int) -> str:
    """The spec with a seed for what is learned; that of random control stays, so that seeds can be stacked."""
    return f"{spec},seed={seed}" if spec.startswith(("abc-mlp", "abc-linformer")) else spec


Split = TypeVar("Split")
# A variant's key, its seed, and how it translates.
Place = tuple[str, int, str]
# Ways of translating, and the set that is translated: greedily by the last weights, or with beams by averaged ones.
SEARCHES = {"greedy": "valid", "beam": "tests"}


def split_of(splits: Mapping[str, Split], how: str) -> Split:
    """What is translated this way: all of the test sets where there are several."""
    return splits[SEARCHES[how] if SEARCHES[how] in splits else "test"]


def hypotheses_file(out: Path, data: str, v: Variant, seed: int, how: str) -> Path:
    """Where a variant's translations lie."""
    return out / data / f"{v.key}.{seed}.{how}.txt"


def hypotheses_in(outs: Sequence[Path], data: str) -> dict[Place, list[str]]:
    """What was said of a corpus, by variant, seed and search; later folders win."""
    found = {}
    for path in (path for out in outs for path in sorted((out / data).glob("*.txt"))):
        key, seed, how, _ = path.name.rsplit(".", 3)
        found[key, int(seed), how] = path.read_text(encoding="utf-8").splitlines()
    return found


def run_variants(
    name: str,
    variants: Mapping[Variant, Sequence[str]],
    config: AbcMtConfig,
    corpus: Corpus,
    *,
    part: Part,
    out: Path,
    seconds: float,
    label: str,
    seeds: Sequence[int],
) -> None:
    """Train the variants that lack a file of hypotheses and translate: each by its searches (greedy, beam).

    The seeds of a variant are one stacked model. They start from weights of their own and see the pairs in orders of
    their own, in batches of the same widths.
    """
    todo = {
        v: searches
        for v, searches in variants.items()
        if not all(hypotheses_file(out, name, v, seed, how).exists() for how in searches for seed in seeds)
    }
    if not todo:
        return
    kept = _trained(name, list(todo), config, corpus, part, seconds=seconds, label=label, seeds=seeds)
    for v, searches in todo.items():
        weights = {"greedy": kept[v.key][-1], "beam": average(kept[v.key])}
        for i, seed in enumerate(seeds):
            started = time.monotonic()
            model = build(config, v, vocab=corpus.tokeniser.vocab_size, seed=seed).to(best_device())
            try:
                for how in searches:
                    _put_weights(model, {n: t[i] for n, t in weights[how].items()})
                    said = translate(
                        model,
                        corpus,
                        split_of(corpus.ids, how)[0][: config.held_out],
                        beams=1 if how == "greedy" else config.beams,
                        longest=config.longest,
                        penalty=config.penalty,
                        batch=config.decode_batch,
                    )
                    write_lines(hypotheses_file(out, name, v, seed, how), said)
            except (RuntimeError, ValueError) as error:
                # A model that diverged has nothing to say; the others go on.
                part.fact(f"failed: {v.key}, seed {seed}", str(error).strip().partition("\n")[0])
            took = round(time.monotonic() - started, 1)
            part.row("translating", data=name, variant=v.key, seed=seed, seconds=took)


def _trained(
    name: str,
    variants: Sequence[Variant],
    config: AbcMtConfig,
    corpus: Corpus,
    part: Part,
    *,
    seconds: float,
    label: str,
    seeds: Sequence[int],
) -> dict[str, list[dict[str, Tensor]]]:
    """The last snapshots of each variant, with a leading axis for its seeds."""
    device, shaped = best_device(), partial(_shaped, corpus.tokeniser.specials, tokens=config.tokens)
    sources = [shaped(*corpus.ids["train"], widths=config.widths, seed=seed, order=seeds[0]) for seed in seeds]
    held_out = _expanded(_first_pairs(corpus, config), len(seeds))
    models: dict[str, Stacked] = {}
    kept = {v.key: deque[dict[str, Tensor]](maxlen=config.averaged) for v in variants}
    an_epoch = sources[0].steps_per_epoch
    every = max(1, an_epoch // config.snapshots_per_epoch)
    began = time.monotonic()

    def keep(step: int) -> None:
        for key, model in models.items():
            kept[key].append(model.snapshot())
        if step % (every * config.look) == 0:
            look(step)

    def look(step: int) -> None:
        row = {"data": name, "set": label, "step": step, "seconds": round(time.monotonic() - began, 1)}
        found = {
            key: mean_loss(model, [held_out], StackedTranslation(label_smoothing=0.0)) for key, model in models.items()
        }
        rows = [
            {**row, "variant": key, "seed": seed, "nll": _finite(nll)}
            for key, losses in found.items()
            for seed, nll in zip(seeds, losses.tolist(), strict=True)
        ]
        part.extend("validation", rows)

    with ExitStack() as stack:
        for v in variants:
            alone = [build(config, v, vocab=corpus.tokeniser.vocab_size, seed=seed).to(device) for seed in seeds]
            for model in alone:
                stack.enter_context(short_attention(model))
            models[v.key] = Stacked(alone)
        found = fit(
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
            on_pause=keep,
            learner_class=StackedLearner,
        )
        if found.steps % (every * config.look):
            look(found.steps)
    for seed in seeds:
        part.row(
            "training", data=name, seed=seed, set=label, steps=found.steps, epochs=found.steps / an_epoch,
            tokens_a_step=config.tokens, schedule=config.schedule, seconds=round(found.seconds, 1), models=len(models),
            parameters=max(sum(p[0].numel() for p in m.parameters()) for m in models.values()),
            pairs=len(corpus.ids["train"][0]) - sources[0].left_out,
            source_tokens=_mean(corpus.ids["train"][0]), target_tokens=_mean(corpus.ids["train"][1]),
        )  # fmt: skip
    # short_attention is over: the names in a snapshot are those of the dense form.
    return {
        key: [{n.replace(".inner", ""): t for n, t in snapshot.items()} for snapshot in some]
        for key, some in kept.items()
    }


def _shaped(specials: Specials, source: Sequence[Any], target: Sequence[Any], **options: Any) -> ShapedSource:
    pad, bos, eos = specials.pad, specials.bos, specials.eos
    assert pad is not None
    assert bos is not None
    assert eos is not None
    return ShapedSource(source, target, pad=pad, bos=bos, eos=eos, **options)


def _first_pairs(corpus: Corpus, config: AbcMtConfig) -> dict[str, Tensor]:
    """One batch of the validation set: as many of its first pairs as a look may take in."""
    width = config.widths[-1]
    pairs = [pair for pair in zip(*corpus.ids["valid"], strict=True) if max(map(len, pair)) < width]
    pairs = pairs[: max(1, config.tokens_held_out // width)]
    source, target = ([pair[i] for pair in pairs] for i in (0, 1))
    return _shaped(corpus.tokeniser.specials, source, target, tokens=width * len(pairs), widths=(width,)).batch(0)


def _expanded(batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The same for every model of a stack."""
    return {name: t.expand(size, *t.shape) for name, t in batch.items()}


def _put_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, p in own.items():
        p.data.copy_(weights[name])


def average(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several states of one model."""
    return {name: torch.stack([s[name].float() for s in states]).mean(0) for name in states[0]}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(rows: Sequence[Any]) -> float:
    return sum(len(row) for row in rows) / len(rows)
