"""What swap, record and generate must do in a model of any architecture: ``judge`` says how one fares."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.adapters.protocol import Site
from tests.adapters.architectures import CannotBuild, build, inputs, quiet

__all__ = ["Verdict", "judge"]

TOLERANCE = 1e-4
# A softmax over more than these is one over keys, not over experts.
MOST_EXPERTS = 6
NONE_REACHED, PARTLY_REACHED = "none of its modules", "can be swapped only in part"
Batch = dict[str, Tensor]


@dataclass
class Verdict:
    """How an architecture fares, and why.

    The outcomes: "works"; "in part", where some modules attend outside of transformers' interface and the layers to
    swap must be named; "refused"; "outside" the interface altogether; "no attention" in it; "not built".
    """

    outcome: str
    reason: str = ""
    # Layers that were swapped, those of them whose W was compared with eager attention's, and those that no input of
    # the sweep reaches (the image tower of a model that is given text).
    layers: int = 0
    compared: int = 0
    unreached: int = 0
    # Whether generation with and without a cache was compared.
    generated: bool = False


def judge(kind: str) -> Verdict:
    """The verdict on an architecture; an AssertionError where something is wrong without a refusal."""
    try:
        model = build(kind)
        batch = inputs(model)
    except CannotBuild as error:
        return Verdict("not built", str(error))
    try:
        sites = adapter_of(model).sites()
        with al.swap(model, "softmax"):
            outputs(model, batch)
    except ValueError as error:
        if PARTLY_REACHED in str(error):
            return judge_sites(model, batch, Verdict("in part", str(error)), adapter_of(model).sites())
        if NONE_REACHED in str(error):
            with SoftmaxOverKeys() as seen:
                outputs(model, batch)
            return Verdict("outside" if attention_modules(model) or seen.calls else "no attention")
        with pytest.raises(ValueError, match=re.escape(str(error))), al.record(model):
            outputs(model, batch)
        return Verdict("refused", str(error))
    check_nothing_is_left(model, batch)
    return judge_sites(model, batch, Verdict("works"), sites)


def judge_sites(model: Any, batch: Batch, verdict: Verdict, sites: list[Site]) -> Verdict:
    """The laws at the sites that the batch reaches."""
    trace = recorded(model, batch)
    # Among equal values, and with a single one, it makes no difference which of them gets the weight.
    differ = {layer.name: float((layer.values - layer.values[:, :, :1]).abs().max()) > TOLERANCE for layer in trace}
    reached = [site for site in sites if site.name in differ]
    assert reached, "no layer is reached"
    layers = [(site.kind, site.layer) for site in reached]
    batches = [one for one in (batch, padded(model, batch)) if one is not None]
    for one in batches:
        check_softmax(model, one, layers)
        check_weights(model, one)
    check_each_layer(model, batch, [site for site in reached if differ[site.name]])
    verdict.layers, verdict.unreached = len(reached), len(sites) - len(reached)
    verdict.compared = check_against_eager(model, batches[-1])
    verdict.generated = check_generation(model, batch, layers)
    return verdict


def attention_modules(model: nn.Module) -> list[str]:
    """The modules that attend, by the names of their classes."""
    return [name for name, module in model.named_modules() if "attention" in type(module).__name__.lower()]


def outputs(model: Any, batch: Batch, **options: Any) -> list[Tensor]:
    """The floating-point tensors that the model returns, caches left out."""
    torch.manual_seed(3)
    with torch.no_grad(), quiet():
        answer = model(**batch, **options)
    return list(tensors_in(answer))


def tensors_in(answer: Any) -> Iterator[Tensor]:
    if isinstance(answer, Tensor) and answer.is_floating_point():
        yield answer
    elif isinstance(answer, (list, tuple)):
        for item in answer:
            yield from tensors_in(item)
    elif isinstance(answer, dict):
        for name, item in answer.items():
            if "past_key" not in name and "cache" not in name:
                yield from tensors_in(item)


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, as a part of the largest number of its tensor."""
    assert [t.shape for t in actual] == [t.shape for t in expected], "the outputs have other shapes"
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if e.numel()]
    return max(float((a - e).abs().nan_to_num(torch.inf).max() / e.abs().max().clamp(min=1e-3)) for a, e in pairs)


def padded(model: Any, batch: Batch) -> Batch | None:
    """The batch with the last three tokens of its second row hidden; None for a model that takes no such mask."""
    if "input_ids" not in batch or "attention_mask" not in inspect.signature(model.forward).parameters:
        return None
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -3:] = 0
    return {**batch, "attention_mask": mask}


def of_real_tokens(tensors: list[Tensor], batch: Batch) -> list[Tensor]:
    """The tensors without their rows for padding, which may see nothing here and anything in transformers."""
    mask = batch.get("attention_mask")
    if mask is None:
        return tensors
    return [t[mask.bool()] if t.shape[:2] == mask.shape else t for t in tensors]


def recorded(model: Any, batch: Batch) -> al.Trace:
    with al.record(model, keep="all") as trace:
        outputs(model, batch)
    return trace


