"""The transformer: encoder, decoder or both, in one file to read from top to bottom; its attention is any mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from attnlab.attention import LayerCache, Mechanism
from attnlab.measure import parameter_count
from attnlab.models.attention import Attention, Carried, attentions, make_mechanisms
from attnlab.models.cache import Cache, SourceCache
from attnlab.models.config import Kind, TransformerConfig
from attnlab.models.init import init_weights
from attnlab.models.positions import count_positions, sinusoids
from attnlab.models.vocabulary import Head, make_embedding, make_head
from attnlab.shapes import Bool, Float, Int
from attnlab.summaries import short_repr

__all__ = ["Block", "EncoderOutput", "Output", "Stack", "Transformer", "count_parameters"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu-tanh": lambda t: gelu(t, approximate="tanh"),
    "relu": relu,
}


class EncoderOutput(NamedTuple):
    """The encoder's hidden states, which a decoder reads, and which of its positions are tokens (None: all)."""

    hidden: Float[Tensor, "b k m"]
    visible: Bool[Tensor, "b k"] | None = None

    def __repr__(self) -> str:
        return short_repr(self)


class Output:
    """A model's answer: the hidden states, and logits made when asked, since a loss may need only some of them."""

    def __init__(self, hidden: Float[Tensor, "b q m"], head: Head | None) -> None:
        self.hidden = hidden
        self.head = head
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Float[Tensor, "b q v"]:
        """The scores of every token at every position."""
        if self.head is None:
            raise ValueError("this model has head='none': its output is .hidden")
        if self._logits is None:
            self._logits = self.head(self.hidden)
        return self._logits


class Block(nn.Module):
    """Attention, cross-attention in a decoder with a source, and a feed-forward layer, each with its residual."""

    def __init__(
        self, config: TransformerConfig, *, kind: Kind, layer: int, mechanism: Mechanism, cross: Mechanism | None
    ) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = Attention(config, kind=kind, layer=layer, mechanism=mechanism)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        if cross is not None:
            self.cross = Attention(config, kind="cross", layer=layer, mechanism=cross)
            self.cross_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.widen = nn.Linear(config.width, config.hidden_width, bias=config.bias)
        self.narrow = nn.Linear(config.hidden_width, config.width, bias=config.bias)
        self.feed_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.activation = config.activation
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def forward(
        self,
        h: Float[Tensor, "b q m"],
        *,
        positions: Int[Tensor, "#b q"],
        visible: Bool[Tensor, "b k"] | None = None,
        source: EncoderOutput | None = None,
        cache: LayerCache | None = None,
        source_cache: SourceCache | None = None,
        carried: tuple[Carried, Carried] | None = None,
    ) -> Float[Tensor, "b q m"]:
        """One layer; pre-norm is h + f(norm(h)), post-norm is norm(h + f(h))."""
        own, cross = carried or (None, None)
        t = self.attention_norm(h) if self.pre else h
        seen = self.attention(t, positions=positions, key_visible=visible, cache=cache, carried=own)
        h = h + self.dropout(seen)
        h = h if self.pre else self.attention_norm(h)
        if source is not None:
            t = self.cross_norm(h) if self.pre else h
            seen = self.cross.cross(
                t, source=source.hidden, source_visible=source.visible, cache=source_cache, carried=cross
            )
            h = h + self.dropout(seen)
            h = h if self.pre else self.cross_norm(h)
        t = self.feed_norm(h) if self.pre else h
        h = h + self.dropout(self.narrow(self.activation_dropout(ACTIVATIONS[self.activation](self.widen(t)))))
        return h if self.pre else self.feed_norm(h)


