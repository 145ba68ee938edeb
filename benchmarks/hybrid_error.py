"""What a memory of some keys a head loses of attention's output, untrained, on a model's own calls.

    python benchmarks/hybrid_error.py smollm2 --write results          # or --text FILE, --memory 64 128

The last ``--length`` tokens of the text are read by softmax and recorded. Controls begin from the tokens before
them. Error is |(W - W^) v| / |W v| of a layer's heads together, and after W_O; the mean over layers.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from storing import make_results, read_results, write_results
from torch import Tensor
from tqdm import tqdm

import attnlab as al
from attnlab.adapters.protocol import adapter_of
from attnlab.caches.contract import Place
from attnlab.caches.kept_keys import KeptKeys
from attnlab.data import bundled_text

TABLE = "errors"


def compared(memory: int) -> dict[str, Any]:
    """{name: spec, spec whose control begins from the model's keys, or policy}, each with ``memory`` keys a head."""
    sinks, half = 4, memory // 2
    hybrid = f"abc-hybrid:slots={half},window={memory - half - sinks},sinks={sinks},block=4"
    few = f"abc-hybrid:slots={memory // 4},window={memory - memory // 4 - sinks},sinks={sinks},block=4"
    select = hybrid.replace("abc-hybrid", "abc-select")
    return {
        "window and sinks": f"window:r={memory - sinks},sinks={sinks}",
        "abc-mlp": f"abc-mlp:slots={memory},tied=false",
        "select, random scores": select,
        "select, scores by regression": (select,),
        "hybrid, random control": hybrid,
        "hybrid, clusters": (hybrid,),
        "hybrid, clusters, a quarter of slots": (few,),
        "hybrid, clusters, no mass": (hybrid + ",mass=false",),
        "hybrid, clusters seen through x": (hybrid + ",control=x",),
        # Token by token, which takes longest.
        "eviction by mass": al.KVPolicy(memory, by="mass"),
        "eviction by leave-one-out": al.KVPolicy(memory, by="leave-one-out"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--text", type=Path, help="by default the text that attnlab comes with")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--memory", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--write", type=Path, help="a folder: write hybrid_error.json there")
    args = parser.parse_args()
    text = bundled_text() if args.text is None else args.text.read_text(encoding="utf-8")
    model, tokenizer, _ = al.load_model(args.model)
    model.eval()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    before, ids = ids[: -args.length], torch.tensor([ids[-args.length :]])
    with torch.no_grad(), al.record(model) as trace:
        model(input_ids=ids)
    config = {"model": args.model, "text": "bundled" if args.text is None else args.text.name, "length": ids.shape[1],
              "tokens of clusters": len(before)}  # fmt: skip
    file = None if args.write is None else args.write / "hybrid_error.json"
    done = [] if file is None else (read_results(file) or {}).get("tables", {}).get(TABLE, [])
    for memory in args.memory:
        for name, what in compared(memory).items():
            spec = what if isinstance(what, str) else what[0] if isinstance(what, tuple) else repr(what)
            labels = {"model": args.model, "memory": memory, "mechanism": name, "spec": spec}
            if any(all(row.get(key) == value for key, value in labels.items()) for row in done):
                continue
            error = judged(model, trace, what, tokenizer, tokenizer.decode(before))
            row = labels | error
            print(row, flush=True)
            if file is not None:
                result = make_results("hybrid_error", "ABC", {TABLE: [row]}, config=config, keys={TABLE: list(labels)})
                write_results(file, result, before=read_results(file))


@torch.no_grad()
def judged(model: Any, trace: Any, what: Any, tokenizer: Any, before: str) -> dict[str, float]:
    """The errors of a memory in every layer, as their mean."""
    if isinstance(what, al.KVPolicy):
        outputs = [evicted(layer.call, what, layer.layer) for layer in tqdm(trace, disable=None)]
    elif isinstance(what, str) and what.startswith("window"):
        outputs = [al.mechanism(what)(layer.call) for layer in trace]
    else:
        student = al.convert(model, what if isinstance(what, str) else what[0], copy=True)
        if isinstance(what, tuple):
            al.initialise_control(student, [before], tokenizer=tokenizer)
        mechanisms = [conversion.mechanism for conversion in adapter_of(student).conversions()]
        outputs = [mech(layer.call) for mech, layer in zip(mechanisms, trace, strict=True)]
    errors = {"output": [], "projected": []}
    for layer, out in zip(trace, outputs, strict=True):
        off = (out - layer.output).transpose(1, 2).flatten(2)
        whole = layer.output.transpose(1, 2).flatten(2)
        errors["output"].append(float(off.norm() / whole.norm()))
        errors["projected"].append(float((off @ layer.projection.mT).norm() / (whole @ layer.projection.mT).norm()))
    return {name: sum(values) / len(values) for name, values in errors.items()}


def evicted(call: al.AttentionCall, policy: al.KVPolicy, layer: int) -> Tensor:
    """The output of tokens that come one by one where only the policy's keys are kept."""
    kept, outputs = KeptKeys(policy, layer), []
    for t in range(call.q.shape[2]):
        k, v = kept.extend(call.k[:, :, t : t + 1], call.v[:, :, t : t + 1])
        step = replace(call, q=call.q[:, :, t : t + 1], k=k, v=v, x=None, causal=False, offset=0, mask=None, bias=None)
        outputs.append(al.Softmax()(step))
        kept.cut(step, Place(layer))
    return torch.cat(outputs, 2)


if __name__ == "__main__":
    main()
