"""One batch of cases under the full cache and under every policy: what ``attnlab judge`` measures.

The batch is read once. Every policy compresses a cache of its own from that reading; then the question is read and the
answer written, or scored. Policies that leave caches of one shape answer together, in one batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnlab.adapters import LoadedModel
from attnlab.adapters.cache_bytes import held_bytes
from attnlab.adapters.prefill import (
    KeysAndValues,
    Prefill,
    cache_of,
    compressed,
    even_keys,
    last_logits,
    read_prefill,
)
from attnlab.caches.kv_policy import KVPolicy, cache_policy
from attnlab.caches.shared_scores import SharedScores
from attnlab.evaluation.judge_cases import JudgeCase
from attnlab.evaluation.ruler import recall
from attnlab.evaluation.tasks import LOSS
from attnlab.shapes import Float, Int

__all__ = ["COLUMNS", "FULL", "SEEN", "UNSEEN", "Cost", "Unit", "Verdict", "measure"]

FULL = "full cache"
# Whether the question is read after the cache is compressed, or before it.
UNSEEN, SEEN = "unseen", "seen"
COLUMNS = (UNSEEN, SEEN)
# Families whose own attention reads kept keys as they are: full causal attention, positions turned into the keys.
JOINABLE = ("llama", "mistral", "qwen2", "qwen3")
# How much the caches of policies that answer together may take, with their copy; on a GPU half of its memory, which
# processes share.
JOINED_BYTES = 1 << 30
# Positions whose logits are computed at once.
MOST_POSITIONS = 16_384
# Tokens that a policy which reads for itself is given at once.
MOST_TOKENS = 65_536
TIMED_STEPS = 7
# Two ways to compute the same attention differ by less than this part of the logits' spread.
ALIKE, ALIKE_IN_HALF = 1e-3, 0.05

# Bytes held, seconds of reading the contexts and of a decoding step; under "full_..." the full cache's, measured in the
# same process on the same batch, so that a ratio holds for a run that was stopped and went on elsewhere.
Cost = dict[str, float | None]


@dataclass(frozen=True)
class Unit:
    """A batch of cases of one task and length in one column, and the policies that are to answer them."""

    cases: tuple[JudgeCase, ...]
    column: str
    # Specs with their budgets; FULL is the full cache.
    policies: tuple[str, ...]
    # Whether decoding is timed.
    timed: bool = False


class Verdict(NamedTuple):
    """A policy's answers to the cases of a unit, in their order, and what its cache cost; or why it refused."""

    policy: str
    answers: list[dict[str, Any]]
    cost: Cost
    refused: str | None = None


@torch.no_grad()
def measure(
    loaded: LoadedModel, unit: Unit, alike: MutableMapping[str, bool], *, processes: int = 1
) -> Iterator[Verdict]:
    """What every policy of a unit answers, as soon as it is known; ``processes`` share the device.

    ``alike`` keeps, from one unit to the next, which policies at which budgets may answer together: those whose cache
    gave the same logits when the model's own attention read it. A larger budget proves nothing for a smaller one.
    """
    batch = _Batch(loaded, unit, alike, processes)
    group: list[_Left] = []
    for spec in unit.policies:
        if spec == FULL:
            yield batch.full_cache()
            continue
        try:
            left = batch.compress(spec, cache_policy(spec))
        except ValueError as error:
            yield Verdict(spec, [], {}, refused=str(error))
            continue
        if isinstance(left, Verdict):
            yield left
            continue
        if group and (left.length != group[0].length or not batch.has_room(group)):
            yield from batch.answer_together(group)
        group.append(left)
    if group:
        yield from batch.answer_together(group)


class _Left(NamedTuple):
    """The cache that a policy left, which may answer together with others of its length."""

    spec: str
    keys: KeysAndValues
    cost: Cost

    @property
    def length(self) -> int:
        """How many keys a head holds."""
        return self.keys[0][0].shape[2]


