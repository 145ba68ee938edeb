"""A tokeniser of words or SentencePiece under the names by which transformers' tokenizers are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.data.tokenisers import SentencePieceTokeniser, Tokeniser, WordTokeniser

__all__ = ["PlainTokenizer"]


class PlainTokenizer:
    """Texts to ids and back as a model of ours learned them; no special token is put around a text.

    >>> tokenizer = PlainTokenizer(WordTokeniser(words=("the", "film")))
    >>> tokenizer("The bad film")["input_ids"], tokenizer.convert_ids_to_tokens([4, 1])
    ([4, 1, 5], ['the', '<unk>'])
    """

    is_fast = False

    def __init__(self, tokeniser: Tokeniser) -> None:
        self.tokeniser = tokeniser
        specials = tokeniser.specials
        self.pad_token_id, self.unk_token_id, self.mask_token_id = specials.pad, specials.unk, specials.mask
        self.bos_token_id = self.cls_token_id = specials.bos
        self.eos_token_id = self.sep_token_id = specials.eos
        self.all_special_ids = specials.ids()

    def __len__(self) -> int:
        return self.tokeniser.vocab_size

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        return_tensors: str | None = None,
        add_special_tokens: bool = True,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """{"input_ids", "attention_mask"} of one text, or of several where no tensors are asked for."""
        rows = self.tokeniser.encode_batch([text] if isinstance(text, str) else list(text))
        encoded: dict[str, Any] = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        if return_tensors is not None:
            import torch

            if return_tensors != "pt" or len(rows) != 1:
                raise ValueError("tensors are made of one text, with return_tensors='pt'")
            return {name: torch.tensor(value, dtype=torch.long) for name, value in encoded.items()}
        return {name: value[0] for name, value in encoded.items()} if isinstance(text, str) else encoded

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""
        if isinstance(self.tokeniser, SentencePieceTokeniser):
            return {piece: i for i, piece in enumerate(self.tokeniser.pieces)}
        assert isinstance(self.tokeniser, WordTokeniser)
        return {word: i for i, word in enumerate((*self.tokeniser.names, *self.tokeniser.words))}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each id."""
        tokens = list(self.get_vocab())
        return [tokens[i] for i in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the ids."""
        special = set(self.all_special_ids) if skip_special_tokens else set()
        return self.tokeniser.decode([int(i) for i in ids if int(i) not in special])

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the files from which ``load_model`` reads it."""
        self.tokeniser.save(folder)
