"""Bounded memory on a CPU: attention against SDPA, and decoding against softmax with a preallocated KV cache.

    python benchmarks/abc_cpu.py --output benchmarks/results/abc_cpu.json

Every number that is compared is a ratio of medians of jobs that took turns in one run. ``--tiny`` is a dry run.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from storing import make_results, write_results
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnlab as al
from attnlab.measure import median_seconds, peak_bytes
from attnlab.models import Cache, KeyValueCache, Transformer, TransformerConfig

HEADS, WIDTH, SLOTS = 8, 64, 32
FULL: dict[str, Any] = {
    "lengths": (1024, 2048, 4096, 8192, 16384),
    "memory": (4096, 8192, 16384, 32768),
    # An encoder's attention at RoBERTa-base's size: rows, heads, tokens.
    "encoder": (4, 12, 512),
    # The decoder of a base transformer (Table 10), without cross-attention and with a vocabulary of 8,192.
    "model": {"width": 512, "heads": 8, "layers": 6, "hidden": 2048, "vocab": 8192},
    "batch": 16,
    "contexts": (512, 1024, 2048, 4096, 8192, 16384),
    # Beyond this the softmax model's keys and values do not fit into a small machine.
    "softmax_up_to": 4096,
    # Table 10's vocabulary too: its matrix is read at every step, whatever the attention.
    "vocabularies": (8192, 32768),
}
TINY: dict[str, Any] = {
    "lengths": (64, 128),
    "memory": (128, 256),
    "encoder": (2, 2, 32),
    "model": {"width": 32, "heads": 2, "layers": 2, "hidden": 64, "vocab": 61},
    "batch": 2,
    "contexts": (16, 64),
    "softmax_up_to": 64,
    "vocabularies": (61, 122),
}
# Members of Table 4, and others that go by place.
ENCODERS = (
    *(f"abc-linformer:slots={n}" for n in (64, 128)),
    "abc-random:slots=128",
    "abc-compressive:slots=64",
    "abc-global:slots=64",
    *(f"abc-mlp:slots={n}" for n in (64, 128)),
)
# Causal memory sizes of Table 2 (32) and of the translation models (8), and the linear baselines of Figure 1.
DECODERS = ("softmax", "abc-mlp:slots=32", "abc-mlp:slots=8", "rfa:features=32", "t2r:features=32", "kernel:elu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the tables to this JSON file")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    torch.manual_seed(0)
    tables = {
        "attention": [attention(length, args.repeats) for length in size["lengths"]],
        "bidirectional": bidirectional(*size["encoder"], args.repeats),
        "memory": [memory(length) for length in size["memory"]],
        "decoding": decoding(size, args.repeats),
        "flatness": flatness(size, args.repeats),
        "vocabularies": vocabularies(size, args.repeats),
    }
    tables["decoding_at_a_glance"] = at_a_glance(tables["decoding"])
    for name, rows in tables.items():
        print(name)
        for row in rows:
            print("   " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if args.output:
        config = {**size, "heads": HEADS, "width": WIDTH, "slots": SLOTS, "threads": torch.get_num_threads()}
        write_results(args.output, make_results("abc_cpu", None, tables, config=config))


def attention(length: int, repeats: int) -> dict[str, Any]:
    """One causal attention, 8 heads of 64; ABC's time includes its control from inputs of width 512."""
    tensors, x, weight = _inputs(length)
    mech = al.AbcMlp(slots=SLOTS)

    def abc() -> Tensor:
        return mech(al.AttentionCall(*tensors, x=x, causal=True))

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=True)

    def forward_only(job: Any) -> Any:
        with torch.no_grad():
            return job()

    seconds = median_seconds(
        {
            "abc": lambda: forward_only(abc),
            "sdpa": lambda: forward_only(sdpa),
            "abc_both": lambda: abc().backward(weight),
            "sdpa_both": lambda: sdpa().backward(weight),
        },
        repeats=repeats if length <= 4096 else 2,
    )
    return {
        "length": length,
        "abc_forward_s": seconds["abc"],
        "sdpa_forward_s": seconds["sdpa"],
        "forward_times_faster": seconds["sdpa"] / seconds["abc"],
        "abc_forward_backward_s": seconds["abc_both"],
        "sdpa_forward_backward_s": seconds["sdpa_both"],
        "forward_backward_times_faster": seconds["sdpa_both"] / seconds["abc_both"],
    }


