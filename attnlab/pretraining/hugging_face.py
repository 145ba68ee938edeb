"""BERT and Llama as Hugging Face builds them, untrained, and the masked language model's loss for a BERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from attnlab.adapters import convert
from attnlab.data import IGNORED, Specials
from attnlab.training import Loss

__all__ = ["BertMaskedLM", "bert_states", "family_and_size", "hugging_face_model"]


def hugging_face_model(name: str, *, task: str, attention: str, length: int, specials: Specials, vocab: int) -> Any:
    """A BERT or a Llama of the size its name says, such as bert-6x256: 6 layers of width 256, heads of 32.

    With another ``attention`` than softmax it is converted before it has learned anything.
    """
    family, layers, width = family_and_size(name)
    family_task, kind = {"bert": ("mlm", "masked"), "llama": ("causal", "causal")}[family]
    if task != family_task:
        raise ValueError(f"{name} is trained as a {kind} language model: its task is {family_task!r}, got {task!r}")
    if layers < 1 or width < 1 or width % 32:
        raise ValueError(f"{name} must have layers, and a width that is a multiple of 32, the width of a head")
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
    }
    model = _bert(shape, length, specials) if family == "bert" else _llama(shape, length, specials)
    return model if attention == "softmax" else convert(model, attention)


def _bert(shape: dict[str, Any], length: int, specials: Specials) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            **shape,
            intermediate_size=4 * shape["hidden_size"],
            max_position_embeddings=max(512, length),
            attention_probs_dropout_prob=0.0,
            pad_token_id=specials.pad,
            type_vocab_size=1,
        )
    )


def _llama(shape: dict[str, Any], length: int, specials: Specials) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            **shape,
            # Three matrices instead of two: as many parameters as with 4 x the width, in a multiple of 16.
            intermediate_size=-(-8 * shape["hidden_size"] // 48) * 16,
            max_position_embeddings=length,
            tie_word_embeddings=True,
            # Every document ends with </s>, so a new one begins after it.
            bos_token_id=specials.eos,
            eos_token_id=specials.eos,
            pad_token_id=specials.pad,
        )
    )


def family_and_size(name: str) -> tuple[str, int, int]:
    """(family, layers, width) of a name such as bert-6x256."""
    family, _, size = name.partition("-")
    try:
        layers, width = (int(n) for n in size.split("x"))
    except ValueError:
        raise ValueError(f"it is named {family}-LAYERSxWIDTH, such as {family}-6x256, got {name!r}") from None
    return family, layers, width


def bert_states(model: Any, batch: Mapping[str, Any]) -> Any:
    """A BERT's last hidden states, without its head."""
    return model.bert(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).last_hidden_state


@dataclass(frozen=True)
class BertMaskedLM:
    """-log p(the label) at masked positions; the vocabulary is scored at a fixed number of places per row.

    That number is far above what a row masks at 15 % (seven standard deviations), and shapes stay fixed.
    """

    name: str = "masked-lm"

    def __call__(self, model: Any, output: Tensor, batch: Mapping[str, Any], step: int) -> Loss:
        labels = batch["labels"]
        length = labels.shape[1]
        at = (labels != IGNORED).int().topk(min(length, length // 4 + 16), dim=1).indices
        hidden = output.gather(1, at[..., None].expand(-1, -1, output.shape[-1]))
        logits, labels = model.cls(hidden).flatten(0, 1), labels.gather(1, at).flatten()
        total = cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        return Loss(total, (labels != IGNORED).sum())

    def count(self, batch: Mapping[str, Any], step: int) -> Tensor:
        """The number of masked tokens."""
        return (batch["labels"] != IGNORED).sum()
