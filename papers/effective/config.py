"""Settings of ``python -m papers effective``, and its tables: the columns that identify a row, and their meaning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["KEYS", "NAME", "NOTES", "PRETRAINED", "EffectiveConfig", "encoder_folder"]

NAME = "effective"
# The results of an encoder that is read as it was pretrained.
PRETRAINED = "effective-pretrained"
_KEYS = {
    "table_2": ["task", "attention"],
    "figure_4": ["task", "attention", "layer"],
    "token_types": ["task", "attention", "token"],
    "token_types_heads": ["task", "attention", "token", "head"],
    "token_types_layers": ["task", "attention", "token", "layer"],
    "segments": ["task", "attention"],
    "to_token": ["task", "attention", "token"],
    "to_token_heads": ["task", "attention", "token", "layer", "head"],
    "to_token_layers": ["task", "attention", "token", "layer"],
    "weight_range": ["task", "attention"],
}
# The columns that identify a row of a table; the paper's row with the same values lies beside ours.
KEYS = {
    **_KEYS,
    **{f"{table}_pretrained": keys for table, keys in _KEYS.items()},
    "artefact": ["task", "pattern"],
    "finetuning": ["task", "attention", "layer"],
    "finetuning_heads": ["task", "attention", "layer", "head"],
    "table_3": ["task"],
    "timing": ["way"],
    "timing_models": ["model", "way"],
    "identity": ["text"],
    "short_inputs": ["length"],
    "alternative": ["text"],
    "scores": ["task"],
    "lengths": ["task"],
    "faithfulness": ["task", "layer", "against", "reading"],
    "faithfulness_differences": ["task", "layer", "against", "first", "second"],
    "faithfulness_summary": ["task", "against"],
    "faithfulness_paired": ["task", "against", "first", "second"],
}
NOTES = {
    "table_2": "Dev set, fine-tuned. effective is exact (V restricted to real tokens); authors is the computation of "
    "the paper's code: padding inside V, one rank and an absolute threshold, as the paper's effective rows were made.",
    "artefact": "Percentage points: change is what exact effective attention moves, authors_change what the authors' "
    "way moves, artefact the difference, which padding alone makes.",
    "segments": "Blocks without a classifier, where inputs have two segments: contrast is (a - c) / (a + c) with the "
    "mean weight a within segments and c across, [CLS], [SEP] and neighbours left out; blocks is the share of maps (%) "
    "where a is at least twice c.",
    "token_types": "When [CLS] is processed in the last layer; the largest weight among the tokens of a type, averaged "
    "over heads and dev inputs. Tags by a perceptron tagger trained on UD English EWT.",
    "token_types_heads": "The same for each head of the last layer: Figure 1.",
    "to_token_heads": "The weight that other tokens give to [CLS] or [SEP], for each layer and head: Figures 5 and 6.",
    "weight_range": "The least and the largest weight of any head, query and key: the colour range of effective "
    "attention in Figures 5 and 6.",
    "finetuning": "Cosine of maps of the pretrained and the fine-tuned encoder, padding excluded.",
    "table_3": "Seconds of an evaluation of the whole dev set in padded batches: eager with its maps, and with every "
    "effective map and residual. svd_ratio is the time by a full SVD of every V, as the paper computed it, over the "
    "standard one on the first svd_batches batches. The paper's model is larger, and its machine another.",
    "timing": "One evaluation batch of the paper's size, padded: eager with its maps, the same with every effective "
    "map and residual, and by a full SVD of every V. timing is BERT-base's size with random weights.",
    "identity": "residual is the largest over inputs, layers and heads; authors_residual the mean error of the output "
    "when it is made from the authors' maps. trivial_share: inputs with no more tokens than V has dimensions.",
    "short_inputs": "difference is |W_perp - W| with the rank of V as it is; difference_float32 with the threshold of "
    "float32, to which a square V is now and then singular (singular_share of the heads).",
    "lengths": "Dev inputs with no more tokens than a head is wide, where effective attention is standard attention: "
    "for this encoder, and for the paper's, whose heads are 64 wide.",
    "faithfulness": "Does a reading say what hiding a key changes? Means over texts of more tokens than a head is wide "
    "(on shorter ones effective attention is attention), with 95 % bootstrap intervals.",
    "faithfulness_summary": "Spearman, all layers: a head's output when a key is hidden from one query; the prediction "
    "when it is hidden from all of a layer, the others sharing its weight, or when its weight is set to zero.",
    "faithfulness_paired": "Differences of Spearman of two readings on the same texts, all layers, 95 % intervals.",
}


@dataclass(frozen=True)
class EffectiveConfig:
    """Section 3's settings: batches of 8, 128 tokens, 3 epochs; and how much of each data set is read.

    ``data`` is the folder of GLUE's tasks, ``model`` that of an encoder (the shipped masked LM by default), ``tagger``
    a saved ``PerceptronTagger``; without one, tags are learned from the CoNLL-U file ``treebank``.
    """

    data: str = "glue"
    model: str | None = None
    tagger: str | None = None
    treebank: str | None = None
    # Sentences of it to learn from; None: all.
    sentences: int | None = None
    # A saved pattern classifier; None: as ``classifier_maps`` says.
    classifier: str | None = None
    # "own": learned from labelled maps of the encoder itself, where there are any; "all": the shipped one, which
    # learned from those of four models.
    classifier_maps: str = "own"
    # The models whose maps it learned from; a run writes it.
    learned_from: tuple[str, ...] = ()
    # Without it the encoder is read as it was pretrained: the tables that end in _pretrained, and the identity.
    finetune: bool = True
    tasks: tuple[str, ...] = ("RTE", "MRPC", "SST-2", "STS-B", "QNLI")
    batch_size: int = 8
    length: int = 128
    epochs: float = 3.0
    # The rate and the next two are transformers' defaults, which the paper says it used.
    lr: float = 5e-5
    warmup: float = 0.0
    weight_decay: float = 0.0
    # Training examples at most, drawn at random: SST-2 is the only task that has more.
    train_limit: int | None = 6000
    # Dev examples whose maps are read, drawn at random.
    dev_limit: int | None = 400
    read_batch: int = 16
    # Dev examples of the faithfulness study, longer than a head is wide (on shorter ones effective attention is
    # attention), and the keys that are hidden in each (None: every one).
    study_texts: int = 40
    study_keys: int | None = None
    timing_repeats: int = 7
    # Batches of each task on which Table 3's full SVD is timed.
    svd_batches: int = 4
    # A randomly drawn BERT-base is timed too: the paper's size.
    timing_base: bool = True
    seed: int = 0
    # Tasks at once; None: all of them on a GPU, one on a CPU.
    jobs: int | None = None


# The paper's is BERT-base on whole training and dev sets; the other settings are the same.
CONFIGS = {"small": EffectiveConfig(), "paper": EffectiveConfig(train_limit=None, dev_limit=None)}


# Our labelled maps of an encoder go by the name of its folder; those of the shipped one by its family's.
SHIPPED_MAPS = ("attnlab-mlm", "attnlab-pairs")


def encoder_folder(config: EffectiveConfig) -> Path:
    """The folder of the encoder: the config's, or the masked LM that comes with the package."""
    from attnlab.adapters.load import SHIPPED

    return SHIPPED if config.model is None else Path(config.model)
