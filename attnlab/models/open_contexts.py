"""What the contexts that are open ask of one attention layer; copies of the layer follow while the contexts last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from torch import nn

__all__ = ["OpenContexts", "refuse_replica"]

Item = TypeVar("Item")


class OpenContexts(Generic[Item]):
    """One item for each open context, the outermost first.

    A copy of the layer that is made inside a context attends as the layer does, until the context ends; what is added
    to the copy stays with the copy. A layer that is saved has none.

    >>> import copy
    >>> contexts = OpenContexts()
    >>> contexts.add("swap")
    >>> twin = copy.deepcopy(contexts)
    >>> twin.add("record")
    >>> list(contexts), list(twin)
    (['swap'], ['swap', 'record'])
    >>> contexts.remove("swap")
    >>> list(contexts), list(twin)
    ([], ['record'])
    """

    def __init__(self, original: OpenContexts[Item] | None = None) -> None:
        self.original, self.own = original, list[Item]()

    def add(self, item: Item) -> None:
        """Open a context."""
        self.own.append(item)

    def remove(self, item: Item) -> None:
        """Remove the last occurrence of this very object: mechanisms may compare equal."""
        del self.own[max(i for i, other in enumerate(self.own) if other is item)]

    def __iter__(self) -> Iterator[Item]:
        if self.original is not None:
            yield from self.original
        yield from list(self.own)

    def __len__(self) -> int:
        return len(self.own) + (0 if self.original is None else len(self.original))

    def __deepcopy__(self, _memo: dict[int, Any]) -> OpenContexts[Item]:
        return OpenContexts(self)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OpenContexts, ()


def refuse_replica(layer: nn.Module, name: str, *, notes: bool, mechanism: object) -> None:
    """Raise a ValueError in a replica of ``nn.DataParallel`` that would note calls or use parameters of the original.

    Each replica runs a part of the batch on its own device, and a note would hold the part of one of them.
    """
    if not getattr(layer, "_is_replica", False):
        return
    learned = isinstance(mechanism, nn.Module) and next(mechanism.parameters(), None) is not None
    if notes or learned:
        reason = "its calls are recorded" if notes else f"{mechanism!r} has parameters, which stay on the first device"
        raise ValueError(
            f"{name} runs in a replica of nn.DataParallel, which holds a part of the batch, but {reason}; run the "
            "model itself, or one process per device (DistributedDataParallel)"
        )
