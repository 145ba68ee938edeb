"""One task of the reproduction of Effective: read the pretrained encoder, fine-tune it, read it again."""

from __future__ import annotations

import json
import lzma
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.devices import best_device
from attnlab.reading.pattern_classifier import PatternNet, load_classifier
from attnlab.training import CrossEntropy, Loss, Recipe, Schedule, Settings, train
from papers.common.row_store import Part
from papers.effective.config import EffectiveConfig, encoder_folder
from papers.effective.glue import (
    TASKS,
    Examples,
    GlueSource,
    Task,
    dev_batches,
    encode,
    read_splits,
    subset,
    tag_types,
)
from papers.effective.study import alternative_row, faithfulness_tables, short_input_rows
from papers.effective.tables import Similarity, Tally, read_maps
from papers.effective.tagger import PerceptronTagger

__all__ = ["SquaredError", "load_tagger", "metrics", "run_task", "sequence_classifier"]

# The width of a head of BERT-base, the paper's model.
BASE_WIDTH = 64


@dataclass(frozen=True)
class SquaredError:
    """The squared error of a model with one output (STS-B)."""

    name: str = "squared_error"

    def __call__(self, model: nn.Module, output: Any, batch: Mapping[str, Any], step: int) -> Loss:
        return Loss((output.logits.float().squeeze(-1) - batch["labels"]).square().sum(), float(len(batch["labels"])))

    def count(self, batch: Mapping[str, Any], step: int) -> float:
        """The number of examples."""
        return float(len(batch["labels"]))


def sequence_classifier(folder: Path | str, *, classes: int, seed: int) -> tuple[Any, Any]:
    """(the encoder with a new head for ``classes``, its tokenizer); the head is drawn from ``seed``."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(folder), num_labels=classes, dtype=torch.float32, use_safetensors=True
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(str(folder))


def load_tagger(path: Path | str) -> PerceptronTagger:
    """A tagger that ``save`` wrote, as it is or as .xz."""
    path = Path(path)
    if path.suffix != ".xz":
        return PerceptronTagger.load(path)
    with lzma.open(path) as file:
        stored = json.load(file)
    return PerceptronTagger(stored["weights"], stored["tags"])


def metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, and of two classes F1 of the second; or for one output the correlation with the labels."""
    if logits.shape[-1] == 1:
        x, y = (t.double() - t.double().mean() for t in (logits[:, 0], labels))
        spread = (x.norm() * y.norm()).item()
        return {"pearson": float(x @ y) / spread if spread else math.nan}
    predicted = logits.argmax(-1)
    accuracy = (predicted == labels).double().mean().item()
    if logits.shape[-1] > 2:
        return {"accuracy": accuracy}
    both, either = int((predicted & labels.long()).sum()), int(predicted.sum()) + int(labels.sum())
    return {"accuracy": accuracy, "f1": 2 * both / max(1, either)}


