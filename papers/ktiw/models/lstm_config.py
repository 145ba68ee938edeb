"""Sizes of KTIW's recurrent models, by name as appendix A.8 gives them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["LSTM_CONFIGS", "ClassifierConfig", "TranslatorConfig"]


def _positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


@dataclass(frozen=True)
class TranslatorConfig:
    """An LSTM translator. Source and target share one embedding.

    The context goes through a linear layer before it meets the decoder's state, and the attention has a bias: so the
    parameters are as many as the paper counts (6,132,544). ``literal`` leaves both out, as section 2.1 reads.
    ``output="linear"`` is the model of A.1, without a hidden layer.
    """

    vocab: int
    width: int = 256
    layers: int = 2
    bidirectional: bool = True
    heads: int = 1
    # How the heads' contexts become one: the paper's sum (Eq. 21), or their mean, as large as one head's.
    contexts: Literal["sum", "mean"] = "sum"
    # Between the layers of an LSTM.
    dropout: float = 0.0
    output: Literal["network", "linear"] = "network"
    literal: bool = False
    attention: str = "softmax"

    def __post_init__(self) -> None:
        _positive(self, "vocab", "width", "layers", "heads")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.contexts not in ("sum", "mean"):
            raise ValueError(f"contexts must be 'sum' or 'mean', got {self.contexts!r}")
        if self.output not in ("network", "linear"):
            raise ValueError(f"output must be 'network' or 'linear', got {self.output!r}")
        if self.literal and self.output == "linear" and self.encoded != self.width:
            raise ValueError(
                f"c_t + d_t (Eq. 31) needs states of one width, got {self.encoded} and {self.width}; "
                "use literal=False or bidirectional=False"
            )

    @property
    def encoded(self) -> int:
        """The width of an encoder state h_l."""
        return self.width * (2 if self.bidirectional else 1)

    @property
    def head_share(self) -> float:
        """What each head's context is multiplied by before they are added."""
        return 1 / self.heads if self.contexts == "mean" else 1.0


@dataclass(frozen=True)
class ClassifierConfig:
    """A one-layer LSTM classifier of two classes with additive attention."""

    vocab: int
    embedding: int = 300
    width: int = 256
    attention_width: int = 256
    bidirectional: bool = True
    attention: str = "softmax"

    def __post_init__(self) -> None:
        _positive(self, "vocab", "embedding", "width", "attention_width")

    @property
    def encoded(self) -> int:
        """The width of an encoder state h_l."""
        return self.width * (2 if self.bidirectional else 1)


_translation = TranslatorConfig(vocab=8000, dropout=0.5)
# 40 words and the symbol a decoder starts from; Eqs. 1 and 2 as they are written.
_permutations = TranslatorConfig(vocab=41, layers=1, bidirectional=False, literal=True)

LSTM_CONFIGS: dict[str, TranslatorConfig | ClassifierConfig] = {
    "ktiw-translation": _translation,
    "ktiw-translation-linear": replace(_translation, output="linear"),
    "ktiw-translation-literal": replace(_translation, literal=True),
    "ktiw-permutations": _permutations,
    "ktiw-permutations-8-heads": replace(_permutations, heads=8),
    # Table 9's vocabulary of IMDB; each data set has its own.
    "ktiw-classification": ClassifierConfig(vocab=60_338),
}
