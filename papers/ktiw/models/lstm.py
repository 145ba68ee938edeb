"""KTIW's recurrent models: an LSTM translator with dot attention and an LSTM classifier with additive attention.

Neither feeds its context back into the recurrence, so both run on cuDNN's whole-sequence LSTM. Attention is a
mechanism's, so ``swap``, ``record`` and every reading work on them as on a transformer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnlab.attention import AttentionCall
from attnlab.models.attention import AttentionLayer
from attnlab.registry import mechanism
from attnlab.shapes import Bool, Float, Int
from papers.ktiw.models.lstm_config import ClassifierConfig, TranslatorConfig

__all__ = [
    "Classification",
    "Classifier",
    "Encoded",
    "Translated",
    "Translator",
    "attention_parameters",
    "freeze_probe",
]

State = tuple[Tensor, Tensor]


class Encoded(NamedTuple):
    """The encoder's states h_l, a mask of those that are not padding (None: all), and the decoder's first state."""

    hidden: Float[Tensor, "b k e"]
    visible: Bool[Tensor, "b k"] | None
    state: State


class Translated(NamedTuple):
    """A translator's output: the vocabulary's logits, the decoder's states s_t, and the encoded source."""

    logits: Float[Tensor, "b q v"]
    states: Float[Tensor, "b q m"]
    source: Encoded


class Classification(NamedTuple):
    """A classifier's output: the log-odds of class 1, and the states h_l."""

    logits: Float[Tensor, " b"]
    source: Encoded


class _SharedContexts(nn.Module):
    """The projection of c = sum over heads of c^(k) (Eq. 21), or mean: as W_O, one matrix repeated for each head."""

    def __init__(self, context: nn.Linear, config: TranslatorConfig) -> None:
        super().__init__()
        self.context, self.config = context, config

    @property
    def weight(self) -> Tensor:
        return self.context.weight.repeat(1, self.config.heads) * self.config.head_share


class DotAttention(AttentionLayer):
    """a[t, l] = s_t^T W h_l for each head, and the heads' contexts summed (Eqs. 1, 2, 20, 21)."""

    def __init__(self, config: TranslatorConfig, *, context: nn.Module) -> None:
        super().__init__(kind="cross", layer=0)
        self.heads, self.share = config.heads, config.head_share
        self.query = nn.Linear(config.width, config.heads * config.encoded, bias=not config.literal)
        self.out = context
        self.mechanism = mechanism(config.attention)

    def forward(self, s: Float[Tensor, "b q m"], *, source: Encoded) -> Float[Tensor, "b q e"]:
        """The context of each decoder state, before any projection."""
        q = self.query(s).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        h = source.hidden.unsqueeze(1)
        # The paper's dot product is not scaled. All heads read the same states: one key/value head for all.
        call = AttentionCall(q, h, h, x=source.hidden, key_visible=source.visible, scale=1.0)
        output = self.run_mechanism(call)
        return output.sum(1) * self.share


class AdditiveAttention(AttentionLayer):
    """a_l = v^T ReLU(Q h_l) (Eq. 7): dot attention whose one query is v and whose keys are ReLU(Q h_l)."""

    def __init__(self, config: ClassifierConfig, *, out: nn.Module) -> None:
        super().__init__(kind="cross", layer=0)
        self.heads = 1
        self.key = nn.Linear(config.encoded, config.attention_width)
        # The bias adds the same to every logit, so softmax ignores it. The paper counts it as a parameter.
        self.score = nn.Linear(config.attention_width, 1)
        self.score.bias.requires_grad_(False)
        self.out = out
        self.mechanism = mechanism(config.attention)

    def forward(self, source: Encoded) -> Float[Tensor, "b e"]:
        """sum_l alpha_l h_l."""
        h = source.hidden.unsqueeze(1)
        k = torch.relu(self.key(h))
        q = self.score.weight.expand(len(h), 1, 1, -1)
        call = AttentionCall(q, k, h, x=source.hidden, key_visible=source.visible, scale=1.0)
        output = self.run_mechanism(call)
        return output[:, 0, 0]


