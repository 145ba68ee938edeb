"""What guidance costs: a guided training step beside the unguided one with SDPA, and beside the usual way, in turns.

    python benchmarks/guidance.py --out FILE    # one GPU: 12 layers, 12 heads of 64, bf16
    python benchmarks/guidance.py --tiny                               # a dry run on a CPU

The usual way keeps all maps of eager attention, writes targets as n x n matrices and takes their mean squared error.
Every step is forward, backward and AdamW on the masked tokens of random texts; ratios are to the unguided step. Steps
are timed eight at a time, as a training runs them: the host prepares the next while the device works. Then the kernel
is checked: its relative errors against maps in float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from storing import make_results, read_results, write_results
from torch import Tensor

from attnlab.adapters import swap
from attnlab.attention import AttentionCall
from attnlab.guidance import Guidance, guide, layer_targets
from attnlab.guidance.attention import Groups, attend_guided
from attnlab.measure import median_seconds, peak_bytes
from attnlab.mechanisms.softmax import Softmax
from attnlab.models import MaskedLM, Transformer, named_config
from attnlab.patterns import SpecialTokens, dense

TOKENS = SpecialTokens(period=(7,), delimiters=(1, 2))


@dataclass(frozen=True)
class Config:
    """One setting of the benchmark."""

    model: str = "roberta-12"
    layers: int = 12
    length: int = 512
    # Texts in a batch.
    texts: int = 84
    fraction: float = 0.5
    padded: bool = False
    vocab: int = 8192
    repeats: int = 3
    # Steps between two readings of the clock. Steps of the usual way are so long that the host's time does not matter.
    block: int = 8
    usual: bool = True
    seed: int = 0


# Table 11's batch for 12 layers, and as many tokens in longer texts; the usual way holds only some of those.
SETTINGS = (
    Config(),
    Config(length=2048, texts=21, usual=False),
    Config(length=2048, texts=8, block=4),
    Config(padded=True, usual=False, block=4),
    Config(length=2048, texts=21, padded=True, usual=False, block=4),
)


# (dtype, width of a head, tokens, padded, causal)
CHECKS = (
    (torch.bfloat16, 64, 512, False, False),
    (torch.bfloat16, 64, 300, True, False),
    (torch.bfloat16, 48, 257, False, True),
    (torch.bfloat16, 128, 300, True, True),
    (torch.float16, 32, 131, True, False),
    (torch.float32, 64, 257, True, False),
)


class Eager(Softmax):
    """Attention that writes and keeps its maps, as it must be run to read them."""

    def __init__(self) -> None:
        object.__setattr__(self, "maps", [])
        object.__setattr__(self, "calls", [])

    def forward(self, call: AttentionCall) -> Tensor:
        W = self.reference(call)
        self.maps.append(W)
        self.calls.append(call)
        return W @ call.v


def make_batch(config: Config, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(3, config.vocab, (config.texts, config.length), generator=generator)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.05, 7, ids)
    ids[:, 0], ids[:, -1] = 1, 2
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.15, ids, -100)
    batch = {"input_ids": ids, "labels": labels}
    if config.padded:
        lengths = torch.randint(config.length // 2, config.length + 1, (config.texts, 1), generator=generator)
        batch["attention_mask"] = torch.arange(config.length) < lengths
        batch["labels"] = labels.masked_fill(~batch["attention_mask"], -100)
    return {name: t.to(device) for name, t in batch.items()}


def usual_loss(eager: Eager, guidance: Guidance, batch: dict[str, Tensor]) -> Tensor:
    """The mean squared error of every guided group's maps against dense targets."""
    n = batch["input_ids"].shape[1]
    mask = batch.get("attention_mask")
    targets: dict[str, Tensor] = {}
    total = torch.zeros((), device=batch["input_ids"].device)
    for layer, (W, call) in enumerate(zip(eager.maps, eager.calls, strict=True)):
        for name, heads in guidance.assign(W.shape[1], layer=layer, n_layers=len(eager.maps)).items():
            if name not in targets:
                drawn = layer_targets(name, call, batch["input_ids"], attention_mask=mask, tokens=TOKENS)
                targets[name] = dense(drawn, keys=n)
            total = total + (W[:, heads.start : heads.stop].float() - targets[name]).square().mean()
    return total


def steps_of(config: Config, device: torch.device, kept: ExitStack) -> dict[str, Callable[[], None]]:
    """The three kinds of step, each on a model of its own; ``kept`` holds the contexts open."""
    guidance = Guidance(fraction=config.fraction, alpha0=10, schedule="constant")
    batch = make_batch(config, device)
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    task = MaskedLM()

    def make(way: str) -> Callable[[], None]:
        torch.manual_seed(config.seed)
        small = {"width": 32, "heads": 4} if config.model == "tiny" else {}
        base = named_config("roberta-12" if config.model == "tiny" else config.model)
        made = replace(base, vocab=config.vocab, layers=config.layers, max_length=config.length, **small)
        # Made on the device: drawing random numbers on a CPU would take longer than all steps on a GPU.
        with device:
            model = Transformer(made).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda" or None)
        eager, term = Eager(), None
        if way == "guided":
            term = kept.enter_context(guide(model, guidance, tokens=TOKENS))
        elif way == "usual":
            kept.enter_context(swap(model, eager))

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                output = model(**inputs)
                total, count = task(model, output, batch, 0)
                loss = total / count
                if term is not None:
                    pull = term(model, output, batch, 0)
                    loss = loss + term.weight(0) * pull.total / pull.count
                elif way == "usual":
                    loss = loss + 10 * usual_loss(eager, guidance, batch)
                    eager.maps.clear()
                    eager.calls.clear()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    ways = ("unguided", "guided", *(["usual"] if config.usual else []))
    return {way: make(way) for way in ways}


