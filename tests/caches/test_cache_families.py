"""Laws over every family of decoders: with all keys a policy changes nothing; a dropped key is a hidden one."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import attnlab as al
from attnlab.caches import KVPolicy
from tests.adapters.test_families import DECODERS, NO_EVICTION, decoded
from tests.adapters.zoo import build, inputs
from tests.caches.policies import EXAMPLES
from tests.tolerance import assert_close

NAMES = [name for name in DECODERS if name not in NO_EVICTION]
# Each family with so many of the policies; every policy meets several families.
POLICIES_A_FAMILY = 4
TURNS = itertools.cycle(EXAMPLES)
CASES = [(name, spec) for name in NAMES for spec in itertools.islice(TURNS, POLICIES_A_FAMILY)]
# What a policy says where it cannot honour a model.
REFUSALS = r"cannot take this call|must turn queries|turns .* of a query|turns them in a way of its own"


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_with_all_keys_the_logits_are_the_models_or_the_policy_refuses(name: str, spec: str) -> None:
    model = build(name)
    ids = inputs(model)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    policy = KVPolicy(99, by=spec)
    logits, refused = None, ""
    try:
        with al.evicting(model, policy) as cache:
            logits = decoded(model, ids, cache)
    except ValueError as error:
        refused = str(error)
    if logits is None:
        assert re.search(REFUSALS, refused), refused
        return
    assert_close(logits, expected)


# Families that count positions by the mask: with a hidden token, later ones stand elsewhere.
MASK_MOVES = ("bloom", "falcon_alibi")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MASK_MOVES])
def test_what_is_dropped_from_a_prompt_is_what_a_mask_hides(name: str) -> None:
    """By the model's own attention, for a question of three tokens and a step: windows and biases stay as they are."""
    model = build(name).double() if name != "xglm" else build(name)
    ids = inputs(model)["input_ids"][:, :11]
    shown = torch.ones_like(ids)
    shown[:, 2:4] = 0
    positions = torch.arange(11).expand_as(ids)

    def read(cache: Any, **texts: Tensor) -> list[Tensor]:
        logits = []
        for lo, hi in ((0, 7), (7, 10), (10, 11)):
            # Without a mask the prompt attends to itself whole.
            more = {key: t[:, :hi] for key, t in texts.items()} if lo else {}
            logits.append(model(ids[:, lo:hi], past_key_values=cache, position_ids=positions[:, lo:hi], **more).logits)
        return logits

    with torch.no_grad():
        expected = read(DynamicCache(), attention_mask=shown)
        with al.evicting(model, "streaming-llm:budget=5,sinks=2,when=prefill") as cache:
            logits = read(cache)
    for part, other in zip(logits, expected, strict=True):
        # Some families compute weights in float32 whatever the model's numbers are.
        assert_close(part, other, dtype=torch.float32)
