"""``attnlab explore``: a model reads a text, and its attention becomes a page; also two texts, two models, or a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters import LoadedModel, record
from attnlab.adapters.generate import target_ends
from attnlab.adapters.load import max_length
from attnlab.adapters.model_files import check_ids, check_reads_text
from attnlab.data import TextFile
from attnlab.data.readers import check_unicode
from attnlab.evaluation.explore import Subject, explore
from attnlab.models import Transformer
from attnlab.pages.explorer import Exploration
from attnlab.pages.explorer.tokens import guess_words
from attnlab.patterns import SpecialTokens, special_tokens
from attnlab.provenance import provenance
from attnlab.reading.registry import recorded_reading

__all__ = ["ExploreConfig", "explore_models", "parse_layers", "readable_tokens", "subject", "texts_of"]

# The most tokens that a sequence-to-sequence model writes where no target text is given.
LONGEST_TARGET = 64
# A file with more characters is not read further: the maps of so many tokens fit no page.
LONGEST_PASSAGE = 1 << 20


@dataclass(frozen=True)
class ExploreConfig:
    """What is shown: readings, mechanisms beside the model's own, the layers kept whole, and the precision."""

    readings: tuple[str, ...] = ("standard",)
    mechanisms: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    precise: bool = False
    target: str | None = None

    def __post_init__(self) -> None:
        for name in self.readings:
            recorded_reading(name)


def explore_models(models: Mapping[str, LoadedModel], texts: Sequence[str], *, config: ExploreConfig) -> Exploration:
    """Every text through every model, side by side in one exploration."""
    if not texts:
        raise ValueError("name a text to read, or a file with --file")
    for text in texts:
        if not text.strip():
            raise ValueError("the text is empty: there is nothing to attend to")
        check_unicode(text, what="the text")
    subjects = []
    for model_name, loaded in models.items():
        for i, text in enumerate(texts):
            parts = [model_name] * (len(models) > 1) + [f"text {i + 1}"] * (len(texts) > 1)
            subjects.append(subject(loaded, text, name=" · ".join(parts) or model_name, target=config.target))
    names = " and ".join(models)
    shown = " / ".join(_short(text) for text in texts)
    about = provenance()
    return explore(
        subjects,
        readings=config.readings,
        mechanisms=config.mechanisms,
        layers=config.layers,
        precise=config.precise,
        title=names,
        subtitle=f"reads “{shown}”",
        about={
            "model": names,
            "attnlab": about["versions"].get("attnlab", "?"),
            "torch": about["versions"].get("torch", "?"),
            "transformers": about["versions"].get("transformers", "?"),
            "device": about["device"],
        },
    )


@torch.no_grad()
def subject(loaded: LoadedModel, text: str, *, name: str = "", target: str | None = None) -> Subject:
    """One text through one model, recorded; a sequence-to-sequence model writes its own target unless one is given."""
    model, tokenizer, task = loaded
    device = next(model.parameters()).device
    encoded = tokenizer(text, return_tensors="pt")
    inputs = {key: t.to(device) for key, t in encoded.items() if _takes(model, key)}
    ids = inputs["input_ids"]
    _check_inputs(loaded, ids, target)
    side = "source" if task in ("mlm", "encoder", "seq2seq") else "target"
    # {text: (ids, token strings, the word of each token)}
    texts = {side: (ids, *readable_tokens(tokenizer, encoded, text))}
    if task == "seq2seq":
        inputs["decoder_input_ids"] = written = _target(loaded, inputs, target)
        tokens = _strings(tokenizer, written[0])
        texts["target"] = (written, tokens, guess_words(tokens))
    with record(model) as trace:
        model(**inputs)
    if side == "source" and all(layer.kind == "decoder" for layer in trace):
        texts = {"target": texts["source"]}
    return Subject(
        trace,
        {key: tokens for key, (_, tokens, _) in texts.items()},
        name=name,
        words={key: words for key, (_, _, words) in texts.items()},
        input_ids={key: ids for key, (ids, _, _) in texts.items()},
        special=_special(tokenizer),
    )


