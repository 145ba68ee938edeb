"""A language model from nothing: a text file or token stores in, a trained model out."""

from attnlab.pretraining.corpus import CorpusConfig, prepare_corpus
from attnlab.pretraining.guided import pattern_tokens
from attnlab.pretraining.hugging_face import BertMaskedLM, bert_states
from attnlab.pretraining.language_model import SHIPPED_MLM, PretrainConfig, build_model, pretrain, task_of
from attnlab.pretraining.training_run import resume_language_model, train_language_model

__all__ = [
    "SHIPPED_MLM",
    "BertMaskedLM",
    "CorpusConfig",
    "PretrainConfig",
    "bert_states",
    "build_model",
    "pattern_tokens",
    "prepare_corpus",
    "pretrain",
    "resume_language_model",
    "task_of",
    "train_language_model",
]
