"""What each mechanism would cost each key/value head of a model, from recorded calls and one gradient of the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from attnlab.adapters.initialise import ControlStart
from attnlab.adapters.protocol import Frame, Site, adapter_of
from attnlab.attention import AttentionCall, Mechanism
from attnlab.data import IGNORED
from attnlab.evaluation.quality import Windows
from attnlab.evaluation.sensitivity import detached, estimated_increase
from attnlab.mechanisms._device import to_model_device
from attnlab.registry import mechanism
from attnlab.shapes import Float
from attnlab.summaries import short_repr
from attnlab.trace import Kind

__all__ = ["Place", "RecordedCosts", "mechanisms_of", "record_costs", "start_controls", "started_candidates"]

# The last number in the name of a site ends the name of its block: model.layers.3.self_attn is in model.layers.3.
BLOCK = re.compile(r"(.*\.\d+)(\.|$)")
Place = tuple[Kind, int]
# The mechanisms of a layer by their specs.
Candidates = Mapping[Place, Mapping[str, Mechanism]]


@dataclass(eq=False)
class RecordedCosts:
    """Sums over windows for each layer and mechanism, one number per key/value head; ``predicted`` tokens in all."""

    first: dict[tuple[Place, str], Tensor] = field(default_factory=dict)
    second: dict[tuple[Place, str], Tensor] = field(default_factory=dict)
    error: dict[tuple[Place, str], Tensor] = field(default_factory=dict)
    # |W_O o|^2 of each layer.
    output: dict[Place, float] = field(default_factory=dict)
    refusals: dict[tuple[Place, str], str] = field(default_factory=dict)
    predicted: int = 0

    __repr__ = short_repr

    def add(self, place: Place, spec: str, first: Tensor, second: Tensor, error: Tensor) -> None:
        """Count one call in."""
        for sums, new in ((self.first, first), (self.second, second), (self.error, error)):
            sums[place, spec] = sums.get((place, spec), torch.zeros(())) + new.double().cpu()


def record_costs(
    model: nn.Module,
    windows: Windows,
    candidates: Candidates,
    *,
    after_layer: Callable[[], None] = lambda: None,
) -> RecordedCosts:
    """The costs of every candidate on windows that are each read once and alone.

    No more than one layer's activations and calls are held at a time: blocks are run again in the backward pass, and a
    layer's candidates are tried when the gradient of its output arrives.
    """
    costs = RecordedCosts()
    adapter = adapter_of(model)
    sites = adapter.sites()
    with _frozen(model), _blocks_run_again(model, sites) as run_again:
        for ids, labels in zip(windows.input_ids, windows.labels, strict=True):
            window = _Window(costs, candidates, run_again, after_layer)
            with torch.enable_grad(), adapter.attach(dict.fromkeys(sites, Frame(note=window.note))):
                logits = adapter.logits(ids[None])[0, :-1]
                following = labels[1:]
                loss = cross_entropy(logits.float(), following, ignore_index=IGNORED, reduction="sum")
                del logits
                window.backward = True
                loss.backward()
            costs.predicted += int((following != IGNORED).sum())
    return costs


def start_controls(model: nn.Module, windows: Windows, mechanisms: Sequence[Mapping[Place, Mechanism]]) -> None:
    """Let the controls of mechanisms, by the layers they are for, begin from the model's own calls on these windows."""
    adapter, start = adapter_of(model), ControlStart()

    def note(site: Site, call: AttentionCall, _mech: Mechanism, _output: Tensor) -> None:
        place = site.kind, site.layer
        for mech in (of_layers[place] for of_layers in mechanisms if place in of_layers):
            # A call that is refused here is refused again, with its reason, where costs are measured.
            with suppress(ValueError):
                start.observe(mech, call)

    with torch.no_grad(), adapter.attach(dict.fromkeys(adapter.sites(), Frame(note=note))):
        for ids in windows.input_ids:
            adapter.logits(ids[None])
    start.begin()


def mechanisms_of(model: nn.Module, specs: Mapping[Place, str]) -> dict[Place, Mechanism]:
    """A mechanism for each layer, on the model's device."""
    return {place: to_model_device(model, mechanism(spec).in_layer(*place)) for place, spec in specs.items()}


