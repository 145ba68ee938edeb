"""Translation: parallel corpora as they are downloaded, batches, a model's loss and translations, and their BLEU.

Batches have a few fixed shapes, so that each shape is one captured graph on a GPU.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.data import FastTokeniser, Malformed, Pairs, Specials, read_parallel, train_bpe
from attnlab.data.batching import generator
from attnlab.data.masking import IGNORED
from attnlab.data.parallel import padded
from attnlab.models import LengthPenalty, Transformer, Translation, beam_search
from attnlab.provenance import write_atomic
from attnlab.training import Term

__all__ = [
    "TASKS",
    "Corpus",
    "ShapedSource",
    "Task",
    "bleu_counts",
    "bleu_of",
    "corpus_bleu",
    "find_file",
    "held_out_nll",
    "mean_loss",
    "read_filipino",
    "read_task",
    "tokenised",
    "translate",
    "write_lines",
]


@dataclass(frozen=True)
class Task:
    """A direction of a corpus: its folder, and the languages' suffixes or the tsv's columns."""

    name: str
    folder: str
    source: str
    target: str


TASKS = {
    task.name: task
    for task in (
        Task("multi30k-en-de", "multi30k", "en", "de"),
        Task("multi30k-de-en", "multi30k", "de", "en"),
        Task("tatoeba-es-en", "tatoeba-spa-eng", "1", "0"),
        Task("wmt10k-en-de", "wmt-ende-10k", "src", "tgt"),
    )
}
SPLITS = ("train", "valid", "test")
# Sentences of a set that is drawn by hash, at most.
HELD_OUT = 1000


def read_task(task: Task, root: Path) -> dict[str, Pairs]:
    """train, valid and test of a task whose folder lies below ``root``; of Multi30k also all of its ``tests``."""
    folder = root / task.folder
    if task.folder == "multi30k":
        return _multi30k(folder, task)
    if task.folder == "wmt-ende-10k":
        return _wmt(folder, task)
    # As published the file is spa.txt, with a third column.
    path = find_file(folder, "pairs.tsv", "spa.txt")
    return _by_hash(read_parallel(path, columns=(int(task.source), int(task.target))))


def read_filipino(folder: Path) -> Pairs:
    """Filipino and English sentences: lines that correspond, or the numbered ones of ALT's files as published."""
    if any(folder.glob("**/data_fil.txt*")):
        return _numbered(*(next(iter(sorted(folder.glob(f"**/data_{side}.txt*")))) for side in ("fil", "en")))
    return read_parallel(find_file(folder, "Tagalog.txt"), find_file(folder, "English.txt"))


def _numbered(source: Path, target: Path) -> Pairs:
    """The sentences of two files that share a number, in the order of the first: number, tab, sentence."""
    sides = [dict(zip(*read_parallel(path, malformed=Malformed("skip")), strict=True)) for path in (source, target)]
    shared = [number for number in sides[0] if number in sides[1]]
    return Pairs(*([side[number] for number in shared] for side in sides))


def _multi30k(folder: Path, task: Task) -> dict[str, Pairs]:
    def read(name: str) -> Pairs:
        return read_parallel(*(find_file(folder, f"{name}.{side}") for side in _sides(task)))

    splits = {"train": read("train"), "valid": read("val"), "test": read("test_2016_flickr")}
    # Later test sets, where the folder has them: with more sentences smaller differences are significant.
    later = [n for n in ("test_2017_flickr", "test_2018_flickr") if any(folder.glob(f"{n}.{task.source}*"))]
    tests = [splits["test"], *map(read, later)]
    return {**splits, "tests": Pairs([x for t in tests for x in t.source], [y for t in tests for y in t.target])}


def _wmt(folder: Path, task: Task) -> dict[str, Pairs]:
    splits = {}
    for split, name in {"train": "train", "valid": "val", "test": "test"}.items():
        pairs = read_parallel(*(find_file(folder, f"{side}-{name}.txt") for side in _sides(task)))
        splits[split] = Pairs(*([html.unescape(text) for text in side] for side in pairs))
    return splits


