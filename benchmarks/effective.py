"""Effective attention against the evaluation it is added to, and against the full SVD: --write for a file.

Table 3 of Sun and Marasović (2021) doubles the evaluation time; every number here is a ratio of medians in one run.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bert import SIZES as BERT_SIZES
from bert import batch_for, bert
from storing import make_results, write_results
from torch import Tensor, nn

from attnlab.adapters import record
from attnlab.linalg.projection import gram_factor, quick_columns
from attnlab.measure import captured, median_seconds, peak_bytes
from attnlab.mechanisms.softmax import softmax
from attnlab.reading.effective import effective_attention, effective_from_output
from attnlab.reading.effective_layers import EffectiveLayers, read_effective

Row = dict[str, Any]
CAUSAL = {"full": 1024, "tiny": 96}
# The paper's batch and length; causal attention is read at another length, by itself.
SIZES = {name: size | {"causal": CAUSAL[name]} for name, size in BERT_SIZES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the rows to this JSON file")
    parser.add_argument("--tiny", action="store_true", help="a dry run on small shapes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's)")
    args = parser.parse_args()
    size = SIZES["tiny" if args.tiny else "full"]
    if args.threads:
        torch.set_num_threads(args.threads)
    cuda = torch.device(args.device).type == "cuda"
    # An SVD takes long on a GPU.
    few = min(5, args.repeats) if cuda else args.repeats
    parts: list[Callable[[], Row]] = [
        lambda: evaluation(size, args.device, args.repeats),
        lambda: evaluation(size, args.device, args.repeats, padded=True),
        lambda: decomposition(size, args.device, few),
        lambda: causal(size, args.device, args.repeats),
        lambda: memory(size, args.device),
        lambda: by_svd(size, args.device, min(2, args.repeats)),
        lambda: causal(size, args.device, args.repeats, reused=True),
    ]
    name, rows = "effective_speed_gpu" if cuda else "effective_speed", []
    for part in parts:
        torch.manual_seed(0)
        with torch.inference_mode():
            row = part()
        rows.append(row)
        print(row["what"])
        print("   " + ", ".join(f"{key} {value:.4g}" for key, value in row.items() if key != "what"), flush=True)
        if args.write:
            config = size | {"repeats": args.repeats}
            write_results(args.write, make_results(name, "Effective", {"ratios": rows}, config=config))


def evaluation(size: dict[str, int], device: str, repeats: int, *, padded: bool = False) -> Row:
    """A whole evaluation step: eager, and with every effective map and residual.

    Padded inputs have from a quarter of the length to all of it.
    """
    model = bert(size, device, "eager")
    batch = batch_for(size, device, shortest=size["length"] // 4 if padded else None)
    # An evaluation enters the context once, and attends to many batches in it; the eager one needs a model of its own.
    read = copy.deepcopy(model)

    def effective() -> float:
        read_layers.clear()
        read(**batch)
        return float(torch.stack([layer.residual for layer in read_layers]).max())

    jobs = {"eager": lambda: model(**batch), "effective": effective}
    with read_effective(read) as read_layers:
        t = median_seconds(jobs, repeats=repeats, warmup=3, device=device)
        largest = effective()
        error = largest_error(model, batch, read_layers)
        alone = device_alone(model, read, read_layers, batch, repeats) if torch.device(device).type == "cuda" else {}
    return {
        "what": f"evaluation, every map and residual{', padded' if padded else ''}",
        "eager_ms": 1e3 * t["eager"],
        "effective_over_eager": t["effective"] / t["eager"],
        **alone,
        "largest_residual": largest,
        "largest_error": error,
    }


def by_svd(size: dict[str, int], device: str, repeats: int) -> Row:
    """The same evaluation with a full SVD of every V instead: on a GPU it takes seconds."""
    model, batch = bert(size, device, "eager"), batch_for(size, device)

    def svd() -> float:
        with record(model) as trace:
            model(**batch)
        worst = 0.0
        for layer in trace:
            w, v = layer.weights(), layer.values
            worst = max(worst, float((full_svd(w, v) @ v - w @ v).norm() / (w @ v).norm()))
        return worst

    t = median_seconds({"eager": lambda: model(**batch), "svd": svd}, repeats=repeats, device=device)
    return {
        "what": "evaluation, every map and residual by full SVD",
        "eager_ms": 1e3 * t["eager"],
        "svd_over_eager": t["svd"] / t["eager"],
        "largest_residual": svd(),
    }


def largest_error(model: nn.Module, batch: dict[str, Tensor], read_layers: EffectiveLayers) -> float:
    """The last layer's maps against float64 throughout."""
    with record(model, layers=-1) as trace:
        model(**batch)
    (layer,) = trace
    call = layer.call
    exact = effective_attention(layer.weights().double(), call.v.double(), key_visible=call.key_visible)
    return float((read_layers[-1].weights - exact.weights).abs().max())


