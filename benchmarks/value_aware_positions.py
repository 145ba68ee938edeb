"""Why longer inputs have positions in parts (OVA, A.1): MLM error over the first steps, beside one repeated table.

python benchmarks/value_aware_positions.py STORES --write results

STORES holds token stores (train, valid, wikitext103-valid) and their tokenizer, as for python -m papers value-aware.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from storing import make_results, write_results
from torch import nn

from attnlab.data import IGNORED, Blocks, MlmSource
from papers.common.wiki_corpus import WikiCorpus
from papers.value_aware.masked_lm import continued_model, masked_score

MODEL = Path(__file__).parent.parent / "attnlab" / "shipped" / "mlm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--write", type=Path, help="a folder: write value_aware_positions.json there")
    args = parser.parse_args()
    corpus = WikiCorpus(args.stores)
    tokeniser = corpus.tokeniser()

    def source(name: str, seed: int | None) -> MlmSource:
        blocks = Blocks(corpus.store(name), tokeniser.specials, length=args.length, seed=seed)
        return MlmSource(blocks, args.rows, vocab_size=tokeniser.vocab_size, seed=0, shuffle=seed is not None)

    held_out = [source("wikitext103-valid", None).batch(step) for step in range(3)]
    train, rows = source("train", 0), []
    config = {name: getattr(args, name) for name in ("length", "rows", "steps", "lr")}
    for positions in ("in parts", "repeated"):
        torch.manual_seed(0)
        net = continued_model(MODEL, positions=args.length, dropout=0.0).eval()
        if positions == "repeated":
            own = net.bert.embeddings.position_embeddings.own.detach()
            net.bert.embeddings.position_embeddings = nn.Embedding.from_pretrained(
                own[torch.arange(args.length) % len(own)].clone(), freeze=False
            )
        optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(args.steps + 1):
            if step % max(1, args.steps // 2) == 0:
                row = {"positions": positions, "step": step, "tokens": step * args.rows * args.length}
                rows.append(row | masked_score(net, held_out))
                print(rows[-1], flush=True)
                if args.write:
                    result = make_results("value_aware_positions", "OVA", {"positions": rows}, config=config)
                    write_results(args.write / "value_aware_positions.json", result)
            _step(net, train.batch(step), optimizer, args.lr * min(1, (step + 1) / args.steps))


def _step(net: Any, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, lr: float) -> None:
    optimizer.param_groups[0]["lr"] = lr
    chosen = batch["labels"] != IGNORED
    logits = net.cls(net.bert(input_ids=batch["input_ids"]).last_hidden_state[chosen])
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, batch["labels"][chosen]).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()


if __name__ == "__main__":
    main()
