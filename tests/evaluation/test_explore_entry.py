"""``al.explore(model, tokenizer, text)`` in one call, and what is said where something else was passed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.adapters import LoadedModel

TEXT = "the king is here and the queen is gone"


@pytest.fixture(scope="module")
def shipped() -> LoadedModel:
    return al.shipped_model()


def test_one_call(shipped: LoadedModel) -> None:
    pages = [
        al.explore(shipped.model, shipped.tokenizer, TEXT),
        al.explore(shipped, text=TEXT),
        al.explore(shipped, TEXT),
    ]
    inputs = shipped.tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad(), al.record(shipped.model) as trace:
        shipped.model(**inputs)
    tokens = shipped.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    recorded = al.explore(trace, tokens=tokens)
    for page in pages:
        (item,) = page.packed.meta["items"]
        (expected,) = recorded.packed.meta["items"]
        assert len(item["stacks"]) == len(expected["stacks"]) == 1
        assert page.packed.meta["texts"] == recorded.packed.meta["texts"]
    both = al.explore(shipped.model, shipped.tokenizer, [TEXT, "long live the king"])
    assert [item["name"] for item in both.packed.meta["items"]] == ["text 1", "text 2"]


@pytest.mark.parametrize("arguments", [(), (None, TEXT), ("tokenizer", "")])
def test_a_model_needs_a_tokenizer_and_a_text(arguments: tuple[Any, ...], shipped: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"explore\(model, tokenizer, text\)"):
        al.explore(shipped.model, *(shipped.tokenizer if one == "tokenizer" else one for one in arguments))


def test_a_trace_needs_no_text(shipped: LoadedModel) -> None:
    with torch.no_grad(), al.record(shipped.model) as trace:
        shipped.model(torch.tensor([[5, 6, 7]]))
    with pytest.raises(ValueError, match="belong to a model, got Trace"):
        al.explore(trace, shipped.tokenizer, TEXT)


@pytest.mark.parametrize("name", ["approximation_error", "read", "effective_attention"])
def test_readings_of_a_model_say_that_it_must_be_recorded(name: str, shipped: LoadedModel) -> None:
    """Past the signatures' type check, which runs under pytest only."""
    function: Any = inspect.unwrap(getattr(al, name))
    arguments = {"approximation_error": ["top-r:r=2"], "read": ["standard"], "effective_attention": []}[name]
    with pytest.raises(ValueError, match=r"got BertForMaskedLM.*attnlab\.record\(model\)"):
        function(shipped.model, *arguments)
