"""What the parts of ``python -m papers value-aware`` share: settings, the corpus, and one training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.data import TokenStore, load_store, load_tokeniser
from attnlab.data.tokenisers import Tokeniser
from attnlab.provenance import write_json
from attnlab.training import Callback, Moment, Recipe, Schedule, Settings, Source, every, train

__all__ = ["CONFIGS", "Corpus", "Meeting", "ValueAwareConfig", "fit", "plan_steps"]

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class ValueAwareConfig:
    """Everything that decides the numbers: the models, how long they learn, and what is put in place of attention.

    Steps of None are planned from the speeds measured while all parts run at once, so that the trainings together take
    about ``train_seconds``; models that are compared get equally many.
    """

    seed: int = 0
    # The causal models (OVA, A.2); the paper's batch is 128 x 512 and its vocabulary WikiText-103's words.
    kernels: tuple[str, ...] = ("exp", "poly", "elu")
    lm_layers: int = 6
    lm_width: int = 512
    lm_heads: int = 8
    lm_length: int = 512
    lm_batch: int = 64
    lm_dropout: float = 0.1
    lm_lr: float = 5e-4
    # The paper clips nothing; where all of a row's scores are near zero the polynomial's gradient is all rounding.
    lm_clip: float | None = 1.0
    # 4,000 of the paper's 31,520 steps.
    lm_warmup: float = 4000 / 31520
    lm_steps: int | None = None
    # Every predicted word but the first window's has at least this many tokens before it.
    lm_context: int = 400
    lm_r: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 65, 128, 256, 512)
    # The masked models (OVA, A.1 and Table 4; the paper's learning rate is 5e-6, for 2.5M steps).
    mlm_short: int = 512
    mlm_long: int = 2048
    mlm_tokens: int = 32_768
    mlm_dropout: float = 0.0
    mlm_lr: float = 3e-4
    mlm_warmup: float = 0.1
    mlm_clip: float = 5.0
    mlm_steps: int | None = None
    mlm_r: tuple[int, ...] = (1, 2, 4, 8, 16, 33, 64, 128, 256, 512, 1024, 2048)
    # (keys a round, rounds) of Figure 1's LSH; Table 1 has the first and the last.
    mlm_lsh: tuple[tuple[int, int], ...] = ((64, 4), (64, 16), (512, 1), (512, 4), (512, 16))
    # Value-aware between 1 and d + 1 keys, which is searched for, on this many rows.
    between_r: tuple[int, ...] = (2, 4, 8, 16)
    between_rows: int = 2
    # Table 1 uses every n-th held-out batch, the figures' sweeps every m-th.
    table_every: int = 1
    sweep_every: int = 4
    curve_points: int = 8
    eval_batch: int = 16
    # Rows of each held-out text; None: all.
    eval_rows: int | None = None
    train_seconds: float = 220.0
    # The share of the GPU that the causal models' trainings get.
    lm_share: float = 0.65
    probe_seconds: float = 6.0
    compile: bool = False

    def __post_init__(self) -> None:
        if not set(self.kernels) <= {"exp", "poly", "elu"} or not self.kernels:
            raise ValueError(f"kernels must be some of exp, poly and elu, got {self.kernels}")
        if not 0 < self.lm_context < self.lm_length:
            raise ValueError(f"lm_context must lie between 0 and lm_length {self.lm_length}, got {self.lm_context}")
        if self.mlm_long > self.mlm_tokens:
            raise ValueError(f"a batch of {self.mlm_tokens} tokens holds no row of {self.mlm_long}")


CONFIGS = {
    "quick": ValueAwareConfig(),
    # Table 4 (ROBERTA-512 and ROBERTA-4096: 8 instances of 512 tokens in a batch, as 8 rows or as one) and A.2.
    "paper": ValueAwareConfig(
        seed=42,
        lm_batch=128,
        lm_clip=None,
        lm_steps=31_520,
        mlm_short=512,
        mlm_long=4096,
        mlm_tokens=8 * 512,
        mlm_lr=5e-6,
        mlm_steps=2_476_000,
        mlm_r=(1, 2, 4, 8, 16, 33, 64, 128, 256, 512, 1024, 2048, 4096),
    ),
}


@dataclass(frozen=True, eq=False)
class Corpus:
    """A folder of token stores (train, valid, wikitext103-valid, wikitext103-test) and their tokenizer."""

    folder: Path

    def tokeniser(self) -> Tokeniser:
        """The tokeniser of all stores."""
        return load_tokeniser(self.folder / "tokenizer")

    def store(self, name: str) -> TokenStore:
        """The store of this name."""
        return load_store(self.folder / name)


@dataclass(frozen=True)
class Meeting:
    """Processes that train at once agree on how long, through files in a folder; ``name`` is group-member."""

    folder: Path
    name: str

    def ready(self) -> None:
        """Wait until every part can start to measure its speed."""
        (self.folder / f"{self.name}.ready").touch()
        _wait_for(self.folder / "go")

    def steps(self, rate: float) -> int:
        """Tell this part's speed while all run; the number of steps that was planned from everybody's."""
        write_json(self.folder / f"{self.name}.rate", rate)
        _wait_for(self.folder / "steps.json")
        planned = self.planned()
        assert planned is not None
        return planned

    def planned(self) -> int | None:
        """The number of steps, if it was planned before."""
        path = self.folder / "steps.json"
        return json.loads(path.read_text())[self.name.partition("-")[0]] if path.exists() else None


def plan_steps(rates: Mapping[str, float], *, seconds: float, share: Mapping[str, float]) -> dict[str, int]:
    """Steps for each group (the name before the dash) so that all of it takes ``seconds`` on one device.

    n processes at once have 1/n of the device each, so a step of part i costs 1 / (n rate_i) seconds of it.

    >>> plan_steps({"lm-exp": 2.0, "lm-elu": 1.0, "mlm-long": 1.0}, seconds=90, share={"lm": 0.5, "mlm": 0.5})
    {'lm': 90, 'mlm': 135}
    """
    groups = {name.partition("-")[0] for name in rates}
    total = sum(share[group] for group in groups)
    planned = {}
    for group in sorted(groups):
        cost = sum(1 / (len(rates) * rate) for name, rate in rates.items() if name.partition("-")[0] == group)
        planned[group] = max(1, round(seconds * share[group] / total / cost))
    return planned


def fit(
    model: nn.Module,
    source: Source,
    *,
    term: Any,
    recipe: Recipe,
    schedule: Callable[[int], Schedule],
    steps: int | None,
    blocks: nn.ModuleList,
    curve: Callable[[int, nn.Module], Mapping[str, float]],
    config: ValueAwareConfig,
    meeting: Meeting,
    run_dir: Path,
    forward: Forward | None = None,
) -> dict[str, Any]:
    """Train by the one loop for ``steps``, or for as many as the meeting plans; ``curve`` is asked along the way."""
    if config.compile:
        _compile(blocks)
    rate = None
    steps = meeting.planned() if steps is None else steps
    if steps is None:
        start = {name: t.detach().clone() for name, t in model.state_dict().items()}
        probe = run_dir.parent / f"{run_dir.name}-probe"
        rate = _measure(model, source, term, recipe, config, meeting, probe, forward)
        steps = meeting.steps(rate)
        model.load_state_dict(start)
    settings = Settings(
        steps=steps,
        recipe=recipe,
        schedule=schedule(steps),
        seed=config.seed,
        evaluate_at=every(max(1, steps // config.curve_points), steps=steps),
        checkpoint_every=max(1, steps // config.curve_points),
    )
    outcome = train(
        model,
        source,
        terms=[term],
        settings=settings,
        run_dir=run_dir,
        callbacks=[_Curve(curve)],
        forward=forward,
        resume=True,
    )
    model.eval()
    return {"steps": steps, "probe_rate": rate, **outcome.timing}


class _Curve(Callback):
    def __init__(self, curve: Callable[[int, nn.Module], Mapping[str, float]]) -> None:
        self.curve = curve

    def on_evaluation(self, moment: Moment) -> Mapping[str, float]:
        # The graphs are for training: its batch, its dropout.
        with uncompiled(), torch.no_grad():
            return self.curve(moment.step, moment.model)


class _EnoughError(Exception):
    pass


class _Speed(Callback):
    """Steps per second over ``seconds``, after a warm-up and once every part is ready."""

    def __init__(self, meeting: Meeting, seconds: float, warmup: int = 6) -> None:
        self.meeting, self.seconds, self.warmup = meeting, seconds, warmup
        self.started, self.rate = 0.0, 0.0

    def on_step(self, moment: Moment) -> None:
        if moment.step == self.warmup:
            _synchronise()
            self.meeting.ready()
            self.started = time.perf_counter()
        elif moment.step > self.warmup and time.perf_counter() - self.started > self.seconds:
            _synchronise()
            self.rate = (moment.step - self.warmup) / (time.perf_counter() - self.started)
            raise _EnoughError


def _measure(
    model: nn.Module,
    source: Source,
    term: Any,
    recipe: Recipe,
    config: ValueAwareConfig,
    meeting: Meeting,
    run_dir: Path,
    forward: Forward | None,
) -> float:
    speed = _Speed(meeting, config.probe_seconds)
    settings = Settings(steps=1_000_000, recipe=replace(recipe, lr=1e-8), seed=config.seed)
    try:
        train(model, source, terms=[term], settings=settings, run_dir=run_dir, callbacks=[speed], forward=forward)
    except _EnoughError:
        return speed.rate
    raise AssertionError("the probe ends only by being stopped")


def _compile(blocks: nn.ModuleList) -> None:
    """Compile each layer; the layers are alike, so that one graph serves them all."""
    from torch._dynamo import config

    # What cannot be compiled runs as it is, more slowly.
    config.suppress_errors = True
    for block in blocks:
        block.compile()


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled layers run as they were written."""
    return torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()


def on_device(batches: Iterator[dict[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """The batches, moved once."""
    return [{name: t.to(device) for name, t in batch.items()} for batch in batches]


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
