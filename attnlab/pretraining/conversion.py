"""From a pretrained model and a text to a folder with the converted model; the same call goes on after a kill."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.adapters import LoadedModel, Plan, convert, is_converted, load_model, save_model
from attnlab.adapters.cache_bytes import cache_bytes
from attnlab.adapters.distillation import STAGES, Distillation, HeldOut, Predictions, TokenRows, teach
from attnlab.adapters.distillation.distill import KL, half_precision
from attnlab.adapters.distillation.memory import step_bytes
from attnlab.adapters.initialise import initialise_control, learned_parts
from attnlab.adapters.load import max_length
from attnlab.adapters.model_files import check_ids, unknown_tokens
from attnlab.adapters.protocol import adapter_of
from attnlab.data.beginnings import tokens_around
from attnlab.data.text_folders import text_files, token_stream
from attnlab.devices import multiplies_bfloat16
from attnlab.pretraining.conversion_steps import planned_steps
from attnlab.provenance import sync_folder, write_json
from attnlab.sizes import byte_text, check_bytes, memory_bytes
from attnlab.training import Settings, list_checkpoints, read_metrics, read_result
from attnlab.training.checkpoints import sweep
from attnlab.training.launch import join_processes
from attnlab.training.runs import RunFolder, read_run, say

__all__ = ["ConversionConfig", "convert_model", "fitted_lengths"]

# The share of the text that is held out, and the windows of it that are read at each evaluation.
HELD_OUT, LEAST_WINDOWS, MOST_WINDOWS = 0.01, 8, 64
# Tokens of the text that planning and the clusters of keys may read, and the tokens of one string of them.
SAMPLE, SAMPLE_ROW = 1 << 18, 1 << 12
CACHE_LENGTHS = (1024, 4096, 16384, 65536)
# What a folder may hold in which a conversion was killed before it wrote run.json.
BEGUN = {".lock", "checkpoints"}

MakePlan = Callable[[LoadedModel, Sequence[str]], Plan]


@dataclass(frozen=True)
class ConversionConfig:
    """One conversion: the model, what its layers attend by, and how it learns; one of the four ways is chosen."""

    model: str
    text: tuple[str, ...]
    mechanism: str | None = None
    plan: Mapping[str, Any] | None = None
    # A share of softmax's cache: a plan for it is made first.
    budget: float | None = None
    # No conversion: the same recipe on the same tokens, for comparison.
    softmax_control: bool = False
    leave_out: tuple[str, ...] = ()
    tokens: int = 10_000_000
    # So many minutes of training, at most ``tokens``.
    minutes: float | None = None
    # The share of the tokens for each stage.
    stages: tuple[tuple[str, float], ...] = (("heads", 0.05), ("logits", 0.95))
    settings: Distillation = field(default_factory=Distillation)
    device: str = "auto"
    # Rows longer than the model's positions are cut to these, instead of refused.
    fit_lengths: bool = False

    def __post_init__(self) -> None:
        ways = (self.mechanism, self.plan, self.budget, self.softmax_control or None)
        if sum(way is not None for way in ways) != 1:
            raise ValueError(
                "say what the model is to attend by: a mechanism, a plan, a budget, or the softmax control"
            )
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")
        for stage, share in self.stages:
            if stage not in STAGES or not 0 <= share < 1e9:
                raise ValueError(
                    f"a stage is one of {', '.join(STAGES)} with a share of at least 0, got {stage}={share}"
                )
        if sum(share for _, share in self.stages) <= 0:
            raise ValueError("one stage must have a share of the tokens above 0")

    @property
    def longest(self) -> int:
        """The longest rows."""
        return max(length for length, _ in self.settings.lengths or ((self.settings.length, 1.0),))

    def as_dict(self) -> dict[str, Any]:
        """The settings as run.json holds them; where the texts lie and where the model runs may change."""
        settings = asdict(self.settings)
        for name in ("checkpoint_every", *(f"{stage}_steps" for stage in STAGES)):
            del settings[name]
        kept = ("model", "mechanism", "plan", "budget", "softmax_control", "tokens", "minutes", "stages")
        return {**{name: getattr(self, name) for name in kept}, "distillation": settings}


def convert_model(
    config: ConversionConfig, *, run_dir: Path, make_plan: MakePlan | None = None, tokens: Path | None = None
) -> dict[str, Any]:
    """Convert, distil and save to ``run_dir/model``; returns what result.json holds.

    ``make_plan`` makes the plan of a config with a budget; it is kept in ``run_dir/plan.json``, its reasons in
    ``plan-report.json``. ``tokens`` is a folder for the texts' tokens, which several conversions may share; without it
    they are kept in the run folder.
    """
    files, held = text_files(config.text), text_files(config.leave_out) if config.leave_out else []
    for file in (*files, *held):
        file.open("rb").close()
    _refuse_other_content(run_dir)
    process, folder = join_processes(Settings(steps=1, device=config.device)), RunFolder(run_dir)
    with _nothing_left_of_a_refused_start(run_dir), folder.hold() if process.is_main_process else nullcontext():
        with process.main_process_first():
            if process.is_main_process:
                sweep(run_dir)
                _describe(folder, config, processes=process.num_processes)
            result = read_result(run_dir)
            if result is not None and (run_dir / "model").is_dir():
                say(f"{run_dir} is finished; nothing to do")
                return result
            loaded = _loaded(config, process)
            asked, config = config, fitted_lengths(config, max_length(loaded.model))
            store, sums = token_stream(files, loaded.tokenizer, cache=tokens or run_dir / "tokens", leave_out=held)
            train, windows = _split(store.tokens, config, loaded)
            plan = _plan(config, run_dir, loaded, train, make_plan)
        say(f"converting {Path(config.model).name}; {len(train):,} tokens to learn from")
        _advise(config, process.device, loaded.tokenizer, train)
        student = _student(config, loaded, plan, train)
        teacher = half_precision(loaded.model, config.settings)
        first = tuple(tokens_around(loaded.tokenizer)[0])
        described = read_run(run_dir).get("data", {})
        data = {"text": sums, "tokens": store.meta["checksum"]}
        steps = described.get("steps") or planned_steps(config, teacher, student, train, first, process)
        if process.is_main_process:
            _describe(folder, asked, processes=process.num_processes, data={**data, "steps": steps})
        process.wait_for_everyone()
        counts: Any = {f"{stage}_steps": steps[stage] for stage in STAGES}
        settings = replace(config.settings, **counts)
        source = TokenRows(train, settings, first=first)
        teach(teacher, student, source, settings, run_dir=run_dir / "stages", held_out=windows)
        losses = HeldOut(Predictions(teacher, student), windows, settings).losses()
        if process.is_main_process:
            _save(LoadedModel(student.eval(), loaded.tokenizer, loaded.task), run_dir / "model")
            folder.finish(_result(config, loaded, student, run_dir, losses, settings))
        process.wait_for_everyone()
    return read_result(run_dir) or {}


def _advise(config: ConversionConfig, device: torch.device, tokenizer: Any, tokens: np.ndarray) -> None:
    """Say what would make this conversion better or faster."""
    if (doubt := unknown_tokens(tokenizer, torch.from_numpy(tokens[:SAMPLE].astype(np.int64)))) is not None:
        say(f"warning: {doubt}")
    if device.type == "cpu" and config.settings.precision == "auto" and multiplies_bfloat16():
        say("this processor multiplies bfloat16 faster than float32: precision bf16 takes less time")


def _refuse_other_content(run_dir: Path) -> None:
    """Raise a ValueError where the folder holds anything but a conversion."""
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is a file; name a folder for the converted model")
    # A file that was being written when the process was killed has such a name.
    names = {path.name for path in run_dir.iterdir() if not (path.name[0] == "." and path.suffix == ".tmp")}
    if names <= BEGUN:
        return
    if "run.json" not in names or "conversion" not in read_run(run_dir)["config"]:
        raise ValueError(f"{run_dir} holds something else than a conversion ({min(names)}); choose another folder")


def _describe(
    folder: RunFolder, config: ConversionConfig, *, processes: int, data: Mapping[str, Any] | None = None
) -> None:
    name = "softmax control" if config.softmax_control else config.mechanism or "plan"
    folder.describe(
        name=f"{Path(config.model).name}, {name}",
        seed=config.settings.seed,
        config={"conversion": config.as_dict()},
        data=data,
        processes=processes,
        resume=True,
    )


@contextmanager
def _nothing_left_of_a_refused_start(run_dir: Path) -> Iterator[None]:
    """Take away what a refused conversion has written, so that the corrected command may use the same folder."""
    existed, begun = run_dir.exists(), (run_dir / "run.json").exists()
    try:
        yield
    except (ValueError, ImportError, OSError):
        trained = any(list_checkpoints(stage) for stage in run_dir.glob("stages/*"))
        if not begun and not trained and run_dir.is_dir():
            for path in run_dir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not existed:
                run_dir.rmdir()
        raise


def _loaded(config: ConversionConfig, process: Any) -> LoadedModel:
    loaded = load_model(config.model)
    if loaded.task != "causal":
        raise ValueError(
            f"{config.model} is no causal language model ({type(loaded.model).__name__}), and only those are converted "
            "on a text"
        )
    if is_converted(loaded.model):
        raise ValueError(f"{config.model} is converted already; name the model it was made from")
    _check_rows(config, loaded.model)
    _check_batch(config, loaded.model, process)
    loaded.model.to(process.device)
    return loaded


def _check_rows(config: ConversionConfig, model: Any) -> None:
    """Refuse rows that are longer than the model's positions."""
    limit = max_length(model)
    if limit is not None and config.longest > limit and not config.fit_lengths:
        raise ValueError(
            f"rows of {config.longest} tokens are longer than the {limit} positions of {type(model).__name__}; "
            f"give shorter lengths, at most {limit}"
        )


