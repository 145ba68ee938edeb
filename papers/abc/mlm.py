"""``python -m papers abc-mlm``: Table 4, a pretrained masked language model converted, continued and fine-tuned."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters import convert, load_model
from attnlab.attention import AttentionCall
from attnlab.data import Blocks, MlmSource
from attnlab.devices import best_device
from attnlab.evaluation.intervals import student_quantile
from attnlab.measure import captured, median_seconds, peak_bytes
from attnlab.mechanisms.softmax import Softmax
from attnlab.models import MaskedLM, Transformer, TransformerConfig, count_parameters, named_config
from attnlab.models.attention import attentions, put_mechanism
from attnlab.shapes import Float
from attnlab.training import Recipe, Schedule
from attnlab.training.side_by_side import fit
from papers.abc.dense_attention import dense_attention
from papers.abc.differences import pooled_deviation
from papers.abc.encoder import SomeMasked, from_bert
from papers.abc.lm_config import Variant
from papers.abc.tables import Rows, curves, spread
from papers.common.compiling import compiled_on_gpu
from papers.common.finetuning import Tuning, tune_seeds
from papers.common.row_store import Part
from papers.common.wiki_corpus import WikiCorpus
from papers.effective.glue import TASKS, encode, read_glue
from papers.value_aware.training import uncompiled

__all__ = [
    "CONFIGS",
    "KEYS",
    "NAME",
    "NOTES",
    "VARIANTS",
    "AbcMlmConfig",
    "Variant",
    "converted",
    "dense",
    "derived",
    "fine_tune",
    "masked_loss",
    "measure_speed",
    "run_mlm",
]

NAME = "abc-mlm"
KEYS = {
    "table_4": ["model", "n", "continued", "task", "seed"],
    "pretraining": ["model", "n", "continued"],
    "curves": ["model", "n", "step"],
    "training": ["part"],
    "speed": ["model", "n"],
    "speed_longer": ["model", "n", "length"],
    "parameters": ["model", "n"],
}
NOTES = {
    "table_4": "Development accuracy in %. RoBERTa-Ours is the shipped masked LM continued as it is, equally long; "
    "continued = false is the model as converted, fine-tuned at once.",
    "pretraining": "Loss at the masked tokens of held-out enwik8 articles.",
    "curves": "The same on the way, for the models that are continued.",
    "speed": "Inference of a model of RoBERTa-base's size; speed and memory relative to softmax in torch's fused form, "
    "and in its plain form (over_unfused), which is what the paper's numbers are relative to; paper: batch 16.",
    "parameters": "Parameters that conversion adds to a model of RoBERTa-base's size, as a share of its own.",
}


# Tokens of a row, as in the paper.
LENGTH = 512
# Updates between evaluations of the held-out loss.
CURVE = 500
# A task with a large training set gets this many times the fine-tuning time of another task.
LARGE = 2.0
# Softmax attention without a fused kernel: the paper's point of comparison for speed.
UNFUSED = "unfused"
# The pretrained model's own attention: nothing is converted.
SOFTMAX = "softmax"
VARIANTS = (
    Variant("RoBERTa-Ours", None, SOFTMAX),
    *(Variant("Linformer", n, f"abc-linformer:slots={n},length={LENGTH}") for n in (64, 128)),
    *(Variant("ABC_MLP", n, f"abc-mlp:slots={n}") for n in (64, 128)),
    Variant("ABC_RD", 128, "abc-random:slots=128"),
)


@dataclass(frozen=True)
class AbcMlmConfig:
    """How the converted models are continued and fine-tuned; the paper continues RoBERTa-base on a TPU."""

    length: int = LENGTH
    batch: int = 32
    recipe: Recipe = field(default_factory=lambda: Recipe(lr=1e-3, betas=(0.9, 0.98)))
    warmup: int = 200
    # Table 4's: --set tasks='["MNLI", "QNLI", "QQP", "SST-2"]'; MNLI's development set is the matched one.
    tasks: tuple[str, ...] = ("SST-2", "MRPC", "RTE")
    # Seeds of fine-tuning, side by side.
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: Mapping[str, float] | None = None
    tune_length: int = 128
    # Four times as many where the training set is large.
    tune_batch: int = 32
    tune_lr: float = 2e-4
    # The share of the time for fine-tuning.
    tune_share: float = 0.45
    # Examples of a task; None: all.
    tune_limit: int | None = None
    streams: int = 3
    # For fine-tuning, of which there are more models, and smaller batches.
    tune_streams: int = 10
    # On a GPU, while models are continued, the operations between products of matrices are fused.
    compile: bool = True
    seed: int = 0
    eval_batches: int | None = None

    def epochs_of(self, task: str) -> float:
        """Fewer epochs where the training set is large."""
        return (self.epochs or {}).get(task, 2.0 if TASKS[task].large else 8.0)


# Continued as RoBERTa-base was pretrained, fine-tuned as it was (Liu et al., 2019), on Table 4's tasks. The paper does
# not say for how many updates it continued; --seconds does.
CONFIGS = {
    "small": AbcMlmConfig(),
    "paper": AbcMlmConfig(
        batch=8192,
        recipe=Recipe(lr=6e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, clip=None),
        warmup=24_000,
        tasks=("MNLI", "QNLI", "QQP", "SST-2"),
        epochs=dict.fromkeys(("MNLI", "QNLI", "QQP", "SST-2"), 10.0),
        # Four times as many, since all four training sets are large.
        tune_batch=8,
        tune_lr=1e-5,
        streams=1,
        tune_streams=1,
    ),
}


def run_mlm(config: AbcMlmConfig, *, corpus: Path, glue: Path, model: Path, part: Part, seconds: float) -> None:
    """Continue every variant, then fine-tune them and their unconverted selves; ``seconds`` is for all of it."""
    began = time.monotonic()
    device = best_device()
    loaded = load_model(model)
    base = from_bert(loaded.model).to(device)
    before = {v.key: converted(base, v) for v in VARIANTS}
    models = {key: copy.deepcopy(m) for key, m in before.items()}
    stores = WikiCorpus(corpus)
    tokeniser = stores.tokeniser()
    blocks = Blocks(stores.store("train"), tokeniser.specials, length=config.length, seed=config.seed)

    def on_pause(step: int) -> None:
        for v in VARIANTS if step % CURVE == 0 else ():
            loss = masked_loss(models[v.key], stores, config)
            models[v.key].train()
            part.row("curves", model=v.model, n=v.n, seed=config.seed, step=step, loss=loss)

    with dense(models.values()), compiled_on_gpu(models.values(), wanted=config.compile):
        fitted = fit(
            models,
            MlmSource(blocks, config.batch, vocab_size=tokeniser.vocab_size, seed=config.seed),
            term=SomeMasked(),
            recipe=config.recipe,
            schedule=Schedule("linear", warmup=config.warmup),
            seconds=(1 - config.tune_share) * seconds - (time.monotonic() - began),
            streams=config.streams,
            every=CURVE,
            on_pause=on_pause,
        )
    tokens = fitted.steps * config.batch * config.length
    part.row("training", part="continued", steps=fitted.steps, tokens=tokens, seconds=round(fitted.seconds, 1))
    for v in VARIANTS:
        for continued, some in ((False, before), (True, models)):
            with dense([some[v.key]]):
                loss = masked_loss(some[v.key], stores, config)
            part.row("pretraining", model=v.model, n=v.n, continued=continued, loss=loss)
            part.row("curves", model=v.model, n=v.n, seed=config.seed, step=fitted.steps if continued else 0, loss=loss)
    every = {(v, True): models[v.key] for v in VARIANTS}
    # Directly after conversion, only the larger memory is fine-tuned: the smaller one cannot do better.
    every |= {(v, False): before[v.key] for v in VARIANTS if v.n != 64}
    shares = [LARGE if TASKS[task].large else 1.0 for task in config.tasks]
    for i, task in enumerate(config.tasks):
        # The time that a task does not use is shared by the tasks after it.
        left = seconds - (time.monotonic() - began)
        if left > 0:
            mine = left * shares[i] / sum(shares[i:])
            fine_tune(task, config, every, loaded.tokenizer, glue, part, seconds=mine)
        else:
            part.fact(f"not fine-tuned: {task}", "no time was left")


@contextmanager
def dense(models: Iterable[Transformer]) -> Iterator[None]:
    """Inside, the models' slots run in the dense form."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(dense_attention(model))
        yield


