"""Value-aware attention beside its peers, as ratios in one run: python benchmarks/value_aware.py [--json] [--part ...].

speed: top-r against SDPA, value-aware r = 1 against exact softmax in chunks of the same size, and their memory.
support: the d + 1 keys of every query against a loop of scipy's NNLS. solver: 1 < r < d + 1 against all supports.
whole: every mechanism and every oracle's keys at full length in one pass, with the memory of all of it (for a GPU).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from storing import make_results, write_results
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnlab as al
from attnlab.attention import query_chunks, repeat_groups
from attnlab.linalg.caratheodory import caratheodory
from attnlab.linalg.sparse_simplex import sparse_simplex
from attnlab.measure import median_seconds, peak_bytes
from attnlab.mechanisms.top_r import CPU_CHUNK

SIZES = {
    "full": {"heads": 12, "d": 64, "length": 4096, "support": 512, "nnls": 192, "cases": 1000},
    "tiny": {"heads": 2, "d": 8, "length": 256, "support": 64, "nnls": 16, "cases": 80},
}
KINDS = ("random", "clustered", "near a line", "on a line", "skewed alpha", "uniform alpha", "duplicates", "norms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a dry run on small shapes")
    parser.add_argument("--part", action="append", choices=("speed", "support", "solver", "whole"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--write",
        type=Path,
        help="a folder: write value_aware_<part>.json there (the support on a GPU: value_aware_support_gpu.json)",
    )
    args = parser.parse_args()
    size = SIZES["tiny" if args.tiny else "full"]
    parts: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {
        "speed": speed,
        "support": support,
        "solver": solver,
        "whole": whole,
    }
    for name in args.part or ("speed", "support", "solver"):
        torch.manual_seed(0)
        rows: list[dict[str, Any]] = []
        # Both devices have their support beside NNLS; the other parts are for one of them.
        title = f"value_aware_{name}" + ("_gpu" if name == "support" and args.device != "cpu" else "")
        config = size | {"device": args.device}
        with torch.inference_mode():
            for row in parts[name](size, args.device, args.repeats):
                rows.append(row)
                # Row by row: what is measured is kept when time runs out.
                if args.write:
                    write_results(args.write / f"{title}.json", make_results(title, "OVA", {name: rows}, config=config))
                if not args.json:
                    values = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                    print(", ".join(values), flush=True)
        if args.json:
            print(json.dumps(make_results(title, "OVA", {name: rows}, config=config), indent=1))


def speed(size: dict[str, int], device: str, repeats: int) -> list[dict[str, Any]]:
    shape = (1, size["heads"], size["length"], size["d"])
    q, k, v = (torch.randn(shape, device=device) for _ in range(3))
    call = al.AttentionCall(q, k, v)
    r = size["d"] + 1

    def chunked() -> Tensor:
        budget = CPU_CHUNK if device == "cpu" else 1 << 26
        values = repeat_groups(v, call.groups)
        return torch.cat([al.Softmax().reference(part) @ values for part in query_chunks(call, budget)], dim=2)

    specs = [f"top-r:r={r}", "value-aware:r=1", "window:r=64", "lsh:r=64,rounds=4", "orf:features=256"]
    jobs: dict[str, Any] = {"SDPA": lambda: scaled_dot_product_attention(q, k, v), "chunked softmax": chunked}
    jobs |= {spec: functools.partial(al.mechanism(spec), call) for spec in specs}
    seconds = median_seconds(jobs, repeats=repeats, device=device)
    memory = {name: peak_bytes(job, device=device) for name, job in jobs.items()}
    return [
        {
            "mechanism": name,
            "seconds": seconds[name],
            "x_sdpa": seconds[name] / seconds["SDPA"],
            "x_chunked_softmax": seconds[name] / seconds["chunked softmax"],
            "peak_mb": memory[name] / 1e6,
            "peak_x_chunked_softmax": memory[name] / memory["chunked softmax"],
        }
        for name in jobs
    ]


def support(size: dict[str, int], device: str, repeats: int) -> list[dict[str, Any]]:
    import numpy as np
    from scipy.optimize import nnls

    n, d = size["support"], size["d"]
    q, k, v = (torch.randn(1, size["heads"], n, d, dtype=torch.float64, device=device) for _ in range(3))
    call = al.AttentionCall(q, k, v)
    alpha = al.Softmax().weights(call)
    exact = alpha @ v
    weights = caratheodory(alpha[0], v[0])
    some = torch.randperm(size["heads"] * n)[: size["nnls"]].tolist()
    systems = [
        (
            torch.cat([v[0, i // n].T, v.new_ones(1, n)]).cpu().numpy(),
            np.append(exact[0, i // n, i % n].cpu().numpy(), 1.0),
        )
        for i in some
    ]
    jobs = {
        "softmax": lambda: al.Softmax()(call),
        "support": lambda: caratheodory(alpha[0], v[0]),
        "nnls": lambda: [nnls(matrix, target) for matrix, target in systems],
    }
    threads = torch.get_num_threads()
    # scipy's loop has one thread, so ours has one too.
    torch.set_num_threads(1)
    seconds = median_seconds(jobs, repeats=max(3, repeats // 2), device=device)
    torch.set_num_threads(threads)
    loop = seconds["nnls"] / len(some) * size["heads"] * n
    return [
        {
            "queries": size["heads"] * n,
            "keys": n,
            "d": d,
            "seconds": seconds["support"],
            "nnls_loop_seconds": loop,
            "x_faster_than_nnls": loop / seconds["support"],
            "x_softmax": seconds["support"] / seconds["softmax"],
            "largest_support": int((weights > 0).sum(-1).max()),
            "largest_output_error": float((weights @ v[0] - exact[0]).abs().max()),
        }
    ]


def whole(size: dict[str, int], device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Outputs at ``length``, and the keys behind d + 1, there and at ``support``; what takes seconds comes last."""
    calls = {
        n: al.AttentionCall(*(torch.randn(1, size["heads"], n, size["d"], device=device) for _ in range(3)))
        for n in (size["support"], size["length"])
    }
    quick = ["softmax", f"top-r:r={size['d'] + 1}", "value-aware:r=1", "value-aware:r=d+1"]
    quick += ["window:r=64", "lsh:r=64,rounds=4", "orf:features=256"]
    todo = [(spec, "output", size["length"]) for spec in quick]
    todo += [("value-aware:r=d+1", "keys", n) for n in calls]
    todo += [(f"value-aware:r={r}", "output", size["length"]) for r in (2, 8)]
    for spec, what, n in todo:
        call, mech = calls[n], al.mechanism(spec)
        job = mech if what == "output" else mech.weights
        peer = al.Softmax() if what == "output" else al.Softmax().weights
        jobs = {"softmax": functools.partial(peer, call)}
        if (spec in quick and what == "output") or n == size["support"]:
            jobs["mine"] = functools.partial(job, call)
        seconds = median_seconds(jobs, repeats=repeats, device=device)
        kept: list[Tensor] = []
        start = time.perf_counter()
        peak = peak_bytes(lambda job=job, call=call, kept=kept: kept.append(job(call)), device=device)
        # What takes seconds is run once, for its time and its memory together.
        seconds.setdefault("mine", time.perf_counter() - start)
        row = {"mechanism": spec, "what": what, "length": n, "seconds": seconds["mine"]}
        row |= {"x_softmax": seconds["mine"] / seconds["softmax"], "peak_gb": peak / 1e9}
        if what == "keys":
            (W,) = kept
            row["largest_support"] = int((W > 0).sum(-1).max())
            row["largest_output_error"] = float((W @ call.v - al.Softmax()(call)).abs().max())
        yield row
    if device == "cuda":
        yield {"mechanism": "all of it", "what": "one pass", "peak_gb": torch.cuda.memory_reserved() / 1e9}


