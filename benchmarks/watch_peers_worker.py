"""One way to get statistics of attention, timed in a process of its own; run by watch_peers.py.

    python watch_peers_worker.py TASK ANSWER

TASK is a JSON file: the way, a model's folder, token ids, repeats, the seconds after which no repeat begins, and the
GiB that the process may take. ANSWER gets the processor time of every repeat (one thread), the memory before the passes
and at their peak, and the mean of each statistic over the queries of every head, by which watch_peers.py can tell
whether all ways measure the same. A way that does not fit has only "fits": false. Peers are imported by their own way,
from their own environment. Linux only, for /proc.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Statistics = dict[str, Tensor]
# From token ids to the statistics of each layer; none for the model alone.
Pass = Callable[[Tensor], list[Statistics]]
LARGEST, SINKS, RECENT = 8, 4, 64
ONE_PASS: dict[str, Any] = {"logits_to_keep": 1, "use_cache": False}
WARM_UP = 128


def main() -> None:
    task, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps(measured(json.loads(task.read_text(encoding="utf-8")))), encoding="utf-8")


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """The answer to a task."""
    limit = int(task["gib"] * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    torch.set_num_threads(1)
    run = WAYS[task["way"]](task["model"])
    ids = torch.tensor([task["ids"]])
    try:
        with torch.no_grad():
            run(ids[:, :WARM_UP])
            reset_peak()
            loaded = peak_mib()
            seconds, statistics = timed(run, ids, task["repeats"], task["seconds"])
    # nnsight wraps the error of the allocator in one of its own.
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return {"fits": False}
        raise
    memory = {"loaded MiB": loaded, "peak MiB": peak_mib()}
    return {"fits": True, "seconds": seconds, **memory, "means": means(statistics)}


def timed(run: Pass, ids: Tensor, repeats: int, most: float) -> tuple[list[float], list[Statistics]]:
    """Processor time of each repeat, and the last statistics."""
    seconds: list[float] = []
    statistics: list[Statistics] = []
    while len(seconds) < repeats and (not seconds or sum(seconds) < most):
        statistics = []
        begin = time.process_time()
        statistics = run(ids)
        seconds.append(time.process_time() - begin)
    return seconds, statistics


def means(statistics: list[Statistics]) -> dict[str, list[list[float]]]:
    """Of each statistic the mean over queries, by layer and head."""
    summaries: dict[str, Callable[[Statistics], Tensor]] = {
        "entropy": lambda s: s["entropy"].mean(-1),
        "largest": lambda s: s["largest"].sum(-1).mean(-1),
        "sinks": lambda s: s["sinks"].mean(-1),
        "recent": lambda s: s["recent"].mean(-1),
        # What a key receives adds up to the number of queries, so the mean says nothing.
        "received": lambda s: s["received"].amax(-1) / s["entropy"].shape[-1],
    }
    return {name: [of(layer)[0].tolist() for layer in statistics] for name, of in summaries.items()}


def dense_statistics(weights: Tensor) -> Statistics:
    """The statistics of a causal layer from its W, (b, h, q, k); head by head, so that no copy of W is made."""
    heads = []
    for w in weights.flatten(0, 1):
        largest, places = w.topk(min(LARGEST, w.shape[-1]))
        heads.append(
            {
                "entropy": torch.special.entr(w).sum(-1),
                "largest": largest,
                "places": places,
                "sinks": w[:, :SINKS].sum(-1),
                "recent": w.triu(1 - RECENT).sum(-1),
                "received": w.sum(0),
            }
        )
    return {name: torch.stack([head[name] for head in heads]).unflatten(0, weights.shape[:2]) for name in heads[0]}


def load(folder: str, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    return loaded.eval()


def model_alone(folder: str) -> Pass:
    model = load(folder, "sdpa")

    def run(ids: Tensor) -> list[Statistics]:
        model(ids, **ONE_PASS)
        return []

    return run


def watch(folder: str, **options: Any) -> Pass:
    import attnlab as al

    model = load(folder, "sdpa")

    def run(ids: Tensor) -> list[Statistics]:
        with al.watch(model, largest=LARGEST, sinks=SINKS, recent=RECENT, **options) as statistics:
            model(ids, **ONE_PASS)
        names = ("entropy", "largest", "places", "sinks", "recent", "received")
        return [{name: getattr(layer, name) for name in names} for layer in statistics.layers]

    return run


def watch_same(folder: str) -> Pass:
    return watch(folder, norm=False, removed=False, block=0)


def eager_kept(folder: str) -> Pass:
    model = load(folder, "eager")

    def run(ids: Tensor) -> list[Statistics]:
        return [dense_statistics(w) for w in model(ids, output_attentions=True, **ONE_PASS).attentions]

    return run


def eager_layers(folder: str) -> Pass:
    model = load(folder, "eager")
    statistics: list[Statistics] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *call: statistics.append(dense_statistics(call[-1][1])))

    def run(ids: Tensor) -> list[Statistics]:
        statistics.clear()
        model(ids, **ONE_PASS)
        return list(statistics)

    return run


def nnsight_model(folder: str) -> Any:
    from nnsight import NNsight

    return NNsight(load(folder, "eager"))


def nnsight_kept(folder: str) -> Pass:
    model = nnsight_model(folder)

    def run(ids: Tensor) -> list[Statistics]:
        with model.trace(ids, **ONE_PASS):
            kept = list().save()  # type: ignore[attr-defined]  # noqa: C408 (nnsight gives objects a method save)
            for layer in model.model.layers:
                kept.append(layer.self_attn.output[1])
        return [dense_statistics(w) for w in kept]

    return run


def nnsight_layers(folder: str) -> Pass:
    model = nnsight_model(folder)

    def run(ids: Tensor) -> list[Statistics]:
        with model.trace(ids, **ONE_PASS):
            kept = list().save()  # type: ignore[attr-defined]  # noqa: C408 (nnsight gives objects a method save)
            for layer in model.model.layers:
                kept.append(dense_statistics(layer.self_attn.output[1]))
        return list(kept)

    return run


def is_pattern(name: str) -> bool:
    return name.endswith("attn.hook_pattern")


def lens_model(folder: str) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def lens_kept(folder: str) -> Pass:
    model = lens_model(folder)

    def run(ids: Tensor) -> list[Statistics]:
        _, cache = model.run_with_cache(ids, names_filter=is_pattern, return_type=None, **ONE_PASS)
        return [dense_statistics(w) for w in cache.values()]

    return run


def lens_layers(folder: str) -> Pass:
    model = lens_model(folder)

    def run(ids: Tensor) -> list[Statistics]:
        statistics: list[Statistics] = []

        def hook(weights: Tensor, hook: Any) -> None:
            statistics.append(dense_statistics(weights))

        model.run_with_hooks(ids, fwd_hooks=[(is_pattern, hook)], return_type=None, **ONE_PASS)
        return statistics

    return run


WAYS: dict[str, Callable[[str], Pass]] = {
    "model alone": model_alone,
    "al.watch, all statistics": watch,
    "al.watch, the same statistics": watch_same,
    "eager, output_attentions": eager_kept,
    "eager, layer by layer": eager_layers,
    "nnsight, W saved": nnsight_kept,
    "nnsight, layer by layer": nnsight_layers,
    "TransformerLens, run_with_cache": lens_kept,
    "TransformerLens, layer by layer": lens_layers,
}


def reset_peak() -> None:
    """From here on the peak is that of the passes, not of loading the model."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_mib() -> float:
    """The most memory resident at once; getrusage would include what the parent had when it started this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert line is not None, "/proc/self/status has no VmHWM"
    return int(line[1]) / 1024


if __name__ == "__main__":
    main()
