"""Reactions as rxnmapper writes them: the tokens of a SMILES, its atoms, their elements and bonds."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["ARROW", "TOKEN", "atoms_of", "bonds_of", "element", "tokens_of"]

ARROW = ">>"
# rxnmapper's own expression (smiles_utils.py, MIT).
TOKEN = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
ELEMENT = re.compile(r"\[?[0-9]*([A-Z][a-z]?|[a-z])")


def tokens_of(smiles: str) -> list[str]:
    """The tokens of a molecule or a reaction.

    >>> tokens_of("BrCC.N>>CCN")
    ['Br', 'C', 'C', '.', 'N', '>>', 'C', 'C', 'N']
    """
    tokens = TOKEN.findall(smiles)
    if "".join(tokens) != smiles:
        raise ValueError(f"{smiles!r} has characters that are no SMILES tokens")
    return tokens


def element(token: str) -> str | None:
    """The element of an atom's token; None for a token that is no atom.

    >>> element("[nH]"), element("Cl"), element("[N+]"), element("=")
    ('N', 'Cl', 'N', None)
    """
    if not (token[0].isalpha() or token[0] == "["):
        return None
    known = ELEMENT.match(token)
    assert known is not None, token
    name = known[1]
    return name.capitalize() if token[0] != "[" or name[0].islower() else name


def atoms_of(tokens: Sequence[str]) -> list[int]:
    """The places of the atoms."""
    return [i for i, token in enumerate(tokens) if element(token) is not None]


def bonds_of(tokens: Sequence[str]) -> set[tuple[int, int]]:
    """The bonds as pairs of places, the smaller first: neighbours, branches and rings.

    >>> sorted(bonds_of(["C", "1", "C", "(", "O", ")", "C", "1"]))
    [(0, 2), (0, 6), (2, 4), (2, 6)]
    """
    bonds: set[tuple[int, int]] = set()
    last: int | None = None
    branches: list[int | None] = []
    rings: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if element(token) is not None:
            if last is not None:
                bonds.add((last, i))
            last = i
        elif token == "(":
            branches.append(last)
        elif token == ")":
            last = branches.pop()
        elif token in (".", "~", ARROW):
            last = None
        elif token.lstrip("%").isdigit():
            assert last is not None, tokens
            if token in rings:
                bonds.add((rings.pop(token), last))
            else:
                rings[token] = last
    return bonds
