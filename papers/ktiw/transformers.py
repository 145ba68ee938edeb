"""Does knowledge of single words drive the cross-attention of transformers too? KTIW's probes per head over training.

Three runs of our transformer or of a Hugging Face encoder-decoder: ``reference``, ``second`` (another seed) and
``uniform``, whose cross-attention is uniform throughout. Agreement is measured with each head of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import record, swap
from attnlab.data import IGNORED, ParallelSource
from attnlab.devices import best_device
from attnlab.dynamics import agreement, forced_probe
from attnlab.dynamics.metrics import random_agreement
from attnlab.models import Transformer, TransformerConfig
from attnlab.provenance import write_json
from attnlab.training import Callback, CrossEntropy, Moment, Recipe, Schedule, Settings, load_weights, train
from papers.ktiw.config import HeadsConfig
from papers.ktiw.corpora import Corpus
from papers.ktiw.readings import BOS, EOS, PAD, Examples, examples

__all__ = ["run_heads"]


def run_heads(corpus: Corpus, work: Path | str, *, config: HeadsConfig) -> Path:
    """Train the three runs into ``work``/<family>/<run>; their evaluations hold the agreements of each head."""
    folder = Path(work) / config.family
    device = best_device()
    on = examples(corpus, "valid", count=config.sentences, device=device, batch=config.sentences)
    gold: dict[tuple[int, int], Tensor] = {}
    for number, run in enumerate(("reference", "second", "uniform")):
        seed = config.seed + number
        torch.manual_seed(seed)
        model = make_model(config, corpus.vocab)
        source = ParallelSource(*corpus.train, pad=PAD, bos=BOS, eos=EOS, batch_size=config.batch, seed=seed)
        settings = Settings(
            steps=config.steps,
            recipe=Recipe(lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01),
            schedule=Schedule("inverse_sqrt", warmup=config.warmup),
            seed=seed,
            precision="no",
            evaluate_at=tuple(step for step in config.evaluate if step <= config.steps),
            watch="accuracy",
            maximise=True,
        )
        with uniform_cross(model) if run == "uniform" else _nothing():
            train(
                model,
                source,
                terms=[CrossEntropy()],
                settings=settings,
                run_dir=folder / run,
                config={"run": run, **asdict(config)},
                callbacks=[_Heads(run, on, gold, config)],
                resume=True,
            )
        if run == "reference":
            load_weights(model, folder / run, which="best")
            model.to(device).eval()
            gold |= attention_rows(model, on)
            first = next(iter(gold.values()))
            noise = torch.rand(first.shape, device=first.device)
            chance = random_agreement(first, noise, lengths=on.lengths, shuffles=5)
            write_json(folder / "chance.json", {"valid": 100 * float(chance.nanmean())})
    return folder


def make_model(config: HeadsConfig, vocab: int) -> nn.Module:
    """Our transformer, or a Hugging Face BART of the same size."""
    if config.family == "attnlab":
        return Transformer(
            TransformerConfig(
                kind="encoder-decoder",
                vocab=vocab,
                width=config.width,
                heads=config.heads,
                layers=config.layers,
                positions="sinusoidal",
                embed_scale=True,
                dropout=config.dropout,
                init="xavier",
            )
        )
    if config.family != "bart":
        raise ValueError(f"family must be attnlab or bart, got {config.family!r}")
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=vocab,
            d_model=config.width,
            encoder_layers=config.layers,
            decoder_layers=config.layers,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=4 * config.width,
            decoder_ffn_dim=4 * config.width,
            dropout=config.dropout,
            max_position_embeddings=512,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
            use_cache=False,
        )
    )


@contextmanager
def uniform_cross(model: nn.Module) -> Iterator[None]:
    """Inside, every cross-attention of the model is uniform."""
    with forced(model)("uniform"):
        yield


def forced(model: nn.Module, layer: int | None = None) -> Callable[[str], Any]:
    """What puts a spec in the place of a layer's cross-attention (None: of every layer's)."""
    chosen: Any = "cross" if layer is None else ("cross", layer)
    return lambda spec: swap(model, spec, layers=chosen, dropout="skip")


@torch.no_grad()
def attention_rows(model: nn.Module, on: Examples) -> dict[tuple[int, int], Tensor]:
    """alpha of each (layer, head) on every target token."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for batch in on.batches:
        with record(model) as trace:
            _logits(model, batch)
        told = batch["labels"] != IGNORED
        for layer in (one for one in trace if one.kind == "cross"):
            for head, weights in enumerate(layer.weights().unbind(1)):
                found.setdefault((layer.layer, head), []).append(weights[told])
    return {key: torch.cat(parts) for key, parts in found.items()}


def head_readings(model: nn.Module, on: Examples, *, each_head: bool) -> dict[str, dict[tuple[int, int], Tensor]]:
    """alpha per head; beta with all cross-attention forced (the same for every head), and with one head forced alone.

    The examples must lie in one batch.
    """
    [batch] = on.batches
    y = batch["labels"]
    told, width = y != IGNORED, on.width
    alpha = attention_rows(model, on)

    def probe(layer: int | None, head: int | None, heads: int) -> Tensor:
        beta = forced_probe(
            lambda: _logits(model, batch),
            forced(model, layer),
            y.masked_fill(~told, -1),
            keys=width,
            head=head,
            heads=heads,
        )
        return beta[told]

    together = probe(None, None, 1)
    found = {"alpha": alpha, "beta": dict.fromkeys(alpha, together)}
    if each_head:
        heads = 1 + max(head for _, head in alpha)
        found["beta_alone"] = {(layer, head): probe(layer, head, heads) for layer, head in alpha}
    return found


class _Heads(Callback):
    """At each evaluation, for each head: what it attends to against the probes, and against the reference's head."""

    def __init__(self, run: str, on: Examples, gold: dict[tuple[int, int], Tensor], config: HeadsConfig) -> None:
        self.run, self.on, self.gold, self.config = run, on, gold, config

    def on_evaluation(self, moment: Moment) -> dict[str, float]:
        on = self.on
        [batch] = on.batches
        told = batch["labels"] != IGNORED
        with torch.no_grad():
            right = _logits(moment.model, batch)[told].argmax(-1) == batch["labels"][told]
        values = {"accuracy": 100 * float(right.double().mean())}
        # A head of a uniform run cannot be read alone: others would be forced to softmax.
        each = self.config.each_head and self.run != "uniform"
        found = head_readings(moment.model, on, each_head=each)
        for layer, head in found["alpha"]:
            pairs = {}
            for name in ("beta", "beta_alone"):
                if name in found and self.run != "uniform":
                    pairs[f"own_{name}"] = (found["alpha"][layer, head], found[name][layer, head])
            if self.gold:
                pairs["gold_beta"] = (self.gold[layer, head], found["beta"][layer, head])
                if self.run != "uniform":
                    pairs["gold_alpha"] = (self.gold[layer, head], found["alpha"][layer, head])
            for name, (u, v) in pairs.items():
                value = agreement(u, v, lengths=on.lengths).nanmean()
                values[f"layer {layer} head {head}/{name}"] = 100 * float(value)
        return values


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return model(**{name: batch[name] for name in names}).logits


@contextmanager
def _nothing() -> Iterator[None]:
    yield
