"""Settings of ``python -m papers value-aware``, and the columns that identify a row of each of its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ARMS", "CONFIGS", "KEYS", "LM_KEYS", "LM_NAME", "NAME", "RealLmConfig", "ValueAwareConfig"]

NAME = "value-aware"
# The masked LMs: continued at a greater length, and, as the control, at their own.
ARMS = ("long", "short")
# The columns that identify a row of a table; the paper's row with the same values lies beside ours.
KEYS = {
    "table_1": ["mechanism"],
    "table_2": ["kernel", "mechanism", "seed"],
    "figure_1": ["family", "r", "rounds"],
    "figure_1_few": ["family", "r"],
    "figure_2": ["kernel", "r", "seed"],
    "figure_2_few": ["kernel", "family", "r", "seed"],
    "figure_3": ["model"],
    "figure_3_curves": ["model", "step"],
    "lm_curves": ["kernel", "step", "seed"],
}

# The same of ``python -m papers value-aware-lm``.
LM_NAME = "value-aware-lm"
LM_KEYS = {
    "windows": ["length", "spec", "window"],
    "output_error": ["spec"],
    "perplexity": ["length", "spec"],
    "against_top_r": ["length", "family", "r"],
}


@dataclass(frozen=True)
class RealLmConfig:
    """The text's windows, and the keys that a pretrained causal LM keeps of every query."""

    windows: int = 40
    length: int = 1024
    batch: int = 8
    # And d + 1, with d the width of a head.
    r: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 128, 256)
    # The first keys that window+sinks always keeps.
    sinks: int = 4
    # (keys a round, rounds), scored on the first windows: a query meets two chunks of keys in every round.
    lsh: tuple[tuple[int, int], ...] = ((64, 4), (64, 16), (256, 4))
    lsh_windows: int = 8
    # Numbers of value-aware keys that are searched for, and the windows that they are scored on.
    searched: tuple[int, ...] = (2, 4, 8, 16)
    search_windows: int = 16
    search_length: int = 256
    search_batch: int = 16
    # Layers whose output error is measured.
    error_layers: int = 6

    def __post_init__(self) -> None:
        if self.windows < 2:
            raise ValueError(f"windows must be at least 2, since intervals are over windows, got {self.windows}")
        if not 1 < self.search_length <= self.length:
            raise ValueError(f"search_length must lie between 2 and the length {self.length}, got {self.search_length}")


@dataclass(frozen=True)
class ValueAwareConfig:
    """Everything that decides the numbers: the models, how long they learn, and what is put in place of attention.

    Steps of None are planned from the speeds measured while all parts run at once, so that the trainings together take
    about ``train_seconds``; models that are compared get equally many.
    """

    seed: int = 0
    # The causal models (OVA, A.2); the paper's batch is 128 x 512.
    lm_vocabulary: Literal["pieces", "words"] = "pieces"
    kernels: tuple[str, ...] = ("exp", "poly", "elu")
    lm_layers: int = 6
    lm_width: int = 512
    lm_heads: int = 8
    lm_length: int = 512
    lm_batch: int = 64
    lm_dropout: float = 0.1
    lm_lr: float = 5e-4
    # The paper does not clip. Where all scores of a row are near zero, the polynomial's gradient is rounding error.
    lm_clip: float | None = 1.0
    # 4,000 of the paper's 31,520 steps.
    lm_warmup: float = 4000 / 31520
    lm_steps: int | None = None
    # Every predicted word but the first window's has at least this many tokens before it.
    lm_context: int = 400
    lm_r: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 65, 128, 256, 512)
    # The masked models (OVA, A.1 and Table 4; the paper's learning rate is 5e-6, for 2.5M steps).
    mlm_short: int = 512
    mlm_long: int = 2048
    mlm_tokens: int = 32_768
    mlm_dropout: float = 0.0
    mlm_lr: float = 3e-4
    mlm_warmup: float = 0.1
    mlm_clip: float = 5.0
    mlm_steps: int | None = None
    mlm_r: tuple[int, ...] = (1, 2, 4, 8, 16, 33, 64, 128, 256, 512, 1024, 2048)
    # (keys a round, rounds) of Figure 1's LSH; Table 1 has the first and the last.
    mlm_lsh: tuple[tuple[int, int], ...] = ((64, 4), (64, 16), (512, 1), (512, 4), (512, 16))
    # Numbers of value-aware keys between 1 and d + 1, which are searched for, and the rows that they are scored on.
    between_r: tuple[int, ...] = (2, 4, 8, 16)
    between_rows: int = 2
    # Table 1 is scored on one held-out batch in ``table_every``, the figures' sweeps on one in ``sweep_every``.
    table_every: int = 1
    sweep_every: int = 4
    curve_points: int = 8
    eval_batch: int = 16
    # Rows of each held-out text; None: all.
    eval_rows: int | None = None
    train_seconds: float = 220.0
    # The share of the GPU that the causal models' trainings get.
    lm_share: float = 0.65
    probe_seconds: float = 6.0
    compile: bool = False

    def __post_init__(self) -> None:
        if self.lm_vocabulary not in ("pieces", "words"):
            raise ValueError(f"lm_vocabulary must be 'pieces' or 'words', got {self.lm_vocabulary!r}")
        if not set(self.kernels) <= {"exp", "poly", "elu"} or not self.kernels:
            raise ValueError(f"kernels must be some of exp, poly and elu, got {self.kernels}")
        if not 0 < self.lm_context < self.lm_length:
            raise ValueError(f"lm_context must lie between 0 and lm_length {self.lm_length}, got {self.lm_context}")
        if self.mlm_long > self.mlm_tokens:
            raise ValueError(f"a batch of {self.mlm_tokens} tokens holds no row of {self.mlm_long}")


CONFIGS = {
    "small": ValueAwareConfig(),
    # To see that everything runs: one kernel, two updates, a few rows of text.
    "smoke": ValueAwareConfig(
        kernels=("exp",),
        lm_layers=1,
        lm_width=64,
        lm_heads=2,
        lm_length=128,
        lm_batch=4,
        lm_steps=2,
        lm_context=96,
        lm_r=(1, 33, 128),
        mlm_short=128,
        mlm_long=256,
        mlm_tokens=1024,
        mlm_steps=2,
        mlm_r=(1, 33, 256),
        mlm_lsh=((64, 4),),
        between_r=(2,),
        between_rows=1,
        sweep_every=1,
        curve_points=1,
        eval_batch=4,
        eval_rows=4,
        probe_seconds=0.5,
    ),
    # Table 4 (ROBERTA-512 and ROBERTA-4096: 8 instances of 512 tokens in a batch, as 8 rows or as one) and A.2, whose
    # 156M parameters are those of WikiText-103's 267,744 words.
    "paper": ValueAwareConfig(
        seed=42,
        lm_vocabulary="words",
        lm_batch=128,
        lm_clip=None,
        lm_steps=31_520,
        mlm_short=512,
        mlm_long=4096,
        mlm_tokens=8 * 512,
        mlm_lr=5e-6,
        mlm_steps=2_476_000,
        mlm_r=(1, 2, 4, 8, 16, 33, 64, 128, 256, 512, 1024, 2048, 4096),
    ),
}