def converted(base: Transformer, variant: Variant) -> Transformer:
    """A copy of the model with the attention of a row."""
    if variant.spec == SOFTMAX:
        return copy.deepcopy(base)
    return convert(base, variant.spec, copy=True)


@torch.no_grad()
def masked_loss(model: Transformer, stores: WikiCorpus, config: AbcMlmConfig) -> float:
    """-log p of a masked token, the mean over held-out articles."""
    tokeniser, device = stores.tokeniser(), next(model.parameters()).device
    blocks = Blocks(stores.store("valid"), tokeniser.specials, length=config.length, seed=None)
    source = MlmSource(blocks, min(32, len(blocks)), vocab_size=tokeniser.vocab_size, seed=7, shuffle=False)
    total = count = 0.0
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for step in range(min(source.steps_per_epoch, config.eval_batches or source.steps_per_epoch)):
        batch = {name: t.to(device) for name, t in source.batch(step).items()}
        with half, uncompiled():
            loss = MaskedLM()(model, model.eval()(batch["input_ids"]), batch, 0)
        total, count = total + float(loss.total), count + float(loss.count)
    return total / count


def fine_tune(
    task: str,
    config: AbcMlmConfig,
    encoders: Mapping[tuple[Variant, bool], Transformer],
    tokenizer: Any,
    glue: Path,
    part: Part,
    *,
    seconds: float | None,
    label: str | None = None,
) -> None:
    """Fine-tune encoders on a task, with all seeds; for all epochs, or in ``seconds``. ``label`` names the training."""
    began = time.monotonic()
    rows = {split: read_glue(glue, TASKS[task], split)[: config.tune_limit] for split in ("train", "dev")}
    examples = {split: encode(some, tokenizer, length=config.tune_length) for split, some in rows.items()}
    # A tenth is for scoring.
    tuning = Tuning(
        batch=config.tune_batch * (4 if TASKS[task].large else 1), length=config.tune_length, lr=config.tune_lr,
        epochs=config.epochs_of(task), streams=config.tune_streams, half=False, classes=TASKS[task].classes,
        seconds=None if seconds is None else 0.9 * seconds - (time.monotonic() - began),
    )  # fmt: skip
    named = {f"{v.key}-{on}": encoder for (v, on), encoder in encoders.items()}
    with dense(encoders.values()):
        fitted, right = tune_seeds(named, examples, tuning, seeds=config.seeds)
    epochs = fitted.steps * tuning.batch / len(examples["train"])
    part.row(
        "training", part=label or task, steps=fitted.steps, tokens=None, epochs=epochs, seconds=round(fitted.seconds, 1)
    )
    for (v, on), seed in product(encoders, config.seeds):
        accuracy = 100 * right[f"{v.key}-{on}", seed]
        part.row("table_4", model=v.model, n=v.n, continued=on, task=task, accuracy=accuracy, seed=seed)


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """Table 4 with a column for each task, the means over seeds, and their mean; and how the loss fell before."""
    rows = spread(tables.get("table_4", []), ["model", "n", "continued"], "task", "accuracy")
    for row in rows:
        row["average"] = fmean(row[task] for task in TASKS if task in row)
    losses = {(r["model"], r["n"], r["continued"]): r["loss"] for r in tables.get("pretraining", [])}
    for row in rows:
        row["masked_loss"] = losses.get((row["model"], row["n"], row["continued"]))
    return {
        "table_4_by_task": rows,
        "table_4_noise": noise(tables.get("table_4", [])),
        "continuing": curves(tables.get("curves", []), ["model", "n"]),
    }