def started_candidates(model: nn.Module, windows: Windows, specs: Sequence[str]) -> Candidates:
    """Each spec's mechanism for each layer of the model, its control begun on these windows."""
    places = [(site.kind, site.layer) for site in adapter_of(model).sites()]
    by_spec = {spec: mechanisms_of(model, dict.fromkeys(places, spec)) for spec in specs}
    start_controls(model, windows, list(by_spec.values()))
    return {place: {spec: of_layers[place] for spec, of_layers in by_spec.items()} for place in places}


@dataclass(eq=False)
class _Window:
    """The calls of one window, from the forward pass to the gradients of their outputs."""

    costs: RecordedCosts
    candidates: Candidates
    # The sites whose blocks are run again in the backward pass.
    run_again: set[Site]
    after_layer: Callable[[], None]
    backward: bool = False
    calls: dict[Site, tuple[AttentionCall, Tensor]] = field(default_factory=dict)
    noted: set[Site] = field(default_factory=set)

    def note(self, site: Site, call: AttentionCall, _mech: Mechanism, output: Tensor) -> None:
        # All parameters are frozen, so that the graph begins at the first layer's output.
        if not output.requires_grad:
            output.requires_grad_()
        if not self.backward:
            if site in self.noted:
                raise ValueError(
                    f"{site.name} attends more than once in a forward pass, and the cost of a mechanism in one call "
                    "alone is not known; take a model whose layers attend once"
                )
            self.noted.add(site)
            output.register_hook(lambda slope: self._arrived(site, slope))
        if self.backward or site not in self.run_again:
            self.calls[site] = detached(call), output.detach()

    def _arrived(self, site: Site, slope: Tensor) -> None:
        call, output = self.calls.pop(site)
        with torch.no_grad():
            _try_candidates(self.costs, self.candidates, site, call, output, slope)
        self.after_layer()


def _try_candidates(
    costs: RecordedCosts, candidates: Candidates, site: Site, call: AttentionCall, output: Tensor, slope: Tensor
) -> None:
    """Count the error of each candidate in a recorded call, and its effect on the loss."""
    place, heads = (site.kind, site.layer), call.groups
    gram = _gram(site, output)
    costs.output[place] = costs.output.get(place, 0.0) + float(_squared(output, gram, output.shape[1]))
    for spec, mech in candidates[place].items():
        if (place, spec) in costs.refusals:
            continue
        try:
            off = mech(call) - output
        except ValueError as refusal:
            costs.refusals[place, spec] = str(refusal)
            continue
        costs.add(place, spec, *estimated_increase(slope, off, heads=heads), _squared(off, gram, heads))


def _gram(site: Site, output: Float[Tensor, "b h q e"]) -> Float[Tensor, "w w"] | None:
    """W_O^T W_O, from which |W_O o|^2 follows; None where W_O is unknown."""
    _, h, _, e = output.shape
    projection = site.projection(h * e)
    return None if projection is None else projection.float().mT @ projection.float()


def _squared(t: Float[Tensor, "b h q e"], gram: Tensor | None, heads: int) -> Float[Tensor, " u"]:
    """|W_O t|^2 of each unit of ``heads`` neighbouring heads."""
    rows = t.float().transpose(1, 2).flatten(0, 1).unflatten(1, (-1, heads)).flatten(2)  # (b q, u, heads e)
    if gram is None:
        return rows.square().sum((0, 2))
    units, width = rows.shape[1:]
    own = gram.unflatten(0, (units, width)).unflatten(2, (units, width)).diagonal(dim1=0, dim2=2)  # (w, w, u)
    return ((rows.transpose(0, 1) @ own.permute(2, 0, 1)) * rows.transpose(0, 1)).sum((1, 2))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and its parameters get no gradients."""
    learning, training = [p for p in model.parameters() if p.requires_grad], model.training
    try:
        model.eval().requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_()
        model.train(training)


@contextmanager
def _blocks_run_again(model: nn.Module, sites: Sequence[Site]) -> Iterator[set[Site]]:
    """Inside, the blocks around these sites keep no activations; yields the sites that are in such blocks."""
    modules = dict(model.named_modules())
    named = {site: match[1] for site in sites if (match := BLOCK.match(site.name))}
    blocks = {name: modules[name] for name in named.values()}
    with ExitStack() as undo:
        for block in blocks.values():
            undo.callback(_restore_forward, block, block.__dict__.get("forward"))
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield set(named)


def _restore_forward(block: nn.Module, before: Any) -> None:
    del block.forward
    if before is not None:
        block.forward = before
