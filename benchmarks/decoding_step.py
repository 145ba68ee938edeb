"""A whole decoding step of a language model: softmax with a static cache beside bounded memories, by CUDA graphs.

    python benchmarks/decoding_step.py --model smollm2 --batch 64 --lengths 2048 8192 \\
        -m abc-select:slots=56,window=64,sinks=4 --plan plan.json --write benchmarks/results/decoding_step.json

All sides replay one captured step of the whole model, embedding to logits. Softmax reads a static cache of as many
tokens, filled with random keys: what is in them costs nothing. A converted model has read a prompt, which its memory is
as large after as after any longer one; heads that a plan leaves with softmax have read as many tokens as the cache has,
and every replay goes on with one more token, for which they have room.
``--tiny`` runs a small random model on a CPU, without graphs, to see that everything fits together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from abc_gpu import graph_ms
from storing import make_results, write_results
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from attnlab.adapters import convert, load_model
from attnlab.adapters.cache_bytes import cache_bytes, held_bytes
from attnlab.evaluation.plans import Plan

TABLE = "steps"
# Tokens of a prompt that are read at once.
PART = 512


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64,
        vocab_size=61,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def softmax_step(model: nn.Module, batch: int, length: int) -> Callable[[], Any]:
    """A step over a static cache that holds ``length`` tokens."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    # The first step makes the buffers.
    model(ids, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    position = torch.full((1,), length - 1, device=model.device)
    inputs = {"position_ids": position.expand(batch, 1), "cache_position": position}
    mask = torch.zeros(batch, 1, 1, length, dtype=model.dtype, device=model.device)
    return lambda: model(ids, past_key_values=cache, use_cache=True, attention_mask=mask, **inputs).logits


def bounded_step(model: nn.Module, batch: int, length: int) -> tuple[Callable[[], Any], DynamicCache]:
    """A step after a prompt of ``length`` tokens."""
    cache = DynamicCache()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)
    for part in ids.split(PART, 1):
        model.base_model(part, past_key_values=cache, use_cache=True)
    position = torch.full((1,), length, device=model.device)

    def step() -> Any:
        out = model(ids[:, :1], past_key_values=cache, use_cache=True, position_ids=position.expand(batch, 1))
        # On the device, so that replays go on.
        position.add_(1)
        return out.logits

    return step, cache


def plain_ms(job: Callable[[], Any]) -> float:
    job()
    begin = time.perf_counter()
    for _ in range(3):
        job()
    return (time.perf_counter() - begin) / 3 * 1e3


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each length and memory; times are compared within a length."""
    loaded = tiny_model() if args.tiny else load_model(args.model, dtype=torch.bfloat16).model
    model = loaded if args.tiny else loaded.to("cuda")
    timed = plain_ms if args.tiny else graph_ms
    memories: dict[str, Any] = {spec: spec for spec in args.mechanisms}
    memories |= {f"plan {file.stem}": Plan.load(file) for file in args.plan}
    students = {name: convert(model, memory, copy=True) for name, memory in memories.items()}
    for length in args.lengths:
        with torch.no_grad():
            whole = timed(softmax_step(model, args.batch, length))
            yield {"memory": "softmax", "tokens": length, "batch": args.batch, "ms": whole, "times_faster": 1.0,
                   "cache_bytes": args.batch * cache_bytes(model, length)}  # fmt: skip
            for name, student in students.items():
                step, cache = bounded_step(student, args.batch, length)
                own = timed(step)
                yield {"memory": name, "tokens": length, "batch": args.batch, "ms": own, "times_faster": whole / own,
                       "cache_bytes": held_bytes(cache)}  # fmt: skip
                del step, cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("-m", "--mechanisms", nargs="+", default=["abc-select:slots=56,window=64,sinks=4"])
    parser.add_argument("--plan", type=Path, nargs="*", default=[])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.batch, args.lengths, spec = 2, [40], "abc-select:slots=4,window=8,sinks=1,block=4"
        args.mechanisms = [spec, f"per-group:groups=softmax/{spec.replace(',', ';')}"]
    table = []
    for row in rows(args):
        table.append(row)
        print(row, flush=True)
        if args.write:
            config = {"model": "tiny" if args.tiny else Path(args.model).name, "dtype": "bfloat16"}
            write_results(args.write, make_results("decoding_step", "ABC", {TABLE: table}, config=config))


if __name__ == "__main__":
    main()
