"""``attnlab reproduce abc-mt``: Tables 3a, 5 and 7, translation with bounded memories in the decoder.

Training leaves hypotheses as text; ``score`` reads them where sacrebleu is installed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.experiments.abc.dense import dense_attention
from attnlab.experiments.pairs import TASKS, Corpus, ShapedSource, read_task, tokenised
from attnlab.experiments.parts import Part, best_device
from attnlab.experiments.together import fit
from attnlab.experiments.translating import corpus_bleu, translate, write_lines
from attnlab.models import Transformer, Translation, named_config
from attnlab.training import Recipe, Schedule

__all__ = [
    "KEYS",
    "NAME",
    "NOTES",
    "SETS",
    "AbcMtConfig",
    "Variant",
    "hypotheses_file",
    "run_task",
    "score",
]

NAME = "abc-mt"
# The task of the tables that stand beside the paper's.
PRIMARY = "multi30k-en-de"
KEYS = {
    "training": ["data", "seed", "set"],
    "losses": ["data", "variant", "seed"],
    "table_3a": ["model", "cross", "causal", "seed"],
    "table_3a_other": ["data", "model", "cross", "causal", "seed"],
    "table_5": ["cross", "causal", "seed"],
    "table_7": ["model", "cross", "causal", "seed"],
}
NOTES = {
    "table_3a": "SacreBLEU on Multi30k's test set of 2016, English to German; beam 5, length penalty 0.6, the last "
    "five snapshots averaged.",
    "table_3a_other": "The same on other corpora; wmt10k has 10,000 pairs to learn from, so its level says little.",
    "table_5": "Validation SacreBLEU, greedy, the last weights without averaging.",
    "table_7": "As Table 3a. k-means is not causal, so the row Cluster has clusters in the cross-attention and "
    "ABC_MLP in the causal attention.",
}


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
        return self.model if self.cross is None else f"{self.model}-{self.cross}-{self.causal}"


def _same(model: str, cross: int, causal: int, spec: str, *, encoder: bool = False) -> Variant:
    specs = [spec.format(n=n) for n in (cross, causal)]
    return Variant(model, cross, causal, specs[0], specs[1], specs[0] if encoder else "softmax")


# N of Linformer: the longest sequence in training and in decoding.
LONGEST = 128
BASE = Variant("BASE")
LINFORMER = f"abc-linformer:slots={{n}},length={LONGEST}"
MLP = "abc-mlp:slots={n}"
TABLE_3A = (
    BASE,
    *(_same("ABC_RD", n, n, "abc-random:slots={n}") for n in (32, 64)),
    *(_same("Linformer", n, n, LINFORMER) for n in (32, 64)),
    *(_same("ABC_MLP", 32, n, MLP) for n in (8, 32)),
)
SIZES = (8, 16, 32, 64)
TABLE_5 = tuple(_same("ABC_MLP", cross, causal, MLP) for causal in SIZES for cross in SIZES if cross >= causal)
TABLE_7 = (
    _same("Window", 32, 32, "abc-window:slots={n}"),
    Variant("Cluster", 32, 32, "abc-cluster:slots=32", "abc-mlp:slots=32"),
    *(_same(f"MLP-{name}", 32, n, f"{MLP},activation={name.lower()}") for name in ("ReLU", "sigmoid") for n in (8, 32)),
    _same("MLP-exp-all", 32, 32, MLP, encoder=True),
)
SETS: dict[str, tuple[Variant, ...]] = {
    "3a": TABLE_3A,
    "5": tuple(v for v in TABLE_5 if v not in TABLE_3A),
    "7": TABLE_7,
    "few": (BASE, TABLE_3A[2], TABLE_3A[4], TABLE_3A[5]),
}


@dataclass(frozen=True)
class AbcMtConfig:
    """Table 10's settings, scaled down; the paper's are 6 layers of width 512 and 32k pieces on 4.5 M pairs.

    The vocabulary is small on purpose: it makes captions about as long as the paper's sentences, in tokens.
    """

    vocab: int = 1000
    width: int = 256
    heads: int = 4
    layers: int = 2
    hidden: int = 1024
    dropout: float = 0.2
    tokens: int = 6144
    # The same for all models that are compared, as long as the time suffices.
    steps: int = 1400
    widths: tuple[int, ...] = (24, 36, 56)
    lr: float = 2e-3
    warmup: int = 300
    label_smoothing: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    beams: int = 5
    penalty: float = 0.6
    # The last so many snapshots are averaged. The paper's are of epochs; so short a training has too few of them.
    averaged: int = 5
    snapshots_per_epoch: int = 4
    # Outputs are cut there.
    longest: int = LONGEST
    streams: int = 8
    decode_batch: int = 250
    # Sentences of the held-out sets; None: all.
    held_out: int | None = 1000


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


def run_task(
    name: str,
    config: AbcMtConfig,
    *,
    root: Path,
    part: Part,
    out: Path,
    seconds: float,
    wanted: str = "3a",
    seed: int = 0,
) -> None:
    """Train one set of variants on one task side by side and write what they translate into ``out``."""
    corpus = tokenised(read_task(TASKS[name], root), vocab=config.vocab)
    run_variants(name, SETS[wanted], config, corpus, part=part, out=out, seconds=seconds, label=wanted, seed=seed)


def run_variants(
    name: str,
    variants: Sequence[Variant],
    config: AbcMtConfig,
    corpus: Corpus,
    *,
    part: Part,
    out: Path,
    seconds: float,
    label: str,
    seed: int,
) -> None:
    """The variants that have no hypotheses yet: train, average, translate."""
    todo = [v for v in variants if not hypotheses_file(out, name, v, seed, "beam").exists()]
    if not todo:
        return
    device, specials = best_device(), corpus.tokeniser.specials
    models = {v.key: build(config, v, vocab=corpus.tokeniser.vocab_size, seed=seed).to(device) for v in todo}
    pad, bos, eos = specials.pad, specials.bos, specials.eos
    assert pad is not None
    assert bos is not None
    assert eos is not None
    source = ShapedSource(
        *corpus.ids["train"], pad=pad, bos=bos, eos=eos, tokens=config.tokens, widths=config.widths, seed=seed
    )
    kept = {key: deque[dict[str, Tensor]](maxlen=config.averaged) for key in models}

    def keep(step: int) -> None:
        for key, model in models.items():
            kept[key].append({n: t.detach().clone() for n, t in model.state_dict().items()})

    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(dense_attention(model))
        found = fit(
            models,
            source,
            term=Translation(label_smoothing=config.label_smoothing),
            recipe=Recipe(lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay, clip=config.clip),
            schedule=Schedule("inverse_sqrt", warmup=config.warmup),
            steps=config.steps,
            seconds=seconds,
            streams=config.streams,
            every=max(1, source.steps_per_epoch // config.snapshots_per_epoch),
            then=keep,
        )
        snapshots = {key: list(kept[key]) for key in models}
    part.row(
        "training", data=name, seed=seed, set=label, steps=found.steps, epochs=found.steps / source.steps_per_epoch,
        tokens_a_step=config.tokens, seconds=round(found.seconds, 1), models=len(models),
        parameters=max(sum(p.numel() for p in m.parameters()) for m in models.values()),
        pairs=len(corpus.ids["train"][0]) - source.left_out,
        source_tokens=_mean(corpus.ids["train"][0]), target_tokens=_mean(corpus.ids["train"][1]),
    )  # fmt: skip
    for v in todo:
        model, losses = models[v.key], found.losses[v.key]
        part.row("losses", data=name, variant=v.key, seed=seed, first=losses[0], last=losses[-1])
        try:
            _translate_all(name, v, config, corpus, model, snapshots[v.key], out, seed)
        except (RuntimeError, ValueError) as error:
            # A model that diverged has nothing to say; the others go on.
            part.fact(f"failed: {v.key}", str(error).strip().partition("\n")[0])


def _translate_all(
    name: str,
    v: Variant,
    config: AbcMtConfig,
    corpus: Corpus,
    model: Transformer,
    snapshots: Sequence[Mapping[str, Tensor]],
    out: Path,
    seed: int,
) -> None:
    say = partial(translate, model, corpus, longest=config.longest, penalty=config.penalty, batch=config.decode_batch)
    if corpus.ids["valid"][0]:
        greedy = say(corpus.ids["valid"][0][: config.held_out], beams=1)
        write_lines(hypotheses_file(out, name, v, seed, "greedy"), greedy)
    # dense_attention is over: the names in a snapshot are those of the dense form.
    model.load_state_dict({n.replace(".inner", ""): t for n, t in average(snapshots).items()})
    best = say(corpus.ids["test"][0][: config.held_out], beams=config.beams)
    write_lines(hypotheses_file(out, name, v, seed, "beam"), best)


def average(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several states of one model."""
    return {name: torch.stack([s[name].float() for s in states]).mean(0).to(t.dtype) for name, t in states[0].items()}