class _Batch:
    """A unit's contexts, read once, and the ways to go on from there."""

    def __init__(self, loaded: LoadedModel, unit: Unit, alike: MutableMapping[str, bool], processes: int) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.unit, self.alike = unit, alike
        self.device = next(self.model.parameters()).device
        context, question = (
            torch.tensor([getattr(case, name) for case in unit.cases], device=self.device)
            for name in ("context", "question")
        )
        # A policy that sees the question reads all of it but the last token, from which the answer starts.
        cut = question.shape[1] - 1 if unit.column == SEEN else 0
        read = torch.cat([context, question[:, :cut]], 1)
        self.rest = self._with_targets(question[:, cut:])
        with _Clock(self.device) as clock:
            self.prefill = read_prefill(self.model, read)
        self.prefill_seconds = clock.seconds
        # The scores of keys, by the first of the contexts that they are of, for all budgets of a policy.
        self.shared: dict[int, SharedScores] = {}
        self.joinable = _reads_kept_keys(self.model)
        self.memory = JOINED_BYTES
        if self.device.type == "cuda":
            self.memory = torch.cuda.get_device_properties(self.device).total_memory // (2 * processes)
        self.full: Cost = {
            "full_bytes": sum(k.nbytes + v.nbytes for k, v in self.prefill.keys_and_values()),
            "full_prefill": clock.seconds,
        }

    @property
    def scored(self) -> int:
        """How many of the last positions have logits that count."""
        return max(1, *(len(case.target) for case in self.unit.cases))

    def _with_targets(self, question: Int[Tensor, "b q"]) -> Int[Tensor, "b n"]:
        """The question, and the tokens that should follow, without the last of the longest."""
        cases, longest = self.unit.cases, self.scored
        # What stands behind a shorter target is seen by nothing that counts.
        targets = [[*case.target, *[case.question[0]] * longest][: longest - 1] for case in cases]
        return torch.cat(
            [question, torch.tensor(targets, dtype=torch.long, device=self.device).view(len(cases), -1)], 1
        )

    def full_cache(self) -> Verdict:
        """What the model answers with every key."""
        cache = cache_of([self.prefill.keys_and_values()])
        own = {name.removeprefix("full_"): value for name, value in self.full.items()}
        seconds = self._full_seconds_per_token() if self.unit.timed else None
        times: Cost = {"decode": seconds, "full_decode": seconds}
        cost: Cost = {**self.full, **own, **times, "bytes": held_bytes(cache)}
        logits = last_logits(self.model, self.rest, cache, count=self.scored)
        return Verdict(FULL, self._answers(cache, logits, 1), cost)

    def compress(self, spec: str, policy: KVPolicy) -> _Left | Verdict:
        """The cache that a policy leaves if it may answer together with others, else its answers."""
        too_many = policy.score.reads_twice and self.prefill.ids.numel() > MOST_TOKENS
        if too_many or self.prefill.unshared is not None:
            return self._read_by_itself(spec, policy)
        left = self._compress_reading(spec, policy)
        left.cost.update(self._timed(policy))
        return left

    def _compress_reading(self, spec: str, policy: KVPolicy) -> _Left | Verdict:
        taken = self._taken()
        with _Clock(self.device) as clock, compressed(self.model, policy, self.prefill, self._shared(0)) as cache:
            clock.stop()
            # A policy that reads twice has done so in this time; one that found scores ready has not taken its own.
            first = 0.0 if policy.score.reads_twice else self.prefill_seconds
            seconds = first + clock.seconds if self._taken() == taken else None
            cost: Cost = {**self.full, "bytes": held_bytes(cache), "prefill": seconds}
            keys = even_keys(cache) if self.joinable and policy.schedule == "prefill" else None
            if keys is None or self.alike.get(spec) is False:
                return self._alone(spec, cache, cost)
            logits = None
            if spec not in self.alike:
                # Before the cache grows.
                keys = [(k.clone(), v.clone()) for k, v in keys]
                logits = last_logits(self.model, self.rest, cache, count=self.scored)
        if logits is not None:
            self.alike[spec] = _close(logits, self._by_own_attention([keys])[1])
        if not self.alike[spec]:
            with compressed(self.model, policy, self.prefill, self._shared(0)) as cache:
                return self._alone(spec, cache, cost)
        return _Left(spec, keys, cost)

    def _alone(self, spec: str, cache: Any, cost: Cost) -> Verdict:
        logits = last_logits(self.model, self.rest, cache, count=self.scored)
        return Verdict(spec, self._answers(cache, logits, 1), cost)

    def _read_by_itself(self, spec: str, policy: KVPolicy) -> Verdict:
        """The answers of a policy that does not take a reading from others, in batches of bounded size."""
        b, n = self.prefill.ids.shape
        size = max(1, MOST_TOKENS // n)
        verdicts, taken = [], self._taken()
        for first in range(0, b, size):
            part = replace(self.unit, cases=self.unit.cases[first : first + size])
            rows = slice(first, first + size)
            prompts, shared = self.prefill.rows(rows), self._shared(first)
            with _Clock(self.device) as clock, compressed(self.model, policy, prompts, shared) as cache:
                clock.stop()
                held = held_bytes(cache)
                logits = last_logits(self.model, self.rest[rows], cache, count=self.scored)
                verdicts.append((self._answers(cache, logits, 1, part.cases), held, clock.seconds))
        answers, held_each, seconds = zip(*verdicts, strict=True)
        read = sum(seconds) if self._taken() == taken else None
        own: Cost = {"bytes": sum(held_each), "prefill": read, **self._timed(policy)}
        return Verdict(spec, [one for part in answers for one in part], {**self.full, **own})

    def _shared(self, first: int) -> SharedScores:
        return self.shared.setdefault(first, SharedScores())

    def _taken(self) -> int:
        """How many scores were not computed again."""
        return sum(shared.taken for shared in self.shared.values())

    def has_room(self, group: Sequence[_Left]) -> bool:
        """Whether another cache may join a group."""
        more = len(group) + 1
        held = sum(k.nbytes + v.nbytes for k, v in group[0].keys)
        # Joining copies the caches once.
        return 2 * more * held <= self.memory and more * len(self.unit.cases) * self.scored <= MOST_POSITIONS

    def answer_together(self, group: list[_Left]) -> Iterator[Verdict]:
        """The answers of policies whose caches hold as many keys, in one batch; the group is empty afterwards."""
        cache, logits = self._by_own_attention([left.keys for left in group])
        costs = [(left.spec, left.cost) for left in group]
        group.clear()
        answers = self._answers(cache, logits, len(costs))
        rows = len(self.unit.cases)
        for i, (spec, cost) in enumerate(costs):
            yield Verdict(spec, answers[i * rows : (i + 1) * rows], cost)

    def _by_own_attention(self, parts: list[KeysAndValues]) -> tuple[Any, Float[Tensor, "b m v"]]:
        """A cache of kept keys, after the model's own attention has read the question with it."""
        count, cache = len(parts), cache_of(parts)
        rest = self.rest.repeat(count, 1)
        logits = last_logits(
            self.model, rest, cache, count=self.scored, position_ids=self._positions(rest.shape[0], 0, rest.shape[1])
        )
        return cache, logits

    def _positions(self, rows: int, first: int, count: int) -> Int[Tensor, "b n"]:
        start = self.prefill.ids.shape[1] + first
        return torch.arange(start, start + count, device=self.device).expand(rows, -1)

    def _answers(
        self, cache: Any, logits: Float[Tensor, "b m v"], copies: int, cases: Sequence[JudgeCase] | None = None
    ) -> list[dict[str, Any]]:
        """The score of each row, and what was written; the rows are ``copies`` of the cases."""
        asked = [*(self.unit.cases if cases is None else cases)] * copies
        if asked[0].target:
            return [_target_score(case, row) for case, row in zip(asked, logits, strict=True)]
        written = self._written(cache, logits[:, -1].argmax(-1), asked[0].new_tokens)
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        return [
            {"score": recall(text, case.answers), "text": text[:200]} for case, text in zip(asked, texts, strict=True)
        ]

    def _written(self, cache: Any, token: Int[Tensor, " b"], count: int) -> list[list[int]]:
        """The most probable tokens, one after the other, up to the end of each text."""
        ends = torch.tensor(_ends(self.model, self.tokenizer), device=self.device)
        written, done = [token], torch.isin(token, ends)
        for step in range(count - 1):
            # Asking the device at every step would make it wait.
            if step % 8 == 7 and bool(done.all()):
                break
            positions = self._positions(len(token), self.rest.shape[1] + step, 1)
            token = last_logits(self.model, token[:, None], cache, position_ids=positions)[:, -1].argmax(-1)
            written.append(token)
            done |= torch.isin(token, ends)
        stop = set(ends.tolist())
        rows = torch.stack(written, 1).tolist()
        return [row[: next((i for i, token in enumerate(row) if token in stop), len(row))] for row in rows]

    def _timed_rows(self) -> Prefill:
        """As many contexts as any policy reads at once, so that all decode batches of one size."""
        return self.prefill.rows(slice(0, max(1, MOST_TOKENS // self.prefill.ids.shape[1])))

    def _timed(self, policy: KVPolicy) -> Cost:
        """Seconds of a decoding step, and of the full cache's just before and after it: a machine's load changes."""
        if not self.unit.timed:
            return {"decode": None, "full_decode": None}
        before = self._full_seconds_per_token()
        with compressed(self.model, policy, self._timed_rows()) as cache:
            own = self._seconds_per_token(cache)
        return {"decode": own, "full_decode": (before + self._full_seconds_per_token()) / 2}

    def _full_seconds_per_token(self) -> float:
        return self._seconds_per_token(cache_of([self._timed_rows().keys_and_values()]))

    def _seconds_per_token(self, cache: Any) -> float:
        """The median seconds of a decoding step of the batch, after the question."""
        rows = self._timed_rows().ids.shape[0]
        token = last_logits(self.model, self.rest[:rows], cache)[:, -1].argmax(-1, keepdim=True)
        # The first step pays for what the others find ready.
        last_logits(self.model, token, cache)
        seconds = []
        for _ in range(TIMED_STEPS):
            with _Clock(self.device) as clock:
                token = last_logits(self.model, token, cache)[:, -1].argmax(-1, keepdim=True)
            seconds.append(clock.seconds)
        return statistics.median(seconds)


def _target_score(case: JudgeCase, logits: Float[Tensor, "m v"]) -> dict[str, Any]:
    """Nats a token for a continuation; for a word, whether every token of it is the most probable."""
    target = torch.tensor(case.target, device=logits.device)
    logits = logits[: len(target)].float()
    if case.task == LOSS:
        return {"score": float(cross_entropy(logits, target))}
    return {"score": float((logits.argmax(-1) == target).all())}


def _close(logits: Tensor, other: Tensor) -> bool:
    difference = (logits.float() - other.float()).abs().mean() / logits.float().std()
    return bool(difference < (ALIKE if logits.dtype in (torch.float32, torch.float64) else ALIKE_IN_HALF))


def _reads_kept_keys(model: Any) -> bool:
    """Whether the model's own attention may read keys between which others were dropped."""
    config = model.config
    windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return config.model_type in JOINABLE and not windows and kinds == {"full_attention"}


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id}
    return sorted(token for token in ends if token is not None)


class _Clock:
    """Seconds inside a ``with``, or up to ``stop``, of what the device has really done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> _Clock:
        self._wait()
        self.start, self.stopped = time.perf_counter(), False
        return self

    def stop(self) -> None:
        """End the measurement."""
        if not self.stopped:
            self._wait()
            self.seconds, self.stopped = time.perf_counter() - self.start, True

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
