"""Attention maps made by code, one recipe per class: what the pattern classifier learns from besides real maps."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import normalise
from attnlab.reading.pattern_data import CLASSES, SIZE, picture
from attnlab.shapes import Float, Int

__all__ = ["generated_pictures"]

TRIES = 30


def generated_pictures(
    count: int, *, seed: int = 0, size: int = SIZE
) -> tuple[Float[Tensor, "n size size"], Int[Tensor, " n"]]:
    """``count`` pictures in equal shares of the classes, of maps of 24 to 96 tokens, encoder and causal, and labels."""
    chosen = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % len(CLASSES)
    pictures = [picture(_map(int(label), chosen)[None], size)[0] for label in labels]
    return torch.stack(pictures), labels


def _map(label: int, chosen: torch.Generator) -> Tensor:
    name = CLASSES[label]
    if name != "block" and _chance(0.4, chosen):
        # Whether a sink or a band is dark enough is a matter of degree, so maps are drawn until one is clear.
        for _ in range(TRIES):
            w = _causal_map(name, chosen)
            if _clear(w, name):
                return w
    return _encoder_map(name, chosen)


def _causal_map(name: str, chosen: torch.Generator) -> Tensor:
    """A causal model's map: its first token is a sink, and near tokens get some weight."""
    n = int(_between(24.0, 96.0, chosen))
    scores = torch.randn(n, n, generator=chosen) * _between(0.2, 1.2, chosen)
    scores = scores + torch.randn(1, n, generator=chosen) * _between(0.0, 0.8, chosen)
    if name == "heterogeneous":
        scores = scores * _between(0.6, 2.0, chosen) + _patches(n, chosen)
    if "vertical" in name and _chance(0.4, chosen):
        scores = scores + _columns(n, chosen)
    low, high = {"vertical": (0.0, 0.5), "heterogeneous": (0.0, 0.2)}.get(name, (0.4, 1.0))
    scores = scores + _diagonals(n, chosen) * _between(low, high, chosen)
    low, high = {"vertical": (1.0, 5.0), "vertical+diagonal": (1.0, 4.0)}.get(name, (0.0, 2.5))
    scores[:, 0] += _between(low, high, chosen)
    return normalise(torch.exp(scores).tril()[None, None])[0, 0]


def _clear(w: Tensor, name: str) -> bool:
    """Whether columns and near diagonals are as dark, in most of the rows that see them, as the class says."""
    x = picture(w[None])[0]
    columns = max(float(x[j:, j].median()) for j in range(2 * SIZE // 3))
    diagonals = max(float(x.diagonal(-j).median()) for j in range(4))
    vertical = columns > 0.6 if "vertical" in name else columns < 0.5
    diagonal = diagonals > 0.7 if "diagonal" in name else diagonals < 0.65
    # In a heterogeneous map near tokens may be dark, since the first rows have few keys.
    return vertical and (diagonal or name == "heterogeneous")


def _encoder_map(name: str, chosen: torch.Generator) -> Tensor:
    n = int(_between(24.0, 96.0, chosen))
    # Noise with a grain: independent entries, or smoothed along the queries, or both.
    scores = torch.randn(n, n, generator=chosen) * _between(0.2, 1.2, chosen)
    faint = torch.randn(1, n, generator=chosen) * _between(0.0, 0.5, chosen)
    scores = scores + faint + torch.randn(n, 1, generator=chosen) * 0.2
    if "vertical" in name:
        scores = scores + _columns(n, chosen)
    if "diagonal" in name:
        scores = scores + _diagonals(n, chosen)
    if name in ("vertical", "vertical+diagonal") and _chance(0.3, chosen):
        # Segments show through most patterns of a model that has read pairs.
        scores = scores + 0.25 * _blocks(n, chosen)
    if name == "block":
        # Keys differ within a segment, and what no segment needs goes to the first token or along the diagonal.
        scores = scores + _blocks(n, chosen) + torch.randn(1, n, generator=chosen) * _between(0.0, 0.7, chosen)
        if _chance(0.4, chosen):
            scores = scores + 0.35 * _diagonals(n, chosen)
        if _chance(0.6, chosen):
            scores[:, 0] += _between(1.0, 6.0, chosen)
    if name == "heterogeneous":
        grid = torch.randn(1, n, generator=chosen) * torch.randn(n, 1, generator=chosen)
        scores = scores * _between(0.6, 2.0, chosen) + grid * _between(0.0, 0.7, chosen) + _patches(n, chosen)
    w = torch.softmax(scores, -1)
    if _chance(0.5, chosen):
        # Effective attention spreads a floor under the pattern and cuts its peaks.
        w = w.clamp(max=float(w.max()) * _between(0.3, 1.0, chosen)) + _between(0.0, 0.5, chosen) / n
    return w


def _columns(n: int, chosen: torch.Generator) -> Tensor:
    """A few delimiters, or many columns of different weight."""
    heights = torch.zeros(n)
    if _chance(0.5, chosen):
        heights[0] = _between(2.0, 6.0, chosen)
    few = int(_between(1.0, 4.0, chosen))
    heights[torch.randint(n, (few,), generator=chosen)] = _between(2.0, 5.0, chosen)
    rows = torch.ones(n, 1)
    if _chance(0.6, chosen):
        heights = heights * 0.7 + torch.randn(n, generator=chosen) * _between(0.7, 1.6, chosen)
        # Not every query follows the columns.
        rows = 1 - _between(0.0, 0.8, chosen) * torch.rand(n, 1, generator=chosen)
    return rows * heights


def _diagonals(n: int, chosen: torch.Generator) -> Tensor:
    """A band around a shifted diagonal, at times with fainter parallels, as repeated words make."""
    i = torch.arange(n)
    shift, width, height = int(_between(-2.0, 3.0, chosen)), _between(0.5, 3.0, chosen), _between(2.5, 6.0, chosen)
    far = (i[:, None] + shift - i).abs()
    band = height * torch.exp(-((far / width) ** 2))
    if _chance(0.4, chosen):
        other = int(_between(n / 6, n / 2, chosen))
        parallel = torch.minimum((i[:, None] + other - i).abs(), (i[:, None] - other - i).abs())
        band = band + 0.6 * height * torch.exp(-((parallel / width) ** 2))
    return band


def _blocks(n: int, chosen: torch.Generator) -> Tensor:
    """Two or three segments that attend within themselves."""
    cuts = sorted(int(_between(n * 0.2, n * 0.8, chosen)) for _ in range(int(_between(1.0, 3.0, chosen))))
    segment = sum((torch.arange(n) >= cut).long() for cut in cuts)
    assert isinstance(segment, Tensor)
    same = (segment[:, None] == segment).float()
    if _chance(0.1, chosen):
        # Segments may also attend to one another.
        same = 1 - same
    return same * _between(1.2, 4.0, chosen)


def _patches(n: int, chosen: torch.Generator) -> Tensor:
    """Irregular spots."""
    coarse = torch.randn(1, 1, max(2, n // 6), max(2, n // 6), generator=chosen) * _between(0.3, 1.2, chosen)
    return torch.nn.functional.interpolate(coarse, (n, n), mode="bilinear", align_corners=False)[0, 0]


def _chance(share: float, chosen: torch.Generator) -> bool:
    return float(torch.rand((), generator=chosen)) < share


def _between(low: float, high: float, chosen: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=chosen))
