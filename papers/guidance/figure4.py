"""Figure 4: the patterns over a sentence, drawn as maps on a page of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlab.pages import element, heat_maps, page
from attnlab.patterns import SpecialTokens, dense, pattern_targets, special_tokens
from attnlab.progress import each
from attnlab.provenance import write_atomic

__all__ = ["SENTENCE", "write_patterns_page"]

SENTENCE = "<s> Welcome to EMNLP . </s>"
SHOWN = ("next", "prev", "first", "period", "delim", "same")


def write_patterns_page(
    out: Path | str, *, text: str = SENTENCE, tokenizer: Any = None
) -> Mapping[str, Sequence[Sequence[float | None]]]:
    """Draw every pattern over ``text``; returns the maps by name.

    Without a tokenizer the words between spaces are the tokens, "." is a full stop, and <s> and </s> are delimiters. A
    pattern that finds nothing in the text is drawn empty; one whose tokens the tokenizer does not have is left out.
    """
    words, ids, tokens = _by_spaces(text) if tokenizer is None else _by_tokenizer(text, tokenizer)
    known = {"period": bool(tokens.period), "delim": bool(tokens.delimiters)}
    maps: dict[str, Sequence[Sequence[float | None]]] = {
        name: dense(pattern_targets(name, ids, tokens=tokens), keys=ids.shape[1])[0, 0].tolist()
        for name in each(SHOWN)
        if known.get(name, True)
    }
    places = " ".join(f"{i}:{word}" for i, word in enumerate(words))
    body = [
        element("h1", "Patterns of attention guidance"),
        element(
            "p", "Row p is how token p of the text should attend; every row that has a target sums to 1.", class_="lead"
        ),
        heat_maps(
            maps,
            name="patterns",
            title=f"“{text}”",
            rows="token p",
            columns="token q",
            high=1.0,
            note=f"Numbers are places in the text: {places}. The last row of next and the first of prev are uniform.",
        ),
    ]
    write_atomic(out, page("Patterns", body, subtitle="Figure 4"))
    return maps


def _by_spaces(text: str) -> tuple[list[str], torch.Tensor, SpecialTokens]:
    words = text.split()
    if not words:
        raise ValueError("the text is empty; give at least one word")
    numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
    ends = tuple(numbers[word] for word in ("<s>", "</s>") if word in numbers)
    stops = (numbers["."],) if "." in numbers else ()
    return words, torch.tensor([[numbers[word] for word in words]]), SpecialTokens(stops, ends)


def _by_tokenizer(text: str, tokenizer: Any) -> tuple[list[str], torch.Tensor, SpecialTokens]:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return tokenizer.convert_ids_to_tokens(ids[0].tolist()), ids, special_tokens(tokenizer)
