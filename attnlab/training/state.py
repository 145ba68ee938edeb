"""The state of a training process as plain tensors and JSON: parameters, optimiser, random generators."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["full_state", "load_state", "random_state", "seed_everything", "set_random_state", "undisturbed"]

Tensors = dict[str, Tensor]
PREFIX = "model."


def full_state(prepared: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> tuple[Tensors, Tensors]:
    """The whole model and optimiser by the user's parameter names, gathered from all ranks if ``sharded``."""
    if sharded:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as get_optimizer

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model: Any = get_model_state_dict(prepared, options=options)
        # Before the first update torch would make an update of its own to have a state to return. Only the first rank
        # gets one.
        optim: Any = get_optimizer(prepared, optimizer, options=options) if optimizer.state else {}
        by_name = optim.get("state", {})
    else:
        objective = _objective(prepared)
        model = objective.state_dict()
        names: dict[Any, str] = {p: name for name, p in objective.named_parameters()}
        by_name = {names[p]: state for p, state in optimizer.state.items()}
    flat = {f"{name[len(PREFIX) :]}.{key}": torch.as_tensor(v) for name, s in by_name.items() for key, v in s.items()}
    return {name[len(PREFIX) :]: tensor for name, tensor in model.items()}, flat


def load_state(
    prepared: nn.Module, optimizer: torch.optim.Optimizer, model: Tensors, flat: Tensors, *, sharded: bool
) -> None:
    """The inverse of ``full_state``; the number of ranks may have changed between them."""
    whole: dict[str, Any] = {PREFIX + name: tensor for name, tensor in model.items()}
    by_name: dict[str, Any] = {}
    for key, tensor in flat.items():
        name, _, slot = key.rpartition(".")
        by_name.setdefault(PREFIX + name, {})[slot] = tensor
    if sharded:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as set_optimizer

        options = StateDictOptions(full_state_dict=True)
        names = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in prepared.named_parameters()}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        set_model_state_dict(prepared, whole, options=options)
        if by_name:
            set_optimizer(prepared, optimizer, {"state": by_name, "param_groups": groups}, options=options)
        return
    objective = _objective(prepared)
    objective.load_state_dict(whole)
    named = {p: name for name, p in objective.named_parameters()}
    current = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    current["state"] = {i: by_name[named[p]] for i, p in enumerate(order) if named[p] in by_name}
    optimizer.load_state_dict(current)


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of every random generator a model may use, as JSON."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
        # Only of this process's device: reading another's state would initialise that device.
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of ``random_state``."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


@contextmanager
def undisturbed(seed: int) -> Iterator[None]:
    """Run with freshly seeded generators and put the old ones back, so that evaluations do not change the training."""
    before = random_state()
    try:
        seed_everything(seed)
        yield
    finally:
        set_random_state(before)


def _objective(prepared: nn.Module) -> nn.Module:
    return prepared.module if isinstance(prepared, nn.parallel.DistributedDataParallel) else prepared


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
