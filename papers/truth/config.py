"""The settings of the benchmark, and its readings and tasks by name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ATTENTION", "CONFIGS", "NAME", "SPREAD", "TASKS", "TruthConfig"]

NAME = "truth"
# The reading that the others are compared with.
ATTENTION = "attention"
# The readings of which the results also say how their numbers are spread over the keys.
SPREAD = (ATTENTION, "norm", "effective", "gradient")
TASKS = {
    "needle": "a number hidden in a text and asked for: each digit comes from that digit of the needle (a causal LM)",
    "needles": "the same with four numbers in the text, each with its key (a causal LM)",
    "copy": "random words said twice: each token of the second time comes from the first time (a causal LM)",
    "facts": "who had which toy, in a child's story: the toy comes from the sentence about its owner (a causal LM)",
    "recall": "pairs of key and value, then a key: its value comes from its pair (an LM trained here, by its seed)",
    "chemistry": "atoms of a product come from atoms of the reactants (the folder that truth-rxnmapper wrote)",
    "translation": "words of a translation, against an aligner (a translator trained here on a folder's multi30k)",
    "masked-chemistry": "the same, an atom hidden from the model and predicted (the same folder)",
}


@dataclass(frozen=True)
class TruthConfig:
    """How many cases, how large they are, and how the LM of ``recall`` is trained."""

    # Cases that count: the model answers them right.
    cases: int = 1000
    # Cases that are made for each one that should count.
    spare: int = 5
    # Predictions that are read in a case.
    targets: int = 2
    # Tokens of a needle's text, words of a list to copy, sentences around the facts of a story.
    length: int = 320
    words: int = 48
    sentences: int = 8
    # Pairs and tokens of a sequence to recall.
    pairs: int = 12
    recall_length: int = 96
    width: int = 64
    heads: int = 4
    # Updates on each of the tasks of growing size that the LM of recall learns.
    steps: int = 500
    lr: float = 3e-3
    # Tokens of the translator's vocabulary, and its updates; it has two layers, twice as wide as the LM of recall.
    vocab: int = 4000
    translation_steps: int = 4000
    # Cases between two writes to the disk.
    chunk: int = 48
    resamples: int = 2000
    seed: int = 0


CONFIGS = {
    "full": TruthConfig(),
    "smoke": TruthConfig(
        cases=6,
        spare=3,
        targets=2,
        length=128,
        words=16,
        pairs=4,
        recall_length=32,
        steps=60,
        vocab=500,
        translation_steps=60,
        chunk=3,
        resamples=200,
    ),
}
