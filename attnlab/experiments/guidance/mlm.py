"""Masked language models with and without guidance, side by side: parts (a), (e), (f) and (g)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from attnlab.data import Blocks, MlmSource, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.experiments.abc.encoder import SomeMasked
from attnlab.experiments.guidance.learner import Curve, GuidedLearner, train_together
from attnlab.experiments.guidance.settings import Arm, MlmConfig
from attnlab.experiments.guidance.timeline import record_heads, write_run
from attnlab.experiments.parts import Part, best_device
from attnlab.experiments.together import lanes
from attnlab.guidance import GuidanceTerm, bias_heads, guide
from attnlab.models import Transformer, TransformerConfig
from attnlab.patterns import SpecialTokens
from attnlab.provenance import provenance
from attnlab.training import Recipe, Schedule, Term

__all__ = ["Pretrained", "encoder", "ended", "learner", "period_ids", "run_arms", "thinned"]

CURVE_POINTS = 250


@dataclass(frozen=True)
class Pretrained:
    """The trained models by the names of their arms, and as they were at some steps before the last."""

    models: Mapping[str, Transformer]
    earlier: Mapping[int, Mapping[str, Transformer]]
    steps: int


def encoder(config: MlmConfig, *, vocab: int, head: Literal["mlm", "none"] = "mlm") -> TransformerConfig:
    """The model of all arms, its vocabulary rounded up to what a GPU likes."""
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


def special_ids(tokeniser: Tokeniser) -> SpecialTokens:
    """Full stops and delimiters of one of our tokenisers."""
    specials = tokeniser.specials
    return SpecialTokens(period_ids(tokeniser), tuple(i for i in (specials.bos, specials.eos) if i is not None))


def period_ids(tokeniser: Tokeniser) -> tuple[int, ...]:
    """The tokens that a full stop becomes, alone and after a word."""
    return tuple(sorted({ids[-1] for ids in tokeniser.encode_batch([".", "a.", "a ."]) if ids}))


def run_arms(
    config: MlmConfig,
    arms: Sequence[Arm],
    *,
    tokeniser: Tokeniser,
    stores: Mapping[str, TokenStore],
    part: Part,
    label: Mapping[str, Any],
    seconds: float | None = None,
    timeline: tuple[str, Path] | None = None,
    keep: Sequence[int] = (),
) -> Pretrained:
    """Train every arm on the same batches; rows of ``part``: ``runs``, ``curves`` and ``evaluations``, as they come.

    ``timeline`` names an arm, and the run folder in which its maps of one text are recorded. ``keep`` names steps at
    which the models are kept as they are.
    """
    device, tokens = best_device(), special_ids(tokeniser)
    part.fact("provenance", provenance())
    part.fact("config", asdict(config))
    models = {arm.name: build(config, vocab=tokeniser.vocab_size).to(device) for arm in arms}
    source, held_out = _sources(config, tokeniser, stores)
    with ExitStack() as stack:
        learners: dict[str, GuidedLearner] = {}
        for i, (arm, lane) in enumerate(zip(arms, lanes(len(arms)), strict=True)):
            lane = lane if i < config.streams else (learners[arms[i % config.streams].name].stream, None)
            learners[arm.name] = _learner(config, arm, models[arm.name], tokens, lane, stack)
        record = _looker(config, arms, learners, held_out, tokeniser, tokens, part, label, timeline)
        kept: dict[int, dict[str, dict[str, torch.Tensor]]] = {}

        def look(step: int) -> None:
            record(step)
            if step in keep:
                states = {name: learner.model.state_dict() for name, learner in learners.items()}
                kept[step] = {name: {key: t.clone() for key, t in state.items()} for name, state in states.items()}

        points = sorted({round(i * config.steps / config.looks) for i in range(config.looks + 1)})
        early = [round(config.steps * share) for share in (0.01, 0.02, 0.05)] if timeline else []
        steps, spent = train_together(
            learners, source, steps=config.steps, seconds=seconds, look_at=sorted({*points, *early, *keep}), look=look
        )
    for arm in arms:
        curve = learners[arm.name].curves()
        row = ended(curve)
        part.row(
            "runs",
            **label,
            arm=arm.name,
            seed=config.seed,
            steps=steps,
            seconds=round(spent, 1),
            **_of(arm),
            **row,
        )
        part.row("curves", **label, arm=arm.name, seed=config.seed, **thinned(curve))
        if timeline is not None and timeline[0] == arm.name:
            looks = [
                e for e in part.content["tables"]["evaluations"] if (e["arm"], e["seed"]) == (arm.name, config.seed)
            ]
            write_run(
                timeline[1],
                name=f"attention guidance, {arm.name}",
                config={**asdict(config), "arm": asdict(arm)},
                seed=config.seed,
                curve=thinned(curve),
                evaluations=looks,
                seconds=spent,
            )
    return Pretrained(models, {at: _restored(models, states) for at, states in kept.items()}, steps)


def _restored(
    models: Mapping[str, Transformer], states: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Transformer]:
    """Models of their own with the weights of an earlier step."""
    earlier = {name: copy.deepcopy(model) for name, model in models.items()}
    for name, model in earlier.items():
        model.load_state_dict(states[name])
    return earlier


def _of(arm: Arm) -> dict[str, Any]:
    return {**asdict(arm), "patterns": "+".join(arm.patterns)}


def _learner(
    config: MlmConfig,
    arm: Arm,
    model: Transformer,
    tokens: SpecialTokens,
    lane: tuple[Any, Any],
    stack: ExitStack,
) -> GuidedLearner:
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


def _sources(
    config: MlmConfig, tokeniser: Tokeniser, stores: Mapping[str, TokenStore]
) -> tuple[MlmSource, list[dict[str, torch.Tensor]]]:
    def of(name: str, seed: int | None) -> Blocks:
        return Blocks(stores[name], tokeniser.specials, length=config.length, seed=seed)

    source = MlmSource(of("train", config.seed), config.batch, vocab_size=tokeniser.vocab_size, seed=config.seed)
    blocks = of("valid", None)
    # The same texts and masks for every seed.
    valid = MlmSource(blocks, min(config.batch, len(blocks)), vocab_size=tokeniser.vocab_size, seed=7, shuffle=False)
    device = best_device()
    some = range(min(max(1, config.eval_tokens // (config.batch * config.length)), valid.steps_per_epoch))
    return source, [{name: t.to(device) for name, t in valid.batch(i).items()} for i in some]


Look = Callable[[int], None]


def _looker(
    config: MlmConfig,
    arms: Sequence[Arm],
    learners: Mapping[str, GuidedLearner],
    held_out: Sequence[dict[str, torch.Tensor]],
    tokeniser: Tokeniser,
    tokens: SpecialTokens,
    part: Part,
    label: Mapping[str, Any],
    timeline: tuple[str, Path] | None,
) -> Look:
    def look(step: int) -> None:
        for arm in arms:
            loss = evaluate(learners[arm.name].model, held_out)
            part.row("evaluations", **label, arm=arm.name, seed=config.seed, at=step, valid_loss=loss)
            if timeline is not None and timeline[0] == arm.name:
                record_heads(
                    learners[arm.name].model, held_out[0], config, arm, tokeniser, tokens, timeline[1], step, loss
                )

    return look


@torch.no_grad()
def evaluate(model: Any, held_out: Sequence[dict[str, torch.Tensor]]) -> float:
    """-log p of a masked token, the mean over the batches."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)
    for batch in held_out:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = SomeMasked()(model, model(batch["input_ids"]), batch, 0)
        total += torch.stack([found.total.float(), torch.as_tensor(found.count, device=device).float()])
    return float(total[0] / total[1])


def ended(curve: Curve) -> dict[str, float]:
    """Means over the last fiftieth of a run."""
    last = max(1, len(curve.task) // 50)
    return {name: sum(values[-last:]) / last for name, values in (("loss", curve.task), ("ag_loss", curve.guidance))}


def thinned(curve: Curve) -> dict[str, Any]:
    """About 250 points of both curves, each the mean since the last; densest at the beginning, where it matters."""
    n = len(curve.task)
    if n == 0:
        return {"at": [], "task": [], "guidance": []}
    edges = sorted({0, n, *(round(n ** (i / CURVE_POINTS)) for i in range(CURVE_POINTS)),
                    *(round(n * i / CURVE_POINTS) for i in range(CURVE_POINTS))})  # fmt: skip
    spans = list(pairwise(edges))
    return {
        "at": [hi for _, hi in spans],
        "task": [round(sum(curve.task[lo:hi]) / (hi - lo), 4) for lo, hi in spans],
        "guidance": [round(sum(curve.guidance[lo:hi]) / (hi - lo), 6) for lo, hi in spans],
    }
