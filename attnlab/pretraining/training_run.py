"""From a text file to a folder with a trained model; a run resumes from its folder alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from attnlab.guidance import Guidance
from attnlab.models import Transformer, save_transformer
from attnlab.pretraining.corpus import CorpusConfig, for_model, prepare_corpus
from attnlab.pretraining.language_model import PretrainConfig, check_training_size, pretrain
from attnlab.training import Outcome

__all__ = ["resume_language_model", "train_language_model"]

C = TypeVar("C", CorpusConfig, PretrainConfig, Guidance)


def train_language_model(
    corpus: CorpusConfig, config: PretrainConfig, *, run_dir: Path, resume: bool = False, track: str | None = None
) -> Outcome:
    """Train, and leave the finished model with its tokeniser in ``run_dir/model``."""
    check_training_size(config, vocab=corpus.vocab if corpus.tokenizer is None else 0)
    run_dir.mkdir(parents=True, exist_ok=True)
    tokeniser, stores = prepare_corpus(corpus, run_dir=run_dir, task=config.task)
    model, outcome = pretrain(
        config,
        tokeniser=tokeniser,
        stores=stores,
        run_dir=run_dir,
        resume=resume,
        track=track,
        config_extra={"corpus": asdict(corpus)},
    )
    for_model(tokeniser, task=config.task).save(run_dir / "model")
    _save(model, run_dir / "model")
    return outcome


def resume_language_model(run_dir: Path, *, track: str | None = None) -> Outcome:
    """Go on with the run in ``run_dir``, with the settings its run.json holds."""
    run_file = run_dir / "run.json"
    if not run_file.is_file():
        raise ValueError(f"{run_dir} holds no run.json, so there is no run to resume there")
    config = json.loads(run_file.read_text(encoding="utf-8"))["config"]
    for name in ("corpus", "pretrain"):
        if name not in config:
            raise ValueError(f"{run_dir} was not made by attnlab train: its run.json names no {name!r}")
    return train_language_model(
        _from_json(CorpusConfig, config["corpus"]),
        _from_json(PretrainConfig, config["pretrain"]),
        run_dir=run_dir,
        resume=True,
        track=track,
    )


def _from_json(cls: type[C], values: Mapping[str, Any]) -> C:
    unknown = values.keys() - {f.name for f in fields(cls)}
    if unknown:
        raise ValueError(f"run.json has settings this attnlab does not know: {', '.join(sorted(unknown))}")
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    if cls is PretrainConfig and settings.get("guidance") is not None:
        settings["guidance"] = _from_json(Guidance, settings["guidance"])
    return cls(**settings)


def _save(model: nn.Module, folder: Path) -> None:
    if isinstance(model, Transformer):
        save_transformer(model, folder)
    else:
        model.save_pretrained(folder)  # type: ignore[operator]
