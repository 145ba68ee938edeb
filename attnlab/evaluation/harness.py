"""lm-eval's model for anything attnlab can put into a model: a mechanism, a plan, a conversion or a cache policy.

``attnlab evaluate`` hands it to lm-eval. The other way round, lm-eval's own command line takes it as the model
"attnlab"; lm-eval 0.4 has no entry points for models, so its command line starts by this module:

    python -m attnlab.evaluation.harness --model attnlab --tasks lambada_openai \\
        --model_args "pretrained=smollm2,mechanism=top-r:r=64"

In a mechanism's settings a semicolon stands for the comma there, which separates the model's arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from attnlab.adapters import LoadedModel, Plan, load_model, swap
from attnlab.adapters.evict import evicting, refuse_prefill
from attnlab.adapters.model_files import check_ids
from attnlab.adapters.protocol import adapter_of
from attnlab.attention import Mechanism
from attnlab.caches.kv_policy import KVPolicy
from attnlab.data.beginnings import tokens_around
from attnlab.devices import to_device
from attnlab.evaluation.answers import SubjectAnswers
from attnlab.registry import mechanism as mechanism_of

__all__ = ["AttnlabLM"]


class AttnlabLM(HFLM):
    """lm-eval's HFLM whose model attends by a mechanism, a plan, or with a cache that evicts keys.

    ``window`` is the length of the windows into which a text is cut where its loss is asked for (by default the
    model's own length, as HFLM does), ``stride`` how many new tokens each window scores; a smaller one gives every
    token a longer past and costs as much more. ``answers`` keeps every answer in a file, and takes from it those that
    are there.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        mechanism: Mechanism | str | None = None,
        plan: Plan | str | Path | None = None,
        policy: KVPolicy | None = None,
        window: int | None = None,
        stride: int | None = None,
        answers: SubjectAnswers | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = torch.float32,
        **kwargs: Any,
    ) -> None:
        if isinstance(pretrained, (str, Path)):
            loaded = load_model(pretrained, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
            pretrained, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        if isinstance(pretrained, LoadedModel):
            pretrained, tokenizer = pretrained.model, tokenizer or pretrained.tokenizer
        if device is not None:
            to_device(device, pretrained)
        self.mechanism = None if mechanism is None else mechanism_of(_with_commas(mechanism))
        self.plan = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        self.policy = policy
        if sum(each is not None for each in (mechanism, plan, policy)) > 1:
            raise ValueError("one of mechanism, plan and policy at a time")
        # In half precision the sum of a window's log likelihoods would be rounded to a hundredth of a nat a token.
        kwargs.setdefault("softmax_dtype", "float32")
        super().__init__(pretrained, tokenizer=tokenizer, **kwargs)
        self._ends_texts_with = tokens_around(self.tokenizer)[1]
        self.window = window or self.max_length
        self.stride = stride or self.window
        if not 1 <= self.stride <= self.window <= self.max_length:
            raise ValueError(
                f"a window of {self.window} tokens with a stride of {self.stride}: the stride is at most the window, "
                f"and the window at most the model's length of {self.max_length} tokens"
            )
        self.answers = answers
        if answers is not None:
            # HFLM tells its hook of every answer, as soon as it has it.
            self.cache_hook = answers
        # For each text whose loss was asked for: (log likelihood, tokens) of its windows.
        self.windows: list[list[tuple[float, int]]] = []

    def tok_encode(self, string: str, *args: Any, **options: Any) -> list[int]:
        """HFLM's tokens of a text that goes on: without those by which the tokenizer ends every text."""
        ids = super().tok_encode(string, *args, **options)
        end = self._ends_texts_with
        return ids[: -len(end)] if end and ids[-len(end) :] == end else ids

    def tok_batch_encode(self, strings: list[str], *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The same of several texts, padded on the left."""
        ids, mask = super().tok_batch_encode(strings, *args, **options)
        end = self._ends_texts_with
        if end and all(row[-len(end) :] == end for row in ids.tolist()):
            return ids[:, : -len(end)], mask[:, : -len(end)]
        return ids, mask

    def attending(self) -> AbstractContextManager[Any]:
        """Inside, the model attends as it was asked to; a cache policy works call by call instead."""
        asked = self.plan if self.mechanism is None else self.mechanism
        return nullcontext() if asked is None else swap(self.model, asked)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        check_ids(self.model, inps)
        if self.policy is not None:
            return self._logits_token_by_token(inps, self.policy)
        with self.attending():
            return super()._model_call(inps, attn_mask, labels)

    def _logits_token_by_token(self, ids: Tensor, policy: KVPolicy) -> Tensor:
        """The logits of each token where keys are evicted after every token."""
        refuse_prefill(policy)
        adapter = adapter_of(self.model)
        with torch.no_grad(), evicting(self.model, policy) as cache:
            return torch.cat([adapter.logits(ids[:, t : t + 1], cache=cache) for t in range(ids.shape[1])], 1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        # A generation config's own limit would stand beside max_length, and transformers warns of the two.
        options.setdefault("max_new_tokens", max_length - context.shape[1])
        check_ids(self.model, context)
        if self.policy is not None:
            with evicting(self.model, self.policy) as cache:
                return super()._model_generate(context, None, stop, past_key_values=cache, **options)
        with self.attending():
            return super()._model_generate(context, None, stop, **options)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """HFLM's, for the requests whose answers are not in the file."""
        ask, quiet = super().loglikelihood, disable_tqdm or not sys.stderr.isatty()
        return self._answered("loglikelihood", requests, partial(ask, disable_tqdm=quiet))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """HFLM's, for the requests whose answers are not in the file.

        Prompts are padded on the left, which caches honour; a policy that cannot take padding gets one at a time.
        """
        ask, batch = super().generate_until, int(self.batch_size_per_gpu)  # type: ignore[has-type]
        quiet = disable_tqdm or not sys.stderr.isatty()
        try:
            if self.policy is not None and "padding" in self.policy.score.cannot():
                self.batch_size_per_gpu = 1
            return self._answered("generate_until", requests, partial(ask, disable_tqdm=quiet))
        finally:
            self.batch_size_per_gpu = batch

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log likelihood of whole texts, by lm-eval's rolling windows; those of each window stay in ``windows``."""
        quiet = disable_tqdm or not sys.stderr.isatty()
        batch = None if self.batch_size == "auto" else self.batch_size
        ask = partial(self._loglikelihood_tokens, disable_tqdm=quiet, override_bs=batch)
        sums = []
        for (text,) in (request.args for request in requests):
            pairs = [
                utils.make_disjoint_window(pair)
                for pair in utils.get_rolling_token_windows(
                    # The first window begins after the prefix: a tokenizer's own would be scored as if it were text.
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.window,
                    context_len=self.window - self.stride + 1,
                )
            ]
            # lm-eval's requests of tokens begin with what the hook is told.
            asked = [((f"window {i}", *map(str, pair)), *pair) for i, pair in enumerate(pairs)]
            answers = self._answered("loglikelihood", asked, ask, key=itemgetter(0))
            self.windows.append([(answer[0], len(pair[1])) for answer, pair in zip(answers, pairs, strict=True)])
            sums.append(sum(answer[0] for answer in answers))
        return sums

    def _answered(
        self,
        kind: str,
        requests: Sequence[Any],
        ask: Callable[[list[Any]], list[Any]],
        *,
        key: Callable[[Any], Any] = attrgetter("args"),
    ) -> list[Any]:
        """The answers to requests; those are asked whose answer the file does not have under the request's key."""
        known = [self.answers.get(kind, key(request)) if self.answers else None for request in requests]
        left = [request for request, answer in zip(requests, known, strict=True) if answer is None]
        fresh = iter(ask(left) if left else [])
        return [next(fresh) if answer is None else answer for answer in known]


def _with_commas(spec: Mechanism | str) -> Mechanism | str:
    mixed = isinstance(spec, str) and spec.startswith(("per-head:", "per-group:"))
    return spec.replace(";", ",") if isinstance(spec, str) and not mixed else spec


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
