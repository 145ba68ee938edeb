"""Table 2's rows, and the settings of ``python -m papers abc-lm``."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnlab.training import Recipe

__all__ = ["CONFIGS", "KEYS", "NAME", "NOTES", "TABLES", "AbcLmConfig", "Variant", "tables_of", "variants_of"]

NAME = "abc-lm"
KEYS = {
    "table_2a": ["model", "n", "context", "seed"],
    "table_2b": ["model", "n", "seed"],
    "curves": ["setting", "model", "n", "seed", "step"],
    "training": ["setting", "model", "n", "seed"],
}
NOTES = {
    "table_2a": "Perplexity per word of WikiText-103's test set, as the paper's, and of its validation set "
    "(perplexity_dev); perplexity_per_token is per token of our 8k "
    "vocabulary. Trained on enwik8's text, lower-cased; words that are <unk> in WikiText-103 are context but are not "
    "predicted. With context 0 every token but a segment's first is predicted.",
    "table_2b": "As 2a, with a context of 256, more layers and layer dropout. ELU's memory is as wide as a head: 128 "
    "in the paper, 96 here.",
    "training": "All models of a table learn from the same batches, for equally many steps; seconds are of a GPU that "
    "other jobs share. tokens_per_parameter leaves the embeddings out.",
    "curves": "Loss of a token of held-out enwik8 articles, in segments without context.",
}


@dataclass(frozen=True)
class Variant:
    """A row of a table: the model's name there, its memory, and its attention."""

    model: str
    n: int | None
    spec: str
    # The row whose trained model this one starts from; None: from scratch.
    start: str | None = None

    @property
    def key(self) -> str:
        """A name for the row, such as ABC_MLP-64."""
        return f"{self.model}-{self.n}"


@dataclass(frozen=True)
class AbcLmConfig:
    """Table 9's settings, scaled down. ``CONFIGS["paper"]`` has the paper's."""

    # Small: what a model sees for each of its parameters counts for more here than how many it has.
    width: int = 192
    heads: int = 2
    layers: int = 3
    # Of Table 2b, which is twice as deep in the paper.
    deep_layers: int = 4
    layer_dropout: float = 0.2
    length: int = 512
    batch: int = 32
    # A model this small does not see a text often enough to learn it by heart.
    dropout: float = 0.0
    activation_dropout: float = 0.0
    # A last normalisation; Baevski and Auli (2019) have none.
    final_norm: bool = True
    recipe: Recipe = field(default_factory=lambda: Recipe(lr=2e-3, betas=(0.9, 0.98)))
    warmup: int = 200
    contexts: tuple[int, ...] = (0, 480)
    deep_context: int = 256
    seeds: tuple[int, ...] = (0,)
    # With a row T2R-pretrained, which starts from the trained BASE, as the paper's T2R does (Kasai et al., 2021b), and
    # then has this share of BASE's updates.
    t2r_pretrained: bool = False
    t2r_updates: float = 1.0
    # Rows by their keys, so that processes may share a table; None: all of them.
    models: tuple[str, ...] | None = None
    # Models of all seeds learn at once; those on one stream share their memory.
    streams: int = 5
    # On a GPU the operations between products of matrices are fused.
    compile: bool = True
    # With a context that all but fills a segment, every so many windows of the test set are scored.
    eval_every: int = 4
    # Windows of the test set; None: all.
    eval_rows: int | None = None
    eval_batch: int = 64

    def __post_init__(self) -> None:
        if not all(0 <= c < self.length for c in (*self.contexts, self.deep_context)):
            raise ValueError(f"contexts must be shorter than a segment of {self.length}, got {self.contexts}")
        if self.t2r_updates <= 0:
            raise ValueError(f"t2r_updates must be positive, got {self.t2r_updates}")


# Table 9; the momentum, the clipping and the warm-up are those of Baevski and Auli (2019), on which it builds. The
# vocabulary is the corpus's: pieces, not words, so that embeddings are not adaptive.
CONFIGS = {
    "small": AbcLmConfig(),
    "paper": AbcLmConfig(
        width=1024,
        heads=8,
        layers=16,
        deep_layers=32,
        batch=64,
        dropout=0.3,
        activation_dropout=0.1,
        final_norm=False,
        recipe=Recipe(kind="nesterov", lr=1.0, betas=(0.99, 0.0), weight_decay=0.0, clip=0.1),
        warmup=16_000,
        t2r_pretrained=True,
        streams=1,
        eval_batch=8,
    ),
    # One model at a time, and long (abc-lm-arm). Both tables have the same depth, so that their BASE and their ABC_MLP
    # are one training; ELU's memory, as wide as a head, is the paper's.
    "arm": AbcLmConfig(
        width=512,
        heads=4,
        layers=6,
        deep_layers=6,
        layer_dropout=0.0,
        batch=64,
        recipe=Recipe(lr=1e-3, betas=(0.9, 0.98)),
        warmup=1000,
        t2r_pretrained=True,
        streams=1,
    ),
}


TABLES: dict[str, tuple[Variant, ...]] = {
    "table_2a": (
        Variant("BASE", None, "softmax"),
        Variant("Linformer", 64, "abc-linformer:slots=64,length={length}"),
        Variant("ABC_RD", 64, "abc-random:slots=64"),
        Variant("ABC_MLP", 32, "abc-mlp:slots=32"),
        Variant("ABC_MLP", 64, "abc-mlp:slots=64"),
    ),
    # ELU's n is the paper's. RFA's is a sine and a cosine for each of 32 random directions; the least value of its
    # sums is about that of its authors' code.
    "table_2b": (
        Variant("BASE", None, "softmax"),
        Variant("ELU", 128, "kernel:elu"),
        Variant("RFA", 64, "rfa:features=32,least=3.0"),
        Variant("T2R", 64, "t2r:features=64"),
        Variant("ABC_MLP", 64, "abc-mlp:slots=64"),
    ),
}
# The paper's T2R, which is not trained from scratch as the others are.
T2R_PRETRAINED = Variant("T2R-pretrained", 64, "t2r:features=64", start="BASE")


def tables_of(key: str) -> dict[str, Variant]:
    """The tables that have a row of this key, such as ABC_MLP-64, with the row."""
    rows = {table: [*some, *((T2R_PRETRAINED,) if table == "table_2b" else ())] for table, some in TABLES.items()}
    found = {table: v for table, some in rows.items() for v in some if v.key == key}
    if not found:
        known = dict.fromkeys(v.key for some in rows.values() for v in some)
        raise ValueError(f"Table 2 has no row {key!r}; it has {', '.join(known)}")
    return found


def variants_of(table: str, config: AbcLmConfig) -> list[Variant]:
    """The rows of a table that a config asks for."""
    pretrained = (T2R_PRETRAINED,) if table == "table_2b" and config.t2r_pretrained else ()
    chosen = [v for v in (*TABLES[table], *pretrained) if config.models is None or v.key in config.models]
    missing = {v.start for v in chosen if v.start} - {v.model for v in chosen}
    if missing:
        raise ValueError(f"T2R-pretrained starts from the trained {', '.join(missing)}; name it in models, too")
    return chosen
