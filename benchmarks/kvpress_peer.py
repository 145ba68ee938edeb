"""The keys that kvpress keeps; run by kvpress_parity.py in an environment that has kvpress and no attnlab.

    python kvpress_peer.py TASK ANSWER

TASK is a JSON file: a model's folder, prompts as token ids, and cases of a press with its settings. ANSWER gets, for
each case and prompt, the kept positions of every layer and head. They are found by the keys themselves: those left in
the cache are looked up among those of a cache without a press.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


def main() -> None:
    task, answer = map(Path, sys.argv[1:])
    asked = json.loads(task.read_text(encoding="utf-8"))
    models = {
        way: AutoModelForCausalLM.from_pretrained(asked["model"], attn_implementation=way, dtype=torch.float32).eval()
        for way in ("sdpa", "eager")
    }
    prompts = [torch.tensor([ids]) for ids in asked["prompts"]]
    whole = {way: [whole_cache(model, ids) for ids in prompts] for way, model in models.items()}
    kept = []
    for case in asked["cases"]:
        way = "eager" if case.get("eager") else "sdpa"
        pairs = zip(prompts, whole[way], strict=True)
        kept.append([positions(models[way], made(case), ids, every) for ids, every in pairs])
    versions = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    answer.write_text(json.dumps({"kept": kept, "versions": versions}), encoding="utf-8")


@torch.no_grad()
def whole_cache(model: Any, ids: Tensor) -> Any:
    """The cache of a prompt without a press."""
    cache = DynamicCache()
    model.model(ids, past_key_values=cache)
    return cache


def made(case: dict[str, Any]) -> Any:
    """The press of a case; one inside another has the compression ratio."""
    inner = [made(case["inner"])] if "inner" in case else []
    return getattr(kvpress, case["press"])(*inner, **case.get("settings", {}))


@torch.no_grad()
def positions(model: Any, press: Any, ids: Tensor, whole: Any) -> list[list[list[int]]]:
    """For each layer and head, the kept positions in order; ``whole`` is the cache without a press."""
    cache = DynamicCache()
    with press(model):
        model.model(ids, past_key_values=cache)
    layers = []
    for number, layer in enumerate(model.model.layers):
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        every = whole.layers[number].keys[0]
        if masked is None:
            layers.append([looked_up(own, left) for own, left in zip(every, cache.layers[number].keys[0], strict=True)])
            continue
        # A press that lets heads share a budget drops no key, and names those that are hidden.
        keep = torch.ones(every.shape[:2], dtype=torch.bool)
        keep[masked[1], masked[2]] = False
        layers.append([row.nonzero()[:, 0].tolist() for row in keep])
        layer.self_attn.masked_key_indices = None
    return layers


def looked_up(every: Tensor, left: Tensor) -> list[int]:
    """The positions of these keys of a head."""
    same = (left[:, None] == every).all(-1)
    assert same.any(-1).all(), "a key that is left is not one of the prompt's"
    return sorted(same.int().argmax(-1).tolist())


if __name__ == "__main__":
    main()
