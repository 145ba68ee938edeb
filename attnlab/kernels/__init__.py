"""Triton twins of mechanisms, same stem as theirs; imported only when a tensor on a GPU asks for one."""

import importlib.util

__all__ = ["AVAILABLE"]

# Without Triton every mechanism keeps to its PyTorch path.
AVAILABLE = importlib.util.find_spec("triton") is not None