def device_alone(
    model: nn.Module, read: nn.Module, read_layers: EffectiveLayers, batch: dict[str, Tensor], repeats: int
) -> dict[str, float]:
    """What the device takes for the layers of both evaluations when it never waits for the host: CUDA graphs."""

    def layers(of: nn.Module) -> Callable[[], object]:
        encoder_inputs: list[Any] = []
        # Making the embeddings and the mask waits for the host, so it cannot be captured.
        hook = of.encoder.register_forward_pre_hook(lambda _, *inputs: encoder_inputs.extend(inputs), with_kwargs=True)
        of(**batch)
        hook.remove()
        args, kwargs = encoder_inputs

        def go() -> object:
            read_layers.clear()
            return of.encoder(*args, **kwargs)

        return go

    graphs = {"eager": captured(layers(model)), "effective": captured(layers(read))}
    t = median_seconds(graphs, repeats=repeats, device="cuda")
    return {"device_eager_ms": 1e3 * t["eager"], "device_effective_over_eager": t["effective"] / t["eager"]}


def decomposition(size: dict[str, int], device: str, repeats: int) -> Row:
    """One layer's heads, like with like: what V is decomposed into, a basis of its columns, and the map.

    V^T V and its Cholesky factor against U, Sigma, W of the authors' call; V to an orthonormal basis against the same;
    W_perp, rank, residual and share against the SVD and W_perp alone.
    """
    d = size["width"] // size["heads"]
    v = torch.randn(size["batch"], size["heads"], size["length"], d, device=device)
    w = softmax(torch.randn(size["batch"], size["heads"], size["length"], size["length"], device=device) * 2)
    parts = v.split(2) if torch.device(device).type == "cpu" else (v,)
    jobs = {
        "factor": lambda: gram_factor(v),
        "basis": lambda: [quick_columns(part) for part in parts],
        "svd": lambda: torch.svd(v, some=False, compute_uv=True),
        "ours": lambda: effective_attention(w, v),
        "svd way": lambda: full_svd(w, v),
        "svd way, float64": lambda: full_svd(w.double(), v.double()),
    }
    t = median_seconds(jobs, repeats=repeats, device=device)
    return {
        "what": "decomposition of one layer",
        "threads": torch.get_num_threads(),
        "ours_ms": 1e3 * t["ours"],
        "svd_over_our_decomposition": t["svd"] / t["factor"],
        "svd_over_our_basis": t["svd"] / t["basis"],
        "svd_way_over_ours_with_residual": t["svd way"] / t["ours"],
        "float64_svd_way_over_ours_with_residual": t["svd way, float64"] / t["ours"],
    }


def causal(size: dict[str, int], device: str, repeats: int, *, reused: bool = False) -> Row:
    """One causal layer at batch 1: weights and output, against weights, output and the effective map.

    ``reused``: the C library keeps freed memory from here on, as it does in a process that has held much; fresh pages
    cost plain attention more than half of its time.
    """
    if reused and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
        libc.mallopt(-1, 2**31 - 1)
        libc.mallopt(-3, 2**30)
    n, d = size["causal"], size["width"] // size["heads"]
    q, k, v = (torch.randn(1, size["heads"], n, d, device=device) for _ in range(3))
    hidden = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)

    def plain() -> Tensor:
        w = torch.softmax((q @ k.mT * d**-0.5).masked_fill(hidden, -torch.inf), -1)
        return w @ v

    w = torch.softmax((q @ k.mT * d**-0.5).masked_fill(hidden, -torch.inf), -1)
    jobs = {"plain": plain, "effective": lambda: effective_attention(w, v, causal=True)}
    t = median_seconds(jobs, repeats=repeats, device=device)
    return {
        "what": f"causal, {n} tokens, batch 1" + (", memory reused" if reused else ""),
        "plain_ms": 1e3 * t["plain"],
        "effective_over_plain": t["effective"] / t["plain"],
        "largest_residual": float(effective_attention(w, v, causal=True).residual.max()),
    }


def memory(size: dict[str, int], device: str) -> Row:
    """Peak memory from (output, values) as the length doubles: linear is 2."""
    d, n = size["width"] // size["heads"], size["causal"]

    def peak(n: int) -> int:
        o, v = (torch.randn(1, size["heads"], n, d, device=device) for _ in range(2))
        return peak_bytes(lambda: effective_from_output(o, v, causal=True), device=device)

    once, twice, map_ = peak(n), peak(2 * n), 4 * size["heads"] * (2 * n) ** 2
    return {"what": "memory from (output, values)", "growth_when_doubled": twice / once, "of_the_map": twice / map_}


def full_svd(w: Tensor, v: Tensor) -> Tensor:
    """The paper's way: W less its projection on the left singular vectors beyond the rank."""
    u, _, _ = torch.svd(v, some=False, compute_uv=True)
    null = u[..., v.shape[-1] :]
    return w - (w @ null) @ null.mT


if __name__ == "__main__":
    main()
