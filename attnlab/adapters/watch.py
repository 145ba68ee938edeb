"""``watch``: statistics of a model's attention at any length, computed in the attention's own pass and without W."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnlab.adapters.module_state import evicts
from attnlab.adapters.protocol import Frame, Layers, Site, adapter_of, select
from attnlab.adapters.watched import AttentionStatistics, LayerStatistics
from attnlab.attention import AttentionCall, Mechanism
from attnlab.fields import check_int
from attnlab.linalg.streaming import CallStatistics, Measures, Text, attention_statistics
from attnlab.mechanisms._device import no_autocast
from attnlab.mechanisms.softmax import Softmax
from attnlab.shapes import Bool
from attnlab.summaries import short_repr
from attnlab.trace import Kind

__all__ = ["watch"]

# Squares of the map are multiples of this, and a map has about so many rows and columns.
SQUARE, SQUARES = 64, 128
# Fields of a call's statistics that have a row for each query.
ROWS = tuple(f.name for f in dataclasses.fields(CallStatistics) if f.name not in ("received", "block_mass"))
MASKED = (
    "a mask shows each query keys of its own, and the share is computed where they are all keys or all earlier ones"
)
OTHER_TEXT = "in cross-attention a query has no place among the keys"


@contextmanager
def watch(
    model: nn.Module,
    *,
    layers: Layers = None,
    largest: int = 8,
    sinks: int = 4,
    recent: int = 64,
    sets: Mapping[str, Tensor] | None = None,
    norm: bool = True,
    removed: bool = True,
    received: bool = True,
    block: int | None = None,
) -> Iterator[AttentionStatistics]:
    """Inside the context, every forward pass fills the statistics of each layer (``LayerStatistics``), on the CPU.

    W is never made: memory grows with the length, not with its square. ``largest`` weights of each query are kept;
    ``sinks`` and ``recent`` are how many first and last keys count as such; ``sets`` names sets of keys by boolean
    masks over the tokens, (n,) or (b, n), and tokens beyond a mask's end are in none. In an encoder-decoder sets are of
    the source text. ``norm``, ``removed`` and ``received`` can be left out, and so can the map of squares of ``block``
    tokens with ``block=0``. While a model generates, each step adds its query to those of the prompt.

    >>> from attnlab.models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(kind="decoder", vocab=11, width=8, heads=2, layers=2))
    >>> with watch(model, sets={"start": torch.tensor([True, True, False])}) as statistics:
    ...     output = model(torch.tensor([[1, 2, 3]]))
    >>> statistics[1].entropy.shape, round(float(statistics[1].sets["start"][0, 0, 1]), 4)
    (torch.Size([1, 2, 3]), 1.0)
    """
    numbers = {"largest": largest, "sinks": sinks, "recent": recent, "block": 0 if block is None else block}
    _check_numbers(numbers)
    measures = Measures(**numbers, norm=norm, removed=removed, received=received)
    adapter = adapter_of(model)
    sites = adapter.sites()
    chosen = select(sites, layers)
    watcher = _Watcher(measures, _masks({} if sets is None else sets), choose_block=block is None)
    watcher.source_sets = any(site.kind == "cross" for site in sites)
    frames = dict.fromkeys(chosen, Frame(note=watcher.note, attend=watcher.attend))
    # A step of cross-attention is known by the decoder's own, so these count queries even where they are not chosen.
    counted = [site for site in sites if site.kind == "decoder" and site not in frames]
    if any(site.kind == "cross" for site in chosen):
        frames |= dict.fromkeys(counted, Frame(note=watcher.count))
    with adapter.attach(frames):
        yield AttentionStatistics(watcher, measures=measures, metadata={"model": type(model).__name__})


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    for name, number in numbers.items():
        check_int(name, number, least=1 if name == "largest" else 0)
    if numbers["block"] % SQUARE:
        raise ValueError(f"block must be a multiple of {SQUARE} tokens, or 0 for no map, got {numbers['block']}")


def _masks(sets: Any) -> dict[str, Bool[Tensor, "r n"]]:
    """The sets of keys as (1 or b, n)."""
    if not isinstance(sets, Mapping):
        raise ValueError(f"sets must be {{name: boolean mask over the tokens}}, got {type(sets).__name__}")
    masks = {}
    for name, mask in sets.items():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() not in (1, 2):
            kind = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the set {name!r} must be a boolean mask over tokens, (n,) or (b, n), got {kind}")
        masks[str(name)] = mask if mask.dim() == 2 else mask[None]
    return masks


@dataclass(eq=False)
class _Pass:
    """One forward pass of a layer and the decoding steps that continue it."""

    site: Site
    texts: int
    heads: int
    first: int
    block: int
    names: list[str]
    queries: int = 0
    keys: int = 0
    parts: list[CallStatistics] = dataclasses.field(default_factory=list)
    received: Tensor | None = None
    block_mass: Tensor | None = None
    # Which tokens of the text were visible as keys; None where all were.
    shown: Tensor | None = None
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    # Statistics of the last call that are on their way to the CPU, and the first key of that call.
    coming: tuple[_Copy, int] | None = None

    __repr__ = short_repr

    def dropped(self, site: Site, call: AttentionCall) -> int:
        """How many of the text's first keys a sliding window's cache no longer holds."""
        return max(0, self.first + self.queries - _offset(site, call)) if site.kind == "decoder" else 0

    def show(self, call: AttentionCall, first_key: int) -> Tensor | None:
        """Note which keys are visible; the number of those before ``first_key``, where there are any."""
        if call.key_visible is not None or self.shown is not None:
            b, _, _, n_k = call.sizes
            now = call.q.new_ones(b, n_k, dtype=torch.bool) if call.key_visible is None else call.key_visible
            before = now[:, :0] if self.shown is None else self.shown[:, :first_key]
            before = pad(before, (0, first_key - before.shape[1]), value=True)
            self.shown = torch.cat([before, now], 1)
        if not first_key:
            return None
        if self.shown is None:
            return torch.full((call.q.shape[0],), first_key, device=call.q.device)
        return self.shown[:, :first_key].sum(1)

    def add(self, part: CallStatistics, first_key: int) -> None:
        """The statistics of the next queries, copied while the model goes on."""
        self._arrive()
        self.queries += part.entropy.shape[2]
        self.coming = _Copy(part), first_key

    def _arrive(self) -> None:
        """Take in the statistics that were on their way."""
        if self.coming is None:
            return
        (copy, first_key), self.coming = self.coming, None
        part = copy.result()
        answered = self.queries - part.entropy.shape[2]
        row = (self.first + answered) // self.block - self.first // self.block if self.block else 0
        if first_key:
            moved = {name: _moved(getattr(part, name), first_key) for name in ("places", "norm_places")}
            received = None if part.received is None else pad(part.received, (first_key, 0))
            part = replace(part, **moved, received=received)  # type: ignore[arg-type]
        self.received = _sum(self.received, part.received)
        self.block_mass = _sum(self.block_mass, part.block_mass, row)
        self.parts.append(replace(part, received=None, block_mass=None))

    def result(self) -> LayerStatistics:
        """What was watched so far."""
        self._arrive()
        if len(self.parts) > 1:
            columns = {name: [getattr(part, name) for part in self.parts] for name in ROWS}
            whole = {n: None if any(t is None for t in ts) else torch.cat(ts, 2) for n, ts in columns.items()}
            self.parts = [CallStatistics(**whole, received=None, block_mass=None)]  # type: ignore[arg-type]
        (part,) = self.parts
        rows = {name: getattr(part, name) for name in ROWS if name != "sets"}
        return LayerStatistics(
            kind=self.site.kind,
            layer=self.site.layer,
            name=self.site.name,
            first=self.first,
            **rows,
            sets={name: part.sets[..., i] for i, name in enumerate(self.names)},
            received=self.received,
            blocks=self._means(),
            block=self.block,
            missing=dict(self.missing),
        )

    def _means(self) -> Tensor | None:
        """Sums divided by the pairs of a square; the last squares have fewer."""
        if self.block_mass is None:
            return None
        start = self.first - self.first % self.block
        rows = _sizes(self.first, self.first + self.queries, start, self.block, self.block_mass.shape[2])
        keys = _sizes(0, self.keys, 0, self.block, self.block_mass.shape[3])
        return self.block_mass / (rows[:, None] * keys).to(self.block_mass)


def _moved(places: Tensor | None, first_key: int) -> Tensor | None:
    """Places among the keys of a call as places in the text."""
    return None if places is None else torch.where(places < 0, places, places + first_key)


def _sizes(first: int, end: int, start: int, block: int, count: int) -> Tensor:
    """How many of the numbers from ``first`` to ``end`` lie in each of ``count`` blocks that begin at ``start``."""
    borders = start + block * torch.arange(count + 1)
    return borders.clamp(first, end).diff().clamp(min=1)


def _sum(total: Tensor | None, part: Tensor | None, row: int = 0) -> Tensor | None:
    """The sum of two arrays whose last axes may have grown; ``part`` begins at ``row`` of the last axis but one."""
    if part is None or total is None:
        return total if part is None else part
    if part.dim() == 4:
        part = pad(part, (0, 0, row, 0))
        rows = max(total.shape[2], part.shape[2])
        total, part = (pad(t, (0, 0, 0, rows - t.shape[2])) for t in (total, part))
    n = max(total.shape[-1], part.shape[-1])
    return pad(total, (0, n - total.shape[-1])) + pad(part, (0, n - part.shape[-1]))


class _Watcher:
    """Computes the statistics of calls and keeps those of the last pass of each layer."""

    # In an encoder-decoder, sets are of the source text.
    source_sets = False

    def __init__(self, measures: Measures, masks: dict[str, Tensor], *, choose_block: bool) -> None:
        self.measures, self.masks, self.choose_block = measures, masks, choose_block
        self.passes: dict[tuple[Kind, int], _Pass] = {}
        # How many queries of its text each layer of a decoder has answered.
        self.answered: dict[int, int] = {}
        self.attended: AttentionCall | None = None

    def __iter__(self) -> Iterator[LayerStatistics]:
        return (watched.result() for watched in self.passes.values())

    def attend(self, site: Site, call: AttentionCall, mech: Mechanism) -> Tensor | None:
        """Statistics and output in one pass, where softmax attention runs without gradients and hides nothing else."""
        hides = call.key_visible is not None or call.mask is not None or call.bias is not None
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (call.q, call.k, call.v))
        if type(mech) is not Softmax or hides or learns or call.q.shape[2] == 0:
            return None
        self.attended = call
        return self._add(site, call, mech).to(call.q.dtype)

    def note(self, site: Site, call: AttentionCall, mech: Mechanism, _output: Tensor) -> None:
        """Statistics of a call whose output was computed elsewhere."""
        if self.attended is call or call.q.shape[2] == 0:
            self.attended = None
            return
        self._add(site, call, mech)

    def count(self, site: Site, call: AttentionCall, _mech: Mechanism, _output: Tensor) -> None:
        """Only count the queries of a decoder's layer."""
        self.answered[site.layer] = _offset(site, call) + call.q.shape[2]

    @torch.no_grad()
    def _add(self, site: Site, call: AttentionCall, mech: Mechanism) -> Tensor:
        watched = self._pass_of(site, call)
        first_key = watched.dropped(site, call)
        text = Text(
            self._members(site, call, first_key),
            watched.first + watched.queries,
            first_key,
            watched.show(call, first_key),
            own_keys=site.kind != "cross",
        )
        measures = replace(self.measures, block=watched.block)
        with no_autocast(call.q):
            statistics, output = attention_statistics(call, mech, measures, text, softmax=type(mech) is Softmax)
        watched.keys = max(watched.keys, first_key + call.k.shape[2])
        if measures.removed and statistics.removed is None:
            watched.missing["removed"] = MASKED
        watched.add(statistics, first_key)
        self.passes[site.kind, site.layer] = watched
        if site.kind == "decoder":
            self.answered[site.layer] = watched.first + watched.queries
        return output

    def _pass_of(self, site: Site, call: AttentionCall) -> _Pass:
        """The pass that a call continues, or a new one."""
        before = self.passes.get((site.kind, site.layer))
        offset = _offset(site, call)
        if site.kind == "cross" and before is not None:
            offset = self.answered.get(site.layer, 0) - call.q.shape[2]
        reached = 0 if before is None else before.first + before.queries
        # A sliding window's cache drops the keys that have left the window, and then holds fewer than were read.
        if before is not None and offset and (offset == reached or (offset < reached and _slides(site))):
            b = before.texts
            if (b, before.heads) != call.q.shape[:2]:
                raise ValueError(
                    f"{b} texts were watched, and the decoding step that continues them has {call.q.shape[0]}; watch "
                    "generation without changing the batch"
                )
            return before
        if before is not None and offset:
            raise ValueError(
                f"a call continues a text at token {offset}, but the last watched query is {reached - 1}: the cache "
                "lost keys or was used outside of this context, or the layer attends more than once in a pass; watch "
                "one text at a time, without evicting its keys"
            )
        missing = {"recent": OTHER_TEXT, "distance": OTHER_TEXT} if site.kind == "cross" else {}
        names = list(self.masks) if self._has_sets(site) else []
        b, h, n_q, _ = call.q.shape
        return _Pass(site, b, h, offset, self._block(offset + n_q), names, missing=missing)

    def _block(self, length: int) -> int:
        """The side of a square: as asked, or such that the map has at most ``SQUARES`` rows."""
        return SQUARE * max(1, -(-length // (SQUARE * SQUARES))) if self.choose_block else self.measures.block

    def _has_sets(self, site: Site) -> bool:
        return site.kind != "decoder" or not self.source_sets

    def _members(self, site: Site, call: AttentionCall, first_key: int) -> Bool[Tensor, "r k m"]:
        """The sets of the call's keys; those beyond a mask's end are in none."""
        b, _, _, n_k = call.sizes
        masks = self.masks if self._has_sets(site) else {}
        for name, mask in masks.items():
            if mask.shape[0] not in (1, b):
                raise ValueError(f"the set {name!r} has masks for {mask.shape[0]} texts, and the model reads {b}")
        kept = [mask[:, first_key : first_key + n_k] for mask in masks.values()]
        kept = [pad(mask, (0, n_k - mask.shape[1])).expand(b, -1) for mask in kept]
        stacked = torch.stack(kept, -1) if kept else torch.zeros(1, n_k, 0, dtype=torch.bool)
        return stacked.to(call.q.device)


def _offset(site: Site, call: AttentionCall) -> int:
    """How many tokens of the queries' text came before the call."""
    if site.kind != "decoder":
        return 0
    return call.offset if call.causal else call.k.shape[2] - call.q.shape[2]


def _slides(site: Site) -> bool:
    """Whether the model's own cache drops keys of this layer."""
    if evicts(site.module):
        return False
    owners = (site.module, getattr(site.module, "config", None))
    return any(
        getattr(o, name, None) is not None for o in owners for name in ("sliding_window", "attention_chunk_size")
    )


class _Copy:
    """Statistics copied to the CPU; from a GPU into pinned memory, without a wait of the host for the device."""

    def __init__(self, statistics: CallStatistics) -> None:
        fields = {f.name: getattr(statistics, f.name) for f in dataclasses.fields(CallStatistics)}
        self.fields = {name: None if t is None else _to_cpu(t) for name, t in fields.items()}
        self.copied = (
            torch.cuda.current_stream(statistics.entropy.device).record_event() if statistics.entropy.is_cuda else None
        )

    def result(self) -> CallStatistics:
        """The copies, complete."""
        if self.copied is not None:
            self.copied.synchronize()
        return CallStatistics(**self.fields)  # type: ignore[arg-type]


def _to_cpu(t: Tensor) -> Tensor:
    kind = torch.float32 if t.is_floating_point() else torch.int32
    if not t.is_cuda:
        return t.to("cpu", kind)
    return torch.empty(t.shape, dtype=kind, pin_memory=True).copy_(t.to(kind), non_blocking=True)
