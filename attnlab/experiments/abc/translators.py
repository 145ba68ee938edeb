"""Translators that differ in their attention, trained side by side; what they say of held-out sets goes to files."""

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
from torch import Tensor

from attnlab.experiments.abc.dense import dense_attention
from attnlab.experiments.pairs import Corpus, ShapedSource
from attnlab.experiments.parts import Part, best_device
from attnlab.experiments.together import fit
from attnlab.experiments.translating import held_out_nll, translate, write_lines
from attnlab.models import Transformer, Translation, named_config
from attnlab.training import Recipe, Schedule

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

Split = TypeVar("Split")
# A variant's key, its seed, and how it translates.
Place = tuple[str, int, str]
# N of Linformer: the longest sequence in training and in decoding.
LONGEST = 128
# Ways of translating, and the set that is translated: greedily by the last weights, or with beams by averaged ones.
SEARCHES = {"greedy": "valid", "beam": "tests"}


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

    The vocabulary is small on purpose: it makes captions about as long as the paper's sentences, in tokens.
    """

    vocab: int = 1000
    width: int = 128
    heads: int = 4
    layers: int = 2
    hidden: int = 512
    dropout: float = 0.1
    tokens: int = 4096
    # At most; the schedule ends where the time does. Models that are compared learn side by side, equally long.
    steps: int = 6000
    widths: tuple[int, ...] = (20, 28, 40, 60)
    lr: float = 3e-3
    warmup: int = 400
    # The paper's is "inverse_sqrt"; this one ends at zero, which suits a short training.
    schedule: str = "linear"
    label_smoothing: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    # Products of bfloat16 on a GPU: slower for models as small as these.
    half: bool = False
    beams: int = 5
    penalty: float = 0.6
    # The last so many snapshots are averaged.
    averaged: int = 5
    snapshots_per_epoch: int = 2
    # Snapshots from one look at the validation set to the next.
    look: int = 4
    tokens_held_out: int = 4096
    # Outputs are cut there.
    longest: int = LONGEST
    streams: int = 8
    decode_batch: int = 3100
    # Sentences of the held-out sets; None: all.
    held_out: int | None = None


def build(config: AbcMtConfig, variant: Variant, *, vocab: int, seed: int) -> Transformer:
    """The untrained model of a row; all rows of a seed start from the same weights."""
    torch.manual_seed(seed)
    return Transformer(
        replace(
            named_config("attnlab-translation"),
            vocab=-(-vocab // 8) * 8,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
            hidden=config.hidden,
            dropout=config.dropout,
            self_attention=variant.self_spec,
            causal_attention=variant.causal_spec,
            cross_attention=variant.cross_spec,
        )
    )


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
    seed: int,
) -> None:
    """Train the variants that lack a file of hypotheses and translate: each by its searches (greedy, beam)."""
    todo = {
        v: searches
        for v, searches in variants.items()
        if not all(hypotheses_file(out, name, v, seed, how).exists() for how in searches)
    }
    if not todo:
        return
    device, specials = best_device(), corpus.tokeniser.specials
    models = {v.key: build(config, v, vocab=corpus.tokeniser.vocab_size, seed=seed).to(device) for v in todo}
    pad, bos, eos = specials.pad, specials.bos, specials.eos
    assert pad is not None
    assert bos is not None
    assert eos is not None
    shaped = partial(ShapedSource, pad=pad, bos=bos, eos=eos, widths=config.widths)
    source = shaped(*corpus.ids["train"], tokens=config.tokens, seed=seed)
    valid = shaped(*corpus.ids["valid"], tokens=min(config.tokens, config.tokens_held_out))
    kept = {key: deque[dict[str, Tensor]](maxlen=config.averaged) for key in models}
    every = max(1, source.steps_per_epoch // config.snapshots_per_epoch)
    began = time.monotonic()

    def look(step: int) -> None:
        for key, model in models.items():
            kept[key].append({n: t.detach().clone() for n, t in model.state_dict().items()})
        # The end of a training is looked at too, wherever it is.
        if step % every == 0 and step // every % config.look:
            return
        spent = round(time.monotonic() - began, 1)
        for key, model in models.items():
            nll = _finite(held_out_nll(model, valid))
            part.row("validation", data=name, set=label, variant=key, seed=seed, step=step, seconds=spent, nll=nll)

    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(dense_attention(model))
        found = fit(
            models,
            source,
            term=Translation(label_smoothing=config.label_smoothing),
            recipe=Recipe(lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay, clip=config.clip),
            schedule=Schedule(config.schedule, warmup=config.warmup),
            steps=config.steps,
            seconds=seconds,
            streams=config.streams,
            half=config.half,
            every=every,
            then=look,
        )
    part.row(
        "training", data=name, seed=seed, set=label, steps=found.steps, epochs=found.steps / source.steps_per_epoch,
        tokens_a_step=config.tokens, schedule=config.schedule, seconds=round(found.seconds, 1), models=len(models),
        parameters=max(sum(p.numel() for p in m.parameters()) for m in models.values()),
        pairs=len(corpus.ids["train"][0]) - source.left_out,
        source_tokens=_mean(corpus.ids["train"][0]), target_tokens=_mean(corpus.ids["train"][1]),
    )  # fmt: skip
    for v, searches in todo.items():
        model, losses = models[v.key], found.losses[v.key]
        started = time.monotonic()
        # dense_attention is over: the names in a snapshot are those of the dense form.
        last, mean = (
            {n.replace(".inner", ""): t for n, t in s.items()} for s in (kept[v.key][-1], average(kept[v.key]))
        )
        try:
            for how in searches:
                model.load_state_dict(last if how == "greedy" else mean)
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
            part.fact(f"failed: {v.key}", str(error).strip().partition("\n")[0])
        part.row(
            "losses", data=name, variant=v.key, seed=seed, first=_finite(losses[0]), last=_finite(losses[-1]),
            translating=round(time.monotonic() - started, 1),
        )  # fmt: skip


def split_of(splits: Mapping[str, Split], how: str) -> Split:
    """What is translated this way: all of the test sets where there are several."""
    return splits[SEARCHES[how] if SEARCHES[how] in splits else "test"]


def average(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several states of one model."""
    return {name: torch.stack([s[name].float() for s in states]).mean(0) for name in states[0]}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(rows: Sequence[Any]) -> float:
    return sum(len(row) for row in rows) / len(rows)


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