def check(
    dtype: torch.dtype, width: int, length: int, padded: bool, causal: bool, device: torch.device
) -> dict[str, Any]:
    """Relative errors of output, row errors and gradients of six guided heads, against maps in float64."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 31, (2, length), generator=generator)
    seen = torch.arange(length) < torch.tensor([[length], [length - 29]]) if padded else None
    heads = Guidance(fraction=1.0).assign(6)
    qkv = [torch.randn(2, 6, length, width, generator=generator).to(dtype) for _ in range(3)]
    slopes: list[Tensor] = []
    by_precision = []
    for precision in (torch.float64, dtype):
        leaves = [t.to(device, precision).requires_grad_() for t in qkv]
        call = AttentionCall(*leaves, key_visible=None if seen is None else seen.to(device), causal=causal)
        targets = {name: layer_targets(name, call, ids.to(device), tokens=TOKENS) for name in heads}
        out, errors = attend_guided(call, Groups(heads, targets))
        slopes = slopes or [torch.randn(t.shape, generator=generator).to(device, t.dtype) for t in (out, errors)]
        grads = torch.autograd.grad(
            (out, errors), leaves, [x.to(t) for x, t in zip(slopes, (out, errors), strict=True)]
        )
        by_precision.append([t.detach().double() for t in (out, errors, *grads)])
    names = ("output", "row_errors", "dq", "dk", "dv")
    off = {n: float((a - b).norm() / a.norm()) for n, a, b in zip(names, *by_precision, strict=True)}
    labels = {"dtype": str(dtype).removeprefix("torch."), "width": width, "length": length}
    return {**labels, "padded": padded, "causal": causal, **off}


def measure(config: Config, device: torch.device, kept: ExitStack) -> list[dict[str, Any]]:
    jobs = steps_of(config, device, kept)

    def block(step: Callable[[], None], steps: int) -> None:
        for _ in range(steps):
            step()

    steps = {way: 1 if way == "usual" else config.block for way in jobs}
    blocks = {way: partial(block, step, steps[way]) for way, step in jobs.items()}
    taken = median_seconds(blocks, repeats=config.repeats, warmup=1, device=device)
    seconds = {way: whole / steps[way] for way, whole in taken.items()}
    hosts = {way: host_seconds(step, device) for way, step in jobs.items()}
    # A second step holds what a first one leaves: the optimiser's state.
    peaks = {way: peak_bytes(job, device=device) for way, job in jobs.items()}
    return [
        {
            "length": config.length,
            "texts": config.texts,
            "padded": config.padded,
            "way": way,
            "milliseconds": 1000 * seconds[way],
            "time_ratio": seconds[way] / seconds["unguided"],
            "host_milliseconds": 1000 * hosts[way],
            "mebibytes": peaks[way] / 2**20,
            "memory_ratio": peaks[way] / peaks["unguided"],
        }
        for way in jobs
    ]


def host_seconds(step: Callable[[], None], device: torch.device) -> float:
    """Host time of a step that starts while the device is idle: the least of three."""
    seconds = []
    for _ in range(3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="three layers of width 32, for a dry run")
    parser.add_argument("--out", type=Path, help="write the tables as JSON")
    parser.add_argument("--only", choices=("steps", "checks"), help="one of the two tables; --out keeps the other")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = SETTINGS
    if options.tiny:
        settings = tuple(
            replace(c, model="tiny", layers=3, length=c.length // 16, texts=c.texts // 8, repeats=2, block=2)
            for c in SETTINGS
        )
    tables: dict[str, list[dict[str, Any]]] = {}
    before = read_results(options.out) if options.out is not None and options.only is not None else None
    if before is not None:
        before["tables"].pop(options.only, None)

    def keep(name: str, rows: list[dict[str, Any]]) -> None:
        tables[name] = tables.get(name, []) + rows
        for row in rows:
            print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        if options.out is not None:
            config = {"settings": [asdict(c) for c in settings]}
            result = make_results("guidance_speed", "AG", tables, config=config, seed=settings[0].seed)
            write_results(options.out, result, before=before)

    if options.only != "checks":
        for config in settings:
            with ExitStack() as kept:
                keep("steps", measure(config, device, kept))
    if options.only != "steps":
        for one in CHECKS:
            keep("checks", [check(*one, device)])


if __name__ == "__main__":
    main()
