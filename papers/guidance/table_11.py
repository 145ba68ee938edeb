"""``python -m papers guidance --config NAME ...``: rows of Table 11, each trained into a run folder that resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlab.data import Blocks, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.models import Transformer, TransformerConfig, named_config
from attnlab.pretraining import PretrainConfig, pretrain
from attnlab.provenance import provenance
from papers.common.row_store import Part
from papers.guidance.assemble import KEYS, assemble
from papers.guidance.config import EPOCHS, PAPER_LENGTH, PAPER_SETTINGS, PaperSetting
from papers.guidance.study import Places, low_resource_stores, wiki_stores

__all__ = ["RunSizes", "pretrain_config", "run_settings", "settings_of"]


@dataclass(frozen=True)
class RunSizes:
    """What a run changes of the paper's sizes; None: as the paper has it."""

    width: int | None = None
    batch: int | None = None
    length: int = PAPER_LENGTH
    # None: the paper's passes over the text.
    steps: int | None = None
    # Of the vocabularies of Filipino and Oromo.
    vocab: int = 8000


def run_settings(
    names: Sequence[str],
    sizes: RunSizes,
    *,
    places: Places,
    work: Path,
    out: Path,
    seeds: Sequence[int] = (0,),
) -> dict[str, Any]:
    """Train the rows of Table 11 that ``names`` names and write ``out``; finished runs are not run again."""
    _check_names(names)
    work.mkdir(parents=True, exist_ok=True)
    part = Part(work / "table-11.json", keys=KEYS)
    part.fact("provenance", provenance())
    part.fact("config", asdict(sizes))
    for name in names:
        setting = PAPER_SETTINGS[name]
        tokeniser, stores = corpus_of(setting, places, sizes)
        for seed in seeds:
            row = run_setting(setting, sizes, tokeniser, stores, work / "runs" / f"{name}-{seed}", seed=seed)
            part.row("table_11", setting=name, seed=seed, **row)
    return assemble(work, out, config={"table_11": asdict(sizes)}, keep=out)


def settings_of(names: Sequence[str], sizes: RunSizes) -> dict[str, Any]:
    """The rows' settings and the sizes of their models, before a text is read."""
    _check_names(names)
    rows = {}
    for name in names:
        setting = PAPER_SETTINGS[name]
        model = named_config(setting.model)
        shape = {"layers": model.layers, "width": sizes.width or model.width, "heads": model.heads}
        rows[name] = {**asdict(setting), "batch": sizes.batch or setting.batch, "model_sizes": shape}
    return {"rows": rows, "length": sizes.length, "steps": sizes.steps, "epochs": None if sizes.steps else EPOCHS}


def _check_names(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in PAPER_SETTINGS]
    if unknown:
        raise ValueError(f"no row of Table 11 named {unknown[0]}; they are {', '.join(PAPER_SETTINGS)}")


def corpus_of(setting: PaperSetting, places: Places, sizes: RunSizes) -> tuple[Tokeniser, dict[str, TokenStore]]:
    """The texts of a row's language, and their tokeniser."""
    if setting.language == "english":
        return wiki_stores(places, f"{setting.model} in English")
    folder = {"filipino": "tagalog", "oromo": "oromo"}[setting.language]
    language = f"{setting.model} in {setting.language.capitalize()}"
    return low_resource_stores(places.need(folder, language), folder, sizes.vocab)


def pretrain_config(
    setting: PaperSetting, sizes: RunSizes, tokeniser: Tokeniser, store: TokenStore, *, seed: int
) -> PretrainConfig:
    """The row as a training: its batch counts texts of the paper's length."""
    batch = sizes.batch or setting.batch
    texts = len(Blocks(store, tokeniser.specials, length=sizes.length, form="enclosed", seed=seed))
    steps = sizes.steps or max(1, EPOCHS * texts // batch)
    return PretrainConfig(
        model=setting.model,
        lengths=(sizes.length,),
        tokens=sizes.length * batch,
        steps=steps,
        lr=setting.lr,
        warmup=setting.warmup_over(steps),
        guidance=setting.guidance(steps=steps, length=sizes.length),
        seed=seed,
    )


def run_setting(
    setting: PaperSetting,
    sizes: RunSizes,
    tokeniser: Tokeniser,
    stores: dict[str, TokenStore],
    run_dir: Path,
    *,
    seed: int,
) -> dict[str, Any]:
    """Train one row, or go on with it; what it was trained with, and its loss on held-out texts."""
    config = pretrain_config(setting, sizes, tokeniser, stores["train"], seed=seed)
    model_config = _model_config(setting, sizes, tokeniser)
    torch.manual_seed(seed)
    _, outcome = pretrain(
        config,
        tokeniser=tokeniser,
        stores=stores,
        run_dir=run_dir,
        model=Transformer(model_config),
        resume=True,
        config_extra={"sizes": asdict(sizes)},
    )
    guidance = config.guidance
    return {
        "language": setting.language,
        "model": setting.model,
        "layers": model_config.layers,
        "width": model_config.width,
        "heads": model_config.heads,
        "guided": setting.guided,
        "patterns": None if guidance is None else guidance.label,
        "lr": config.lr,
        "warmup": config.warmup,
        "alpha0": setting.alpha0,
        "fraction": setting.fraction,
        "hold": None if guidance is None else guidance.hold,
        "batch": config.tokens // sizes.length,
        "length": sizes.length,
        "steps": outcome.step,
        "loss": outcome.metrics["valid/masked-lm"],
        "error": outcome.metrics["valid/error"],
    }


def _model_config(setting: PaperSetting, sizes: RunSizes, tokeniser: Tokeniser) -> TransformerConfig:
    """The model of Table 10, with the tokeniser's vocabulary rounded up to what a GPU likes."""
    named = named_config(setting.model)
    return replace(
        named,
        vocab=-(-tokeniser.vocab_size // 64) * 64,
        width=sizes.width or named.width,
        max_length=max(named.max_length, sizes.length),
    )