def noise(rows: Rows) -> Rows:
    """For each task, how much accuracy differs between seeds of fine-tuning, pooled over the models.

    ``told_from`` is the least significant difference between two models' means (95 %).

    >>> rows = [dict(model="a", n=1, continued=True, task="RTE", seed=i, accuracy=60.0 + i) for i in range(3)]
    >>> [(row["deviation"], round(row["told_from"], 2)) for row in noise(rows)]
    [(1.0, 3.51)]
    """
    by_task = []
    for task in dict.fromkeys(row["task"] for row in rows):
        settings: dict[tuple[Any, ...], list[float]] = {}
        for row in rows:
            if row["task"] == task:
                settings.setdefault((row["model"], row["n"], row["continued"]), []).append(row["accuracy"])
        s, degrees = pooled_deviation(settings.values())
        if s is not None:
            seeds = min(len(each) for each in settings.values() if len(each) > 1)
            reach = student_quantile(degrees) * s * math.sqrt(2 / seeds)
            by_task.append({"task": task, "seeds": seeds, "deviation": s, "told_from": reach})
    return by_task


class Unfused(Softmax):
    """Softmax attention whose W lies in memory, as it did where the paper measured; for calls without padding."""

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """softmax(q k^T) v, product by product."""
        return (call.softmax_scale * call.q @ call.k.mT).softmax(-1) @ call.v


