"""Triton twins of mechanisms, same stem as theirs; imported only when a tensor on a GPU asks for one."""

import importlib.util

import torch

__all__ = ["AVAILABLE"]

# Without Triton, or on a GPU that is not NVIDIA's, every mechanism keeps to its PyTorch path.
AVAILABLE = importlib.util.find_spec("triton") is not None and torch.version.hip is None
