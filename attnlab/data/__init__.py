"""Corpora, tokenisers, batches: text from files in, a pure function of (seed, step) out."""

from attnlab.data.batching import Buckets, Order
from attnlab.data.beginnings import TextFile
from attnlab.data.bundled import bundled_text
from attnlab.data.labelled import Labelled, LabelledSource, read_labelled, read_trees
from attnlab.data.malformed import Malformed
from attnlab.data.masking import IGNORED, Masking, mask_tokens
from attnlab.data.packing import Blocks
from attnlab.data.parallel import Pairs, ParallelSource, encode_pairs, read_parallel
from attnlab.data.readers import hf_texts, read_text, records, texts
from attnlab.data.sources import CausalSource, MlmSource
from attnlab.data.store import TokenStore, load_store, tokenise, write_store
from attnlab.data.tokenisers import (
    FastTokeniser,
    SentencePieceTokeniser,
    Specials,
    Tokeniser,
    WordTokeniser,
    as_tokeniser,
    load_tokeniser,
)
from attnlab.data.vocabularies import train_bpe, train_sentencepiece, train_wordpiece, train_words

__all__ = [
    "IGNORED",
    "Blocks",
    "Buckets",
    "CausalSource",
    "FastTokeniser",
    "Labelled",
    "LabelledSource",
    "Malformed",
    "Masking",
    "MlmSource",
    "Order",
    "Pairs",
    "ParallelSource",
    "SentencePieceTokeniser",
    "Specials",
    "TextFile",
    "TokenStore",
    "Tokeniser",
    "WordTokeniser",
    "as_tokeniser",
    "bundled_text",
    "encode_pairs",
    "hf_texts",
    "load_store",
    "load_tokeniser",
    "mask_tokens",
    "read_labelled",
    "read_parallel",
    "read_text",
    "read_trees",
    "records",
    "texts",
    "tokenise",
    "train_bpe",
    "train_sentencepiece",
    "train_wordpiece",
    "train_words",
    "write_store",
]
