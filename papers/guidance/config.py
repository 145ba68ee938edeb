"""The paper's settings by name (Tables 10 and 11), and those of our own smaller runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnlab.guidance import Guidance

__all__ = ["EPOCHS", "PAPER_LENGTH", "PAPER_SETTINGS", "Arm", "MlmConfig", "PaperSetting", "ablations", "arms"]


# Tokens of a text in the paper.
PAPER_LENGTH = 512
# Steps for which the authors' code keeps alpha at alpha0.
HOLD_STEPS = 20_000
# The share of a run that is too short for the paper's warm-up.
SHORT_WARMUP = 0.1
# Passes over the text, of the English models on GPUs (A.4).
EPOCHS = 7


@dataclass(frozen=True)
class PaperSetting:
    """One row of AG's Table 11: the model of Table 10 by its name in ``attnlab.models``, and how it is trained.

    A warm-up of the paper's steps, and alpha0 held for the 20,000 steps of the authors' code, where they are at most
    half of a run; a shorter run has them as shares: ``SHORT_WARMUP``, and the default hold of ``Guidance``.
    """

    model: str
    language: str
    guided: bool
    lr: float
    warmup: int
    batch: int
    alpha0: float | None = None
    # lambda
    fraction: float | None = None

    def guidance(self, *, steps: int, length: int = PAPER_LENGTH) -> Guidance | None:
        """The settings of guidance for a run of ``steps`` on texts of ``length`` tokens; None for a row without.

        alpha0 belongs to 512 tokens; for another length it is scaled to the same pull on each row.
        """
        if not self.guided:
            return None
        assert self.alpha0 is not None
        hold = HOLD_STEPS / (steps - 1) if steps >= 2 * HOLD_STEPS else Guidance.hold
        return Guidance(fraction=self.fraction, alpha0=self.alpha0 * length / PAPER_LENGTH, hold=hold, steps=steps)

    def warmup_over(self, steps: int) -> int:
        """The warm-up of a run of ``steps``, in steps."""
        return self.warmup if steps >= 2 * self.warmup else round(SHORT_WARMUP * steps)


def _paper() -> dict[str, PaperSetting]:
    batches = {"english": (120, 84, 48), "filipino": (40, 28, 16), "oromo": (40, 40, 32)}
    plain, settings = {8: 1e-4, 12: 5e-5, 16: 1e-5}, {}
    for language, sizes in batches.items():
        for (layers, lr), batch in zip(plain.items(), sizes, strict=True):
            model, warmup = f"roberta-{layers}", 1000 if language == "oromo" else 10_000
            settings[f"{language}-{model}-mlm"] = PaperSetting(model, language, False, lr, warmup, batch)
            alpha0 = 100.0 if layers == 8 else 10.0
            settings[f"{language}-{model}-ag"] = PaperSetting(model, language, True, 1e-4, 0, batch, alpha0, 0.5)
    return settings


# english-roberta-12-ag, english-roberta-12-mlm, filipino-..., oromo-...
PAPER_SETTINGS = _paper()


@dataclass(frozen=True)
class Arm:
    """One of the models that are trained side by side; every other setting is shared."""

    guided: bool
    lr: float
    # A share of the steps.
    warmup: float = 0.0
    alpha0: float = 10.0
    fraction: float = 0.5
    patterns: tuple[str, ...] = ("next", "prev", "first", "period", "delim")
    # Pattern added to the logits instead of a loss, with this strength.
    bias: float | None = None

    @property
    def guided_patterns(self) -> str | None:
        """The patterns that heads are guided to, by the loss or by a bias, in one word; None for an unguided arm."""
        return "+".join(self.patterns) if self.guided or self.bias is not None else None

    @property
    def name(self) -> str:
        """The arm in one word."""
        kind = "AG" if self.guided else "MLM"
        if self.bias is not None:
            kind = f"bias{self.bias:g}"
        parts = [kind, f"lr{self.lr:g}", f"w{self.warmup:g}"]
        if self.guided and self.alpha0 != 10:
            parts.append(f"a{self.alpha0:g}")
        if self.guided and self.fraction != 0.5:
            parts.append(f"f{self.fraction:g}")
        if self.guided and self.patterns != Arm.patterns:
            parts.append("+".join(self.patterns))
        return "-".join(parts)


@dataclass(frozen=True)
class MlmConfig:
    """Our masked language models: Table 10's depths, narrower, on shorter texts.

    alpha0 belongs to texts of 512 tokens, as in Table 11; for ours it is scaled to the same pull on each row.
    """

    layers: int = 12
    width: int = 256
    heads: int = 8
    length: int = 128
    # Texts in a batch.
    batch: int = 32
    steps: int = 4000
    # The share of the steps with alpha at alpha0, and at how many steps the models are evaluated.
    hold: float = 0.3
    looks: int = 10
    # Less than one pass over the text is made.
    dropout: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    streams: int = 8
    # The same tokens for any batch.
    eval_tokens: int = 16384
    seed: int = 0

    def guidance(self, arm: Arm) -> Guidance:
        """The arm's guidance."""
        return Guidance(
            fraction=arm.fraction,
            patterns=arm.patterns,
            alpha0=arm.alpha0 * self.length / PAPER_LENGTH,
            hold=self.hold,
            steps=self.steps,
        )


def arms(lrs: tuple[float, ...], warmups: tuple[float, ...]) -> list[Arm]:
    """Every learning rate with every warm-up, with and without guidance: the baseline is tuned as carefully."""
    return [Arm(guided, lr, warmup) for guided in (True, False) for lr in lrs for warmup in warmups]


def ablations(best: Arm) -> list[Arm]:
    """Variations of a guided arm: alpha0, lambda, one pattern at a time, a bias on the logits in place of the loss."""
    alphas = [replace(best, alpha0=alpha0) for alpha0 in (1.0, 100.0)]
    fractions = [replace(best, fraction=fraction) for fraction in (0.25, 1.0)]
    single = [replace(best, patterns=(name,)) for name in Arm.patterns]
    biases = [replace(best, guided=False, bias=strength) for strength in (2.0, 5.0)]
    return [*alphas, *fractions, *single, *biases]