class Stack(nn.Module):
    """Positions added to token vectors, then the blocks: one encoder or one decoder."""

    def __init__(self, config: TransformerConfig, kind: Kind) -> None:
        super().__init__()
        self.config = config
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_length, config.width) if learned else None
        self.embed_norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.embed_norm else None
        self.dropout = nn.Dropout(config.dropout)
        has_cross = kind == "decoder" and config.depth("cross") > 0
        crosses = make_mechanisms(config, "cross") if has_cross else [None] * config.depth(kind)
        self.blocks = nn.ModuleList(
            Block(config, kind=kind, layer=i, mechanism=mech, cross=cross)
            for i, (mech, cross) in enumerate(zip(make_mechanisms(config, kind), crosses, strict=True))
        )
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.has_final_norm else None

    def forward(
        self,
        vectors: Float[Tensor, "b q m"],
        *,
        positions: Int[Tensor, "#b q"],
        visible: Bool[Tensor, "b k"] | None = None,
        source: EncoderOutput | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "b q m"]:
        """The hidden states above the last block."""
        h = self._embed(vectors, positions)
        carried = Carried(), Carried()
        for i, block in enumerate(cast("Iterable[Block]", self.blocks)):
            after = block(
                h,
                positions=positions,
                visible=visible,
                source=source,
                cache=None if cache is None else cache.of_layer(i, block.attention.current_mechanism()),
                source_cache=None if cache is None or source is None else cache.cross[i],
                carried=carried,
            )
            h = self._drop_layer(h, after)
        return h if self.norm is None else self.norm(h)

    def _embed(self, vectors: Float[Tensor, "b q m"], positions: Int[Tensor, "#b q"]) -> Float[Tensor, "b q m"]:
        if self.config.embed_scale:
            vectors = vectors * self.config.width**0.5
        if self.positions is not None:
            vectors = vectors + self.positions(positions)
        elif self.config.positions == "sinusoidal":
            vectors = vectors + sinusoids(positions, self.config.width).to(vectors.dtype)
        if self.embed_norm is not None:
            vectors = self.embed_norm(vectors)
        return self.dropout(vectors)

    def _drop_layer(self, before: Float[Tensor, "b q m"], after: Float[Tensor, "b q m"]) -> Float[Tensor, "b q m"]:
        """LayerDrop. The layer is computed and then left out: every parameter has a gradient, as DDP wants it."""
        if not self.training or self.config.layer_dropout == 0:
            return after
        keep = torch.rand((), device=before.device) >= self.config.layer_dropout
        return torch.where(keep, after, before)


