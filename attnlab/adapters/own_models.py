"""Models with our attention layers as the protocol sees them: our Transformer, and modules that hold such layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.evict import refuse_other_attention
from attnlab.adapters.protocol import Conversion, Frame, Groups, ModelAdapter, Site
from attnlab.attention import AttentionCall, Mechanism
from attnlab.caches.contract import Place
from attnlab.caches.kept_keys import KeptKeys
from attnlab.caches.kv_policy import KVPolicy
from attnlab.caches.layers import KeysOfLayers, LayerPool
from attnlab.mechanisms._device import to_model_device
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.attention import AttentionLayer, put_mechanism
from attnlab.models.cache import Cache, KeyValueCache
from attnlab.models.config import FIELDS, Kind, specs_per_layer
from attnlab.models.positions import count_positions, rotate
from attnlab.models.transformer import Transformer
from attnlab.registry import spec_of
from attnlab.shapes import Bool, Float, Int

__all__ = ["OwnModel"]


class OwnModel(ModelAdapter):
    """A model whose attention layers are ``attnlab.models.AttentionLayer``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether the model holds such a layer."""
        return any(isinstance(module, AttentionLayer) for module in model.modules())

    def sites(self) -> list[Site]:
        """Its attention layers by their own numbers; counted in order where a number would occur twice."""
        layers = [(name, m) for name, m in self.model.named_modules() if isinstance(m, AttentionLayer)]
        unique = len({(layer.kind, layer.layer) for _, layer in layers}) == len(layers)
        counts: Counter[Kind] = Counter()
        sites = []
        for name, layer in layers:
            number = layer.layer if unique else counts[layer.kind]
            counts[layer.kind] += 1
            sites.append(Site(layer, layer.kind, number, name, layer.out))
        return sites

    @contextmanager
    def attach(self, frames: Mapping[Site, Frame]) -> Iterator[None]:
        """Give each layer its frame's mechanism and note."""
        with ExitStack() as undo:
            for site, frame in frames.items():
                layer = _layer_of(site)
                if frame.mechanism is not None:
                    layer.replacements.add(frame.mechanism)
                    undo.callback(layer.replacements.remove, frame.mechanism)
                if frame.note is not None:
                    observer = _Noting(site, frame)
                    layer.observers.add(observer)
                    undo.callback(layer.observers.remove, observer)
            yield

    def mechanism_at(self, site: Site) -> Mechanism:
        """The innermost swap, or the layer's own mechanism."""
        return _layer_of(site).current_mechanism()

    def conversions(self) -> Sequence[Conversion]:
        """The layers whose own mechanism is not softmax."""
        layers = [(site, _layer_of(site).mechanism) for site in self.sites()]
        return [
            Conversion(mech, site.kind, site.layer, site.name) for site, mech in layers if type(mech) is not Softmax
        ]

    def convert(self, groups: Groups, *, drop_bias: bool, example: Mapping[str, Any] | None) -> None:
        """Make the mechanisms submodules of their layers, and name them in the config."""
        model = self._transformer("be converted", "make it with these mechanisms in its config")
        config = _config_with(model, groups)
        placed = [(_layer_of(site), to_model_device(model, mech)) for mech, sites in groups.values() for site in sites]
        before = [(layer, layer.mechanism) for layer, _ in placed]
        first = next(model.parameters())
        for layer, mech in placed:
            put_mechanism(layer, mech)
        try:
            # Mechanisms make their parameters here, and refuse what they cannot do.
            model.run_once(example)
        except BaseException:
            for layer, mech in before:
                put_mechanism(layer, mech)
            raise
        for _, mech in placed:
            if isinstance(mech, nn.Module):
                mech.to(first.device, first.dtype).train(model.training)
        for module in (model, model.encoder, model.decoder):
            if module is not None:
                module.config = config

    @contextmanager
    def evicting_cache(self, policy: KVPolicy) -> Iterator[Any]:
        """A cache for ``model(ids, cache=cache)`` and the searches."""
        model = self._transformer("evict keys", "only its caches can be bounded")
        decoder = [site for site in self.sites() if site.kind == "decoder"]
        if not decoder:
            raise ValueError("a transformer of kind 'encoder' does not decode, so it has no cache to evict from")
        for site in decoder:
            refuse_other_attention(site.name, self.mechanism_at(site))
        if policy.score.reads_twice:
            raise ValueError(
                f"the cache policy {policy.by!r} reads a prompt twice, which models of attnlab.models cannot; choose "
                "another policy"
            )
        yield _EvictingCache(model, policy, decoder)

    def logits(self, ids: Int[Tensor, "b q"], *, cache: Any = None) -> Float[Tensor, "b q v"]:
        """The model's logits."""
        return self.model(ids, cache=cache).logits if cache is not None else self.model(ids).logits

    def _transformer(self, what: str, instead: str) -> Transformer:
        if not isinstance(self.model, Transformer):
            raise ValueError(
                f"{type(self.model).__name__} cannot {what}: of the models with our attention layers only "
                f"attnlab.models.Transformer can; {instead}"
            )
        return self.model