def _mean(rows: Sequence[Any]) -> float:
    return sum(len(row) for row in rows) / len(rows)


def hypotheses_file(out: Path, data: str, v: Variant, seed: int, how: str) -> Path:
    """Where a variant's translations lie."""
    return out / data / f"{v.key}.{seed}.{how}.txt"


def untestable(tables: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    """A window as long as the sentence is softmax attention, so it cannot be beaten as a bounded memory."""
    lengths = [r["target_tokens"] for r in tables.get("training", []) if r["data"] == PRIMARY]
    if not lengths or max(lengths) > 32:
        return {}
    why = f"sentences have {max(lengths):.0f} tokens on average, so a window of 32 holds most of them whole"
    return {"abc-mt-beats-window-and-cluster": why}


def score(out: Path, root: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables from every file of hypotheses below ``out``."""
    tables: dict[str, list[dict[str, Any]]] = {"table_3a": [], "table_5": [], "table_7": [], "table_3a_other": []}
    by_key = {v.key: v for v in (*TABLE_3A, *TABLE_5, *TABLE_7)}
    for folder in sorted(p for p in out.iterdir() if p.is_dir() and p.name in TASKS):
        texts = read_task(TASKS[folder.name], root)
        for path in sorted(folder.glob("*.txt")):
            key, seed, how, _ = path.name.rsplit(".", 3)
            v, split = by_key[key], {"beam": "test", "greedy": "valid"}[how]
            hypotheses = path.read_text(encoding="utf-8").splitlines()
            bleu = corpus_bleu(hypotheses, texts[split].target[: len(hypotheses)])
            row = {"cross": v.cross, "causal": v.causal, "bleu": bleu, "seed": int(seed), "sentences": len(hypotheses)}
            if folder.name != PRIMARY:
                if how == "beam":
                    tables["table_3a_other"].append({"data": folder.name, "model": v.model, **row})
                continue
            if how == "greedy" and v in TABLE_5:
                tables["table_5"].append(row)
            if how == "beam" and v in TABLE_3A:
                tables["table_3a"].append({"model": v.model, **row})
            name = "MLP-exp" if v.model == "ABC_MLP" else v.model
            if how == "beam" and (
                v in TABLE_7 or v == BASE or (v.model == "ABC_MLP" and v.causal in (8, 32) and v.cross == 32)
            ):
                tables["table_7"].append({"model": name, **row, "converged": bleu >= 1.0})
    return tables
