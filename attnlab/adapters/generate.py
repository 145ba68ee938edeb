"""A text continued by a model, whichever kind it is, with the attention that it has at the moment."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters.load import LoadedModel
from attnlab.fields import check_int, expect
from attnlab.models import Transformer
from attnlab.shapes import Int

__all__ = ["generate", "sample_rows", "target_ends"]


@torch.no_grad()
def generate(
    loaded: LoadedModel, text: str, *, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
) -> str:
    """The text with what a causal model writes after it, or what a sequence-to-sequence model makes of it.

    ``loaded`` is what ``load_model`` returns. At temperature 0 the most probable token is taken each time. A mechanism
    with a memory of its own (its ``make_cache``) decodes with it; inside ``swap`` the swapped one attends.
    """
    expect("loaded", loaded, LoadedModel, "what load_model returns")
    expect("text", text, str, "a string")
    check_int("max_new_tokens", max_new_tokens, least=1)
    expect("temperature", temperature, (int, float), "a number")
    check_int("seed", seed, least=0)
    model, tokenizer, task = loaded
    if task not in ("causal", "seq2seq"):
        raise ValueError(
            f"{type(model).__name__} predicts {'masked tokens' if task == 'mlm' else 'no tokens'}, so it cannot "
            "continue a text; use a causal or a sequence-to-sequence model"
        )
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number of at least 0, got {temperature}")
    ids = tokenizer(text, return_tensors="pt")["input_ids"].to(next(model.parameters()).device)
    end = _end(tokenizer)
    if task == "causal" and end is not None and ids.shape[1] > 1 and ids[0, -1] == end:
        # Some tokenizers end every text, and nothing continues an ended one.
        ids = ids[:, :-1]
    if ids.shape[1] == 0:
        raise ValueError("there is no token to continue: give some text")
    written = sample_rows(loaded, ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return tokenizer.decode(written[0].tolist(), skip_special_tokens=True)


@torch.no_grad()
def sample_rows(
    loaded: LoadedModel,
    ids: Int[Tensor, "b k"],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    **settings: Any,
) -> Int[Tensor, "b n"]:
    """Rows without padding and what the model writes after them; a row that has ended is filled up.

    ``settings`` are further ones of transformers' ``generate``, which our own models do not have.
    """
    model, tokenizer, task = loaded
    asked: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        asked["temperature"] = temperature
    end = _end(tokenizer)
    if isinstance(model, Transformer):
        first = target_ends(tokenizer)[0] if task == "seq2seq" else None
        return model.generate(ids, bos_token_id=first, eos_token_id=end, seed=seed, **asked)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
        torch.manual_seed(seed)
        return model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=pad, **asked, **settings)


def target_ends(tokenizer: Any) -> tuple[int, int | None]:
    """The tokens with which the targets of our encoder-decoders begin and end."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    if first is None:
        raise ValueError("the tokenizer has no token with which a target begins (bos or cls)")
    return first, _end(tokenizer)


def _end(tokenizer: Any) -> int | None:
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
