"""Attention maps as small pictures of one size, and the names of the patterns that they may show."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, interpolate

from attnlab.shapes import Float

__all__ = ["CLASSES", "SIZE", "picture"]

# Kovaleva et al. (2019); section 3.1 of Effective.
CLASSES = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")
SIZE = 48


def picture(maps: Float[Tensor, "n q k"], size: int = SIZE) -> Float[Tensor, "n size size"]:
    """Maps of real tokens as pictures: absolute weights over their 99.5th percentile, square root, at most 1.

    A longer map is shrunk by maxima, so that a line one token wide is not thinned away; a shorter one is repeated.
    """
    x = maps.abs().float()
    top = torch.quantile(x.flatten(1), 0.995, dim=1).clamp(min=1e-12)
    x = (x / top[:, None, None]).clamp(max=1).sqrt()[:, None]
    height, width = x.shape[-2:]
    # Up first, then down: an axis that is long enough stays as it is.
    x = interpolate(x, (max(height, size), max(width, size)), mode="nearest")
    return adaptive_max_pool2d(x, size)[:, 0]
