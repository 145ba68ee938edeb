"""Every claim of the five papers as code, and what their tests read."""

from papers.abc import claims as bounded_memory
from papers.abc import claims_translation as bounded_memory_translation
from papers.abc import claims_use as bounded_memory_use
from papers.common.claims.ledger import (
    HELD,
    NOT_HELD,
    NOT_RUN,
    NOT_TESTABLE,
    Cell,
    Claim,
    Missing,
    Predicate,
    Verdict,
    judge,
)
from papers.common.claims.statistics import Interval, paired_bootstrap, pooled_deviation, seed_interval, student
from papers.effective import claims as effective
from papers.guidance import claims as guidance
from papers.ktiw import claims as dynamics
from papers.value_aware import claims as value_aware

__all__ = [
    "HELD",
    "NOT_HELD",
    "NOT_RUN",
    "NOT_TESTABLE",
    "PAPERS",
    "Cell",
    "Claim",
    "Interval",
    "Missing",
    "Predicate",
    "Verdict",
    "all_claims",
    "judge",
    "paired_bootstrap",
    "pooled_deviation",
    "seed_interval",
    "student",
    "tables_wanted",
]

PAPERS = {
    "AG": "Deshpande and Narasimhan (2020), Guiding Attention for Self-Supervised Learning with Transformers",
    "KTIW": "Snell, Zhong, Klein and Steinhardt (2021), Approximating How Single Head Attention Learns",
    "Effective": "Sun and Marasović (2021), Effective Attention Sheds Light On Interpretability",
    "ABC": "Peng et al. (2022), ABC: Attention with Bounded-memory Control",
    "OVA": "Gupta and Berant (2021), Value-aware Approximate Attention",
}
MODULES = (guidance, dynamics, effective, bounded_memory, bounded_memory_translation, bounded_memory_use, value_aware)


def all_claims() -> tuple[Claim, ...]:
    """Every claim, paper by paper."""
    return tuple(claim for module in MODULES for claim in module.CLAIMS)


def tables_wanted() -> dict[str, dict[str, str]]:
    """What the claims read: results file, table, and the columns it needs."""
    return {name: tables for module in MODULES for name, tables in module.TABLES.items()}