def _check_inputs(loaded: LoadedModel, ids: Tensor, target: str | None) -> None:
    """Raise if the model cannot read these tokens, or has no use for a target."""
    model, _, task = loaded
    if target is not None and task != "seq2seq":
        raise ValueError(f"a target is what a sequence-to-sequence model writes, and {type(model).__name__} is none")
    check_unicode(target or "", what="the target")
    if ids.shape[1] == 0:
        raise ValueError("the tokenizer makes no token of this text")
    check_reads_text(model)
    check_ids(model, ids)
    limit = max_length(model)
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens, and {type(model).__name__} reads at most {limit}; cut it"
        )


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers and ranges, as in "0,3,5-7".

    >>> parse_layers("0,3,5-7")
    (0, 3, 5, 6, 7)
    """
    layers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part.strip())
        if ends is None:
            raise ValueError(f"layers must be numbers below 10000 and ranges such as 0,3,5-7, got {text!r}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise ValueError(f"the range of layers {part.strip()} ends before it begins")
        layers += range(first, last + 1)
    return tuple(layers)


def _takes(model: Any, name: str) -> bool:
    if name == "token_type_ids":
        return getattr(model.config, "type_vocab_size", 0) >= 2
    return name in ("input_ids", "attention_mask")


def _target(loaded: LoadedModel, inputs: Mapping[str, Tensor], target: str | None) -> Tensor:
    model, tokenizer, _ = loaded
    if isinstance(model, Transformer):
        return _own_target(loaded, inputs, target)
    start = getattr(model.generation_config, "decoder_start_token_id", None)
    if start is None:
        start = model.config.decoder_start_token_id
    if target is None:
        written = model.generate(**inputs, max_new_tokens=LONGEST_TARGET, do_sample=False, num_beams=1)
        return written[:, :-1] if written.shape[1] > 2 else written
    ids = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(inputs["input_ids"].device)
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)


def _own_target(loaded: LoadedModel, inputs: Mapping[str, Tensor], target: str | None) -> Tensor:
    model, tokenizer, _ = loaded
    first, end = target_ends(tokenizer)
    if target is None:
        longest = min(LONGEST_TARGET, max_length(model) or LONGEST_TARGET)
        written = model.generate(**inputs, max_new_tokens=longest, bos_token_id=first, eos_token_id=end)
        return written[:, :-1] if written.shape[1] > 2 else written
    ids = tokenizer(target, add_special_tokens=False, return_tensors="pt")["input_ids"].to(inputs["input_ids"].device)
    return torch.cat([torch.full_like(ids[:, :1], first), ids], 1)


def readable_tokens(tokenizer: Any, encoded: Any, text: str) -> tuple[list[str], list[int]]:
    """Token strings as people read them, and the word of each."""
    ids = encoded["input_ids"][0]
    raw = _strings(tokenizer, ids)
    if not getattr(tokenizer, "is_fast", False) or not any(token.startswith(("Ġ", "▁", "Ċ")) for token in raw):
        return raw, guess_words(raw)
    # Byte-level tokens are unreadable beyond ASCII, so each is shown as its piece of the text.
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    shown, words, word = [], [], -1
    for i, (token, (start, end)) in enumerate(zip(raw, spans, strict=True)):
        piece = text[start:end]
        bare = piece.strip()
        before = text[start - 1 : start] if start else " "
        joins = bool(i and piece and not piece[0].isspace() and not before.isspace() and _alike(before, piece[0]))
        word += not joins
        words.append(word)
        shown.append(bare or token)
    return shown, words


def _alike(a: str, b: str) -> bool:
    return a.isalnum() == b.isalnum()


def _strings(tokenizer: Any, ids: Tensor) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids.tolist())]


def _special(tokenizer: Any) -> SpecialTokens | None:
    try:
        return special_tokens(tokenizer)
    except ValueError:
        return None


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 70 else words[:69] + "…"


def texts_of(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The texts of the command line, then those of the files."""
    return [*texts, *map(_passage, files)]


def _passage(file: Path) -> str:
    text, whole = TextFile(file).beginning(LONGEST_PASSAGE)
    if not whole:
        raise ValueError(
            f"{file} has more than {LONGEST_PASSAGE:,} characters, and a page shows the attention over one passage; "
            "cut it"
        )
    return text.strip()
