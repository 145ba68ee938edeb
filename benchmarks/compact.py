"""Compaction of a prompt's keys against eviction: a needle whose question comes later, and the loss of a continuation.

    python benchmarks/compact.py --device cuda --dtype bfloat16 --write benchmarks/results
    python benchmarks/compact.py --tiny                       # a dry run of seconds on a CPU

Every context has as many tokens as every other, so that they are read in batches. It is read and compressed first; the
question, or the continuation, comes after that, and nothing of it is known before. ``needle`` is the share of cases
whose answer contains the number, with Wilson's interval; ``added_loss`` is the loss of the continuation above the full
cache's, in nats per token, with the 95 % interval of its mean over the windows, which overlap where the text is short.
``error`` is the certificate's: the relative error of a head's output on queries that were not fitted. ``seconds``
in the table ``time`` are those of reading one context of ``--long`` tokens with the policy, less those of reading it
without one: for kvzip and ``queries=repeat`` a second reading is in them. Cells that come after ``--seconds`` have
passed are left out, and said so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from storing import make_results, read_results, write_results
from torch import Tensor

import attnlab as al
from attnlab.data import bundled_text
from attnlab.evaluation.intervals import mean_interval, wilson
from attnlab.evaluation.ruler import RULER_TASKS, make_cases

QUESTION = "What is the special magic"
POLICIES = (
    "compact:queries=repeat",
    "kvzip:layers=shared",
    "expected-attention",
    "snapkv",
    "compact:queries=sampled",
    "compact:queries=prompt",
    "kvzip",
    "streaming-llm:when=prefill",
)
KEYS = {"quality": ["model", "tokens", "policy", "budget"], "time": ["model", "tokens", "policy", "budget"]}
Row = dict[str, Any]


def main() -> None:
    args = arguments()
    start = time.perf_counter()
    loaded = al.load_model(args.model, dtype=getattr(torch, args.dtype)) if not args.tiny else tiny_model()
    model = loaded.model.to(args.device)
    text = args.text.read_text(encoding="utf-8") if args.text else bundled_text()
    text = text if isinstance(text, str) else text.beginning(None)[0]
    needles = needle_batches(loaded.tokenizer, text, args)
    windows = text_windows(loaded.tokenizer, text, args)
    named = {"model": Path(args.model).name if not args.tiny else "tiny", "tokens": args.tokens}
    rows: list[Row] = []
    left_out = []
    full: list[float] = []
    for policy, budget in cells(args):
        if time.perf_counter() - start > args.seconds:
            left_out.append((policy, budget))
            continue
        row, losses = quality(model, policy, budget, needles, windows, args, full)
        full = full or losses
        rows.append(named | row)
        print(rows[-1], flush=True)
    times = list(timed(model, loaded.tokenizer, text, named, args))
    if left_out:
        print(f"left out after {args.seconds} s: {left_out}")
    tables = {"quality": rows, "time": times}
    config = {name: str(value) for name, value in vars(args).items() if name != "write"}
    config |= {name: Path(value).name for name in ("model", "text") if (value := getattr(args, name))}
    result = make_results("compact", "OVA", tables, config=config, seed=args.seed, keys=KEYS)
    if args.write:
        path = args.write / "compact.json"
        write_results(path, result, before=read_results(path) if path.exists() else None)
    print(f"{time.perf_counter() - start:.0f} s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, help="the haystack and the text that is continued; the shipped one")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--long", type=int, default=4096, help="the context whose compaction is timed; 0: none")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.05])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=130.0, help="no cell is begun after so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a folder: write compact.json there")
    parser.add_argument("--tiny", action="store_true", help="a random model and few cases: a dry run")
    args = parser.parse_args()
    if args.tiny:
        args.tokens, args.long, args.cases, args.windows, args.batch, args.continuation = 220, 128, 3, 2, 2, 16
        args.policies = ["compact:queries=repeat", "compact:queries=prompt", "kvzip:layers=shared"]
        args.budgets = [0.25]
    return args


def tiny_model() -> Any:
    """A random Llama with the shipped tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = al.shipped_model().tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=37,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
    )
    return al.LoadedModel(LlamaForCausalLM(config).eval(), tokenizer, "causal")


def cells(args: argparse.Namespace) -> Iterator[tuple[str | None, float | None]]:
    """The full cache, then for each policy its budgets."""
    yield None, None
    yield from ((policy, budget) for policy in args.policies for budget in args.budgets)


def needle_batches(tokenizer: Any, text: str, args: argparse.Namespace) -> list[tuple[Tensor, Tensor, list[Any]]]:
    """(Contexts (b, n), questions (b, m), tests of an answer): contexts of one length, questions too in each batch."""

    def encode(part: str, special: bool = True) -> list[int]:
        return tokenizer(part, add_special_tokens=special, verbose=False).input_ids

    cases = make_cases(
        "needle",
        length=args.tokens,
        cases=args.cases,
        count_tokens=lambda prompt: len(encode(prompt)),
        haystack=text,
        seed=args.seed,
    )
    made = []
    for case in cases:
        at = case.prompt.rindex(QUESTION)
        context = encode(case.prompt[:at])
        made.append((context, encode(case.prompt[at:], special=False), case.answers[0], case.depth or 0.0))
    length = min(len(context) for context, *_ in made)
    by_question: dict[int, list[tuple[list[int], list[int], str]]] = {}
    for context, question, answer, depth in made:
        # What is too long is taken out of the haystack, far from the needle.
        at = (len(context) - (over := len(context) - length)) * (3 if depth < 0.5 else 1) // 4
        cut = context[:at] + context[at + over :]
        by_question.setdefault(len(question), []).append((cut, question, answer))
    batches = []
    for group in by_question.values():
        for first in range(0, len(group), args.batch):
            contexts, questions, answers = zip(*group[first : first + args.batch], strict=True)
            batches.append((torch.tensor(contexts), torch.tensor(questions), list(answers)))
    return [
        (context.to(args.device), question.to(args.device), [contains(tokenizer, answer) for answer in answers])
        for context, question, answers in batches
    ]


