"""``python -m papers guidance``: the parts (a) to (g), each on its own, so that results grow over several runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data import Malformed, TokenStore, load_store, load_tokeniser, read_text, records, train_bpe
from attnlab.data.tokenisers import Tokeniser
from attnlab.progress import each
from papers.common.row_store import Part, gather
from papers.common.translation import TASKS, corpus_bleu, find_file, read_task
from papers.guidance.assemble import KEYS, assemble
from papers.guidance.config import Arm, MlmConfig, ablations, arms
from papers.guidance.electra import ElectraConfig, run_electra
from papers.guidance.finetune import TuneConfig, fine_tune
from papers.guidance.mlm import Pretrained, Run, run_arms
from papers.guidance.tables import best_arm
from papers.guidance.translation import TranslationConfig, run_translation

__all__ = ["PARTS", "Places", "StudyConfig", "low_resource_stores", "run_parts", "wiki_stores"]

# The share of the time in which models that have been pretrained are fine-tuned.
TUNING = 0.3
# The share of the time for translating.
DECODING = 0.15
PARTS = {
    "a": "12 layers with and without guidance, tuned alike, three seeds (Figure 5)",
    "b": "fine-tuned accuracy after a shorter and a longer pretraining (Table 9)",
    "c": "ELECTRA (Figure 6)",
    "d": "translation: BASE, AG, hard-coded Gaussian (Figure 7)",
    "e": "8 and 16 layers",
    "f": "little text: Oromo and Filipino",
    "g": "ablations of alpha0, lambda and patterns, and a bias in place of the loss",
}


@dataclass(frozen=True)
class Places:
    """Where the data lie; each part needs only some of the folders."""

    corpus: Path | None = None
    glue: Path | None = None
    translation: Path | None = None
    oromo: Path | None = None
    tagalog: Path | None = None

    def need(self, name: str, part: str) -> Path:
        """The folder, or an error that names the missing option."""
        folder = getattr(self, name)
        if folder is None:
            raise ValueError(f"part ({part}) needs --{name}" if part in PARTS else f"{part} needs --{name}")
        return Path(folder)


@dataclass(frozen=True)
class StudyConfig:
    """What is trained; the steps of each part are those of its config."""

    mlm: MlmConfig = field(default_factory=MlmConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    electra: ElectraConfig = field(default_factory=ElectraConfig)
    translation: TranslationConfig = field(default_factory=TranslationConfig)
    # The ratio and the sizes follow Table 11, for narrower models.
    lrs: tuple[float, ...] = (1e-3, 5e-4)
    warmups: tuple[float, ...] = (0.0, 0.1)
    # All rates and warm-ups are tried on the first seed, the best on the others.
    tuned_seed: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)
    # Fine-tuned are the models as they are after all updates (long), and as they were after this share of them (short).
    short: float = 0.5
    depths: tuple[int, ...] = (8, 16)
    low_resource_vocab: int = 8000
    low_resource_dropout: float = 0.1
    tune_at_once: bool = False


def run_parts(
    config: StudyConfig,
    only: Sequence[str],
    *,
    places: Places,
    work: Path,
    out: Path,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run the parts in the order named, gather all that ``work`` and an earlier ``out`` hold, and write ``out``."""
    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    work.mkdir(parents=True, exist_ok=True)
    if "a" in only and "b" in only:
        # The models of (a) are fine-tuned in the same run, and not trained again.
        config, only = replace(config, tune_at_once=True), [name for name in only if name != "b"]
    run: dict[str, Callable[..., None]] = {"a": part_a, "b": part_b, "c": part_c, "d": part_d, "e": part_e, "f": part_f,
                                           "g": part_g}  # fmt: skip
    began = time.monotonic()
    for name in each(only, lambda name: f"part {name}"):
        left = None if seconds is None else seconds - (time.monotonic() - began)
        if left is not None and left <= 0:
            break
        run[name](config, places, work, left)
        assemble(work, out, config=asdict(config), keep=out)
    return assemble(work, out, config=asdict(config), keep=out)


def wiki_stores(places: Places, part: str) -> tuple[Tokeniser, dict[str, TokenStore]]:
    """The tokeniser and the stores of the folder that wiki-corpus wrote."""
    home = places.need("corpus", part)
    return load_tokeniser(home / "tokenizer"), {name: load_store(home / name) for name in ("train", "valid")}