def measure_speed(part: Part, *, batch: int, length: int, repeats: int) -> None:
    """Tables ``speed`` and ``parameters``: inference, on a GPU in half precision, and what conversion adds.

    At another length than the paper's the speeds are ``speed_longer``.
    """
    device = best_device()
    config = replace(named_config("roberta-base"), max_length=max(length, LENGTH), dropout=0.0)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = torch.randint(5, 1000, (batch, length), device=device)
    own = count_parameters(config)
    models = {UNFUSED: _on(device, kind, config)}
    for attention in attentions(models[UNFUSED]):
        put_mechanism(attention, Unfused())
    for v in VARIANTS:
        wanted = replace(config, self_attention=v.spec.replace(f"length={LENGTH}", f"length={length}"))
        models[v.key] = _on(device, kind, wanted)
        extra = count_parameters(wanted) - own
        if length == LENGTH:
            part.row("parameters", model=v.model, n=v.n, extra=extra, extra_share=extra / own)
    with torch.no_grad():
        runs = {key: (lambda model=model: model(tokens).hidden) for key, model in models.items()}
        peaks = {key: peak_bytes(run, device=device) for key, run in runs.items()}
        jobs = {key: _replayed(run) if device.type == "cuda" else run for key, run in runs.items()}
        seconds = median_seconds(jobs, repeats=repeats, warmup=1, device=device)
    base, table = VARIANTS[0].key, "speed" if length == LENGTH else "speed_longer"
    for v in VARIANTS:
        part.row(
            table, model=v.model, n=v.n, speed=seconds[base] / seconds[v.key], memory=peaks[v.key] / peaks[base],
            speed_over_unfused=seconds[UNFUSED] / seconds[v.key], memory_over_unfused=peaks[v.key] / peaks[UNFUSED],
            milliseconds=1000 * seconds[v.key], megabytes=peaks[v.key] / 1e6, batch=batch, length=length,
            captured=jobs[v.key] is not runs[v.key],
        )  # fmt: skip


def _replayed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The run as one captured graph: the launches of many small kernels would hide what they cost."""
    try:
        return captured(run)
    except RuntimeError:
        # A model that waits for the host cannot be captured: it is timed with its launches, as its row notes.
        return run


def _on(device: torch.device, kind: torch.dtype, config: TransformerConfig) -> Transformer:
    # Made on the device: drawing the weights of so many models on the host takes longer than measuring them.
    with torch.device(device):
        return Transformer(config).to(device, kind).eval()
