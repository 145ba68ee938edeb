"""How attention is learned (KTIW, Snell et al., 2021): probes, proxies and agreement on plain arrays, for any model."""

from attnlab.dynamics.corpus import NULL, Bitext, PairTable, bitext, count_table
from attnlab.dynamics.ibm import IBMModel1, fit_ibm, ibm_alpha, ibm_beta, translations
from attnlab.dynamics.initial import logit_derivative, theta_derivative
from attnlab.dynamics.learnable import Learnable, learnable_from_cooccurrence, sharpness
from attnlab.dynamics.metrics import Xi, agreement, contextualised, kendall_tau, pad_rows, random_agreement
from attnlab.dynamics.optimal import OptimalAttention, optimal_attention
from attnlab.dynamics.probes import class_probe, lexical_probe, proxy_probe
from attnlab.dynamics.saliency import gradient_saliency

__all__ = [
    "NULL",
    "Bitext",
    "IBMModel1",
    "Learnable",
    "OptimalAttention",
    "PairTable",
    "Xi",
    "agreement",
    "bitext",
    "class_probe",
    "contextualised",
    "count_table",
    "fit_ibm",
    "gradient_saliency",
    "ibm_alpha",
    "ibm_beta",
    "kendall_tau",
    "learnable_from_cooccurrence",
    "lexical_probe",
    "logit_derivative",
    "optimal_attention",
    "pad_rows",
    "proxy_probe",
    "random_agreement",
    "sharpness",
    "theta_derivative",
    "translations",
]
