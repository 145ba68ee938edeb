"""What trained translators say of held-out sets, in files; several processes may ask them at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from attnlab.experiments.abc.translators import AbcMtConfig, Variant, build
from attnlab.experiments.parts import best_device
from attnlab.experiments.translating import Search

__all__ = ["SEARCHES", "Place", "Speaker", "Speakers", "hypotheses_file", "hypotheses_in", "speakers", "split_of"]

Split = TypeVar("Split")
# A variant's key, its seed, and how it translates.
Place = tuple[str, int, str]
# Ways of translating, and the set that is translated: greedily by the last weights, or with beams by averaged ones.
SEARCHES = {"greedy": "valid", "beam": "tests"}


@dataclass(frozen=True, eq=False)
class Speaker:
    """A trained model, as it can be sent to another process, and what it is asked: weights and sources by search."""

    config: AbcMtConfig
    variant: Variant
    vocab: int
    seed: int
    weights: dict[str, dict[str, np.ndarray]]
    searches: dict[str, Search]
    sources: dict[str, list[Any]]

    def say(self) -> dict[str, list[list[int]]]:
        """The tokens of its translations, by search."""
        device = best_device()
        model = build(self.config, self.variant, vocab=self.vocab, seed=self.seed).to(device)
        found, own = {}, dict(model.named_parameters())
        for how, search in self.searches.items():
            assert own.keys() == self.weights[how].keys()
            for name, weight in self.weights[how].items():
                own[name].data.copy_(torch.from_numpy(weight))
            found[how] = search(model, self.sources[how])
        return found


class Speakers:
    """Who translates: this process, or several others that were started before there was anything to say."""

    def __init__(self, pool: ProcessPoolExecutor | None, ready: Sequence[Future[Any]] = ()) -> None:
        self.pool, self.ready = pool, ready

    def ask(self, speaker: Speaker) -> Future[Any] | None:
        """Begin with it, if there are others and they have come."""
        if self.pool is None or any(not x.done() or x.exception() is not None for x in self.ready):
            return None
        return self.pool.submit(speaker.say)

    def answer(self, speaker: Speaker, asked: Future[Any] | None) -> dict[str, list[list[int]]]:
        """What it said; where the others are gone this process asks it."""
        try:
            return speaker.say() if asked is None else asked.result()
        except BrokenExecutor:
            return speaker.say()


@contextmanager
def speakers(count: int) -> Iterator[Speakers]:
    """So many processes, ready; 0: none but this one."""
    if not count:
        yield Speakers(None)
        return
    # A process that was forked cannot talk to the GPU.
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Speakers(pool, [pool.submit(_get_ready) for _ in range(count)])


def _get_ready() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.zeros((), device=best_device())


def split_of(splits: Mapping[str, Split], how: str) -> Split:
    """What is translated this way: all of the test sets where there are several."""
    return splits[SEARCHES[how] if SEARCHES[how] in splits else "test"]


def hypotheses_file(out: Path, data: str, v: Variant, seed: int, how: str) -> Path:
    """Where a variant's translations lie."""
    return out / data / f"{v.key}.{seed}.{how}.txt"


def hypotheses_in(outs: Sequence[Path], data: str) -> dict[Place, list[str]]:
    """What was said of a corpus, by variant, seed and search; later folders win."""
    found = {}
    for path in (path for out in outs for path in sorted((out / data).glob("*.txt"))):
        key, seed, how, _ = path.name.rsplit(".", 3)
        found[key, int(seed), how] = path.read_text(encoding="utf-8").splitlines()
    return found
