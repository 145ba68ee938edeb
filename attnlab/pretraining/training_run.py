"""From a text file to a folder with a trained model; a run resumes from its folder alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import nn

from attnlab.guidance import Guidance
from attnlab.models import Transformer, save_transformer
from attnlab.pretraining.corpus import CorpusConfig, for_model, prepare_corpus
from attnlab.pretraining.language_model import PretrainConfig, check_training_size, pretrain
from attnlab.provenance import file_sha256
from attnlab.training import Outcome, list_checkpoints
from attnlab.training.launch import check_tracker, join_processes
from attnlab.training.runs import RunFolder, read_run, say

__all__ = ["resume_language_model", "train_language_model"]

C = TypeVar("C", CorpusConfig, PretrainConfig, Guidance)


def train_language_model(
    corpus: CorpusConfig, config: PretrainConfig, *, run_dir: Path, resume: bool = False, track: str | None = None
) -> Outcome:
    """Train, and leave the finished model with its tokeniser in ``run_dir/model``.

    The folder is locked and its run.json written before anything else, so that a run that is killed at any moment can
    be resumed from its folder alone.
    """
    check_training_size(config, vocab=corpus.vocab if corpus.tokenizer is None else 0)
    check_tracker(track)
    process, folder = join_processes(config.settings()), RunFolder(run_dir)
    corpus = corpus if resume else corpus.located()
    with _nothing_left_of_a_refused_start(run_dir), folder.hold() if process.is_main_process else nullcontext():
        with process.main_process_first():
            if process.is_main_process:
                _begin(folder, corpus, config, processes=process.num_processes, resume=resume)
            data = read_run(run_dir).get("data", {})
            tokeniser, stores = prepare_corpus(
                corpus, run_dir=run_dir, task=config.task, fingerprint=data.get("tokeniser")
            )
        model, outcome = pretrain(
            config,
            tokeniser=tokeniser,
            stores=stores,
            run_dir=folder,
            resume=resume,
            track=track,
            config_extra={"corpus": corpus.as_dict()},
        )
        if process.is_main_process:
            for_model(tokeniser, task=config.task).save(run_dir / "model")
            _save(model, run_dir / "model")
    return outcome


def resume_language_model(run_dir: Path, *, track: str | None = None, checkpoint_every: int | None = None) -> Outcome:
    """Go on with the run in ``run_dir``, with the settings its run.json holds; how often it is saved may change."""
    if not (run_dir / "run.json").is_file():
        raise ValueError(f"{run_dir} holds no run.json, so there is no run to resume there")
    config = read_run(run_dir)["config"]
    for name in ("corpus", "pretrain"):
        if not isinstance(config.get(name), dict):
            raise ValueError(f"{run_dir} was not made by attnlab train: its run.json names no {name!r}")
    corpus = _from_json(CorpusConfig, config["corpus"])
    settings = _from_json(PretrainConfig, config["pretrain"])
    if checkpoint_every is not None:
        settings = replace(settings, checkpoint_every=checkpoint_every)
    text = Path(corpus.text)
    if corpus.sha256 is not None and text.is_file() and file_sha256(text) != corpus.sha256:
        say(f"{text} has changed since the run began; going on with the tokens kept in {run_dir}")
    return train_language_model(corpus, settings, run_dir=run_dir, resume=True, track=track)


def _begin(folder: RunFolder, corpus: CorpusConfig, config: PretrainConfig, *, processes: int, resume: bool) -> None:
    """Write run.json, or check it; of an earlier start that got no further nothing is used."""
    if not (folder.path / "run.json").exists():
        shutil.rmtree(folder.path / "tokenizer", ignore_errors=True)
    folder.describe(
        name=config.label,
        seed=config.seed,
        config={
            "pretrain": config.as_dict(),
            "corpus": corpus.as_dict(),
            "training": config.settings().as_dict(),
        },
        processes=processes,
        resume=resume,
    )


@contextmanager
def _nothing_left_of_a_refused_start(run_dir: Path) -> Iterator[None]:
    """Take new folders, or run.json, away again if a new run is refused, so that the corrected command may use them."""
    fresh = not (run_dir / "run.json").exists()
    missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        yield
    except (ValueError, ImportError, OSError):
        if fresh and not list_checkpoints(run_dir):
            (run_dir / "run.json").unlink(missing_ok=True)
            if missing:
                shutil.rmtree(missing[-1], ignore_errors=True)
        raise


def _from_json(cls: type[C], values: Mapping[str, Any]) -> C:
    hints = get_type_hints(cls)
    unknown = values.keys() - {f.name for f in fields(cls)}
    if unknown:
        raise ValueError(f"run.json has settings this attnlab does not know: {', '.join(sorted(unknown))}")
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    if cls is PretrainConfig and isinstance(settings.get("guidance"), dict):
        settings["guidance"] = _from_json(Guidance, settings["guidance"])
    for name, value in settings.items():
        if not _fits(value, hints[name]):
            raise ValueError(f"run.json has {name} = {value!r}, which is not {hints[name]}")
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in settings]
    if missing:
        raise ValueError(f"run.json lacks the setting {missing[0]}")
    return cls(**settings)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of the annotated type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _save(model: nn.Module, folder: Path) -> None:
    if isinstance(model, Transformer):
        save_transformer(model, folder)
    else:
        model.save_pretrained(folder)  # type: ignore[operator]
