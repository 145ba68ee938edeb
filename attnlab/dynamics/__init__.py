"""How attention is learned (KTIW, Snell et al., 2021): probes, proxies and agreement on plain arrays, for any model."""

from attnlab.dynamics.corpus import NULL, Bitext, PairTable, bitext, count_table
from attnlab.dynamics.ibm import IBMModel1, fit_ibm, ibm_alpha, ibm_beta, translations
from attnlab.dynamics.metrics import Xi, agreement, contextualised, kendall_tau, pad_rows, random_agreement

__all__ = [
    "NULL",
    "Bitext",
    "IBMModel1",
    "PairTable",
    "Xi",
    "agreement",
    "bitext",
    "contextualised",
    "count_table",
    "fit_ibm",
    "ibm_alpha",
    "ibm_beta",
    "kendall_tau",
    "pad_rows",
    "random_agreement",
    "translations",
]
