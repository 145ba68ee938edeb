"""How attention is learned (KTIW, Snell et al., 2021): probes, proxies and agreement on plain arrays, for any model."""

from attnlab.dynamics.corpus import NULL, Bitext, PairTable, bitext, count_table
from attnlab.dynamics.forced import forced_probe, position_spec
from attnlab.dynamics.ibm import IBMModel1, fit_ibm, ibm_alpha, ibm_beta, translations
from attnlab.dynamics.initial import logit_derivative, theta_derivative
from attnlab.dynamics.learnable import Learnable, learnable_from_cooccurrence, sharpness
from attnlab.dynamics.metrics import Xi, agreement, contextualised, kendall_tau, pad_rows, random_agreement
from attnlab.dynamics.optimal import OptimalAttention, optimal_attention
from attnlab.dynamics.probes import class_probe, lexical_probe, proxy_probe
from attnlab.dynamics.proxy import (
    BagOfWords,
    LogisticProxy,
    ProxyConfig,
    TrainedProxy,
    logistic_proxy,
    train_proxy,
)
from attnlab.dynamics.saliency import gradient_saliency

__all__ = [
    "NULL",
    "BagOfWords",
    "Bitext",
    "IBMModel1",
    "Learnable",
    "LogisticProxy",
    "OptimalAttention",
    "PairTable",
    "ProxyConfig",
    "TrainedProxy",
    "Xi",
    "agreement",
    "bitext",
    "class_probe",
    "contextualised",
    "count_table",
    "fit_ibm",
    "forced_probe",
    "gradient_saliency",
    "ibm_alpha",
    "ibm_beta",
    "kendall_tau",
    "learnable_from_cooccurrence",
    "lexical_probe",
    "logistic_proxy",
    "logit_derivative",
    "optimal_attention",
    "pad_rows",
    "position_spec",
    "proxy_probe",
    "random_agreement",
    "sharpness",
    "theta_derivative",
    "train_proxy",
    "translations",
]
