"""The project's one legend of axis names, for signatures such as ``Float[Tensor, "b h q d"]``.

| axis | meaning                                   |
| ---- | ----------------------------------------- |
| b    | batch                                     |
| h    | query heads                               |
| g    | key/value heads; h is a multiple of g     |
| q    | queries                                   |
| k    | keys                                      |
| d    | width of a query or key                   |
| e    | width of a value                          |
| m    | width of the model (of ``x``)             |
| n    | slots of a bounded memory                 |
| f    | features of a kernel's feature map        |

jaxtyping checks these under pytest. It is no requirement of the package, so without it the names stay plain labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Shaped
    except ImportError:

        class _Label:
            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = Shaped = _Label


__all__ = ["Bool", "Float", "Int", "Shaped"]