class Translator(nn.Module):
    """LSTM encoder and decoder with dot attention (KTIW, 2.1); batches as the transformer's.

    >>> config = TranslatorConfig(vocab=11, width=4, layers=1, bidirectional=False)
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> Translator(config)(tokens, decoder_input_ids=tokens).logits.shape
    torch.Size([1, 3, 11])
    """

    def __init__(self, config: TranslatorConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.tokens = nn.Embedding(config.vocab, width)
        dropout = config.dropout if config.layers > 1 else 0.0
        shape = {"num_layers": config.layers, "batch_first": True, "dropout": dropout}
        self.encoder = nn.LSTM(width, width, bidirectional=config.bidirectional, **shape)
        self.decoder = nn.LSTM(width, width, **shape)
        self.context = nn.Identity() if config.literal else nn.Linear(config.encoded, width)
        summed = config.heads > 1 and isinstance(self.context, nn.Linear)
        out = _SharedContexts(self.context, config) if summed else self.context  # type: ignore[arg-type]
        self.attention = DotAttention(config, context=out)
        read = (config.encoded if config.literal else width) + width
        self.hidden = None if config.output == "linear" else nn.Linear(read, width)
        self.output = nn.Linear(width, config.vocab)

    def forward(
        self,
        input_ids: Int[Tensor, "b k"],
        *,
        decoder_input_ids: Int[Tensor, "b q"],
        attention_mask: Tensor | None = None,
    ) -> Translated:
        """Logits for every target position; padding must be on the right."""
        source = self.encode(self.tokens(input_ids), attention_mask=attention_mask)
        states, _ = self.decode(decoder_input_ids, source.state)
        return Translated(self.predict(self.attention(states, source=source), states), states, source)

    def encode(self, embeddings: Float[Tensor, "b k m"], *, attention_mask: Tensor | None = None) -> Encoded:
        """The encoder's states for embedded words; the decoder starts from the mean of both directions' last states."""
        hidden, visible, state = _run(self.encoder, embeddings, attention_mask)
        if self.config.bidirectional:
            h, c = (t.unflatten(0, (-1, 2)).mean(1) for t in state)
            state = (h, c)
        return Encoded(hidden, visible, state)

    def decode(self, tokens: Int[Tensor, "b q"], state: State) -> tuple[Float[Tensor, "b q m"], State]:
        """The decoder's states s_t from a state on, and the state after them."""
        return self.decoder(self.tokens(tokens), state)

    def predict(self, context: Float[Tensor, "*n e"], s: Float[Tensor, "*n m"]) -> Float[Tensor, "*n v"]:
        """The logits of N([c, s]) (Eq. 2), or of W(c + s) for linear output (Eq. 31); with c = h_l, the probe's."""
        c = self.context(context)
        if self.hidden is None:
            return self.output(c + s)
        return self.output(torch.relu(self.hidden(torch.cat([c, s], -1))))


class Classifier(nn.Module):
    """BiLSTM with additive attention and a sigmoid (KTIW, 2.4).

    >>> Classifier(ClassifierConfig(vocab=11, embedding=5, width=4))(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.embedding)
        self.encoder = nn.LSTM(config.embedding, config.width, bidirectional=config.bidirectional, batch_first=True)
        self.output = nn.Linear(config.encoded, 1)
        self.attention = AdditiveAttention(config, out=self.output)

    def forward(self, input_ids: Int[Tensor, "b k"], *, attention_mask: Tensor | None = None) -> Classification:
        """The log-odds of class 1; padding must be on the right."""
        return self.classify(self.tokens(input_ids), attention_mask=attention_mask)

    def classify(self, embeddings: Float[Tensor, "b k m"], *, attention_mask: Tensor | None = None) -> Classification:
        """The same from embedded words, as the saliency of a word needs it."""
        hidden, visible, state = _run(self.encoder, embeddings, attention_mask)
        source = Encoded(hidden, visible, state)
        return Classification(self.output(self.attention(source)).squeeze(1), source)


def attention_parameters(model: Translator | Classifier) -> list[nn.Parameter]:
    """The parameters of the attention weights: W of Eq. 1, or Q and v of Eq. 7."""
    layer = model.attention
    parts = [layer.query] if isinstance(layer, DotAttention) else [layer.key, layer.score]
    return [p for part in parts for p in part.parameters()]


def freeze_probe(model: Translator | Classifier) -> None:
    """Frozen-beta mode (A.6): only attention is trained, so that the lexical probe does not change."""
    trained = {id(p) for p in attention_parameters(model) if p.requires_grad}
    for p in model.parameters():
        p.requires_grad_(id(p) in trained)


def _run(
    lstm: nn.LSTM, embeddings: Float[Tensor, "b k m"], attention_mask: Tensor | None
) -> tuple[Float[Tensor, "b k e"], Bool[Tensor, "b k"] | None, State]:
    """The states over each row's length: the backward direction starts at the row's last word, not at padding."""
    if attention_mask is None:
        hidden, state = lstm(embeddings)
        return hidden, None, state
    if attention_mask.shape != embeddings.shape[:2]:
        raise ValueError(
            f"attention_mask must be (batch, length) = {tuple(embeddings.shape[:2])}, got {tuple(attention_mask.shape)}"
        )
    visible = attention_mask.bool()
    seen = visible.cpu()
    lengths = seen.sum(1)
    if (lengths == 0).any():
        raise ValueError(f"row {int((lengths == 0).nonzero()[0])} has no words; leave empty sentences out")
    if (seen[:, 1:] & ~seen[:, :-1]).any():
        raise ValueError(
            "an LSTM reads from the left, so padding must stand on the right; attention_mask has it before"
        )
    packed = pack_padded_sequence(embeddings, lengths, batch_first=True, enforce_sorted=False)
    states, state = lstm(packed)
    hidden, _ = pad_packed_sequence(states, batch_first=True, total_length=embeddings.shape[1])
    return hidden, visible, state
