"""Our training loop beside nanoGPT's, on the same model, batch and device, in turns, in one process.

    python benchmarks/train_lm.py                 # one GPU: the 6-layer, 512-wide, 512-token LM, bf16, compiled
    python benchmarks/train_lm.py --tiny          # a dry run on a CPU

Prints tokens per second of both and their ratio, model FLOPs against the measured bf16 matrix rate, the share of time
our loop waited for data, and where the device's time goes. ``--out`` writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from storing import make_results, write_results
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnlab.models import Transformer, TransformerConfig
from attnlab.training import Callback, CrossEntropy, Moment, Recipe, Schedule, Settings, train


@dataclass(frozen=True)
class Config:
    layers: int = 6
    width: int = 512
    heads: int = 8
    length: int = 512
    # GPT-2's vocabulary, rounded up to a multiple of 64 as nanoGPT does.
    vocab: int = 50304
    batch: int = 64
    warmup: int = 20
    rounds: int = 6
    # Steps of each loop in a round, and steps under the profiler after the last.
    steps: int = 50
    profiled: int = 5
    compile: bool = True
    mode: str = "default"
    seed: int = 1337


TINY = replace(
    Config(), layers=2, width=32, heads=2, length=16, vocab=97, batch=4, warmup=2, rounds=2, steps=5, compile=False
)


def make_model(config: Config) -> nn.Module:
    torch.manual_seed(config.seed)
    return Transformer(
        TransformerConfig(
            kind="decoder",
            vocab=config.vocab,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
            max_length=config.length,
            bias=False,
        )
    )


def flops_per_token(config: Config) -> int:
    """Forward and backward: 6 per weight in a matrix product, 12 per layer, width and key in attention (as nanoGPT)."""
    weights = config.layers * 12 * config.width**2 + config.vocab * config.width
    return 6 * weights + 12 * config.layers * config.width * config.length


class Tokens:
    """Random spans of a memory-mapped file of tokens, as both loops read them."""

    def __init__(self, file: Path, config: Config) -> None:
        rng = np.random.default_rng(config.seed)
        rng.integers(0, config.vocab, size=max(1 << 14, 1000 * config.length), dtype=np.uint16).tofile(file)
        self.file, self.config = file, config

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        # nanoGPT opens the file anew for each batch, so that pages already read do not count as its memory.
        data = np.memmap(self.file, dtype=np.uint16, mode="r")
        n = self.config.length
        starts = torch.randint(len(data) - n - 1, (self.config.batch,), generator=generator)
        x = torch.stack([torch.from_numpy(data[i : i + n].astype(np.int64)) for i in starts.tolist()])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + n].astype(np.int64)) for i in starts.tolist()])
        return {"input_ids": x, "labels": y}


class WithLoss(nn.Module):
    """nanoGPT's models return their loss, so that it is compiled with them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.model(x).logits
        return cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-100)


