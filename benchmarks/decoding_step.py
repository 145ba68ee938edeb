"""A whole decoding step of a language model: softmax with a static cache beside bounded memories, by CUDA graphs.

    python benchmarks/decoding_step.py --model smollm2 --batch 64 --lengths 2048 8192 --compile \\
        -m abc-select:slots=56,window=64,sinks=4 --plan plan.json --write benchmarks/results/decoding_step.json

All sides replay one captured step of the whole model, embedding to logits. Softmax reads a static cache of as many
tokens, filled with random keys: what is in them costs nothing. It stands in two rows. As transformers does it, a static
cache needs a mask, for which keys are repeated and no flash kernel runs. The best is the faster of SDPA's ways to read
a full cache without a mask; ``times_faster`` is over that one. A converted model has read a prompt, which its memory is
as large after as after any longer one; heads that a plan leaves with softmax have read as many tokens as the cache has,
and every replay goes on with one more token, for which they have room.

``--compile`` adds rows in which torch.compile has compiled the step of each side, compared with each other: softmax is
one graph, and of a converted model all is compiled but what happens inside of attention.
``--tiny`` runs a small random model on a CPU, without graphs, to see that everything fits together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from abc_gpu import graph_ms
from storing import make_results, read_results, write_results
from tiny_models import tiny_llama as tiny_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, DynamicCache, StaticCache

from attnlab.adapters import convert, load_model
from attnlab.adapters.cache_bytes import cache_bytes, held_bytes
from attnlab.evaluation.plans import Plan

TABLE = "steps"
KEYS = {TABLE: ["memory", "tokens", "batch", "compiled"]}
# Tokens of a prompt that are read at once.
PART = 512
# Calls after which torch.compile has made all graphs of a step: at the second it learns that lengths grow.
COMPILING = 3


def grouped_queries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """SDPA of one query over a full cache, which needs no mask and repeats no keys."""
    out = sdpa(query, key, value, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous(), None


def heads_as_queries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """The same, the query heads that share keys being queries of one head."""
    rows = query.squeeze(2).unflatten(1, (key.shape[1], -1))
    return sdpa(rows, key, value, scale=scaling).flatten(1, 2).unsqueeze(1), None


# Without a mask function of the same name, transformers makes no mask.
BEST = {"grouped queries": grouped_queries, "heads as queries": heads_as_queries}
USUAL = "sdpa"
for name, function in BEST.items():
    AttentionInterface.register(name, function)


@contextmanager
def attending(model: nn.Module, way: str) -> Iterator[None]:
    """Inside, the model attends by the function that transformers knows under this name."""
    own = model.config._attn_implementation
    try:
        model.config._attn_implementation = way
        yield
    finally:
        model.config._attn_implementation = own


def full_cache(model: nn.Module, batch: int, length: int) -> StaticCache:
    """A static cache of random keys and values."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    # The first step makes the buffers.
    model(torch.zeros(batch, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def softmax_step(run: Callable[..., Any], cache: StaticCache, *, masked: bool) -> Callable[[], Tensor]:
    """A step that reads all of a static cache; the new key takes the place of a random one."""
    keys = cache.layers[0].keys
    batch, _, length, _ = keys.shape
    for layer in cache.layers:
        # Every step moves on by one place.
        layer.cumulative_length.zero_()
    ids = torch.zeros(batch, 1, dtype=torch.long, device=keys.device)
    position = torch.full((batch, 1), length - 1, device=keys.device)
    mask = torch.zeros(batch, 1, 1, length, dtype=keys.dtype, device=keys.device) if masked else None
    inputs = {"position_ids": position, "attention_mask": mask}
    return lambda: run(ids, past_key_values=cache, use_cache=True, **inputs).logits


def bounded_step(
    model: nn.Module, batch: int, length: int, run: Callable[..., Any] | None = None
) -> tuple[Callable[[], Tensor], DynamicCache]:
    """A step after a prompt of ``length`` tokens, by ``run``: the model, or the model compiled."""
    run = model if run is None else run
    cache = DynamicCache()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)
    for part in ids.split(PART, 1):
        model.base_model(part, past_key_values=cache, use_cache=True)
    position = torch.full((1,), length, device=model.device)

    def step() -> Tensor:
        out = run(ids[:, :1], past_key_values=cache, use_cache=True, position_ids=position.expand(batch, 1))
        # On the device, so that replays go on.
        position.add_(1)
        return out.logits

    return step, cache


def compiled(model: nn.Module, backend: str) -> Callable[..., Any]:
    """The model by torch.compile, which has forgotten all others."""
    torch.compiler.reset()
    # The code of a layer is compiled for every layer: beyond the usual limit of 8 layers would stay as they are.
    torch._dynamo.config.recompile_limit = 8 + 4 * model.config.num_hidden_layers
    return torch.compile(model, backend=backend)


def plain_ms(job: Callable[[], Any]) -> float:
    job()
    begin = time.perf_counter()
    for _ in range(3):
        job()
    return (time.perf_counter() - begin) / 3 * 1e3


def timed(step: Callable[[], Tensor], args: argparse.Namespace, *, by_compiler: bool) -> float:
    """Milliseconds of a step; nothing is compiled any more while they are counted."""
    for _ in range(COMPILING if by_compiler else 0):
        step()
    return plain_ms(step) if args.tiny else graph_ms(step)


def times_of_softmax(model: nn.Module, args: argparse.Namespace, length: int, *, by_compiler: bool) -> dict[str, float]:
    """Milliseconds of a step by each way to attend."""
    cache, times = full_cache(model, args.batch, length), {}
    for way in args.ways:
        with attending(model, way):
            run = compiled(model, args.backend) if by_compiler else model
            times[way] = timed(softmax_step(run, cache, masked=way == USUAL), args, by_compiler=by_compiler)
    return times


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each length and memory; times are compared within a length, and compiled with compiled."""
    loaded = tiny_model() if args.tiny else load_model(args.model, dtype=torch.bfloat16).model
    model = loaded if args.tiny else loaded.to("cuda")
    memories: dict[str, Any] = {spec: spec for spec in args.mechanisms}
    memories |= {f"plan {file.stem}": Plan.load(file) for file in args.plan}
    students = {name: convert(model, memory, copy=True) for name, memory in memories.items()}
    for length in args.lengths:
        for by_compiler in (False, True)[: 1 + args.compile]:
            with torch.no_grad():
                yield from rows_of_length(model, students, args, length, by_compiler=by_compiler)


def rows_of_length(
    model: nn.Module, students: dict[str, nn.Module], args: argparse.Namespace, length: int, *, by_compiler: bool
) -> Iterator[dict[str, Any]]:
    """Softmax in its two rows, then every memory."""
    labels = {"tokens": length, "batch": args.batch, "compiled": by_compiler}
    softmax = times_of_softmax(model, args, length, by_compiler=by_compiler)
    usual, held = softmax.pop(USUAL, None), args.batch * cache_bytes(model, length)
    way = min(softmax, key=softmax.__getitem__)
    best = softmax[way]
    if usual is not None:
        yield {"memory": "softmax, as transformers does it", **labels, "ms": usual, "times_faster": best / usual,
               "cache_bytes": held}  # fmt: skip
    yield {"memory": "softmax, best", **labels, "ms": best, "times_faster": 1.0, "cache_bytes": held, "way": way,
           "ms of ways": softmax}  # fmt: skip
    for name, student in students.items():
        run = compiled(student, args.backend) if by_compiler else student
        step, cache = bounded_step(student, args.batch, length, run)
        own = timed(step, args, by_compiler=by_compiler)
        yield {"memory": name, **labels, "ms": own, "times_faster": best / own, "cache_bytes": held_bytes(cache)}
        del step, cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("-m", "--mechanisms", nargs="+", default=["abc-select:slots=56,window=64,sinks=4"])
    parser.add_argument("--plan", type=Path, nargs="*", default=[])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--ways", nargs="+", choices=(USUAL, *BEST), default=(USUAL, *BEST),
                        help=f"how softmax attends; {USUAL} is what transformers does")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="also both sides compiled by torch.compile")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    if not set(args.ways) - {USUAL}:
        parser.error("--ways needs one without a mask, which times are compared with")
    # The compiler proper would take minutes for what a CPU is to show.
    args.backend = "aot_eager" if args.tiny else "inductor"
    if args.tiny:
        args.batch, args.lengths, spec = 2, [40], "abc-select:slots=4,window=8,sinks=1,block=4"
        args.mechanisms = [spec, f"per-group:groups=softmax/{spec.replace(',', ';')}"]
    for row in rows(args):
        print(row, flush=True)
        if args.write:
            config = {"model": "tiny" if args.tiny else Path(args.model).name, "dtype": "bfloat16"}
            made = make_results("decoding_step", "ABC", {TABLE: [row]}, config=config, keys=KEYS)
            write_results(args.write, made, before=read_results(args.write))


if __name__ == "__main__":
    main()