def _by_hash(pairs: Pairs) -> dict[str, Pairs]:
    """1 % each held out by a hash of the target, so that no translation of a held-out sentence is learned from."""
    splits = {split: Pairs([], []) for split in SPLITS}
    for source, target in zip(*pairs, strict=True):
        place = int.from_bytes(hashlib.blake2b(target.encode(), digest_size=4).digest(), "big") % 100
        split = {0: "test", 1: "valid"}.get(place, "train")
        if split == "train" or (target not in splits[split].target and len(splits[split].target) < HELD_OUT):
            splits[split].source.append(source)
            splits[split].target.append(target)
    return splits


def _sides(task: Task) -> tuple[str, str]:
    return task.source, task.target


def find_file(folder: Path, *names: str) -> Path:
    """The file of one of these names, plain or compressed."""
    for name in names:
        for suffix in ("", ".xz", ".gz"):
            if (folder / f"{name}{suffix}").is_file():
                return folder / f"{name}{suffix}"
    raise ValueError(f"{folder} holds no {' or '.join(names)} (nor .xz, .gz); name the folder that the files lie in")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A task's texts and, by a vocabulary shared by both sides, their token ids."""

    tokeniser: FastTokeniser
    texts: dict[str, Pairs] = field(repr=False)
    ids: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = field(repr=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, on one line."""
        special = set(self.tokeniser.specials.ids())
        return " ".join(self.tokeniser.decode([t for t in tokens if t not in special]).split())


def tokenised(texts: dict[str, Pairs], *, vocab: int) -> Corpus:
    """Byte-level BPE learned from both sides of the training set."""
    tokeniser = train_bpe([*texts["train"].source, *texts["train"].target], vocab_size=vocab)
    ids = {
        split: tuple([np.array(row, np.int64) for row in tokeniser.encode_batch(side)] for side in pairs)
        for split, pairs in texts.items()
    }
    return Corpus(tokeniser, texts, ids)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class ShapedSource:
    """Batches for an encoder-decoder of about ``tokens`` a side; each is as wide as one of ``widths``.

    A pair goes to the narrowest width that holds both sides with their end; longer pairs are left out. Each epoch has
    an order of its own, a pure function of (seed, epoch). Sources of one ``order`` have batches of one width at a step.
    """

    source: Sequence[np.ndarray] = field(repr=False)
    target: Sequence[np.ndarray] = field(repr=False)
    specials: Specials
    tokens: int
    widths: tuple[int, ...] = (16, 24, 32, 48, 64)
    seed: int = 0
    order: int | None = None
    _members: dict[int, np.ndarray] = field(init=False, repr=False)
    _rows: dict[int, dict[str, Tensor]] = field(init=False, repr=False, default_factory=dict)
    _made: dict[int, list[tuple[int, np.ndarray]]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in ("pad", "bos", "eos") if getattr(self.specials, name) is None]
        if missing:
            raise ValueError(f"the vocabulary has no token for {', '.join(missing)}, which batches of pairs need")
        lengths = np.array([1 + max(len(x), len(y)) for x, y in zip(self.source, self.target, strict=True)])
        at = np.searchsorted(self.widths, lengths)
        members = {width: np.flatnonzero(at == i) for i, width in enumerate(self.widths)}
        object.__setattr__(self, "_members", {w: m for w, m in members.items() if len(m) >= self.tokens // w})
        if not self._members:
            raise ValueError(f"{len(lengths)} pairs are too few for a batch of {self.tokens} tokens of any width")

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; what does not fill a batch waits for the next epoch's order."""
        return sum(len(m) // (self.tokens // w) for w, m in self._members.items())

    @property
    def left_out(self) -> int:
        """Pairs that are too long, or of a width too rare to fill a batch."""
        return len(self.source) - sum(len(m) for m in self._members.values())

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if epoch not in self._made:
            self._made.clear()
            self._made[epoch] = self._epoch(epoch)
        width, chosen = self._made[epoch][at]
        if width not in self._rows:
            self._rows[width] = self._padded(width)
        rows = torch.from_numpy(chosen)
        return {name: t[rows] for name, t in self._rows[width].items()}

    def _padded(self, width: int) -> dict[str, Tensor]:
        """All pairs of a width, each padded once."""
        pad, bos, eos = (int(getattr(self.specials, name)) for name in ("pad", "bos", "eos"))
        x = [_wide(np.append(self.source[i], eos), width, pad) for i in self._members[width]]
        y = [self.target[i] for i in self._members[width]]
        input_ids = padded(x, pad)
        return {
            "input_ids": input_ids,
            "attention_mask": input_ids != pad,
            "decoder_input_ids": padded([_wide(np.insert(row, 0, bos), width, pad) for row in y], pad),
            "labels": padded([_wide(np.append(row, eos), width, IGNORED) for row in y], IGNORED),
        }

    def _epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        rng, batches = generator(self.seed, epoch), []
        for width, members in self._members.items():
            size, order = self.tokens // width, rng.permutation(len(members))
            batches += [(width, order[lo : lo + size]) for lo in range(0, len(order) - size + 1, size)]
        mixing = rng if self.order is None else generator(self.order, epoch, 1)
        return [batches[i] for i in mixing.permutation(len(batches))]


def _wide(row: np.ndarray, width: int, fill: int) -> np.ndarray:
    return np.concatenate([row, np.full(width - len(row), fill, row.dtype)])


# Batches of a validation set that are evaluated during training.
LOOKED_AT = 8


@torch.no_grad()
def held_out_nll(model: Transformer, source: ShapedSource) -> float:
    """-log p of a token of the translations in the first batches, without smoothing."""
    batches = [source.batch(step) for step in range(min(LOOKED_AT, source.steps_per_epoch))]
    return float(mean_loss(model, batches, Translation(label_smoothing=0.0)))


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], term: Term) -> Tensor:
    """The mean of a term over what it counts in all batches, with the model in evaluation mode."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    total, count = torch.zeros((), device=device), torch.zeros((), device=device)
    for batch in ({name: t.to(device) for name, t in batch.items()} for batch in batches):
        output = model(**{name: t for name, t in batch.items() if name != "labels"})
        loss = term(model, output, batch, 0)
        total, count = total + loss.total.float(), count + torch.as_tensor(loss.count, device=device)
    model.train(training)
    return total / count


def translate(
    model: Transformer,
    corpus: Corpus,
    sources: Sequence[Any],
    *,
    beams: int,
    longest: int,
    penalty: float = 0.6,
    batch: int = 250,
) -> list[str]:
    """The model's translation of each source, in their order; sources of similar length are searched together.

    Neither side is longer than ``longest``: of a longer source the end is read. One beam is greedy.
    """
    specials, device = corpus.tokeniser.specials, next(model.parameters()).device
    assert specials.pad is not None
    assert specials.eos is not None
    sources = [row[-(longest - 1) :] for row in sources]
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    translations: dict[int, str] = {}
    for lo in range(0, len(order), batch):
        chosen = order[lo : lo + batch]
        ids = padded([torch.tensor([*sources[i], specials.eos]).numpy() for i in chosen], specials.pad).to(device)
        beams_of_rows = beam_search(
            model,
            ids,
            attention_mask=ids != specials.pad,
            eos=specials.eos,
            bos=specials.bos,
            beams=beams,
            max_new=min(longest, int(1.5 * ids.shape[1]) + 10),
            length_penalty=LengthPenalty(alpha=penalty if beams > 1 else 0.0),
        )
        translations |= {i: corpus.decode(best[0].tokens) for i, best in zip(chosen, beams_of_rows, strict=True)}
    return [translations[i] for i in range(len(sources))]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """A file of one text a line; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """SacreBLEU with its defaults (13a, mixed case)."""
    return float(_metric().corpus_score(list(hypotheses), [list(references)]).score)


def bleu_counts(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """(sentences, 10): n-grams that are right and all of them, n = 1 to 4, and both lengths; BLEU is of their sums."""
    # The order of n-grams matters to a sentence's score alone, not to what is counted.
    metric = _metric(effective_order=True)
    scores = [metric.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], np.int64)


def bleu_of(counts: np.ndarray) -> float:
    """BLEU of summed counts, as ``corpus_bleu`` has it."""
    right, total = counts[:4].astype(int).tolist(), counts[4:8].astype(int).tolist()
    bleu = _metric().compute_bleu(right, total, int(counts[8]), int(counts[9]), smooth_method="exp")
    return float(bleu.score)


def _metric(*, effective_order: bool = False) -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError('scoring needs sacrebleu: pip install "attnlab[train]"') from error
    # force: no warning about outputs that look tokenised.
    return BLEU(effective_order=effective_order, force=True)
