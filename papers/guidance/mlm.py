"""Masked language models with and without guidance, side by side: parts (a), (e), (f) and (g)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from attnlab.data import Blocks, MlmSource, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.devices import best_device
from attnlab.guidance import GuidanceTerm, bias_heads, guide
from attnlab.models import Transformer, TransformerConfig
from attnlab.patterns import SpecialTokens
from attnlab.pretraining import pattern_tokens
from attnlab.provenance import provenance
from attnlab.training import Recipe, Schedule, Term
from attnlab.training.side_by_side import lanes
from papers.abc.encoder import SomeMasked
from papers.common.row_store import Part
from papers.guidance.config import Arm, MlmConfig
from papers.guidance.learner import Curve, GuidedLearner, train_guided
from papers.guidance.timeline import record_heads, write_run

__all__ = ["Key", "Pretrained", "Run", "encoder", "ended", "learner", "run_arms", "thinned"]

CURVE_POINTS = 250


class Run(NamedTuple):
    """An arm with a seed and a depth of its own; all else in the settings of runs side by side is the same."""

    config: MlmConfig
    arm: Arm

    @property
    def key(self) -> Key:
        """The arm's name, the seed and the depth, which identify the run."""
        return Key(self.arm.name, self.config.seed, self.config.layers)


class Key(NamedTuple):
    """An arm's name, a seed and a depth."""

    arm: str
    seed: int
    depth: int


@dataclass(frozen=True)
class Pretrained:
    """The trained models, and as they were at some steps before the last."""

    models: Mapping[Key, Transformer]
    earlier: Mapping[int, Mapping[Key, Transformer]]
    steps: int


