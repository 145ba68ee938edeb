"""How weights start: N(0, 0.02) as in BERT, RoBERTa and GPT-2, or Xavier as in fairseq."""

from __future__ import annotations

from torch import nn

from attnlab.models.attention import Attention
from attnlab.models.config import TransformerConfig

__all__ = ["init_weights"]

NORMAL_STD = 0.02


def init_weights(model: nn.Module, config: TransformerConfig) -> None:
    """Fill every weight but the mechanisms' own, which know best; biases start at 0, norms at the identity.

    ``normal``: every matrix and embedding N(0, 0.02). ``xavier``: embeddings N(0, 1/sqrt(their width)), matrices
    uniform in +-sqrt(6 / (in + out)). As q, k and v are one matrix, theirs are smaller by 1/sqrt(2), as in fairseq.
    """
    owned = {id(part) for m in model.modules() if isinstance(m, Attention) for part in _parts_of_mechanism(m)}
    for module in model.modules():
        if id(module) in owned:
            continue
        if isinstance(module, nn.Linear):
            _init_matrix(module, config)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            std = NORMAL_STD if config.init == "normal" else module.embedding_dim**-0.5
            nn.init.normal_(module.weight, std=std)


def _init_matrix(module: nn.Linear, config: TransformerConfig) -> None:
    if config.init == "normal":
        nn.init.normal_(module.weight, std=NORMAL_STD)
    else:
        nn.init.xavier_uniform_(module.weight)


def _parts_of_mechanism(layer: Attention) -> list[nn.Module]:
    return list(layer.mechanism.modules()) if isinstance(layer.mechanism, nn.Module) else []