class Transformer(nn.Module):
    """A transformer from its config. Batches speak Hugging Face: ``input_ids``, ``attention_mask``, ``labels``.

    >>> config = TransformerConfig(kind="decoder", vocab=11, width=8, heads=2, layers=1, causal_attention="kernel:elu")
    >>> Transformer(config)(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 11])
    """

    # Accelerate reads here which blocks FSDP wraps.
    _no_split_modules = ["Block"]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = make_embedding(config)
        self.encoder = None if config.kind == "decoder" else Stack(config, "encoder")
        self.decoder = None if config.kind == "encoder" else Stack(config, "decoder")
        self.head = make_head(config, self.tokens)
        init_weights(self, config)
        self.make_lazy_parameters()

    def forward(
        self,
        input_ids: Int[Tensor, "b k"],
        *,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Int[Tensor, "b q"] | None = None,
        decoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """The output for a batch; masks are true (or 1) at tokens and false at padding, which may be on either side.

        An encoder-decoder reads ``input_ids`` and continues ``decoder_input_ids``; the other kinds take no such thing.
        """
        if (decoder_input_ids is not None) != (self.config.kind == "encoder-decoder"):
            needs = "needs" if decoder_input_ids is None else "takes no"
            raise ValueError(f"a transformer of kind {self.config.kind!r} {needs} decoder_input_ids")
        if self.config.kind == "decoder":
            return self.decode(input_ids, attention_mask=attention_mask, cache=cache)
        source = self.encode(input_ids, attention_mask=attention_mask)
        if decoder_input_ids is None:
            return self._output(source.hidden)
        return self.decode(decoder_input_ids, source, attention_mask=decoder_attention_mask, cache=cache)

    def encode(self, input_ids: Int[Tensor, "b k"], *, attention_mask: Tensor | None = None) -> EncoderOutput:
        """The encoder's output for a batch."""
        if self.encoder is None:
            raise ValueError("a transformer of kind 'decoder' has no encoder")
        visible = _visible(attention_mask, input_ids)
        self._check_length(input_ids.shape[1])
        positions = _positions(visible, input_ids)
        return EncoderOutput(self.encoder(self.tokens(input_ids), positions=positions, visible=visible), visible)

    def decode(
        self,
        input_ids: Int[Tensor, "b q"],
        source: EncoderOutput | None = None,
        *,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """The decoder's output; with a cache, ``input_ids`` and its mask are only the tokens the cache has not seen."""
        if self.decoder is None:
            raise ValueError("a transformer of kind 'encoder' has no decoder")
        if (source is None) != (self.config.kind == "decoder"):
            raise ValueError(f"a {self.config.kind} {'needs' if source is None else 'takes no'} source")
        visible = _visible(attention_mask, input_ids)
        self._check_length(input_ids.shape[1] + (0 if cache is None else cache.length))
        if cache is None:
            positions = _positions(visible, input_ids)
        else:
            visible, positions = cache.extend(input_ids, visible)
        vectors = self.tokens(input_ids)
        return self._output(self.decoder(vectors, positions=positions, visible=visible, source=source, cache=cache))

    def make_cache(self, batch: int, capacity: int) -> Cache:
        """An empty past for this many rows and at most this many positions."""
        self._check_length(capacity)
        layers = [layer for layer in attentions(self, ("decoder",)) if isinstance(layer, Attention)]
        return Cache(
            [layer.make_cache(batch, capacity) for layer in layers],
            made_by=[layer.current_mechanism() for layer in layers],
            cross_layers=self.config.depth("cross"),
            capacity=capacity,
        )

    def generate(
        self,
        input_ids: Int[Tensor, "b k"],
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        seed: int = 0,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        use_cache: bool = True,
    ) -> Int[Tensor, "b n"]:
        """Rows and what continues them, ended rows filled up with ``eos_token_id``, by the names of transformers.

        An encoder-decoder's rows begin with ``bos_token_id``. ``attnlab.models.beam_search`` searches.
        """
        from attnlab.models.search import sample

        new = sample(
            self,
            input_ids,
            eos=eos_token_id,
            max_new=max_new_tokens,
            temperature=temperature if do_sample else 0.0,
            seed=seed,
            bos=bos_token_id,
            attention_mask=attention_mask,
            cached=None if use_cache else False,
        )
        longest = max(map(len, new))
        filled = [[*row, *[eos_token_id or 0] * (longest - len(row))] for row in new]
        start = input_ids if bos_token_id is None else torch.full_like(input_ids[:, :1], bos_token_id)
        return torch.cat([start, torch.tensor(filled, device=input_ids.device)], dim=1)

    def _output(self, hidden: Float[Tensor, "b q m"]) -> Output:
        return Output(hidden, cast("Head | None", self.head))

    def _check_length(self, length: int) -> None:
        if self.config.positions == "learned" and length > self.config.max_length:
            raise ValueError(
                f"{length} positions, but the model learned {self.config.max_length} (max_length); shorten the input, "
                "or use sinusoidal or rotary positions"
            )

    def make_lazy_parameters(self) -> None:
        """Let mechanisms make the parameters that they make at their first call: optimisers and files need them."""
        if not any(isinstance(layer.mechanism, nn.Module) for layer in attentions(self)):
            return
        self.run_once()

    def run_once(self, example: Mapping[str, Any] | None = None) -> None:
        """A forward pass for its effects on the mechanisms: on ``example``, or on two tokens."""
        if example is None:
            tokens = torch.zeros(1, 2, dtype=torch.long, device=next(self.parameters()).device)
            example = {"input_ids": tokens}
            if self.config.kind == "encoder-decoder":
                example["decoder_input_ids"] = tokens
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                self(**example)
        finally:
            self.train(training)


def count_parameters(config: TransformerConfig) -> int:
    """How many numbers such a model learns, counted without making them.

    >>> count_parameters(TransformerConfig(kind="decoder", vocab=11, width=8, heads=2, layers=1, max_length=5))
    1016
    """
    with torch.device("meta"):
        return parameter_count(Transformer(config))


def _visible(attention_mask: Tensor | None, tokens: Int[Tensor, "b q"]) -> Bool[Tensor, "b q"] | None:
    if attention_mask is None:
        return None
    if attention_mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask must be (batch, length) = {tuple(tokens.shape)}, true at tokens and false at padding, "
            f"got {tuple(attention_mask.shape)}"
        )
    return attention_mask.bool()


def _positions(visible: Bool[Tensor, "b q"] | None, tokens: Int[Tensor, "b q"]) -> Int[Tensor, "#b q"]:
    if visible is None:
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    return count_positions(visible)
