"""Part (d): translation with guidance in encoder, decoder and cross-attention, beside hard-coded Gaussian heads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnlab.adapters import swap
from attnlab.devices import best_device
from attnlab.guidance import GaussianHeads, Guidance, GuidanceTerm, guide
from attnlab.models import Transformer, Translation, named_config
from attnlab.pretraining import pattern_tokens
from attnlab.provenance import provenance
from attnlab.trace import Kind
from attnlab.training import Recipe, Schedule
from attnlab.training.side_by_side import lanes
from papers.common.row_store import Part
from papers.common.translation import (
    TASKS,
    Corpus,
    ShapedSource,
    held_out_nll,
    read_task,
    tokenised,
    translate,
    write_lines,
)
from papers.guidance.learner import GuidedLearner, train_guided
from papers.guidance.mlm import ended, thinned

__all__ = ["MODELS", "TranslationConfig", "run_translation"]

MODELS = ("BASE", "AG", "Gaussian")
# What each kind of attention can follow: a decoder's Next is cut away, and delimiters stand at a text's end only.
PATTERNS: dict[Kind, tuple[str, ...]] = {
    "encoder": ("next", "prev", "first", "period"),
    "decoder": ("prev", "first"),
    "cross": ("next", "prev", "first", "period"),
}


@dataclass(frozen=True)
class TranslationConfig:
    """Our translation models; the paper's are transformer-base on IWSLT and WMT, English to German."""

    task: str = "multi30k-en-de"
    vocab: int = 4000
    width: int = 256
    heads: int = 8
    layers: int = 3
    hidden: int = 1024
    dropout: float = 0.2
    tokens: int = 4096
    widths: tuple[int, ...] = (16, 24, 32, 48)
    steps: int = 3000
    hold: float = 0.1
    lr: float = 1e-3
    warmup: float = 0.1
    alpha0: float = 10.0
    label_smoothing: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    looks: int = 12
    held_out: int = 1000


def run_translation(
    config: TranslationConfig,
    *,
    root: Path,
    part: Part,
    out: Path,
    seeds: Sequence[int],
    seconds: float | None = None,
) -> None:
    """Train each model of each seed on the same batches; losses go to ``part``, translations to ``out``."""
    corpus = tokenised(read_task(TASKS[config.task], root), vocab=config.vocab)
    part.fact("provenance", provenance())
    part.fact("config", asdict(config))
    device = best_device()
    names = {f"{name}-{seed}": (name, seed) for seed in seeds for name in MODELS}
    with ExitStack() as stack:
        learners, made = {}, {}
        for (key, (name, seed)), lane in zip(names.items(), lanes(len(names)), strict=True):
            made[key] = _build(config, corpus, seed).to(device)
            learners[key] = _learner(config, corpus, name, made[key], lane, stack)
        shaped = partial(ShapedSource, specials=corpus.tokeniser.specials, widths=config.widths, seed=seeds[0])
        source = shaped(*corpus.ids["train"], tokens=config.tokens)
        valid = shaped(*corpus.ids["valid"], tokens=min(1024, config.tokens))

        def evaluate(step: int) -> None:
            for key, (name, seed) in names.items():
                loss = held_out_nll(made[key], valid)
                part.row("translation_evaluations", arm=name, seed=seed, at=step, valid_nll=loss)

        points = sorted({round(i * config.steps / config.looks) for i in range(config.looks + 1)})
        steps, spent = train_guided(
            [(source, learners.values())], steps=config.steps, seconds=seconds, evaluate_at=points, evaluate=evaluate
        )
        for key, (name, seed) in names.items():
            curve = learners[key].curves()
            nll = held_out_nll(made[key], valid)
            part.row(
                "translation_runs",
                arm=name,
                seed=seed,
                steps=steps,
                seconds=round(spent, 1),
                valid_nll=nll,
                **ended(curve),
            )
            part.row("translation_curves", arm=name, seed=seed, **thinned(curve))
        # Gaussian heads must be in place when the model is used, so decoding belongs inside.
        for key in names:
            lines = translate(made[key], corpus, corpus.ids["test"][0][: config.held_out], beams=5, longest=64)
            write_lines(out / f"{key}.txt", lines)


def _build(config: TranslationConfig, corpus: Corpus, seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(
        replace(
            named_config("attnlab-translation"),
            vocab=-(-corpus.tokeniser.vocab_size // 8) * 8,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
            hidden=config.hidden,
            dropout=config.dropout,
            norm="post",
        )
    )


def _learner(
    config: TranslationConfig, corpus: Corpus, name: str, model: Transformer, lane: tuple[Any, Any], stack: ExitStack
) -> GuidedLearner:
    terms: list[GuidanceTerm] = []
    if name == "Gaussian":
        stack.enter_context(swap(model, GaussianHeads(), layers=["encoder", "decoder"]))
    if name == "AG":
        tokens = pattern_tokens(corpus.tokeniser)
        for kind, patterns in PATTERNS.items():
            guidance = Guidance(
                fraction=0.5,
                patterns=patterns,
                # Per row, so that texts of all widths are pulled alike; alpha0 belongs to 512 tokens.
                alpha0=config.alpha0 / 512,
                reduction="row",
                hold=config.hold,
                steps=config.steps,
                kind=kind,
            )
            terms.append(stack.enter_context(guide(model, guidance, tokens=tokens)))
    return GuidedLearner(
        model,
        [Translation(label_smoothing=config.label_smoothing)],
        guidance=terms,
        recipe=Recipe(lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay, clip=config.clip),
        schedule=Schedule("inverse_sqrt", warmup=round(config.warmup * config.steps)),
        steps=config.steps,
        stream=lane[0],
        pool=lane[1],
    )
