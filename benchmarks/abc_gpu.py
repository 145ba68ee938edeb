"""ABC_MLP's kernels beside torch's SDPA and flash-linear-attention, as ratios in one run on one GPU.

python benchmarks/abc_gpu.py [--part shapes ...] [--end-to-end] [--write benchmarks/results/abc_gpu.json]. Times are
medians of CUDA-graph replays (a peer that cannot be captured: eager). abc_gpu_targets.py says which targets it meets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from abc_gpu_cost import Row, cost, moved, traffic
from storing import make_results, write_results
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnlab.measure import captured

# batch, heads, length, head size, slots; the targets of the issue come first.
SHAPES = ((8, 8, 2048, 128, 64), (1, 8, 32768, 128, 64), (16, 8, 512, 128, 64))
OTHERS = (
    {"shape": (8, 8, 2048, 64, 64)},
    {"shape": (8, 8, 2048, 32, 64)},
    {"shape": (8, 8, 2048, 128, 32)},
    {"shape": (8, 8, 2048, 128, 128)},
    {"shape": (8, 8, 2048, 128, 64), "groups": 2},
    {"shape": (1, 8, 16384, 128, 64), "packed": 8},
)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TOKENS = 32768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=tuple(PARTS))
    parser.add_argument("--end-to-end", action="store_true", help="a decoder trained and decoding, too")
    parser.add_argument("--seconds", type=float, default=600, help="start no new measurement after this long")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    chosen = args.part or [p for p in PARTS if p != "end_to_end" or args.end_to_end]
    # Autograd's own thread would add host time that a training step of many layers hides.
    torch.autograd.set_multithreading_enabled(False)
    torch.manual_seed(0)
    start, tables = time.perf_counter(), {}
    for part in chosen:
        rows: list[Row] = []
        tables[part] = rows
        for row in PARTS[part]():
            rows.append(row)
            print(part, ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
            if args.write:
                write_results(args.write, make_results("abc_gpu", "ABC", tables, config={"dtype": "bfloat16"}))
            if time.perf_counter() - start > args.seconds:
                print(f"stopped after {args.seconds:.0f} s")
                return


def graph_ms(job: Callable[[], Any], repeats: int = 20, each: int = 1) -> float:
    """The median of CUDA-graph replays; of ``each`` calls in a graph, for one of them."""

    def calls() -> None:
        for _ in range(each):
            job()

    return eager_ms(captured(calls), repeats) / each


def eager_ms(job: Callable[[], Any], repeats: int = 20, calls: int = 1) -> float:
    """The median between two events around the call; with more ``calls``, of each of so many in a row."""
    for _ in range(2):
        job()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            job()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def ceilings() -> Any:
    """The card's ceilings: a copy, and a bf16 matrix product of random numbers."""
    big = torch.randn(1 << 29, device="cuda")
    to = torch.empty_like(big)
    bandwidth = 2 * big.numel() * 4 / eager_ms(lambda: to.copy_(big)) / 1e9
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield {"copy TB/s": bandwidth, "bf16 TFLOP/s": 2 * 8192**3 / eager_ms(lambda: a @ b) / 1e9}