class _Reader:
    """The dev set of one task, and the readings of a model on it."""

    def __init__(self, config: EffectiveConfig, task: Task, dev: Examples, tokenizer: Any, segments: bool) -> None:
        self.config, self.task, self.tokenizer, self.segments = config, task, tokenizer, segments
        self.dev, self.device = dev, best_device()
        self.net: PatternNet | None = None
        self.types: Tensor | None = None

    def batches(self, n: int | None, size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        examples = self.dev if n is None else self.dev.first(n)
        return dev_batches(
            examples,
            size=size,
            length=self.config.length,
            segments=self.segments,
            classes=self.task.classes,
            device=self.device,
        )

    def longest(self, n: int) -> dict[str, Tensor]:
        """The texts with the most tokens, as one batch."""
        chosen = sorted(range(len(self.dev)), key=lambda i: -len(self.dev.ids[i]))[:n]
        batch = self.dev.batch(chosen, length=self.config.length, segments=self.segments, classes=self.task.classes)
        return {name: t.to(self.device) for name, t in batch.items()}

    def long_texts(self, n: int, width: int) -> Iterator[dict[str, Tensor]]:
        """Texts of more than ``width`` tokens, one at a time, without padding."""
        for place in [i for i, ids in enumerate(self.dev.ids) if len(ids) > width][:n]:
            length = len(self.dev.ids[place])
            batch = self.dev.batch([place], length=length, segments=self.segments, classes=self.task.classes)
            yield {name: t.to(self.device) for name, t in batch.items() if name != "labels"}

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        logits, labels = [], []
        for _, batch in self.batches(None, 64):
            logits.append(model(**{k: t for k, t in batch.items() if k != "labels"}).logits.float().cpu())
            labels.append(batch["labels"].cpu())
        return metrics(torch.cat(logits), torch.cat(labels))

    def prepare(self, part: Part) -> None:
        """Load the classifier of patterns and tag the tokens; if there is none, the part notes it as a fact."""
        config = self.config
        try:
            self.net = load_classifier(config.classifier).to(self.device)
        except ValueError as error:
            part.fact("no patterns", str(error))
        if config.tagger is None:
            part.fact("no token types", "the config names no tagger")
            return
        rows = tag_types(
            self.dev.first(config.dev_limit), self.tokenizer, load_tagger(config.tagger), length=config.length
        )
        self.types = torch.full((len(rows), config.length), -1)
        for i, row in enumerate(rows):
            self.types[i, : len(row)] = row

    def read(self, model: nn.Module, before: nn.Module | None) -> tuple[Tally, Similarity]:
        """Every map of the model on the dev set; with ``before``, also how similar they are to that model's."""
        tally, similarity = Tally(self.net), Similarity()
        for places, batch in self.batches(self.config.dev_limit, self.config.read_batch):
            maps, facts, _ = read_maps(model, batch, authors=True)
            real = batch["attention_mask"].bool()
            ids = batch["input_ids"]
            marked = {"cls": ids == self.tokenizer.cls_token_id, "sep": ids == self.tokenizer.sep_token_id}
            types = None if self.types is None else self.types[places].to(self.device)
            two = len(self.task.columns) > 1
            segments = self.dev.segment_ids(places, length=self.config.length).to(self.device) if two else None
            tally.add(
                maps,
                facts,
                real=real,
                marked={k: t & real for k, t in marked.items()},
                types=types,
                segments=segments,
            )
            if before is not None:
                old, _, _ = read_maps(before, batch)
                similarity.add(old, maps, real)
        return tally, similarity


def run_task(name: str, config: EffectiveConfig, part: Part, folder: Path) -> None:
    """One task from its data to its last table; each table is written as soon as it is made."""
    task, device = TASKS[name], best_device()
    clock, model = _Clock(part), encoder_folder(config)
    pretrained, tokenizer = sequence_classifier(model, classes=task.classes, seed=config.seed)
    segments = getattr(pretrained.config, "type_vocab_size", 0) > 1
    rows, how = read_splits(config.data, task, seed=config.seed)
    rows["train"] = subset(rows["train"], config.train_limit, seed=config.seed)
    examples = {s: encode(r, tokenizer, length=config.length) for s, r in rows.items()}
    part.fact("examples", {s: len(e) for s, e in examples.items()} | {"split": how})
    width = pretrained.config.hidden_size // pretrained.config.num_attention_heads
    if not part.has("lengths"):
        part.row("lengths", **_lengths(name, examples["dev"], width))
    reader = _Reader(config, task, examples["dev"], tokenizer, segments)
    reader.prepare(part)
    pretrained.to(device)
    clock("prepared")

    if not part.has("to_token_pretrained"):
        with part.step("pretrained maps"):
            tally, _ = reader.read(pretrained, None)
            of_all = {f"{k}_pretrained": v for k, v in tally.tables(name).items()}
            part.add_tables(of_all if config.finetune else of_all | {"identity": [tally.identity(name)]})
        clock("pretrained maps")
    if not config.finetune:
        _probe_outputs(name, config, part, reader, pretrained, width, separator=tokenizer.sep_token_id)
        return

    source = GlueSource(examples["train"], config.batch_size, config.length, segments, task.classes, config.seed)
    tuned, _ = sequence_classifier(model, classes=task.classes, seed=config.seed)
    steps = max(1, round(config.epochs * source.steps_per_epoch))
    term: Any = SquaredError() if task.classes == 1 else CrossEntropy()
    # An interrupted training continues from its checkpoint; a finished one is loaded.
    outcome = train(tuned, source, terms=[term], settings=_settings(config, steps), run_dir=folder, resume=True)
    tuned.to(device).eval()
    if not part.has("scores"):
        part.row("scores", task=name, **reader.scores(tuned), steps=steps, seconds=outcome.timing.get("seconds"))
        clock("fine-tuned")
    if not part.has("identity"):
        with part.step("maps"):
            tally, similarity = reader.read(tuned, pretrained)
            part.add_tables(tally.tables(name) | similarity.tables(name) | {"identity": [tally.identity(name)]})
        clock("maps")
    _probe_outputs(name, config, part, reader, tuned, width, separator=tokenizer.sep_token_id)
    if not part.has("faithfulness"):
        _study(name, config, part, reader, tuned, width)
        clock("faithfulness")


def _lengths(name: str, dev: Examples, width: int) -> dict[str, Any]:
    """The shares of dev inputs with no more tokens than a head is wide, in this encoder and in BERT-base."""
    lengths = [len(ids) for ids in dev.ids]
    return {
        "task": name,
        "tokens": sum(lengths) / len(lengths),
        "width": width,
        "trivial_share": sum(n <= width for n in lengths) / len(lengths),
        "trivial_share_base": sum(n <= BASE_WIDTH for n in lengths) / len(lengths),
    }


def _settings(config: EffectiveConfig, steps: int) -> Settings:
    return Settings(
        steps=steps,
        recipe=Recipe(lr=config.lr, weight_decay=config.weight_decay),
        schedule=Schedule("linear", warmup=round(config.warmup * steps)),
        seed=config.seed,
        log_every=max(1, steps // 20),
        checkpoint_every=max(1, steps // 2),
        keep=1,
    )


def _probe_outputs(
    name: str, config: EffectiveConfig, part: Part, reader: _Reader, tuned: Any, width: int, *, separator: int
) -> None:
    """Another distribution with the same output, and short inputs, where effective attention is attention."""
    if not part.has("alternative"):
        with part.step("alternative"):
            batch = reader.longest(2)
            part.row("alternative", **alternative_row(read_maps(tuned, batch)[2], text=name))
    if name == config.tasks[0] and not part.has("short_inputs"):
        with part.step("short inputs"):
            _, batch = next(reader.batches(32, 32))
            lengths = sorted({max(4, width // 4), width // 2, 3 * width // 4, width})
            part.add_tables({"short_inputs": short_input_rows(tuned, batch, lengths=lengths, separator=separator)})


def _study(name: str, config: EffectiveConfig, part: Part, reader: _Reader, tuned: Any, width: int) -> None:
    """Which reading is faithful, on texts longer than a head is wide."""
    with part.step("faithfulness"):
        texts = reader.long_texts(config.study_texts, width)
        prediction = (lambda output: output.logits.float()) if TASKS[name].classes == 1 else None
        part.add_tables(
            faithfulness_tables(
                tuned, texts, task=name, prediction=prediction, keys=config.study_keys, seed=config.seed
            )
        )


class _Clock:
    def __init__(self, part: Part) -> None:
        self.part, self.start = part, time.monotonic()

    def __call__(self, name: str) -> None:
        self.part.fact(f"seconds: {name}", round(time.monotonic() - self.start, 1))
