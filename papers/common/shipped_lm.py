"""``python -m papers shipped-lm``: the causal language model in attnlab/shipped/lm, and its twin with a bounded memory.

It learns from short rows, then from rows as long as it may read; the twin has the same weights, and learns only which
keys its memory keeps. A second call goes on where the first was stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.adapters import LoadedModel, load_model, save_conversion
from attnlab.adapters.cache_bytes import cache_bytes
from attnlab.adapters.distillation import Distillation
from attnlab.adapters.evict import token_losses
from attnlab.data import CausalSource, TokenStore
from attnlab.data.packing import Blocks
from attnlab.measure import parameter_count
from attnlab.pretraining import PretrainConfig, build_model, pretrain
from attnlab.pretraining.conversion import ConversionConfig, convert_model
from attnlab.pretraining.corpus import for_model
from attnlab.progress import each
from attnlab.training import load_weights, read_metrics, read_result
from papers.common.row_store import make_results, write_results
from papers.common.wiki_corpus import WikiCorpus

__all__ = ["ShippedLM", "make_shipped_lm"]

NAME = "shipped_lm"
# The longest rows that the twin learns from.
TWIN_LENGTH = 2048


@dataclass(frozen=True)
class ShippedLM:
    """Sizes and lengths of both trainings, and the memory of the twin."""

    model: str = "llama-4x192"
    length: int = 512
    longest: int = 8192
    steps: int = 20_000
    tokens: int = 32_768
    lr: float = 3e-3
    long_steps: int = 2_000
    long_lr: float = 5e-4
    mechanism: str = "abc-select:slots=28,window=32,sinks=4"
    twin_tokens: int = 2_000_000
    # Tokens of each held-out text that the losses are of.
    evaluated: int = 131_072
    seed: int = 0

    @property
    def lengths(self) -> list[int]:
        """The lengths at which both are evaluated: each twice the one before."""
        return [self.length << i for i in range((self.longest // self.length).bit_length())]

    def phase(self, name: str) -> PretrainConfig:
        """The training on "short" or "long" rows."""
        short = name == "short"
        length, steps, lr = (
            (self.length, self.steps, self.lr) if short else (self.longest, self.long_steps, self.long_lr)
        )
        return PretrainConfig(
            model=self.model, task="causal", lengths=(length,), tokens=self.tokens, steps=steps, lr=lr,
            warmup=max(1, steps // 20), decay="cosine", betas=(0.9, 0.95), weight_decay=0.1, evaluations=10,
            seed=self.seed,
        )  # fmt: skip


def make_shipped_lm(config: ShippedLM, *, corpus: Path, work: Path, folder: Path, out: Path) -> dict[str, Any]:
    """Train, convert, write ``folder``/lm and ``folder``/lm-bounded, and the results file."""
    wiki = WikiCorpus(corpus)
    tokeniser = wiki.tokeniser()
    stores = {"train": wiki.store("train"), "valid": wiki.store("valid")}
    # Made for the longest rows, so that the model says how long a text may be.
    model = build_model(config.phase("long"), tokeniser)
    for name in ("short", "long"):
        run = work / name
        pretrain(config.phase(name), tokeniser=tokeniser, stores=stores, run_dir=run, model=model, resume=run.exists())
        # A run that was finished before has trained no model here.
        load_weights(model, run)
    _save_half(model, folder / "lm")
    for_model(tokeniser, task="causal").save(folder / "lm")
    text = _as_text(stores["train"], tokeniser, work / "train.txt", characters=8 * config.twin_tokens)
    convert_model(_twin(config, folder / "lm", text), run_dir=work / "twin")
    shutil.rmtree(folder / "lm-bounded", ignore_errors=True)
    save_conversion(work / "twin" / "model", folder / "lm-bounded")
    teacher, twin = load_model(folder / "lm"), load_model(work / "twin" / "model")
    tables = {
        "training": list(_trainings(config, work, model)),
        "curve": [row | {"rows": name} for name in ("short", "long") for row in _curve(work / name)],
        "loss": list(_losses(config, wiki, {"softmax": teacher, config.mechanism: twin})),
    }
    return write_results(out, make_results(NAME, None, tables, config=asdict(config), seed=config.seed))


def _twin(config: ShippedLM, folder: Path, text: Path) -> ConversionConfig:
    length = min(TWIN_LENGTH, config.longest)
    settings = Distillation(batch=max(1, 16_384 // length), length=length, seed=config.seed, repeats=0.1)
    return ConversionConfig(
        model=str(folder), text=(str(text),), mechanism=config.mechanism, tokens=config.twin_tokens,
        stages=(("heads", 1.0),), settings=settings,
    )  # fmt: skip


def _save_half(model: Any, folder: Path) -> None:
    """Half precision: what is evaluated here is what is shipped."""
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.float16).save_pretrained(folder)
    model.float()


def _as_text(store: TokenStore, tokeniser: Any, path: Path, *, characters: int) -> Path:
    """The first articles again as text, as conversions read it."""
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for i in range(len(store)):
            if written >= characters:
                break
            written += file.write(tokeniser.decode(store[i].tolist()).strip() + "\n\n")
    return path


def _trainings(config: ShippedLM, work: Path, model: Any) -> Iterator[dict[str, Any]]:
    for name in ("short", "long"):
        phase, timing = config.phase(name), (read_result(work / name) or {})["timing"]
        yield {
            "rows": phase.lengths[0], "steps": phase.steps, "tokens_a_step": phase.tokens,
            "tokens": phase.steps * phase.tokens, "parameters": parameter_count(model),
            "seconds": timing["seconds"], "lr": phase.lr,
        }  # fmt: skip


def _curve(run: Path) -> Iterator[dict[str, Any]]:
    for line in read_metrics(run):
        if line["kind"] == "eval":
            yield {"step": line["step"], "valid_loss": line["values"]["valid/loss"]}


def _losses(config: ShippedLM, wiki: WikiCorpus, models: Mapping[str, LoadedModel]) -> Iterator[dict[str, Any]]:
    """Nats a token of both held-out texts in rows of each length, and the cache's bytes there."""
    jobs = [
        (text, name, length) for text in ("valid", "wikitext103-valid") for name in models for length in config.lengths
    ]
    specials = wiki.tokeniser().specials
    for text, name, length in each(jobs, lambda job: f"{job[0]}, {job[1]}, {job[2]} tokens"):
        store, model = wiki.store(text), models[name].model
        blocks = Blocks(store, specials, length=length, form="stream", seed=None)
        rows = min(len(blocks), max(1, config.evaluated // length))
        source = CausalSource(blocks, 1, seed=config.seed, shuffle=False)
        yield {
            "text": text, "attention": name, "length": length, "rows": rows,
            "loss": _mean_loss(model, source, rows), "cache_bytes": cache_bytes(model, length),
        }  # fmt: skip


@torch.no_grad()
def _mean_loss(model: Any, source: CausalSource, rows: int) -> float:
    return float(torch.cat([token_losses(model, source.batch(row)["input_ids"], None) for row in range(rows)]).mean())