def encoder(config: MlmConfig, *, vocab: int, head: Literal["mlm", "none"] = "mlm") -> TransformerConfig:
    """The model of all arms, its vocabulary rounded up to a multiple of 64, which is faster on a GPU."""
    return TransformerConfig(
        kind="encoder",
        vocab=-(-vocab // 64) * 64,
        width=config.width,
        heads=config.heads,
        layers=config.layers,
        max_length=config.length,
        norm="post",
        embed_norm=True,
        head=head,
        dropout=config.dropout,
    )


def build(config: MlmConfig, *, vocab: int) -> Transformer:
    """The untrained model; all arms of a seed and depth start from the same weights."""
    torch.manual_seed(config.seed)
    return Transformer(encoder(config, vocab=vocab))


def run_arms(
    runs: Sequence[Run],
    *,
    tokeniser: Tokeniser,
    stores: Mapping[str, TokenStore],
    part: Part,
    label: Mapping[str, Any],
    seconds: float | None = None,
    timeline: tuple[Key, Path] | None = None,
    keep: Sequence[int] = (),
) -> Pretrained:
    """Train all at once, those of a seed on the same batches; ``part`` has ``runs``, ``curves`` and ``evaluations``.

    ``timeline`` names a run, and the folder in which its maps of one text are recorded. ``keep`` names steps at which
    the models are kept as they are.
    """
    tokens, config = pattern_tokens(tokeniser), runs[0].config
    _note_settings(runs, part)
    models = {run.key: build(run.config, vocab=tokeniser.vocab_size).to(best_device()) for run in runs}
    held_out = _held_out(config, tokeniser, stores)
    kept: dict[int, dict[Key, dict[str, torch.Tensor]]] = {}
    evaluate_all = _evaluator(runs, models, held_out, tokeniser, tokens, part, label, timeline)

    def on_pause(step: int) -> None:
        evaluate_all(step)
        if step in keep:
            kept[step] = {key: _cloned(model.state_dict()) for key, model in models.items()}

    with ExitStack() as stack:
        learners = _learners(runs, models, tokens, stack)
        by_source = [
            (_source(replace(config, seed=seed), tokeniser, stores), [x for k, x in learners.items() if k.seed == seed])
            for seed in dict.fromkeys(run.config.seed for run in runs)
        ]
        pauses = sorted({*_evaluation_steps(config, early=timeline is not None), *keep})
        steps, spent = train_guided(
            by_source, steps=config.steps, seconds=seconds, evaluate_at=pauses, evaluate=on_pause
        )
    for run in runs:
        _note_run(run, learners[run.key].curves(), part, label, steps=steps, seconds=spent, timeline=timeline)
    return Pretrained(models, {at: _restored(models, states) for at, states in kept.items()}, steps)


def _note_settings(runs: Sequence[Run], part: Part) -> None:
    depths = sorted({run.config.layers for run in runs})
    layers = depths[0] if len(depths) == 1 else ", ".join(map(str, depths))
    part.fact("provenance", provenance())
    part.fact("config", {**asdict(runs[0].config), "layers": layers})


def _learners(
    runs: Sequence[Run], models: Mapping[Key, Transformer], tokens: SpecialTokens, stack: ExitStack
) -> dict[Key, GuidedLearner]:
    """A learner for each run; beyond the config's number of streams they share the streams of the first ones."""
    streams = runs[0].config.streams
    learners: dict[Key, GuidedLearner] = {}
    for i, (run, lane) in enumerate(zip(runs, lanes(len(runs)), strict=True)):
        lane = lane if i < streams else (learners[runs[i % streams].key].stream, None)
        learners[run.key] = _learner(run, models[run.key], tokens, lane, stack)
    return learners


def _evaluation_steps(config: MlmConfig, *, early: bool) -> set[int]:
    """Evenly spaced steps, with those of the first 5 % where heads are recorded for a timeline."""
    even = {round(i * config.steps / config.looks) for i in range(config.looks + 1)}
    return even | ({round(config.steps * share) for share in (0.01, 0.02, 0.05)} if early else set())


def _cloned(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in state.items()}


def _note_run(
    run: Run,
    curve: Curve,
    part: Part,
    label: Mapping[str, Any],
    *,
    steps: int,
    seconds: float,
    timeline: tuple[Key, Path] | None,
) -> None:
    """The rows of a finished run, and its run folder where its heads were recorded."""
    labels = {**label, **run.key._asdict()}
    part.row("runs", **labels, steps=steps, seconds=round(seconds, 1), **_of(run.arm), **ended(curve))
    part.row("curves", **labels, **thinned(curve))
    if timeline is not None and timeline[0] == run.key:
        evaluations = part.content["tables"]["evaluations"]
        write_run(
            timeline[1],
            name=f"attention guidance, {run.arm.name}",
            config={**asdict(run.config), "arm": asdict(run.arm)},
            seed=run.config.seed,
            curve=thinned(curve),
            evaluations=[row for row in evaluations if (row["arm"], row["seed"]) == run.key[:2]],
            seconds=seconds,
        )


def _restored(
    models: Mapping[Key, Transformer], states: Mapping[Key, Mapping[str, torch.Tensor]]
) -> dict[Key, Transformer]:
    """Copies of the models with the weights of an earlier step."""
    earlier = {key: copy.deepcopy(model) for key, model in models.items()}
    for key, model in earlier.items():
        model.load_state_dict(states[key])
    return earlier


def _of(arm: Arm) -> dict[str, Any]:
    return {**asdict(arm), "patterns": arm.guided_patterns}


def _learner(
    run: Run, model: Transformer, tokens: SpecialTokens, lane: tuple[Any, Any], stack: ExitStack
) -> GuidedLearner:
    config, arm = run
    terms: list[GuidanceTerm] = []
    if arm.bias is not None:
        stack.enter_context(bias_heads(model, config.guidance(arm), tokens=tokens, strength=arm.bias))
    elif arm.guided:
        terms = [stack.enter_context(guide(model, config.guidance(arm), tokens=tokens))]
    return learner(config, arm, model, [SomeMasked()], terms, lane)


def learner(
    config: MlmConfig,
    arm: Arm,
    model: nn.Module,
    task: Sequence[Term],
    guidance: Sequence[GuidanceTerm],
    lane: tuple[Any, Any],
) -> GuidedLearner:
    """The arm's model with its learning rate and warm-up."""
    return GuidedLearner(
        model,
        task,
        guidance=guidance,
        recipe=Recipe(lr=arm.lr, betas=config.betas, weight_decay=config.weight_decay, clip=config.clip),
        schedule=Schedule("linear", warmup=round(arm.warmup * config.steps)),
        steps=config.steps,
        stream=lane[0],
        pool=lane[1],
    )


def _source(config: MlmConfig, tokeniser: Tokeniser, stores: Mapping[str, TokenStore]) -> MlmSource:
    blocks = Blocks(stores["train"], tokeniser.specials, length=config.length, seed=config.seed)
    return MlmSource(blocks, config.batch, vocab_size=tokeniser.vocab_size, seed=config.seed)


def _held_out(
    config: MlmConfig, tokeniser: Tokeniser, stores: Mapping[str, TokenStore]
) -> list[dict[str, torch.Tensor]]:
    """The same texts and masks for every seed."""
    blocks = Blocks(stores["valid"], tokeniser.specials, length=config.length, seed=None)
    valid = MlmSource(blocks, min(config.batch, len(blocks)), vocab_size=tokeniser.vocab_size, seed=7, shuffle=False)
    device = best_device()
    some = range(min(max(1, config.eval_tokens // (config.batch * config.length)), valid.steps_per_epoch))
    return [{name: t.to(device) for name, t in valid.batch(i).items()} for i in some]


def _evaluator(
    runs: Sequence[Run],
    models: Mapping[Key, Transformer],
    held_out: Sequence[dict[str, torch.Tensor]],
    tokeniser: Tokeniser,
    tokens: SpecialTokens,
    part: Part,
    label: Mapping[str, Any],
    timeline: tuple[Key, Path] | None,
) -> Callable[[int], None]:
    """A function that evaluates all models at a step, and records the heads of the run that ``timeline`` names."""

    def evaluate_all(step: int) -> None:
        for run in runs:
            model = models[run.key]
            loss = evaluate(model, held_out)
            part.row("evaluations", **label, **run.key._asdict(), at=step, valid_loss=loss)
            if timeline is not None and timeline[0] == run.key:
                record_heads(model, held_out[0], run.config, run.arm, tokeniser, tokens, timeline[1], step, loss)

    return evaluate_all


@torch.no_grad()
def evaluate(model: Any, held_out: Sequence[dict[str, torch.Tensor]]) -> float:
    """-log p of a masked token, the mean over the batches."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)
    for batch in held_out:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = SomeMasked()(model, model(batch["input_ids"]), batch, 0)
        total += torch.stack([loss.total.float(), torch.as_tensor(loss.count, device=device).float()])
    return float(total[0] / total[1])


def ended(curve: Curve) -> dict[str, float]:
    """Means over the last fiftieth of a run."""
    last = max(1, len(curve.task) // 50)
    return {name: sum(values[-last:]) / last for name, values in (("loss", curve.task), ("ag_loss", curve.guidance))}


def thinned(curve: Curve) -> dict[str, Any]:
    """About 250 points of both curves, each the mean since the last; densest at the beginning, where it matters.

    Without guidance the second is left out.
    """
    n = len(curve.task)
    if n == 0:
        return {"at": [], "task": [], "guidance": []}
    edges = sorted({0, n, *(round(n ** (i / CURVE_POINTS)) for i in range(CURVE_POINTS)),
                    *(round(n * i / CURVE_POINTS) for i in range(CURVE_POINTS))})  # fmt: skip
    spans = list(pairwise(edges))
    return {
        "at": [hi for _, hi in spans],
        "task": [round(sum(curve.task[lo:hi]) / (hi - lo), 4) for lo, hi in spans],
        "guidance": [round(sum(curve.guidance[lo:hi]) / (hi - lo), 6) for lo, hi in spans if any(curve.guidance)],
    }