class _Noting:
    """Calls a frame's note as a layer's observer."""

    def __init__(self, site: Site, frame: Frame) -> None:
        self.site, self.frame = site, frame

    def __call__(self, _layer: AttentionLayer, call: AttentionCall, mech: Mechanism, output: Tensor) -> None:
        assert self.frame.note is not None
        self.frame.note(self.site, call, mech, output)


class _EvictingKeyValues(KeyValueCache):
    """The keys and values of one layer that a policy keeps."""

    def __init__(self, site: Site, layers: int, policy: KVPolicy, pool: LayerPool) -> None:
        super().__init__(0)
        self.site, self.layers, self.kept = site, layers, KeptKeys(policy, site.layer, pool)

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Bool[Tensor, "b k"] | None
    ) -> tuple[AttentionCall, Tensor]:
        """Attend over the keys that are left and the call's own, then evict."""
        refuse_other_attention(self.site.name, mechanism)
        if self._steps(call):
            self.kept.append(call.k, call.v)
            return call, self.kept.attend(call.q, scale=call.softmax_scale)
        k, v = self.kept.extend(call.k, call.v)
        mask = self.kept.mask(call)
        full = replace(call, k=k, v=v, key_visible=None, mask=mask, offset=k.shape[2] - call.q.shape[2])
        full = replace(full, bias=self.kept.bias(call.q))
        output = mechanism(full)
        projection = self.site.projection(call.q.shape[1] * v.shape[-1])
        turn = rotate if getattr(self.site.module, "rotary", False) else None
        self.kept.cut(full, Place(self.site.layer, self.layers, projection, turn))
        return full, output

    def _steps(self, call: AttentionCall) -> bool:
        """Whether the flat keys can be read as they are: no observer asks for the call, and no token is padding."""
        if _layer_of(self.site).observers or not self.kept.steps(call.k):
            return False
        return call.key_visible is None or bool(call.key_visible.all())

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        self.kept.select(rows)


class _EvictingCache(KeysOfLayers, Cache):
    """A decoder's past of bounded size; tokens are numbered by how many were read."""

    def __init__(self, model: Transformer, policy: KVPolicy, decoder: list[Site]) -> None:
        pool = LayerPool()
        super().__init__(
            [_EvictingKeyValues(site, len(decoder), policy, pool) for site in decoder],
            made_by=[_layer_of(site).current_mechanism() for site in decoder],
            cross_layers=model.config.depth("cross"),
            # The number of positions that the model may read is checked by the model.
            capacity=torch.iinfo(torch.int64).max,
        )

    def extend(
        self, tokens: Int[Tensor, "b q"], visible: Bool[Tensor, "b q"] | None
    ) -> tuple[Bool[Tensor, "b k"] | None, Int[Tensor, "#b q"]]:
        """Count in new tokens, some of which may be padding."""
        if visible is None and self._visible is None:
            return super().extend(tokens, None)
        start, self.length = self.length, self.length + tokens.shape[1]
        past, new = self._visible, torch.ones_like(tokens, dtype=torch.bool) if visible is None else visible
        if past is None:
            past = new.new_ones(tokens.shape[0], start)
        self._visible = torch.cat([past, new], 1)
        return self._visible, count_positions(self._visible)[:, start:]

    def kept_keys(self) -> list[KeptKeys]:
        """Those of the layers."""
        return [layer.kept for layer in self.layers if isinstance(layer, _EvictingKeyValues)]


def _layer_of(site: Site) -> AttentionLayer:
    assert isinstance(site.module, AttentionLayer)
    return site.module


def _config_with(model: Transformer, groups: Groups) -> Any:
    """The model's config with the specs of these mechanisms in the fields of their kinds."""
    chosen = {(site.kind, site.layer): spec_of(mech) for mech, sites in groups.values() for site in sites}
    fields: dict[str, Any] = {}
    for kind in {kind for kind, _ in chosen}:
        before = specs_per_layer(model.config, kind)
        specs = tuple(chosen.get((kind, layer), spec) for layer, spec in enumerate(before))
        fields[FIELDS[kind]] = specs[0] if len(set(specs)) == 1 else specs
    return replace(model.config, **fields)