def _best(config: StudyConfig, work: Path) -> dict[bool, Arm]:
    """The arms that part (a) found best on the first seed; the highest rate with a warm-up where it was not run."""
    usual = {guided: Arm(guided, config.lrs[0], config.warmups[-1]) for guided in (True, False)}
    path = work / "a.json"
    if not path.exists():
        return usual
    best = best_arm(gather({"a": path}).tables)
    every = {arm.name: arm for arm in arms(config.lrs, config.warmups)}
    return {guided: every.get(best.get(guided, ""), arm) for guided, arm in usual.items()}


def part_a(config: StudyConfig, places: Places, work: Path, seconds: float | None) -> None:
    """Tune on the first seed, then the best arms on the others at once; the heads of a guided one are recorded."""
    tokeniser, stores = wiki_stores(places, "a")
    part, began = Part(work / "a.json", keys=KEYS), time.monotonic()
    recorded = Run(config.mlm, Arm(True, config.lrs[0], config.warmups[-1])).key
    rounds = _rounds(config)
    for number, seeds in enumerate(rounds):
        first = seeds == [config.tuned_seed]
        todo = arms(config.lrs, config.warmups) if first else list(_best(config, work).values())
        # The time that is left is shared by the rounds that are left.
        left = None if seconds is None else (seconds - (time.monotonic() - began)) / (len(rounds) - number)
        tuning = TUNING if config.tune_at_once else 0.0
        pretrained = run_arms(
            [Run(replace(config.mlm, seed=seed), arm) for seed in seeds for arm in todo],
            tokeniser=tokeniser,
            stores=stores,
            part=part,
            label={"part": "a"},
            seconds=None if left is None else left * (1 - tuning),
            timeline=(recorded, work / "timeline") if first else None,
            keep=[round(config.short * config.mlm.steps)] if config.tune_at_once else (),
        )
        if config.tune_at_once:
            _tune(config, places, work, pretrained, None if left is None else left * tuning)


def _rounds(config: StudyConfig) -> list[list[int]]:
    """The seeds that are trained at once: the one that is tuned on, then the others."""
    others = [seed for seed in config.seeds if seed != config.tuned_seed]
    tuned = [config.tuned_seed] if config.tuned_seed in config.seeds else []
    return [seeds for seeds in (tuned, others) if seeds]


def part_b(config: StudyConfig, places: Places, work: Path, seconds: float | None) -> None:
    """The best arms pretrained and fine-tuned; with (a) in the same run, its models are."""
    tokeniser, stores = wiki_stores(places, "b")
    pretrained = run_arms(
        [Run(replace(config.mlm, seed=seed), arm) for seed in config.seeds for arm in _best(config, work).values()],
        tokeniser=tokeniser,
        stores=stores,
        part=Part(work / "b.json", keys=KEYS),
        label={"part": "b"},
        seconds=None if seconds is None else seconds * (1 - TUNING),
        keep=[round(config.short * config.mlm.steps)],
    )
    _tune(config, places, work, pretrained, None if seconds is None else seconds * TUNING)


def _tune(config: StudyConfig, places: Places, work: Path, pretrained: Pretrained, seconds: float | None) -> None:
    """Fine-tune the best arms as they are at the end, and then as they were before, as long as time lasts."""
    tokeniser, _ = wiki_stores(places, "b")
    best, began = {arm.name for arm in _best(config, work).values()}, time.monotonic()
    for training, at, models in [
        ("long", pretrained.steps, pretrained.models),
        *(("short", *kept) for kept in pretrained.earlier.items()),
    ]:
        fine_tune(
            {key: model for key, model in models.items() if key.arm in best},
            config.tune,
            tokeniser=tokeniser,
            glue=places.need("glue", "b"),
            part=Part(work / "b.json", keys=KEYS),
            label={"training": training, "steps": at},
            seconds=None if seconds is None else seconds - (time.monotonic() - began),
        )


def part_c(config: StudyConfig, places: Places, work: Path, seconds: float | None) -> None:
    """ELECTRA at every learning rate, with a warm-up."""
    tokeniser, stores = wiki_stores(places, "c")
    every = arms(config.lrs, config.warmups[-1:])
    todo = [replace(arm, alpha0=arm.alpha0 * config.electra.alpha_scale) if arm.guided else arm for arm in every]
    run_electra(
        config.electra, todo, tokeniser=tokeniser, stores=stores, part=Part(work / "c.json", keys=KEYS), seconds=seconds
    )