def contains(tokenizer: Any, answer: str) -> Callable[[list[int]], bool]:
    """Whether a continuation contains the answer."""
    return lambda ids: answer in tokenizer.decode(ids).replace(" ", "")


def text_windows(tokenizer: Any, text: str, args: argparse.Namespace) -> Tensor:
    """Windows of the text, spread evenly: a context of ``tokens`` and its continuation."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    size = args.tokens + args.continuation
    if len(ids) < size:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than a window of {size}; give a longer one by --text")
    last = len(ids) - size
    firsts = sorted({round(i * last / max(1, args.windows - 1)) for i in range(args.windows)})
    return torch.tensor([ids[first : first + size] for first in firsts], device=args.device)


def opened(model: Any, policy: str | None, budget: float | None) -> Any:
    """A context with the cache of a policy, or with one that keeps all."""
    if policy is None:
        from transformers import DynamicCache

        return nullcontext(DynamicCache())
    return al.evicting(model, f"{policy}{',' if ':' in policy else ':'}budget={budget}")


@torch.no_grad()
def quality(
    model: Any,
    policy: str | None,
    budget: float | None,
    needles: list[tuple[Tensor, Tensor, list[Any]]],
    windows: Tensor,
    args: argparse.Namespace,
    full: list[float],
) -> tuple[Row, list[float]]:
    """A row of the table, and the loss of each window."""
    start, hits, losses, errors = time.perf_counter(), [], [], []
    for contexts, questions, answers in needles:
        with opened(model, policy, budget) as cache:
            read(model, contexts, cache)
            texts = greedy(model, questions, cache)
            errors += errors_of(cache)
        hits += [is_right(ids) for is_right, ids in zip(answers, texts, strict=True)]
    for part in windows.split(args.batch):
        with opened(model, policy, budget) as cache:
            read(model, part[:, : args.tokens], cache)
            logits = model(part[:, args.tokens :], past_key_values=cache, use_cache=True).logits[:, :-1].float()
        targets = part[:, args.tokens + 1 :]
        losses += torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none").double().mean(1).tolist()
    needle = wilson(sum(hits), len(hits))
    over = mean_interval([mine - exact for mine, exact in zip(losses, full or losses, strict=True)])
    row = {
        "policy": policy or "full cache",
        "budget": budget,
        "needle": needle.value,
        "needle_low": needle.low,
        "needle_high": needle.high,
        "added_loss": over.value,
        "added_loss_low": over.low,
        "added_loss_high": over.high,
        "loss": statistics.fmean(losses),
        "error": statistics.fmean(errors) if errors else None,
        "cases": len(hits),
        "windows": len(losses),
        "seconds": time.perf_counter() - start,
    }
    return row, losses


def read(model: Any, ids: Tensor, cache: Any) -> None:
    """Let the model read a context, and the cache's policy compress it."""
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def greedy(model: Any, ids: Tensor, cache: Any) -> list[list[int]]:
    """The likeliest continuations after the tokens."""
    made = []
    for _ in range(RULER_TASKS["needle"].new_tokens // 2):
        ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        made.append(ids)
    return torch.cat(made, 1).tolist()


def errors_of(cache: Any) -> list[float]:
    """The certificate's error of every layer."""
    made = cache.certificates() if hasattr(cache, "certificates") else []
    return [float(one.error.mean()) for one in made if one is not None and not bool(one.error.isnan().any())]


@torch.no_grad()
def timed(model: Any, tokenizer: Any, text: str, named: Row, args: argparse.Namespace) -> Iterator[Row]:
    """The seconds that a policy adds to the reading of one long context: the median of three, after a first."""
    if args.long == 0:
        return
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ids = torch.tensor([(ids * (1 + args.long // len(ids)))[: args.long]], device=args.device)
    plain = seconds(model, None, None, ids)
    for policy in args.policies:
        if policy.startswith(("compact", "kvzip")):
            taken = seconds(model, policy, args.budgets[0], ids)
            row = named | {"tokens": args.long, "policy": policy, "budget": args.budgets[0]}
            yield row | {"seconds": taken - plain, "seconds_of_reading": plain}
            print(f"{policy}: {taken - plain:.2f} s beside {plain:.2f} s of reading {args.long} tokens", flush=True)


def seconds(model: Any, policy: str | None, budget: float | None, ids: Tensor) -> float:
    """The median time of three readings, after one that is not counted."""
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        with opened(model, policy, budget) as cache:
            read(model, ids, cache)
        if ids.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    main()
