"""OVA's masked task: a masked LM continued at a greater length, then judged with its attention approximated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import swap
from attnlab.data import IGNORED, Blocks, MlmSource
from attnlab.devices import best_device
from attnlab.measure import parameter_count
from attnlab.pretraining import BertMaskedLM, bert_states
from attnlab.shapes import Float, Int
from attnlab.training import Recipe, Schedule
from papers.value_aware.training import PartRun, fit, on_device, uncompiled

__all__ = ["Places", "continued_model", "masked_score", "run_mlm", "table_1_specs"]

HELD_OUT = ("valid", "wikitext103-valid")
Batches = list[dict[str, Tensor]]


class Places(nn.Module):
    """own[p mod n] + part[p div n]: n places again and again, and the number of the repetition (OVA, A.1 and POSq).

    The first part adds nothing. The others start at random, as far from it as places are from each other. If they
    started alike, a token could not be distinguished from those at the same place of other parts.
    """

    def __init__(self, own: Float[Tensor, "n c"], parts: int) -> None:
        super().__init__()
        self.own = nn.Parameter(own.clone())
        spread = (own - own.mean(0)).std()
        self.part = nn.Parameter(spread * torch.randn(parts, own.shape[1], generator=torch.Generator().manual_seed(0)))
        with torch.no_grad():
            self.part[0] = 0

    def forward(self, at: Int[Tensor, "*q"]) -> Float[Tensor, "*q c"]:
        return self.own[at % len(self.own)] + self.part[at // len(self.own)]


def continued_model(folder: Path | str, *, positions: int, dropout: float) -> Any:
    """The masked LM of a folder with ``positions`` places: its own, in as many parts as needed (A.1)."""
    from transformers import AutoConfig, BertConfig, BertForMaskedLM

    kind = AutoConfig.from_pretrained(folder).model_type
    if kind != "bert":
        raise ValueError(f"{folder} holds a model of type {kind!r}; only a BERT can be continued")
    model = BertForMaskedLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    own = model.bert.embeddings.position_embeddings.weight.detach()
    config = BertConfig.from_pretrained(folder, max_position_embeddings=positions, hidden_dropout_prob=dropout)
    longer = BertForMaskedLM(config).float()
    longer.bert.embeddings.position_embeddings = Places(own, -(-positions // len(own)))
    kept = {n: t for n, t in model.state_dict().items() if "position_embeddings" not in n}
    missing, unexpected = longer.load_state_dict(kept, strict=False)
    assert not unexpected
    assert all("position_embeddings" in name for name in missing)
    return longer


def table_1_specs(d: int) -> dict[str, str]:
    """Table 1's columns by the names that the claims read, each with our mechanism; d is the width of a head."""
    return {
        "softmax": "softmax",
        "top-r:r=1": "top-r:r=1",
        "top-r:r=d+1": f"top-r:r={d + 1}",
        "value-aware:r=1": "value-aware:r=1",
        "value-aware:r=d+1": f"value-aware:r={d + 1}",
        "orf:features=256": "orf:features=256,variant=as-written",
        "orf:features=256,variant=corrected": "orf:features=256,variant=corrected",
        "lsh:r=64,rounds=4": "lsh:r=64,rounds=4",
        "lsh:r=512,rounds=16": "lsh:r=512,rounds=16",
    }


@torch.no_grad()
def masked_score(model: Any, batches: Batches) -> dict[str, float]:
    """The share of masked tokens predicted wrongly, in %, and the mean of -log p."""
    wrong, nll, count = 0, 0.0, 0
    for batch in batches:
        labels = batch["labels"]
        chosen = labels != IGNORED
        hidden = model.bert(input_ids=batch["input_ids"]).last_hidden_state
        logits = model.cls(hidden[chosen]).float()
        wrong += int((logits.argmax(-1) != labels[chosen]).sum())
        nll += float(torch.nn.functional.cross_entropy(logits, labels[chosen], reduction="sum"))
        count += int(chosen.sum())
    return {"mlm_error": 100 * wrong / count, "loss": nll / count, "predicted": count}


