"""Triton twins of mechanisms, same stem as theirs; imported only when a tensor on a GPU asks for one.

``abc`` ABC_MLP and other slots, forward, backward and one step; ``decoding`` one step of linear attention, and slots
that are only read; ``effective`` effective attention; ``guided`` attention with errors to patterns; ``hybrid``
abc-hybrid, forward, backward and one step; ``ragged`` one step over keys whose number differs by head; ``select``
abc-select, forward, backward and one step; ``statistics`` softmax attention with statistics of its weights. Files that
end in ``_triton`` hold kernels, and others prepare their arguments (``abc``, ``hybrid`` and ``select`` list their own).
``launching`` is how all but ``guided`` are launched.
"""

import importlib.util

import torch

__all__ = ["AVAILABLE", "LAUNCH_VARIABLE", "TESTED_TRITON"]

# Without Triton, or on a GPU that is not NVIDIA's, every mechanism keeps to its PyTorch path.
AVAILABLE = importlib.util.find_spec("triton") is not None and torch.version.hip is None
# The first and last minor version of Triton with which direct launches were tested; others launch plainly.
TESTED_TRITON = ((3, 4), (3, 6))
# The environment variable that chooses how kernels are launched: "plain" or "direct" (see ``launching``).
LAUNCH_VARIABLE = "ATTNLAB_KERNEL_LAUNCH"