def bidirectional(rows: int, heads: int, length: int, repeats: int) -> list[dict[str, Any]]:
    """One attention of an encoder: the time of each member, its control included, over softmax; plain and padded."""
    width = heads * WIDTH
    leaf = torch.randn(rows, length, 3 * width, requires_grad=True)
    x, weight = torch.randn(rows, length, width), torch.randn(rows, heads, length, WIDTH)
    seen = torch.ones(rows, length, dtype=torch.bool)
    seen[::2, length // 2 :] = False
    mechs = {spec: al.mechanism(spec) for spec in ("softmax", *ENCODERS)}

    def attend(spec: str, padded: bool) -> Tensor:
        # As a projection leaves them: the heads of a token side by side.
        q, k, v = (t.unflatten(-1, (heads, WIDTH)).transpose(1, 2) for t in leaf.chunk(3, -1))
        return mechs[spec](al.AttentionCall(q, k, v, x=x, key_visible=seen if padded else None))

    def forward(spec: str, padded: bool) -> Tensor:
        with torch.no_grad():
            return attend(spec, padded)

    jobs: dict[str, Any] = {}
    for spec in mechs:
        jobs[f"{spec} forward"] = lambda spec=spec: forward(spec, False)
        jobs[f"{spec} padded"] = lambda spec=spec: forward(spec, True)
        jobs[f"{spec} both"] = lambda spec=spec: attend(spec, False).backward(weight)
    seconds = median_seconds(jobs, repeats=repeats)
    return [
        {
            "mechanism": spec,
            "forward_ms": 1000 * seconds[f"{spec} forward"],
            **{
                f"{what}_over_softmax": seconds[f"{spec} {what}"] / seconds[f"softmax {what}"]
                for what in ("forward", "padded", "both")
            },
        }
        for spec in mechs
    ]


def memory(length: int) -> dict[str, Any]:
    """The most that a forward and backward pass holds at once, its inputs and their gradients included."""

    def both() -> None:
        tensors, x, weight = _inputs(length)
        al.AbcMlp(slots=SLOTS)(al.AttentionCall(*tensors, x=x, causal=True)).backward(weight)

    peak = peak_bytes(both)
    return {"length": length, "peak_gb": peak / 1e9, "bytes_per_token": peak / length}


def decoding(size: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Greedy steps of a whole model at a batch of 16, after a context of each length."""
    models = {spec: Transformer(_config(size, spec)).eval() for spec in DECODERS}
    rows = []
    for context in size["contexts"]:
        specs = [spec for spec in DECODERS if spec != "softmax" or context <= size["softmax_up_to"]]
        caches = {spec: _filled(models[spec], size["batch"], context, 64) for spec in specs}
        with torch.inference_mode():
            steps = {spec: _step(models[spec], caches[spec], size["batch"]) for spec in specs}
            seconds = median_seconds(steps, repeats=3 * repeats, warmup=3)
        for spec in specs:
            row = {
                "model": spec,
                "context": context,
                "tokens_per_s": size["batch"] / seconds[spec],
                "cache_mb": _bytes(caches[spec]) / 1e6,
            }
            if "softmax" in seconds:
                row["times_softmax"] = seconds["softmax"] / seconds[spec]
            rows.append(row)
    return rows


def flatness(size: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """One model after contexts of all lengths, in turns: the step's time over that at the shortest."""
    model = Transformer(_config(size, f"abc-mlp:slots={SLOTS}")).eval()
    with torch.inference_mode():
        steps = {
            str(context): _step(model, _filled(model, size["batch"], context, 64), size["batch"])
            for context in size["contexts"]
        }
        seconds = median_seconds(steps, repeats=3 * repeats, warmup=3)
    shortest = next(iter(seconds.values()))
    return [
        {"context": int(name), "tokens_per_s": size["batch"] / t, "times_shortest": t / shortest}
        for name, t in seconds.items()
    ]


def vocabularies(size: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """How much the vocabulary's share of a step hides, at the longest context that softmax is run with."""
    rows, context = [], size["softmax_up_to"]
    for vocab in size["vocabularies"]:
        sized = {**size, "model": {**size["model"], "vocab": vocab}}
        with torch.inference_mode():
            steps = {}
            for spec in ("softmax", f"abc-mlp:slots={SLOTS}"):
                model = Transformer(_config(sized, spec)).eval()
                steps[spec] = _step(model, _filled(model, size["batch"], context, 64), size["batch"])
            seconds = median_seconds(steps, repeats=3 * repeats, warmup=3)
        softmax, abc = seconds.values()
        rows.append(
            {
                "vocabulary": vocab,
                "context": context,
                "softmax": size["batch"] / softmax,
                "abc-mlp": size["batch"] / abc,
                "abc-mlp over softmax": softmax / abc,
            }
        )
    return rows


def at_a_glance(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second by context, one column per model."""
    by_context: dict[int, dict[str, Any]] = {}
    for row in rows:
        line = by_context.setdefault(row["context"], {"context": row["context"]})
        line[row["model"]] = row["tokens_per_s"]
        if row["model"] == f"abc-mlp:slots={SLOTS}":
            line["abc-mlp over softmax"] = row.get("times_softmax")
    return list(by_context.values())


def _inputs(length: int) -> tuple[list[Tensor], Tensor, Tensor]:
    tensors = [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
    x = torch.randn(1, length, HEADS * WIDTH, requires_grad=True)
    return tensors, x, torch.randn(1, HEADS, length, WIDTH)


def _config(size: dict[str, Any], spec: str) -> TransformerConfig:
    return TransformerConfig(kind="decoder", **size["model"], positions="sinusoidal", causal_attention=spec)


def _filled(model: Transformer, batch: int, context: int, room: int) -> Cache:
    """A cache as after ``context`` tokens; what the keys are does not change how long a step takes."""
    cache = model.make_cache(batch, context + room)
    with torch.inference_mode():
        model(torch.zeros(batch, 1, dtype=torch.long), cache=cache)
        for layer in cache.layers:
            if isinstance(layer, KeyValueCache):
                assert layer.k is not None
                assert layer.v is not None
                layer.k.normal_()
                layer.v.normal_()
                layer.length = context
    cache.length = context
    return cache


def _step(model: Transformer, cache: Cache, batch: int) -> Any:
    last = torch.zeros(batch, 1, dtype=torch.long)

    def step() -> None:
        nonlocal last
        last = model(last, cache=cache).logits[:, -1:].argmax(-1)

    return step


def _bytes(cache: Cache) -> int:
    """What the layers hold."""
    total = 0
    for layer in cache.layers:
        state = getattr(layer, "state", layer)
        held = [state] if isinstance(state, Tensor) else [t for t in vars(state).values() if isinstance(t, Tensor)]
        total += sum(t.numel() * t.element_size() for t in held)
    return total


if __name__ == "__main__":
    main()
