"""Table 3: what effective attention costs an evaluation, ours against the full SVD."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import record
from attnlab.attention import repeat_groups
from attnlab.devices import best_device
from attnlab.measure import median_seconds
from attnlab.reading.effective_layers import read_effective
from papers.common.row_store import Part
from papers.effective.config import EffectiveConfig, encoder_folder
from papers.effective.glue import TASKS, dev_batches, encode, read_splits
from papers.effective.padded_effective import padded_effective_attention

__all__ = ["run_timing", "task_row", "timing_rows"]

Inputs = Mapping[str, Tensor]
# One evaluation of a batch.
Evaluate = Callable[[Inputs], Any]


def run_timing(config: EffectiveConfig, part: Part) -> None:
    """The rows of ``timing`` (the paper's size, random weights), ``timing_models`` and ``table_3`` (the encoder)."""
    import transformers

    device = best_device()
    base = transformers.BertConfig() if config.timing_base else transformers.BertConfig(num_hidden_layers=1)
    torch.manual_seed(config.seed)
    folder = encoder_folder(config)
    encoder = transformers.AutoModel.from_pretrained(str(folder), dtype=torch.float32).to(device).eval()
    models: dict[str, Any] = {"BERT-base, random": transformers.BertModel(base), folder.name: encoder}
    for what, model in models.items():
        model.to(device).eval()
        if part.has("timing_models", model=what, way="full-svd"):
            continue
        batch = _half_padded_batch(config, model.config.vocab_size, device)
        for row in timing_rows(model, batch, what=what, repeats=config.timing_repeats):
            if not part.has("timing_models", model=what, way=row["way"]):
                part.row("timing_models", **row)
            if what.startswith("BERT-base") and not part.has("timing", way=row["way"]):
                part.row("timing", **row)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    for task in config.tasks:
        if not part.has("table_3", task=task):
            with part.step(f"table 3 {task}"):
                batches = _dev_set(config, task, tokenizer, getattr(encoder.config, "type_vocab_size", 0) > 1, device)
                part.row("table_3", **task_row(encoder, batches, task=task, svd_batches=config.svd_batches))


def _half_padded_batch(config: EffectiveConfig, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """A batch of the paper's size of random tokens, about half of it padding, as in these tasks."""
    ids = torch.randint(5, vocab, (config.batch_size, config.length))
    lengths = torch.linspace(config.length // 4, config.length, config.batch_size)
    mask = torch.arange(config.length) < lengths[:, None]
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def _dev_set(
    config: EffectiveConfig, task: str, tokenizer: Any, segments: bool, device: torch.device
) -> list[dict[str, Tensor]]:
    """The task's dev set in padded batches of the paper's size, without labels."""
    rows, _ = read_splits(config.data, TASKS[task], seed=config.seed)
    examples = encode(rows["dev"], tokenizer, length=config.length)
    sizes: dict[str, Any] = {"size": config.batch_size, "length": config.length, "classes": TASKS[task].classes}
    batches = dev_batches(examples, segments=segments, device=device, **sizes)
    return [{name: t for name, t in batch.items() if name != "labels"} for _, batch in batches]


@contextmanager
def _evaluations(model: nn.Module) -> Iterator[dict[str, Evaluate]]:
    """Three evaluations of a batch: eager with its maps, with effective maps and residuals, and by the full SVD."""
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    # An evaluation enters the context once and reads many batches in it, so the eager one needs a model of its own.
    reader = copy.deepcopy(model)
    try:
        with read_effective(reader) as maps:

            def standard(inputs: Inputs) -> None:
                model(**inputs, output_attentions=True)

            def ours(inputs: Inputs) -> float:
                maps.clear()
                reader(**inputs)
                return float(torch.stack([e.residual for e in maps]).max())

            def full_svd(inputs: Inputs) -> None:
                with record(model) as trace:
                    model(**inputs)
                for layer in trace:
                    w, v = layer.weights(), repeat_groups(layer.call.v, layer.call.groups)
                    padded_effective_attention(w, v, key_visible=layer.call.key_visible)

            yield {"standard": standard, "ours": ours, "full-svd": full_svd}
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


@torch.no_grad()
def timing_rows(
    model: nn.Module, batch: Inputs, *, what: str, repeats: int = 7, svd_repeats: int = 1
) -> Iterator[dict[str, Any]]:
    """Seconds of an evaluation batch: as it is, with every effective map and residual, by the full SVD."""
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    device = inputs["input_ids"].device
    shape = "x".join(str(n) for n in inputs["input_ids"].shape)
    with _evaluations(model) as evaluations:
        # The SVD last and seldom: on a GPU it takes seconds.
        for way, evaluate in evaluations.items():
            # Each beside the evaluation it is compared with, so that a noisy moment slows both.
            jobs = {name: _job(one, [inputs]) for name, one in (("standard", evaluations["standard"]), (way, evaluate))}
            svd = way == "full-svd"
            times, warmup = (svd_repeats, 1) if svd else (repeats, 3)
            seconds = median_seconds(jobs, repeats=times, warmup=warmup, device=device)
            ratio = seconds[way] / seconds["standard"]
            beside = {"seconds": seconds[way], "standard_seconds": seconds["standard"], "ratio": ratio}
            yield {"model": what, "way": way, "batch": shape, **beside}


@torch.no_grad()
def task_row(model: nn.Module, batches: Sequence[Inputs], *, task: str, svd_batches: int) -> dict[str, Any]:
    """A row of Table 3: the whole dev set with standard and with effective attention; the SVD on the first batches."""
    device = batches[0]["input_ids"].device
    first = batches[:svd_batches]
    with _evaluations(model) as evaluations:
        for evaluate in evaluations.values():
            evaluate(batches[0])
        jobs = {way: _job(evaluations[way], batches) for way in ("standard", "ours")}
        seconds = median_seconds(jobs, repeats=1, warmup=0, device=device)
        jobs = {way: _job(evaluations[way], first) for way in ("standard", "full-svd")}
        on_first = median_seconds(jobs, repeats=1, warmup=0, device=device)
    return {
        "task": task,
        "examples": sum(len(batch["input_ids"]) for batch in batches),
        "standard_seconds": seconds["standard"],
        "effective_seconds": seconds["ours"],
        "ratio": seconds["ours"] / seconds["standard"],
        "svd_ratio": on_first["full-svd"] / on_first["standard"],
        "svd_batches": len(first),
    }


def _job(evaluate: Evaluate, batches: Sequence[Inputs]) -> Callable[[], None]:
    def run() -> None:
        for inputs in batches:
            evaluate(inputs)

    return run
