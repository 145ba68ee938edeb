"""What swap, record and generate must do in a model of any architecture; ``judge`` says how one fares."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import attnlab as al
from attnlab.adapters import adapter_of
from tests.adapters.architectures import CannotBuild, build, inputs, quiet

__all__ = ["Verdict", "judge"]

TOLERANCE = 1e-4
OUTSIDE = ("none of its modules", "can be swapped only in part")
# A softmax over more than these is one over keys.
MOST_EXPERTS = 6
SDPA = torch.nn.functional.scaled_dot_product_attention


@dataclass
class Verdict:
    """How an architecture fares: "works", "refused", "outside", "no attention", "not built"; why, and what was seen."""

    outcome: str
    reason: str = ""
    layers: int = 0
    # Layers whose W is that of eager attention.
    compared: int = 0
    # Layers that no input of the sweep reaches (an image tower that is given text only).
    unreached: int = 0
    generates: bool = False


def judge(kind: str) -> Verdict:
    """The verdict on an architecture; an AssertionError where something is silently wrong."""
    try:
        model = build(kind)
        batch = inputs(model)
    except Exception as error:
        return Verdict("not built", " ".join(f"{type(error).__name__}: {error}".split()))
    try:
        sites = adapter_of(model).sites()
        with al.swap(model, "softmax"):
            outputs(model, batch)
    except ValueError as error:
        outside = any(words in str(error) for words in OUTSIDE)
        if outside and not attention_modules(model):
            return Verdict("no attention")
        return Verdict("outside" if outside else "refused", str(error))
    reached = reached_sites(model, batch)
    verdict = Verdict("works", layers=len(reached), unreached=len(sites) - len(reached))
    assert reached, "no layer is reached"
    check_softmax(model, batch)
    check_nothing_is_left(model, batch)
    check_each_layer(model, batch, reached)
    check_weights(model, batch)
    verdict.compared = check_against_eager(model, batch)
    verdict.generates = check_generation(model, batch)
    return verdict


def attention_modules(model: nn.Module) -> list[str]:
    """The modules that attend, by their class names."""
    return [name for name, module in model.named_modules() if "attention" in type(module).__name__.lower()]


def outputs(model: Any, batch: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """The floating-point tensors that the model returns, caches left out."""
    torch.manual_seed(3)
    with torch.no_grad(), quiet():
        answer = model(**batch, **options)
    flat: list[Tensor] = []

    def add(value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            flat.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, dict):
            for name, item in value.items():
                if "past_key" not in name and "cache" not in name:
                    add(item)

    add(answer)
    return flat


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, as a part of the largest number of its tensor."""
    assert [t.shape for t in actual] == [t.shape for t in expected], "the outputs have other shapes"
    parts = [(a - e).abs().nan_to_num(torch.inf).max() / e.abs().max().clamp(min=1e-3) for a, e in zip(actual, expected, strict=True) if e.numel()]
    return float(max(parts))


def padded(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The batch with its second row's last three tokens hidden; None for a model that takes no such mask."""
    if "input_ids" not in batch or "attention_mask" not in inspect.signature(model.forward).parameters:
        return None
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -3:] = 0
    return {**batch, "attention_mask": mask}


def of_real_tokens(tensors: list[Tensor], batch: dict[str, Tensor]) -> list[Tensor]:
    """The tensors without their rows for padding, which sees nothing here and anything in transformers."""
    mask = batch.get("attention_mask")
    if mask is None:
        return tensors
    return [t[mask.bool()] if t.shape[:2] == mask.shape else t for t in tensors]


def check_softmax(model: Any, batch: dict[str, Tensor]) -> None:
    """A swap with softmax gives the model's outputs, under padding too."""
    for one in (batch, padded(model, batch)):
        if one is None:
            continue
        expected = outputs(model, one)
        assert all(bool(t.isfinite().all()) for t in expected), "the model's own outputs are not finite"
        again = difference(outputs(model, one), expected)
        assert again == 0, f"the model gives other outputs the second time ({again:.1e})"
        with al.swap(model, "softmax"):
            off = difference(of_real_tokens(outputs(model, one), one), of_real_tokens(expected, one))
        what = "under padding" if "attention_mask" in one else ""
        assert off <= TOLERANCE, f"swap(softmax) is off by {off:.1e} {what}"
        assert difference(outputs(model, one), expected) == 0, "the model is not what it was after the swap"


