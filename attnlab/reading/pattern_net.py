"""The network that tells patterns apart: several small ConvNets side by side, whose probabilities are averaged."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from attnlab.reading.pattern_data import CLASSES, SIZE
from attnlab.reading.pattern_features import feature_count, pattern_features
from attnlab.shapes import Float

__all__ = ["PatternNet"]


class PatternNet(nn.Module):
    """Each of the ``members`` has four convolutions over a picture and its column and diagonal means.

    ``pattern_features`` stand beside what they find. Members are groups of one convolution, so that all of them take
    hardly longer than one on a GPU.
    """

    def __init__(self, members: int = 5, width: int = 12, hidden: int = 48) -> None:
        super().__init__()
        self.members = members
        sizes = [3, width, 2 * width, 3 * width, 4 * width]
        # The first is at full size, and would be most of the work.
        self.layers = nn.ModuleList(
            nn.Conv2d(members * a, members * b, 3 if i else 5, 1 if i else 2, 1 if i else 2, groups=members)
            for i, (a, b) in enumerate(pairwise(sizes))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4 * members, members * b) for b in sizes[1:])
        # Linear layers of each member.
        self.join = nn.Conv1d(members * (2 * sizes[-1] + feature_count(SIZE)), members * hidden, 1, groups=members)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Conv1d(members * hidden, members * len(CLASSES), 1, groups=members)

    def forward(self, x: Float[Tensor, "n size size"]) -> Float[Tensor, "n classes"]:
        """The logarithm of the members' mean probability of each class."""
        planes, features = _planes(x), pattern_features(x)
        logits = self._logits(planes.repeat(1, self.members, 1, 1), features.repeat(1, self.members))
        return logits.log_softmax(-1).logsumexp(1) - math.log(self.members)

    def each(self, x: Float[Tensor, "m n size size"]) -> Float[Tensor, "n m classes"]:
        """Logits of every member, for pictures of its own."""
        m, n, size, _ = x.shape
        flat = x.flatten(0, 1)
        planes = _planes(flat).view(m, n, 3, size, size).transpose(0, 1).flatten(1, 2)
        features = pattern_features(flat).view(m, n, -1).transpose(0, 1).flatten(1)
        return self._logits(planes, features)

    def _logits(self, planes: Tensor, features: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            planes = torch.relu(norm(conv(planes)))
            planes = nn.functional.max_pool2d(planes, 2) if i else planes
        parts = (planes.amax((-1, -2)), planes.mean((-1, -2)), features)
        summary = torch.cat([part.view(len(part), self.members, -1) for part in parts], -1).flatten(1)
        joined = self.drop(torch.relu(self.join(summary[..., None])))
        return self.out(joined).view(len(planes), self.members, -1)


def _planes(x: Tensor) -> Tensor:
    """The picture; its column and diagonal means, which two classes are about: a convolution sees a few tokens far."""
    columns = x.mean(1)[:, None].expand_as(x)
    return torch.stack([x, columns, _along_diagonals(_diagonal_means(x))], 1)


def _offsets() -> Tensor:
    i = torch.arange(SIZE)
    return i - i[:, None] + SIZE - 1


def _diagonal_means(x: Tensor) -> Tensor:
    """The mean along each of the 2 SIZE - 1 diagonals."""
    at = _offsets().flatten().to(x.device)
    sums = torch.zeros(len(x), 2 * SIZE - 1, dtype=x.dtype, device=x.device).index_add(1, at, x.flatten(1))
    return sums / torch.bincount(at, minlength=2 * SIZE - 1)


def _along_diagonals(means: Tensor) -> Tensor:
    return means[:, _offsets().to(means.device)]