def part_d(config: StudyConfig, places: Places, work: Path, seconds: float | None) -> None:
    """Translation, and BLEU where sacrebleu is installed."""
    root = places.need("translation", "d")
    part, hypotheses = Part(work / "d.json", keys=KEYS), work / "translations"
    training = None if seconds is None else (1 - DECODING) * seconds
    run_translation(config.translation, root=root, part=part, out=hypotheses, seeds=config.seeds, seconds=training)
    score_translations(config.translation, root=root, hypotheses=hypotheses, out=work / "bleu.json")


def part_e(config: StudyConfig, places: Places, work: Path, seconds: float | None) -> None:
    """The best arms at other depths, all at once."""
    tokeniser, stores = wiki_stores(places, "e")
    best = _best(config, work).values()
    run_arms(
        [Run(replace(config.mlm, layers=depth), arm) for depth in config.depths for arm in best],
        tokeniser=tokeniser,
        stores=stores,
        part=Part(work / "e.json", keys=KEYS),
        label={"part": "e"},
        seconds=seconds,
    )


def part_f(config: StudyConfig, places: Places, work: Path, seconds: float | None) -> None:
    """The best arms on little text, each language with a vocabulary of its own."""
    languages = [language for language in ("oromo", "tagalog") if getattr(places, language) is not None]
    mlm = replace(config.mlm, dropout=config.low_resource_dropout)
    for language in languages or ["oromo"]:
        tokeniser, stores = low_resource_stores(places.need(language, "f"), language, config.low_resource_vocab)
        run_arms(
            [Run(mlm, arm) for arm in _best(config, work).values()],
            tokeniser=tokeniser,
            stores=stores,
            part=Part(work / f"f-{language}.json", keys=KEYS),
            label={"part": "f", "language": language},
            seconds=None if seconds is None else seconds / len(languages),
        )


def part_g(config: StudyConfig, places: Places, work: Path, seconds: float | None) -> None:
    """One setting of the best guided arm changed at a time."""
    tokeniser, stores = wiki_stores(places, "g")
    best = _best(config, work)
    run_arms(
        [Run(config.mlm, arm) for arm in (*best.values(), *ablations(best[True]))],
        tokeniser=tokeniser,
        stores=stores,
        part=Part(work / "g.json", keys=KEYS),
        label={"part": "g"},
        seconds=seconds,
    )


def low_resource_stores(folder: Path, language: str, vocab: int) -> tuple[Tokeniser, dict[str, TokenStore]]:
    """A tokeniser learned from the training texts, and the texts by it: Oromo's news, or the Filipino half of pairs."""
    texts = _texts(folder, language)
    tokeniser = train_bpe(texts["train"], vocab_size=vocab)
    return tokeniser, {split: _store(some, tokeniser) for split, some in texts.items()}


def _store(texts: Sequence[str], tokeniser: Tokeniser) -> TokenStore:
    rows = tokeniser.encode_batch(texts)
    ends = np.cumsum([0, *(len(row) for row in rows)])
    return TokenStore(np.concatenate([np.array(row, np.uint16) for row in rows]), ends)


def _texts(folder: Path, language: str) -> dict[str, list[str]]:
    if language == "oromo":
        files = {"train": find_file(folder, "train.tsv"), "valid": find_file(folder, "dev.tsv")}
        return {split: _column(path, "text") for split, path in files.items()}
    # As published, ALT's data_fil.txt has a number and a tab before each sentence.
    path = find_file(folder, "Tagalog.txt", "data_fil.txt")
    lines = [line.rpartition("\t")[2] for line in read_text(path).splitlines() if line.strip()]
    held_out = len(lines) // 20
    return {"train": lines[held_out:], "valid": lines[:held_out]}


def _column(path: Path, name: str) -> list[str]:
    """A column of a tsv, without the few lines that hold a tab inside a field."""
    return [row[name] for _, row in records(path, columns=[name], malformed=Malformed("skip"))]


def score_translations(config: TranslationConfig, *, root: Path, hypotheses: Path, out: Path) -> list[dict[str, Any]]:
    """SacreBLEU of every file of translations; nothing where sacrebleu is not installed."""
    references = read_task(TASKS[config.task], root)["test"].target
    rows = []
    for path in sorted(hypotheses.glob("*.txt")):
        name, _, seed = path.stem.rpartition("-")
        lines = path.read_text(encoding="utf-8").splitlines()
        try:
            bleu = corpus_bleu(lines, references[: len(lines)])
        except ImportError:
            return []
        rows.append({"arm": name, "seed": int(seed), "bleu": bleu, "sentences": len(lines)})
    Part(out, keys=KEYS).extend("bleu", rows)
    return rows