def made(shape: tuple[int, ...], groups: int | None = None, packed: int = 1) -> tuple[list[Tensor], Tensor | None]:
    b, h, t, d, n = shape
    g = h if groups is None else groups
    sizes = ((b, h, t, d), (b, g, t, d), (b, g, t, d), (b, g, t, n))
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in sizes]
    bounds = torch.arange(0, t + 1, t // packed, device="cuda", dtype=torch.int32) if packed > 1 else None
    return tensors, bounds


def forward_and_both(job: Callable[[], Tensor], inputs: list[Tensor], clock: Any = graph_ms) -> tuple[float, float]:
    with torch.no_grad():
        ahead = clock(job)
    pull = torch.randn_like(job())
    return ahead, clock(lambda: torch.autograd.grad(job(), inputs, pull))


def launches() -> Any:
    """Every launch of a training step at the first shape: its time, bytes over time, what it takes of the card."""
    from torch.profiler import ProfilerActivity, profile

    from attnlab.kernels.abc import abc_attention
    from attnlab.kernels.launching import known_launches

    tensors, _ = made(SHAPES[0])
    pull = torch.randn_like(tensors[0])
    for _ in range(3):
        torch.autograd.grad(abc_attention(*tensors)[0], tensors, pull)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            torch.autograd.grad(abc_attention(*tensors)[0], tensors, pull)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    each = len(events) // 5
    parts = traffic(SHAPES[0])
    parts["read_states"] += parts["saved"]
    compiled = known_launches()
    seen = set()
    for i in range(each):
        name = events[i].name
        us = statistics.median(events[i + j * each].time_range.elapsed_us() for j in range(5))
        # The second launch of a kernel is for wide chunks, which need several references; there are none.
        wide = name in seen
        seen.add(name)
        row = {"kernel": name, "references": "several" if wide else "one", "us": us}
        if not wide and name in parts:
            row |= {"MB": parts[name], "TB/s": parts[name] / us}
        yield row | compiled.get((name, wide), {})


def measured(
    shape: tuple[int, ...], clock: Any = graph_ms, *, groups: int | None = None, packed: int = 1
) -> tuple[Row, list[Tensor]]:  # fmt: skip
    from attnlab.kernels.abc import abc_attention

    tensors, bounds = made(shape, groups, packed)
    ahead, both = forward_and_both(lambda: abc_attention(*tensors, cu_seqlens=bounds)[0], tensors, clock)
    names = dict(zip(("B", "H", "T", "D", "slots"), shape, strict=True))
    return {**names, "forward ms": ahead, "both ms": both}, tensors


def beside_sdpa(row: Row, tensors: list[Tensor]) -> Row:
    q, k, v, _ = tensors
    gqa = q.shape[1] != k.shape[1]
    ahead, both = forward_and_both(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=gqa), [q, k, v])
    return {**row, "SDPA forward ms": ahead, "SDPA both ms": both,
            "forward / SDPA": row["forward ms"] / ahead, "both / SDPA": row["both ms"] / both}  # fmt: skip


def shapes() -> Any:
    """The issue's shapes, with the peer where it is installed."""
    from attnlab.kernels.abc import abc_attention

    for shape in SHAPES:
        row, tensors = measured(shape)
        ahead, both = forward_and_both(lambda t=tensors: abc_attention(*t)[0], tensors, eager_ms)  # type: ignore[misc]
        row |= {"eager forward ms": ahead, "eager both ms": both}
        yield beside_pytorch(beside_fla(beside_sdpa(row, tensors), tensors), tensors)


def roofline() -> Any:
    """What must move and be computed, what the kernels move, and how long that takes at the card's ceilings."""
    ceiling = next(ceilings())
    for shape in SHAPES:
        row = {**dict(zip(("B", "H", "T", "D", "slots"), shape, strict=True)), **cost(shape), **moved(shape)}
        for what in ("forward", "both"):
            row[f"least ms {what}"] = row[f"least MB {what}"] / ceiling["copy TB/s"] / 1e3
            row[f"moved ms {what}"] = row[f"moved MB {what}"] / ceiling["copy TB/s"] / 1e3
            row[f"GFLOP ms {what}"] = row[f"GFLOP {what}"] / ceiling["bf16 TFLOP/s"]
        yield row


def beside_fla(row: Row, tensors: list[Tensor]) -> Row:
    """flash-linear-attention's chunk_abc, eager, where it is installed."""
    try:
        from fla.ops.abc import chunk_abc
    except ImportError:
        return row
    turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in tensors]
    ahead, both = forward_and_both(lambda: chunk_abc(*turned)[0], turned, lambda job: eager_ms(job, 5))
    return {**row, "fla forward ms": ahead, "fla both ms": both,
            "fla / forward": ahead / row["forward ms"], "fla / both": both / row["both ms"]}  # fmt: skip