def run_mlm(arm: str, run: PartRun, *, model: Path) -> None:
    """Continue the masked LM ``short`` or ``long``; the long one then fills Table 1 and Figure 1."""
    config, part = run.config, run.part
    device, tokeniser = best_device(), run.corpus.tokeniser()
    length = {"short": config.mlm_short, "long": config.mlm_long}[arm]
    net = continued_model(model, positions=length, dropout=config.mlm_dropout)
    if tokeniser.vocab_size > net.config.vocab_size:
        raise ValueError(
            f"the corpus has {tokeniser.vocab_size} tokens and the model {net.config.vocab_size}; "
            "tokenise the corpus with the model's tokenizer"
        )
    held_out = _held_out(run, length, device)

    def curve(step: int, net: Any) -> dict[str, float]:
        score = masked_score(net, held_out)
        part.row("figure_3_curves", model=arm, length=length, step=step, tokens=step * config.mlm_tokens, **score)
        return score

    kept = run.folder / "model.safetensors"
    if not kept.exists():
        blocks = Blocks(run.corpus.store("train"), tokeniser.specials, length=length, seed=config.seed)
        facts = fit(
            net,
            MlmSource(blocks, config.mlm_tokens // length, vocab_size=tokeniser.vocab_size, seed=config.seed),
            term=BertMaskedLM(),
            recipe=Recipe(lr=config.mlm_lr, betas=(0.9, 0.98), weight_decay=0.01, clip=config.mlm_clip),
            schedule=lambda steps: Schedule("linear", warmup=round(config.mlm_warmup * steps)),
            steps=config.mlm_steps,
            blocks=net.bert.encoder.layer,
            curve=curve,
            run=run,
            forward=bert_states,
        )
        part.fact("training", facts | {"parameters": parameter_count(net)})
        _keep(net, kept)
    net = _load_kept(net, kept).to(device).eval()
    steps = part.content["facts"]["training"]["steps"]
    with uncompiled():
        part.row("figure_3", model=arm, length=length, steps=steps, **masked_score(net, held_out))
        if arm == "long":
            short = _held_out(run, config.mlm_short, device)
            read = f"long, read at {config.mlm_short}"
            part.row("figure_3", model=read, length=config.mlm_short, steps=steps, **masked_score(net, short))
            _judge(net, run, held_out)


def _keep(net: nn.Module, path: Path) -> None:
    """Save in half precision. The saved model is the one that is scored, so that a resumed run scores the same."""
    from safetensors.torch import save_model

    draft = path.with_suffix(".draft")
    save_model(net.half().to("cpu"), str(draft))
    draft.replace(path)


def _load_kept(net: nn.Module, path: Path) -> nn.Module:
    from safetensors.torch import load_model

    load_model(net.half().to("cpu"), path)
    return net.float()


def _judge(net: Any, run: PartRun, held_out: Batches) -> None:
    """Put approximations in place of the model's attention, and measure the rows of Table 1 and Figure 1."""
    config, part = run.config, run.part
    d = net.config.hidden_size // net.config.num_attention_heads

    def score_on(batches: Batches) -> Callable[[str], dict[str, Any]]:
        def measure(spec: str) -> dict[str, Any]:
            with swap(net, spec):
                return {"spec": spec, **masked_score(net, batches)}

        return measure

    tabled = {spec: {"mechanism": name} for name, spec in table_1_specs(d).items()}
    part.rows("table_1", tabled, score_on(held_out[:: config.table_every]))
    # The search for value-aware keys between 1 and d + 1 is slow, so both kinds are scored on a few rows.
    few = [{name: t[: config.between_rows] for name, t in held_out[0].items()}]
    wanted: dict[str, dict[str, Any]] = {"softmax": {"family": "softmax"}}
    for r in (1, *config.between_r):
        wanted |= {f"{family}:r={r}": {"family": family, "r": r} for family in ("top-r", "value-aware")}
    part.rows("figure_1_few", wanted, score_on(few))
    wanted = {}
    for r in config.mlm_r:
        wanted |= {f"{family}:r={r}": {"family": family, "r": r} for family in ("top-r", "window")}
    wanted |= {f"value-aware:r={r}": {"family": "value-aware", "r": r} for r in (1, d + 1)}
    for r, rounds in config.mlm_lsh:
        wanted[f"lsh:r={r},rounds={rounds}"] = {"family": "lsh", "r": r, "rounds": rounds}
    part.rows("figure_1", wanted, score_on(held_out[:: config.sweep_every]))


def _held_out(run: PartRun, length: int, device: torch.device) -> Batches:
    """Both held-out texts in rows of ``length``, with masks that are always the same."""
    config, tokeniser = run.config, run.corpus.tokeniser()
    batches: Batches = []
    for name in HELD_OUT:
        blocks = Blocks(run.corpus.store(name), tokeniser.specials, length=length, seed=None)
        # As many tokens in a batch at every length.
        rows = min(len(blocks), max(1, config.eval_batch * config.mlm_short // length))
        source = MlmSource(blocks, rows, vocab_size=tokeniser.vocab_size, seed=config.seed, shuffle=False)
        wanted = source.steps_per_epoch
        if config.eval_rows is not None:
            wanted = min(wanted, -(-config.eval_rows // rows))
        batches += on_device((source.batch(step) for step in range(wanted)), device)
    return batches
