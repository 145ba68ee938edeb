"""Statistics of softmax attention by the kernels of ``attnlab.kernels.statistics``."""

from __future__ import annotations

from attnlab.attention import AttentionCall
from attnlab.linalg.streaming import CallStatistics, Measures, Text
from attnlab.shapes import Float

__all__ = ["kernel_serves", "stream_by_kernel"]


def kernel_serves(call: AttentionCall, measures: Measures, text: Text) -> bool:
    return False


def stream_by_kernel(call: AttentionCall, measures: Measures, text: Text) -> tuple[CallStatistics, Float]:
    raise NotImplementedError