def beside_pytorch(row: Row, tensors: list[Tensor]) -> Row:
    """attnlab's own path without kernels, in chunks, eager."""
    import attnlab as al
    from attnlab.mechanisms._bounded.slots import Control, SlotMechanism

    class FixedControl(SlotMechanism):
        """Slots with the control logits that the kernels get, without kernels."""

        slots, normalise = tensors[3].shape[3], "read"

        def control(self, _call: al.AttentionCall, _places: Tensor) -> Control:
            return Control(tensors[3])

        def fused(self, *_args: Any, **_kwargs: Any) -> None:
            return None

    q, k, v, _ = tensors
    mech = FixedControl()
    ahead, both = forward_and_both(
        lambda: mech(al.AttentionCall(q, k, v, causal=True)), tensors, lambda job: eager_ms(job, 3)
    )  # fmt: skip
    return {**row, "PyTorch forward ms": ahead, "PyTorch both ms": both,
            "PyTorch / forward": ahead / row["forward ms"], "PyTorch / both": both / row["both ms"]}  # fmt: skip


def others() -> Any:
    """Other head sizes and slots, grouped queries and packed sequences, beside what the bytes moved predict."""

    def clock(job: Callable[[], Any]) -> float:
        # Five calls in a graph: the cost of a replay does not depend on bytes.
        return graph_ms(job, each=5)

    base, _ = measured(SHAPES[0], clock)
    base_bytes = moved(SHAPES[0])
    for case in OTHERS:
        how = {name: value for name, value in case.items() if name != "shape"}
        row, _ = measured(case["shape"], clock, **how)
        case_bytes = moved(case["shape"], **how)
        for what in ("forward", "both"):
            expected = base[f"{what} ms"] * case_bytes[f"moved MB {what}"] / base_bytes[f"moved MB {what}"]
            row[f"{what} / by bytes"] = row[f"{what} ms"] / expected
        yield {**row, "groups": how.get("groups", row["H"]), "packed": how.get("packed", 1)}


def lengths() -> Any:
    """From short to long at the same number of tokens, 8 heads of 128, 64 slots; and peak memory of both passes."""
    from attnlab.kernels.abc import abc_attention

    for length in LENGTHS:
        shape = (max(1, TOKENS // length), 8, length, 128, 64)
        row, tensors = measured(shape)
        row = beside_sdpa(row, tensors) if length <= 65536 else row
        row = beside_fla(row, tensors) if length <= 32768 else row
        pull = torch.randn_like(tensors[0])
        own = sum(t.numel() * t.element_size() for t in tensors)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(abc_attention(*tensors)[0], tensors, pull)
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before + own + pull.numel() * 2
        yield row | {"peak MB": held / 1e6, "peak / inputs and gradients": held / (2 * own + 2 * pull.numel() * 2)}


def host() -> Any:
    """Host time of an eager call, which returns before the device is done; measured before any part that profiles."""
    from attnlab.kernels.abc import abc_attention

    for shape in ((1, 8, 512, 128, 64), SHAPES[0]):
        tensors, _ = made(shape)
        q, k, v, _ = tensors
        pull = torch.randn_like(q)
        jobs = {
            "forward": (lambda t=tensors: abc_attention(*t)[0], lambda q=q, k=k, v=v: sdpa(q, k, v, is_causal=True)),
            "both": (
                lambda t=tensors, pull=pull: torch.autograd.grad(abc_attention(*t)[0], t, pull),
                lambda q=q, k=k, v=v, pull=pull: torch.autograd.grad(sdpa(q, k, v, is_causal=True), (q, k, v), pull),
            ),
        }
        for name, (ours, theirs) in jobs.items():
            with torch.set_grad_enabled(name == "both"):
                row = dict(zip(("B", "H", "T"), shape, strict=False))
                yield {**row, "what": name, "host ms": host_ms(ours), "SDPA host ms": host_ms(theirs)}


def host_ms(job: Callable[[], Any], repeats: int = 50) -> float:
    """The median of calls that begin when the device is idle; the smallest of three, since others use the host too."""
    for _ in range(5):
        job()
    medians = []
    for _ in range(3):
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            job()
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times))
    return 1e3 * min(medians)


