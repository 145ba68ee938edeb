"""What of a student is trained, and how its layers run: compiled, recomputed, with a stream of half precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attnlab.adapters.protocol import adapter_of
from attnlab.adapters.whole_layers import whole_layers
from attnlab.errors import first_line, is_out_of_memory
from attnlab.mechanisms._device import compiled_parts

__all__ = [
    "body_of",
    "fast_layers",
    "layers_of",
    "low_rank",
    "new_parameters",
    "only",
    "projections",
    "trained_parameters",
]

# Graphs of one layer's code: each length, with and without gradients, and the pieces around the attention function.
GRAPHS = 64
# Where errors of the compiler are defined.
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")


def new_parameters(converted: nn.Module) -> list[nn.Parameter]:
    """The parameters of the converted layers' mechanisms, each once."""
    mechanisms = [conversion.mechanism for conversion in adapter_of(converted).conversions()]
    learned = nn.ModuleList(mech for mech in mechanisms if isinstance(mech, nn.Module))
    return [p for p in learned.parameters() if p.requires_grad]


def body_of(model: nn.Module) -> nn.Module:
    """A model without its head over the vocabulary: its hidden states cost less than its logits."""
    body = getattr(model, "base_model", None)
    return body if isinstance(body, nn.Module) and hasattr(model, "get_output_embeddings") else model


def trained_parameters(student: nn.Module, stage: str, *, train: str, adapters: Iterable[nn.Parameter]) -> list[Any]:
    """The parameters that a stage trains: the new ones, and after the first stage adapters, attention or all."""
    new, adapters = new_parameters(student), list(adapters)
    if stage == "heads":
        return new
    if adapters:
        return [*new, *adapters]
    if train == "attention":
        return [*new, *(p for module in _attention_modules(student) for p in module.parameters())]
    if stage == "hidden":
        # The last norm and the head have no part in hidden states, and the embedding is the teacher's.
        return [*new, *(p for layer in layers_of(student).values() for p in layer.parameters())]
    return [*new, *student.parameters()]


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with the projections of q, k, v and o."""
    modules: list[nn.Module] = []
    for site in adapter_of(model).sites():
        modules += [site.module, *([] if site.output_linear is None else [site.output_linear])]
    return modules


@contextmanager
def only(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients are made for these parameters alone."""
    wanted = {id(p) for p in parameters}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in wanted]
    for p in others:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in others:
            p.requires_grad_(True)


class _LowRank(nn.Module):
    """W + B A (Hu et al., 2022), with B = 0 at first."""

    def __init__(self, weight: Tensor, rank: int, seed: int) -> None:
        super().__init__()
        out, width = weight.shape
        a = torch.randn(rank, width, generator=torch.Generator().manual_seed(seed)) * width**-0.5
        self.a, self.b = nn.Parameter(a.to(weight)), nn.Parameter(weight.new_zeros(out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@contextmanager
def low_rank(student: nn.Module, rank: int, *, seed: int) -> Iterator[list[nn.Parameter]]:
    """Inside, each projection of the attention has a change of this rank beside it; afterwards it is added to it."""
    if rank == 0:
        yield []
        return
    chosen = projections(student, rank)
    adapters: list[nn.Parameter] = []
    for i, module in enumerate(chosen):
        beside = _LowRank(module.weight, rank, seed * 1_000_003 + i)  # type: ignore[arg-type]
        parametrize.register_parametrization(module, "weight", beside)
        adapters += [beside.a, beside.b]
    try:
        yield adapters
    finally:
        for module in chosen:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def projections(student: nn.Module, rank: int) -> list[nn.Module]:
    """The modules with the attention's matrices; a ValueError where there is none, or one is smaller than the rank."""
    modules = {id(m): m for module in _attention_modules(student) for m in module.modules() if _is_matrix(m)}
    new = {id(p) for p in new_parameters(student)}
    chosen = [m for m in modules.values() if id(m.weight) not in new]
    if not chosen:
        raise ValueError(f"lora={rank}: no projection of this {type(student).__name__}'s attention is a matrix")
    least = min(min(m.weight.shape) for m in chosen)  # type: ignore[arg-type]
    if rank > least:
        raise ValueError(f"a change of rank {rank} is more than a matrix of the attention has, {least}: lower lora")
    return chosen


def _is_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.is_floating_point()


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers around the places where a model attends, by name: "model.layers.3" around its self_attn."""
    layers: dict[str, nn.Module] = {}
    for site in adapter_of(model).sites():
        parts = site.name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            name = ".".join(parts[: number + 1])
            layers[name] = model.get_submodule(name)
    return layers


@contextmanager
def fast_layers(model: nn.Module, *, compile: bool = False, checkpointing: bool = False) -> Iterator[None]:
    """Inside, layers are compiled or recomputed, no cache is filled, and autocast has its way from the embedding on.

    The parameters stay float32, the masters that the optimiser changes and a checkpoint holds: to cast them costs six
    bytes a parameter and step, under a thousandth of a step's time. What costs is the stream between layers, as wide as
    the first thing in it: an embedding, which autocast would leave in float32.
    """
    with ExitStack() as undo:
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # type: ignore[union-attr]
            undo.callback(setattr, config, "use_cache", True)
        if next(model.parameters()).is_cuda:
            # Products that a mechanism keeps in float32 have factors which autocast has rounded further already.
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        if isinstance(embedding, nn.Embedding):
            undo.callback(embedding.register_forward_hook(_as_autocast).remove)
        layers = list(layers_of(model).values()) if compile or checkpointing else []
        if compile:
            from torch._dynamo import config as dynamo

            undo.enter_context(dynamo.patch(recompile_limit=GRAPHS))
            compiler = _Compiler()
            # Where attention cannot be traced, the parts around it are compiled, and some of its own by themselves.
            undo.enter_context(compiled_parts(compiler.of))
            undo.enter_context(whole_layers(model))
        for layer in layers:
            forward: Callable[..., Any] = (
                MethodType(compiler.of(type(layer).forward), layer) if compile else layer.forward
            )
            layer.forward = _recomputed(forward) if checkpointing else forward
            undo.callback(layer.__dict__.pop, "forward")
        yield


def _as_autocast(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    kind = output.device.type
    return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


class _Compiler:
    """Compiled functions, one for each class of layer and part of a mechanism.

    Where one fails, all run as they are written from then on. One compiled function serves all layers of a class, whose
    graphs then are made once.
    """

    def __init__(self) -> None:
        self.works = True
        self.compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled."""
        if function not in self.compiled:
            self.compiled[function] = self._guarded(function)
        return self.compiled[function]

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function, dynamic=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.works:
                try:
                    return compiled(*args, **kwargs)
                except Exception as error:
                    # Recomputed layers are ended by an exception of torch's, which is none of the compiler's.
                    if not type(error).__module__.startswith(COMPILERS) or is_out_of_memory(error):
                        raise
                    self.works = False
                    warnings.warn(
                        f"torch.compile failed, so layers run uncompiled, and slower ({type(error).__name__}: "
                        f"{first_line(error)})",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            return function(*args, **kwargs)

        return run