def fitted_lengths(config: ConversionConfig, limit: int | None) -> ConversionConfig:
    """The config with rows of at most ``limit`` tokens, as many tokens in a step as before."""
    if limit is None or config.longest <= limit:
        return config
    settings = config.settings
    shares: dict[int, float] = {}
    for length, share in settings.lengths or ((settings.length, 1.0),):
        shares[min(length, limit)] = shares.get(min(length, limit), 0.0) + share
    first, tokens = min(settings.length, limit), settings.batch * settings.length
    return replace(
        config, settings=replace(settings, lengths=tuple(shares.items()), length=first, batch=tokens // first)
    )


def _check_batch(config: ConversionConfig, model: Any, process: Any) -> None:
    """Refuse a step that cannot fit, and say what memory a large one takes: a system may end what takes too much."""
    settings = config.settings
    tokens = settings.batch * settings.length
    weights = any(share and stage != "heads" for stage, share in config.stages)
    size = step_bytes(model, settings, process.device, processes=process.num_processes, weights=weights)
    instead = "make the batch smaller" if settings.checkpointing else "make the batch smaller, or use checkpointing"
    check_bytes(f"a step of {tokens:,} tokens", size, instead=instead, device=process.device)
    if size > memory_bytes(str(process.device)) / 2:
        say(f"a step of {tokens:,} tokens takes {byte_text(size)} of memory or more; to take less, {instead}")


def _split(
    tokens: np.ndarray, config: ConversionConfig, loaded: LoadedModel
) -> tuple[np.ndarray, list[dict[str, Tensor]]]:
    """The tokens to learn from, and batches of windows of the last ones, which are held out."""
    first = tokens_around(loaded.tokenizer)[0]
    # The one that ends texts, too, which no text holds.
    check_ids(loaded.model, torch.tensor([*first, int(tokens.max(initial=0))]))
    width = config.longest - len(first)
    cut = len(tokens) - max(int(HELD_OUT * len(tokens)), LEAST_WINDOWS * width)
    if cut < max(config.longest, len(tokens) // 2):
        raise ValueError(
            f"the text holds {len(tokens):,} tokens, too few for rows of {config.longest} and {LEAST_WINDOWS} held-out "
            f"windows of as many: give at least {2 * LEAST_WINDOWS * config.longest:,} tokens, or shorter lengths"
        )
    held = tokens[cut:]
    # Whole batches of the size that training has: another would be compiled anew.
    size = max(1, config.settings.batch * config.settings.length // config.longest)
    # An evaluation reads at most a hundredth of what is learned from, so that short runs are not all evaluation.
    worth = max(LEAST_WINDOWS, config.tokens // (100 * width))
    count = min(MOST_WINDOWS, worth, len(held) // width)
    count = count // size * size or count
    starts = np.linspace(0, len(held) - width, count).astype(np.int64)
    rows = np.stack(
        [np.concatenate([np.array(first, np.int64), held[at : at + width].astype(np.int64)]) for at in starts]
    )
    return tokens[:cut], [{"input_ids": part} for part in torch.from_numpy(rows).split(size)]


def _plan(
    config: ConversionConfig, run_dir: Path, loaded: LoadedModel, train: np.ndarray, make_plan: MakePlan | None
) -> Plan | str | None:
    """What the layers attend by; a plan is kept in the folder, and made only where it is not there yet."""
    file = run_dir / "plan.json"
    if config.plan is not None and not file.exists():
        Plan.from_json(config.plan).save(file)
    if config.budget is not None and not file.exists():
        assert make_plan is not None, "a budget needs a planner"
        say(f"planning for {config.budget:g} of softmax's cache at {config.longest:,} tokens")
        plan = make_plan(loaded, _sample(train, loaded.tokenizer))
        if plan.report is not None:
            write_json(run_dir / "plan-report.json", plan.report)
        plan.save(file)
    return Plan.load(file) if config.mechanism is None and not config.softmax_control else config.mechanism


def _sample(train: np.ndarray, tokenizer: Any) -> list[str]:
    """Texts from all over the tokens."""
    width = min(SAMPLE_ROW, len(train))
    starts = np.linspace(0, len(train) - width, max(1, min(SAMPLE, len(train)) // width)).astype(np.int64)
    return [tokenizer.decode(train[at : at + width].tolist()) for at in starts]


def _student(config: ConversionConfig, loaded: LoadedModel, plan: Plan | str | None, train: np.ndarray) -> nn.Module:
    """The converted copy of the model, its controls begun from the model's own attention."""
    if plan is None:
        return copy.deepcopy(loaded.model)
    student = convert(loaded.model, plan, copy=True)
    parts = [learned_parts(conversion.mechanism) for conversion in adapter_of(student).conversions()]
    mechanisms = [part.mechanism for of_layer in parts for part in of_layer]
    # A control that layers share has no keys of its own.
    if mechanisms and len({id(mech) for mech in mechanisms}) == len(mechanisms):
        length = min(1024, config.longest)
        texts = _sample(train, loaded.tokenizer)
        initialise_control(student, texts, tokenizer=loaded.tokenizer, length=length, seed=config.settings.seed)
    return student


def _save(loaded: LoadedModel, folder: Path) -> None:
    """Write the model under another name first: a folder of this name is whole."""
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    save_model(loaded, draft)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(draft, folder)
    sync_folder(folder.parent)


def _result(
    config: ConversionConfig,
    loaded: LoadedModel,
    student: nn.Module,
    run_dir: Path,
    losses: Mapping[str, float],
    settings: Distillation,
) -> dict[str, Any]:
    """The losses, which student is saved, the cache at several lengths, and each stage's rate and speed."""
    limit = max_length(loaded.model) or max(CACHE_LENGTHS)
    lengths = [n for n in CACHE_LENGTHS if n <= limit] or [limit]
    tokens, speeds, rates = settings.batch * settings.length, {}, {}
    for folder in sorted((run_dir / "stages").iterdir()):
        timing, stage = (read_result(folder) or {}).get("timing", {}), folder.name.partition("-")[2]
        speeds[stage] = tokens * timing.get("steps_per_second", 0.0)
        rates[stage] = read_run(folder)["config"]["training"]["recipe"]["lr"]
    return {
        "name": json.loads((run_dir / "run.json").read_text())["name"],
        "metrics": dict(losses),
        "saved": _saved_student(run_dir / "stages"),
        "cache": [
            {"length": n, "bytes": cache_bytes(student, n), "softmax_bytes": cache_bytes(loaded.model, n)}
            for n in lengths
        ],
        "tokens": settings.steps * tokens,
        "tokens_per_second": speeds,
        "learning_rates": rates,
    }


def _saved_student(stages: Path) -> dict[str, Any]:
    """The stage and step of the student with the least KL on held-out text, which every stage ends with."""
    folders = sorted(stages.iterdir())
    results = [(folder, read_result(folder) or {}) for folder in folders]
    # A stage whose best student is that of its step 0 ended with the one before it.
    folder, best = next(((f, r) for f, r in reversed(results) if r["best_step"]), results[0])
    [first, *_] = (line["values"] for line in read_metrics(folders[0]) if line["kind"] == "eval")
    return {
        "stage": folder.name.partition("-")[2],
        "step": best["best_step"],
        "of": best["step"],
        "kl": best["best_value"],
        "kl_at_start": first[KL],
    }