def solver(size: dict[str, int], device: str, _repeats: int) -> list[dict[str, Any]]:
    """Gap (error - best) / best to the best of all supports, at most 12 keys and r at most 4; errors are distances."""
    settings = [(kind, d, r) for kind in KINDS for d in (3, 6) for r in (2, 3, 4) if r <= d]
    each = -(-size["cases"] // len(settings))
    gaps: dict[str, list[Tensor]] = {}
    for kind, d, r in settings:
        v, alpha = cases(kind, each, 12, d)
        o = (alpha.unsqueeze(1) @ v).squeeze(1)
        everything = torch.ones(each, 1, 12, dtype=torch.bool)
        keys, beta = sparse_simplex(o.unsqueeze(1), v, everything, alpha.unsqueeze(1), r)
        chosen = v.gather(1, keys.squeeze(1).unsqueeze(-1).expand(-1, -1, d))
        error = ((beta @ chosen).squeeze(1) - o).norm(dim=-1)
        best = brute_force(o, v, r)
        width = (v - o.unsqueeze(1)).norm(dim=-1).amax(-1)
        gap = ((error - best) / torch.maximum(best, 1e-6 * width)).clamp_min(0)
        gaps.setdefault(kind, []).append(gap)
        gaps.setdefault(f"r = {r}", []).append(gap)
        gaps.setdefault("all", []).append(gap)
    return [distribution(name, torch.cat(parts)) for name, parts in gaps.items()]


def distribution(name: str, gap: Tensor) -> dict[str, Any]:
    return {
        "cases": name,
        "n": len(gap),
        "share_optimal": float((gap < 1e-6).double().mean()),
        "median": float(gap.median()),
        "p95": float(gap.quantile(0.95)),
        "p99": float(gap.quantile(0.99)),
        "largest": float(gap.max()),
    }


def cases(kind: str, n: int, keys: int, d: int) -> tuple[Tensor, Tensor]:
    """Values (n, keys, d) and alpha (n, keys)."""
    v = torch.randn(n, keys, d, dtype=torch.float64)
    logits = torch.randn(n, keys, dtype=torch.float64)
    if kind == "clustered":
        v = 3 * torch.randn(n, 3, d, dtype=torch.float64)[:, torch.arange(keys) % 3] + 0.1 * v
    if kind in ("near a line", "on a line"):
        line = torch.randn(n, keys, 1, dtype=torch.float64) * torch.randn(n, 1, d, dtype=torch.float64)
        v = line + (0.01 * v if kind == "near a line" else 0)
    if kind == "skewed alpha":
        logits = 4 * logits
    if kind == "uniform alpha":
        logits = 0 * logits
    if kind == "duplicates":
        v = v[:, torch.arange(keys) % (keys // 2)]
    if kind == "norms":
        v = v * torch.exp(2 * torch.randn(n, keys, 1, dtype=torch.float64))
    return v, logits.softmax(-1)


def brute_force(o: Tensor, v: Tensor, r: int) -> Tensor:
    """The smallest distance over all supports: the best point of every face is the affine minimum of some subset."""
    best = torch.full(o.shape[:1], torch.inf, dtype=torch.float64)
    for size in range(1, r + 1):
        for subset in itertools.combinations(range(v.shape[1]), size):
            base = v[:, subset[0]]
            if size == 1:
                best = torch.minimum(best, (base - o).norm(dim=-1))
                continue
            edges = (v[:, list(subset[1:])] - base.unsqueeze(1)).mT
            t = torch.linalg.lstsq(edges, (o - base).unsqueeze(-1), driver="gelsd").solution
            inside = ((t >= -1e-12).all(1) & (t.sum(1) <= 1 + 1e-12)).squeeze(-1)
            far = (base + (edges @ t).squeeze(-1) - o).norm(dim=-1)
            best = torch.where(inside, torch.minimum(best, far), best)
    return best


if __name__ == "__main__":
    main()