def decode() -> Any:
    """One step against a memory in float32, and SDPA over caches of growing length."""
    from attnlab.kernels.abc import abc_step

    rate = next(ceilings())["copy TB/s"] * 1e9
    for b, h, d, n in ((64, 16, 128, 64), (16, 8, 64, 32)):
        q, k, v = (torch.randn(b, h, 1, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        control = torch.randn(b, h, 1, n, device="cuda", dtype=torch.bfloat16)
        state = (torch.randn(b, h, n, d, device="cuda"), torch.randn(b, h, n, d, device="cuda"),
                 torch.zeros(b, h, n, device="cuda"))  # fmt: skip
        step = lambda a=(q, k, v, control, state): abc_step(*a)  # noqa: E731
        ours, ten = graph_ms(step), graph_ms(step, each=10)
        bytes_ms = 2 * 2 * b * h * n * d * 4 / rate
        for context in (2048, 8192, 32768):
            keys, values = (torch.randn(b, h, context, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            theirs = graph_ms(lambda q=q, keys=keys, values=values: sdpa(q, keys, values))  # type: ignore[misc]
            del keys, values
            yield {"B": b, "H": h, "D": d, "slots": n, "context": context, "step ms": ours,
                   "one of ten ms": ten, "bytes alone ms": bytes_ms,
                   "SDPA ms": theirs, "SDPA / step": theirs / ours}  # fmt: skip


def end_to_end() -> Any:
    """A decoder of 8 layers and width 1,024: training at 8,192 tokens, and a batch of 16 decoding at 32k."""
    from attnlab.models import Transformer, TransformerConfig

    for spec in ("softmax", "abc-mlp:slots=64"):
        config = TransformerConfig(
            kind="decoder", vocab=8192, width=1024, heads=8, layers=8, positions="rotary", causal_attention=spec
        )
        model = Transformer(config).cuda()
        tokens = torch.randint(8192, (2, 8192), device="cuda")

        def train(model: Any = model, tokens: Tensor = tokens) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
            model.zero_grad()

        train()
        torch.cuda.reset_peak_memory_stats()
        training = eager_ms(train, 5)
        row = {"model": spec, "training tokens/s": tokens.numel() / training * 1e3,
               "training peak GB": torch.cuda.max_memory_allocated() / 1e9}  # fmt: skip
        model = model.bfloat16().eval()
        with torch.inference_mode():
            cache = model.make_cache(16, 32768 + 64)
            before = torch.cuda.memory_allocated()
            for _ in range(8):
                model.decode(torch.randint(8192, (16, 4096), device="cuda"), cache=cache).hidden.sum()
            one = torch.randint(8192, (16, 1), device="cuda")
            step = eager_ms(lambda m=model, one=one, cache=cache: m.decode(one, cache=cache).logits, 10)  # type: ignore[misc]
            row |= {"decoding tokens/s": 16 / step * 1e3, "past GB": (torch.cuda.memory_allocated() - before) / 1e9}
        del model, cache
        torch.cuda.empty_cache()
        yield row


PARTS: dict[str, Callable[[], Any]] = {
    "ceilings": ceilings,
    "host": host,
    "decode": decode,
    "shapes": shapes,
    "roofline": roofline,
    "others": others,
    "lengths": lengths,
    "end_to_end": end_to_end,
    "launches": launches,
}

if __name__ == "__main__":
    main()
