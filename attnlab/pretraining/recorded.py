"""The attention of one text while a language model learns, recorded at every evaluation for ``attnlab explore RUN``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnlab.adapters import record
from attnlab.data import FastTokeniser, SentencePieceTokeniser, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.reading.timeline import record_step
from attnlab.training import Callback, Moment, RunError

__all__ = ["AttentionRecorder", "attention_recorder"]

# Tokens of the held-out text that are shown where no text is named: a map of these can be read.
SHOWN = 32


class AttentionRecorder(Callback):
    """Records the maps of one row of tokens in the run's folder at every evaluation."""

    def __init__(self, ids: Tensor, tokens: Sequence[str]) -> None:
        self.ids, self.tokens = ids, tokens

    def on_evaluation(self, moment: Moment) -> None:
        """Every process runs the model, since its parameters may be shared out; the first one writes."""
        from accelerate import PartialState

        device = next(moment.model.parameters()).device
        with torch.no_grad(), record(moment.model) as trace:
            moment.model(input_ids=self.ids.to(device))
        if not PartialState().is_main_process:
            return
        try:
            record_step(moment.run_dir, moment.step, trace, tokens=self.tokens)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"step {moment.step} cannot be recorded in {moment.run_dir / 'steps'}: {error}; remove that folder to "
                "record from here on"
            ) from error


def attention_recorder(
    text: str, lengths: Sequence[int], task: str, tokeniser: Tokeniser, stores: Mapping[str, TokenStore]
) -> AttentionRecorder:
    """The recorder of ``text``, cut at the model's longest row; of an empty one, the held-out text's first tokens."""
    specials, most = tokeniser.specials, max(lengths)
    ids = tokeniser.encode_batch([text])[0] if text else stores["valid"].tokens[:SHOWN].tolist()
    if not ids:
        raise ValueError(f"the text to record has no tokens: {text!r}")
    # As in training: a masked model reads [CLS] text [SEP], and a causal one begins after the end of a document.
    before, after = (specials.bos, specials.eos) if task == "mlm" else (specials.eos, None)
    room = most - (before is not None) - (after is not None)
    row = [i for i in (before, *ids[:room], after) if i is not None]
    return AttentionRecorder(torch.tensor([row]), _strings(tokeniser, row))


def _strings(tokeniser: Tokeniser, ids: Sequence[int]) -> list[str]:
    if isinstance(tokeniser, FastTokeniser):
        return [str(tokeniser.tokenizer.id_to_token(i)) for i in ids]
    if isinstance(tokeniser, SentencePieceTokeniser):
        return [tokeniser.pieces[i] for i in ids]
    return [tokeniser.decode([i]) for i in ids]
