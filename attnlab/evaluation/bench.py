"""``attnlab bench``: time and peak memory of mechanisms against torch's SDPA on the same call, over lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from attnlab.attention import AttentionCall, Mechanism
from attnlab.devices import to_device
from attnlab.errors import problem_of
from attnlab.measure import median_seconds, peak_bytes
from attnlab.mechanisms.softmax import Softmax
from attnlab.progress import each
from attnlab.provenance import command_line, provenance
from attnlab.registry import mechanism
from attnlab.sizes import check_bytes, check_operations, check_seconds

__all__ = ["BenchConfig", "bench", "bench_lines"]

# The shortest time that any call takes.
LEAST_SECONDS = 1e-5


@dataclass(frozen=True)
class BenchConfig:
    """The calls that are timed."""

    mechanisms: tuple[str, ...] = ("kernel:elu", "window:r=64", "top-r:r=65", "value-aware:r=1")
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    heads: int = 8
    width: int = 64
    batch: int = 1
    causal: bool = True
    backward: bool = False
    repeats: int = 3
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("heads", "width", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be positive, got {self.lengths}")


def bench(config: BenchConfig) -> dict[str, Any]:
    """One row per mechanism and length: seconds and bytes, and their ratios to SDPA's in the same run.

    ``bytes_growth`` is the ratio of peak bytes to those at the length before: 2 for a doubling is linear.
    """
    mechanisms = {spec: mechanism(spec) for spec in config.mechanisms}
    _check_size(config)
    rows: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    for length in each(config.lengths, lambda tokens: f"{tokens:,} tokens"):
        call = _call(config, length)
        jobs = {"sdpa": partial(_job, Softmax(), call, config.backward)}
        for spec, mech in mechanisms.items():
            jobs[spec] = partial(_job, mech, call, config.backward)
        refused = {spec: why for spec, job in jobs.items() if (why := _refusal(job)) is not None}
        timed = {spec: job for spec, job in jobs.items() if spec not in refused}
        seconds = median_seconds(timed, repeats=config.repeats, warmup=0, device=config.device)
        peaks = {spec: peak_bytes(job, device=config.device) for spec, job in timed.items()}
        for spec in jobs:
            if spec in refused:
                rows.append({"mechanism": spec, "length": length, "refused": refused[spec]})
                continue
            rows.append(
                {
                    "mechanism": spec,
                    "length": length,
                    "seconds": seconds[spec],
                    "time_ratio": seconds[spec] / seconds["sdpa"],
                    "bytes": peaks[spec],
                    "memory_ratio": peaks[spec] / peaks["sdpa"],
                    "bytes_growth": peaks[spec] / before[spec] if spec in before else None,
                }
            )
        before = dict(peaks)
    made = {**provenance(), "command": command_line()}
    return {"name": "bench", "config": asdict(config), "seed": config.seed, **made, "tables": {"rows": rows}}


def bench_lines(result: dict[str, Any]) -> Sequence[str]:
    """The table as aligned text."""
    lines = [f"{'mechanism':<24}{'length':>8}{'time':>12}{'of SDPA':>10}{'memory':>12}{'of SDPA':>10}{'growth':>8}"]
    for row in result["tables"]["rows"]:
        if "refused" in row:
            lines.append(f"{row['mechanism']:<24}{row['length']:>8}  refused: {row['refused']}")
            continue
        growth = "" if row["bytes_growth"] is None else f"{row['bytes_growth']:.2f} x"
        lines.append(
            f"{row['mechanism']:<24}{row['length']:>8}{row['seconds'] * 1e3:>9.1f} ms{row['time_ratio']:>8.2f} x"
            f"{row['bytes'] / 2**20:>8.1f} MiB{row['memory_ratio']:>8.2f} x{growth:>8}"
        )
    return lines


def _check_size(config: BenchConfig) -> None:
    """Refuse lengths whose queries, keys and values do not fit, or whose scores take SDPA hours."""
    length, heads = max(config.lengths), config.batch * config.heads
    what = f"a call of {config.batch} x {config.heads} heads over {length} tokens of width {config.width}"
    # Three tensors and the output, and the gradient of each.
    tensors = 8 if config.backward else 4
    instead = "give smaller lengths, heads, width or batch"
    check_bytes(what, 4 * tensors * heads * length * config.width, instead=instead, device=config.device)
    # A first run, the repeats, and one that counts the memory.
    runs = config.repeats + 2
    calls = runs * len(config.lengths) * (len(config.mechanisms) + 1)
    check_seconds(f"{calls} calls", calls * LEAST_SECONDS, instead="give fewer repeats")
    # A product and a sum for each score and each value.
    operations = 4 * heads * length**2 * config.width * runs // (2 if config.causal else 1)
    check_operations(
        f"timing {what}", operations, instead="give smaller lengths or fewer repeats", device=config.device
    )


def _call(config: BenchConfig, length: int) -> AttentionCall:
    generator = torch.Generator().manual_seed(config.seed)
    shape = (3, config.batch, config.heads, length, config.width)
    q, k, v = to_device(config.device, torch.randn(shape, generator=generator)).requires_grad_(config.backward)
    # As of a model whose heads together are as wide as its layers.
    x = torch.randn(config.batch, length, config.heads * config.width, generator=generator)
    return AttentionCall(q, k, v, x=to_device(config.device, x), causal=config.causal)


def _job(mech: Mechanism, call: AttentionCall, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        out = mech(call)
    if backward:
        torch.autograd.grad(out.sum(), (call.q, call.k, call.v))


def _refusal(job: Callable[[], None]) -> str | None:
    """Why the call cannot be taken; a first run, which also warms up."""
    try:
        job()
    except ValueError as error:
        return problem_of(error).splitlines()[0]
    return None
