"""Where kernels are tested, and how far they may be from float64, ||a - b|| / ||b||."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