class Unswapped(TorchFunctionMode):
    """Notes every attention that torch computes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SDPA:
            self.calls.append(f"scaled_dot_product_attention {tuple(args[0].shape) if args else ''}")
        if getattr(func, "__name__", "") in ("softmax", "softmax_") and args and args[0].dim() >= 3 and min(args[0].shape[-2:]) > MOST_EXPERTS:
            self.calls.append(f"softmax {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


def check_nothing_is_left(model: Any, batch: dict[str, Tensor]) -> None:
    """Under another mechanism in all layers, no softmax over keys is left in the model."""
    with al.swap(model, "uniform"), Unswapped() as seen:
        outputs(model, batch)
    assert not seen.calls, f"attends beside the swap: {seen.calls[0]}"


def reached_sites(model: Any, batch: dict[str, Tensor]) -> list[tuple[Any, int]]:
    """The sites that the batch reaches, each with the number of its keys."""
    with al.record(model) as trace:
        outputs(model, batch)
    reached = {layer.name: layer.call.k.shape[2] for layer in trace}
    return [(site, reached[site.name]) for site in adapter_of(model).sites() if site.name in reached]


def check_each_layer(model: Any, batch: dict[str, Tensor], sites: list[tuple[Any, int]]) -> None:
    """A mechanism in one layer alone changes the outputs."""
    expected = outputs(model, batch)
    for site, keys in sites:
        with al.swap(model, "uniform", layers=[(site.kind, site.layer)]):
            off = difference(outputs(model, batch), expected)
        # Every mechanism gives a single key all the weight.
        assert off > 1e-6 or keys == 1, f"{site.name}: swapping it changes nothing"


def check_weights(model: Any, batch: dict[str, Tensor]) -> None:
    """W times the values is the output, and its rows sum to 1, or to 0 where a query sees nothing."""
    for one in (batch, padded(model, batch)):
        if one is None:
            continue
        with al.record(model) as trace:
            outputs(model, one)
        for layer in trace:
            w = layer.weights()
            sums = w.sum(-1)
            seen = sums > 0.5
            assert float((sums[seen] - 1).abs().max()) < TOLERANCE, f"{layer.name}: rows of W do not sum to 1"
            assert float(sums[~seen].abs().sum()) == 0, f"{layer.name}: rows of W sum to neither 1 nor 0"
            mixed = w @ layer.values.repeat_interleave(layer.call.groups, 1)
            off = difference([mixed[seen]], [layer.output[seen]])
            assert off <= TOLERANCE, f"{layer.name}: W @ v is off by {off:.1e}"


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Inside, the model attends by this attention of transformers."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def check_against_eager(model: Any, batch: dict[str, Tensor]) -> int:
    """The recorded W is the one that eager attention returns: the number of layers that were compared."""
    count = 0
    for one in (padded(model, batch) or batch,):
        own: dict[str, list[Tensor]] = {}
        modules = dict(model.named_modules())
        with implementation(model, "eager"):
            names = [site.name for site in adapter_of(model).sites()]

            def keep(name: str) -> Any:
                def hook(_module: Any, _args: Any, answer: Any) -> None:
                    tensors = [t for t in (answer if isinstance(answer, tuple) else ()) if isinstance(t, Tensor) and t.dim() == 4]
                    own.setdefault(name, []).append(tensors[-1] if tensors else None)

                return hook

            hooks = [modules[name].register_forward_hook(keep(name)) for name in names]
            try:
                asked = "output_attentions" in inspect.signature(model.forward).parameters
                eager = outputs(model, one, **({"output_attentions": True} if asked else {}))
            finally:
                for hook in hooks:
                    hook.remove()
            if not all(bool(t.isfinite().all()) for t in eager):
                return 0
            with al.record(model, keep="all") as trace:
                outputs(model, one)
            for layer in trace:
                history = trace.history(layer.layer, kind=layer.kind) if False else history_of(trace, layer)
                weights = own.get(layer.name, [])
                if len(weights) != len(history):
                    continue
                for step, w in zip(history, weights, strict=True):
                    expected = step.weights()
                    if w is None or w.shape != expected.shape:
                        continue
                    seen = expected.sum(-1) > 0.5
                    off = float((w[seen] - expected[seen]).abs().max())
                    assert off <= TOLERANCE, f"{layer.name}: W is off eager attention's by {off:.1e}"
                    count += 1
    return count


def history_of(trace: Any, layer: Any) -> Any:
    return trace.history((layer.kind, layer.layer))


def check_generation(model: Any, batch: dict[str, Tensor]) -> bool:
    """Generation with a cache gives the tokens that it gives without one, if the model's own does."""
    if not getattr(model, "can_generate", lambda: False)() or not hasattr(model, "generate"):
        return False
    given = {name: t for name, t in batch.items() if name != "decoder_input_ids"}

    def generated(use_cache: bool) -> Tensor:
        torch.manual_seed(3)
        with torch.no_grad(), quiet():
            return model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False, num_beams=1, use_cache=use_cache)

    try:
        own = [generated(use_cache) for use_cache in (True, False)]
    except Exception:
        return False
    if not torch.equal(*own):
        return False
    with al.swap(model, "softmax"):
        assert torch.equal(generated(True), own[0]), "generate under swap(softmax) gives other tokens"
    with al.swap(model, "top-r:r=3"):
        assert torch.equal(generated(True), generated(False)), "generate with and without a cache differ under a swap"
    return True
