"""What ``import attnlab`` adds to other packages, when and only when they are imported: a leaf without torch.

transformers learns names such as "attnlab:top-r:r=64" for ``attn_implementation``, lm-eval the model "attnlab".
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["ADOPTED", "register_hooks", "when_imported"]

# The beginning of an attn_implementation that names a mechanism.
ADOPTED = "attnlab:"


def register_hooks() -> None:
    """Add to transformers and lm-eval what this module's documentation says; again is no harm."""
    when_imported("transformers.modeling_utils", _name_mechanisms)
    when_imported("lm_eval.models", _name_model)


def _name_mechanisms(modeling_utils: ModuleType) -> None:
    """Let transformers ask us about an attn_implementation that begins with "attnlab:", before it looks at the name.

    It looks when a model is made and when its implementation is set; the second way only warns where a model's
    attention cannot be set, and so must ask by itself.
    """
    cls = modeling_utils.PreTrainedModel
    for method in ("_check_and_adjust_attn_implementation", "set_attn_implementation"):
        setattr(cls, method, _after_adopting(getattr(cls, method)))


def _after_adopting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def adopt_and_go_on(model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        names = attn_implementation.values() if isinstance(attn_implementation, dict) else [attn_implementation]
        for name in names:
            if isinstance(name, str) and name.startswith(ADOPTED):
                from attnlab.adapters.implementation import adopt

                adopt(model, name)
        return method(model, attn_implementation, *args, **kwargs)

    return adopt_and_go_on


def _name_model(_: ModuleType) -> None:
    """Register lm-eval's model "attnlab", which it imports when somebody asks for it."""
    from lm_eval.api.registry import model_registry

    if "attnlab" not in model_registry:
        model_registry.register("attnlab", target="attnlab.evaluation.harness:AttnlabLM")


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act(module)`` now if the module is imported, else once, right after its import."""
    module = sys.modules.get(name)
    if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False) is False:
        act(module)
    else:
        sys.meta_path.insert(0, _Awaited(name, act))


class _Awaited(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, with a loader that calls back once the module is there."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        exec_module, act = spec.loader.exec_module, self.act

        def exec_and_act(module: ModuleType) -> None:
            exec_module(module)
            act(module)

        spec.loader.exec_module = exec_and_act  # type: ignore[method-assign]
        return spec
