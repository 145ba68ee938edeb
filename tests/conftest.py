"""Shapes in signatures are checked while the tests run, and every test starts from the same seed."""

from __future__ import annotations

import os

import pytest

# Two workers on two cores: one thread each, or they fight. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    # Triton reads this when it is first imported; then its kernels run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with install_import_hook("attnlab", "beartype.beartype"):
    import attnlab
    import attnlab.registry

    attnlab.all_mechanisms()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