def check_softmax(model: Any, batch: Batch, layers: list[tuple[str, int]]) -> None:
    """A swap with softmax gives the model's outputs, and leaves the model as it was."""
    expected = outputs(model, batch)
    assert all(bool(t.isfinite().all()) for t in expected), "the model's own outputs are not finite"
    assert difference(outputs(model, batch), expected) == 0, "the model gives other outputs the second time"
    with al.swap(model, "softmax", layers=layers):
        off = difference(of_real_tokens(outputs(model, batch), batch), of_real_tokens(expected, batch))
    assert off <= TOLERANCE, (
        f"swap(softmax) is off by {off:.1e}, {'padded' if 'attention_mask' in batch else 'unpadded'}"
    )
    assert difference(outputs(model, batch), expected) == 0, "the model is not what it was after the swap"


class SoftmaxOverKeys(TorchFunctionMode):
    """Notes every softmax over keys that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        scores = name.startswith("softmax") and args[0].dim() > 2 and min(args[0].shape[-2:]) > MOST_EXPERTS
        if scores or name == "scaled_dot_product_attention":
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


def check_nothing_is_left(model: Any, batch: Batch) -> None:
    """Under a mechanism without a softmax in all layers, the model computes none over keys."""
    with al.swap(model, "uniform"), SoftmaxOverKeys() as seen:
        outputs(model, batch)
    assert not seen.calls, f"the model attends beside the swap: {seen.calls[0]}"


def check_each_layer(model: Any, batch: Batch, sites: list[Site]) -> None:
    """Another mechanism in one layer alone changes the outputs."""
    expected = outputs(model, batch)
    for site in sites:
        with al.swap(model, "uniform", layers=[(site.kind, site.layer)]):
            off = difference(outputs(model, batch), expected)
        assert off > 1e-6, f"{site.name}: swapping it changes nothing"


def check_weights(model: Any, batch: Batch) -> None:
    """W times the values is the output, and its rows sum to 1, or are zero where a query sees nothing."""
    for layer in recorded(model, batch):
        w = layer.weights()
        seen = w.sum(-1) > 0.5
        assert float((w.sum(-1) - seen.to(w)).abs().max()) <= TOLERANCE, f"{layer.name}: rows of W do not sum to 1"
        mixed = w @ layer.values.repeat_interleave(layer.call.groups, 1)
        off = difference([mixed[seen]], [layer.output[seen]])
        assert off <= TOLERANCE, f"{layer.name}: W @ v is off by {off:.1e}"


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Inside, the model attends by transformers' eager attention."""
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    before = {key: getattr(config, "_attn_implementation", None) for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def check_against_eager(model: Any, batch: Batch) -> int:
    """The recorded W is the one that eager attention returns, with all that it holds: the number of layers compared.

    So windows, chunks, ALiBi and position biases are in it. Not every module returns its W.
    """
    count = 0
    with eager(model):
        returned = returned_weights(model, batch)
        trace = recorded(model, batch)
        for layer in trace:
            calls = trace.history((layer.kind, layer.layer))
            own = returned.get(layer.name, [])
            for call, theirs in zip(calls, own, strict=True) if len(own) == len(calls) else ():
                w = call.weights()
                if theirs is None or theirs.shape != w.shape:
                    continue
                seen = w.sum(-1) > 0.5
                off = float((w - theirs)[seen].abs().max())
                assert off <= TOLERANCE, f"{layer.name}: W is off eager attention's by {off:.1e}"
                count += 1
    return count


def returned_weights(model: Any, batch: Batch) -> dict[str, list[Tensor | None]]:
    """{site: the weights that its module returns, call by call}; empty if eager attention gives the model NaN."""
    returned: dict[str, list[Tensor | None]] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, answer: Any) -> None:
            tensors = [t for t in tensors_in(answer if isinstance(answer, (tuple, list)) else ()) if t.dim() == 4]
            returned.setdefault(name, []).append(tensors[-1] if tensors else None)

        return hook

    hooks = [site.module.register_forward_hook(keep(site.name)) for site in adapter_of(model).sites()]
    asks = "output_attentions" in inspect.signature(model.forward).parameters
    try:
        answers = outputs(model, batch, **({"output_attentions": True} if asks else {}))
    finally:
        for hook in hooks:
            hook.remove()
    return returned if all(bool(t.isfinite().all()) for t in answers) else {}


def check_generation(model: Any, batch: Batch, layers: list[tuple[str, int]]) -> bool:
    """Under a swap, generation with a cache gives the tokens that it gives without one, where the model's own does."""
    if not getattr(model, "can_generate", bool)() or not hasattr(model, "generate"):
        return False
    prompt = {name: t for name, t in batch.items() if name != "decoder_input_ids"}
    limits = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    if model.config.is_encoder_decoder:
        limits["decoder_start_token_id"] = 2

    def generated(*, use_cache: bool) -> Tensor:
        with torch.no_grad(), quiet():
            return model.generate(**prompt, **limits, use_cache=use_cache)

    try:
        own = generated(use_cache=True)
        if not torch.equal(own, generated(use_cache=False)):
            return False
    except Exception:
        # What the model cannot do by itself is no matter of a swap.
        return False
    with al.swap(model, "softmax", layers=layers):
        assert torch.equal(generated(use_cache=True), own), "generate gives other tokens under swap(softmax)"
    with al.swap(model, "top-r:r=3", layers=layers):
        tokens = [generated(use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*tokens), "under a swap, generate gives other tokens with a cache than without one"
    return True