def nanogpt_loop(config: Config, tokens: Tokens, device: torch.device, recipe: Recipe) -> Iterator[None]:
    """The loop of nanoGPT's train.py, one update at a time."""
    model = WithLoss(make_model(config)).to(device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=recipe.lr,
        betas=recipe.betas,
        fused=cuda or None,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16) if cuda else nullcontext()
    run = torch.compile(model, mode=config.mode) if config.compile else model

    def get_batch(step: int) -> tuple[Tensor, Tensor]:
        batch = tokens.batch(step)
        x, y = batch["input_ids"], batch["labels"]
        if cuda:
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x.to(device), y.to(device)

    model.train()
    step = 0
    x, y = get_batch(step)
    while True:
        lr = recipe.lr * min(1.0, (step + 1) / 100) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / 100_000)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        with autocast:
            loss = run(x, y)
        # The next batch is fetched while the device is busy with this one.
        x, y = get_batch(step + 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()
        step += 1
        yield


class Turns(Callback):
    """Stops our loop's clock after each round, lets the other loop run as many steps, and at the end profiles ours."""

    def __init__(self, config: Config, peer: Iterator[None], device: torch.device) -> None:
        self.config, self.peer, self.device = config, peer, device
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.profile: torch.profiler.profile | None = None
        self.profiled_seconds = 0.0
        self.since = 0.0

    def on_step(self, moment: Moment) -> None:
        config, last = self.config, self.config.warmup + self.config.rounds * self.config.steps
        if moment.step == config.warmup:
            self.run_peer(config.warmup)
            self.since = self.now()
        elif config.warmup < moment.step <= last and (moment.step - config.warmup) % config.steps == 0:
            self.ours.append(self.now() - self.since)
            self.theirs.append(self.run_peer(config.steps))
            if moment.step == last:
                activities = [torch.profiler.ProfilerActivity.CPU]
                if self.device.type == "cuda":
                    activities = [torch.profiler.ProfilerActivity.CUDA]
                self.profile = torch.profiler.profile(activities=activities)
                self.profile.start()
            self.since = self.now()
        elif moment.step == last + config.profiled and self.profile is not None:
            self.profiled_seconds = self.now() - self.since
            self.profile.stop()

    def run_peer(self, steps: int) -> float:
        start = self.now()
        for _ in range(steps):
            next(self.peer)
        return self.now() - start

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


KINDS = {
    "attention": ("flash", "fmha", "attention", "softmax_warp"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "aten::mm", "aten::addmm", "aten::bmm"),
    "optimiser": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "fused elementwise and reductions": ("triton",),
    "copies": ("memcpy", "memset", "copy_"),
}


def where_time_goes(turns: Turns) -> tuple[list[dict], list[dict]]:
    """Device time by kind of kernel and the longest kernels, as shares of the profiled steps' time."""
    assert turns.profile is not None
    cuda = turns.device.type == "cuda"
    total = turns.profiled_seconds * 1e6
    rows = [
        {
            "kernel": e.key[:120],
            "calls": e.count,
            "share": (e.self_device_time_total if cuda else e.self_cpu_time_total) / total,
        }
        for e in turns.profile.key_averages()
    ]
    rows = sorted((r for r in rows if r["share"] > 0), key=lambda r: -r["share"])
    kinds = dict.fromkeys([*KINDS, "other kernels"], 0.0)
    for row in rows:
        name = row["kernel"].lower()
        kinds[next((k for k, marks in KINDS.items() if any(m in name for m in marks)), "other kernels")] += row["share"]
    kinds["nothing running"] = max(0.0, 1 - sum(kinds.values()))
    return [{"kind": k, "share": v} for k, v in kinds.items()], rows[:20]


def matrix_rate(device: torch.device, size: int) -> float:
    """FLOP per second of a bf16 product of two size x size matrices, measured."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    repeats = 30 if device.type == "cuda" else 3
    times = []
    for _ in range(3):
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return 2 * size**3 / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a dry run of seconds on a CPU")
    parser.add_argument("--batch", type=int, help="sequences in a batch")
    parser.add_argument("--rounds", type=int, help="rounds of each loop")
    parser.add_argument("--steps", type=int, help="steps in a round")
    parser.add_argument("--mode", help="torch.compile's mode, for both loops")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    args = parser.parse_args()
    changes = {k: v for k in ("batch", "rounds", "steps", "mode") if (v := getattr(args, k)) is not None}
    config = replace(TINY if args.tiny else Config(), **changes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # As nanoGPT does; it affects the products that autocast leaves in float32.
    torch.set_float32_matmul_precision("high")

    rate = matrix_rate(device, 256 if args.tiny else 8192)
    recipe = Recipe(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0)
    total = config.warmup + config.rounds * config.steps + config.profiled
    with tempfile.TemporaryDirectory() as folder:
        tokens = Tokens(Path(folder) / "tokens.bin", config)
        turns = Turns(config, nanogpt_loop(config, tokens, device, recipe), device)
        settings = Settings(
            steps=total,
            recipe=recipe,
            schedule=Schedule("cosine", warmup=min(100, total - 1)),
            compile=config.compile,
            compile_mode=config.mode,
            log_every=10,
            seed=config.seed,
        )
        outcome = train(
            make_model(config),
            tokens,
            terms=[CrossEntropy()],
            settings=settings,
            run_dir=Path(folder) / "run",
            callbacks=[turns],
        )
    waited = outcome.timing["waiting_share"] * total / outcome.timing["steps_per_second"]
    report(config, turns, rate, waited, args.out)


def report(config: Config, turns: Turns, rate: float, waited: float, out: Path | None) -> None:
    per_round = config.steps * config.batch * config.length
    rows = [
        {"round": i, "ours": per_round / a, "nanogpt": per_round / b, "ratio": b / a}
        for i, (a, b) in enumerate(zip(turns.ours, turns.theirs, strict=True))
    ]
    ours, theirs = (statistics.median(row[k] for row in rows) for k in ("ours", "nanogpt"))
    flops = flops_per_token(config)
    kinds, kernels = where_time_goes(turns)
    summary = {
        "tokens_per_second": ours,
        "nanogpt_tokens_per_second": theirs,
        "ratio": statistics.median(row["ratio"] for row in rows),
        "matrix_rate_tflops": rate / 1e12,
        "flops_per_token": flops,
        "share_of_matrix_rate": ours * flops / rate,
        "nanogpt_share_of_matrix_rate": theirs * flops / rate,
        "waiting_share": waited / (sum(turns.ours) + turns.profiled_seconds),
    }
    for name, value in summary.items():
        print(f"{name:32} {value:,.4g}")
    for row in kinds:
        print(f"  {row['kind']:34} {row['share']:.1%}")
    if out is not None:
        tables = {"summary": [summary], "rounds": rows, "time_by_kind": kinds, "longest_kernels": kernels}
        write_results(out, make_results("train_lm", None, tables, config=asdict(config), seed=config.seed))


if __name__ == "__main__":
    main()
