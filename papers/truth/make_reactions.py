"""Reactions with known atom maps, from templates and random substituents: writes papers/truth/reactions.json.

    python -m papers.truth.make_reactions [COUNT]

Needs rdkit; the benchmark itself reads the file and does not. A source is given for each atom of the product as the
places of atoms among the reactants' atoms: several where they are alike by symmetry, none where the mechanism leaves it
open (the new oxygen of a hydrolysed ester). Solvents and bases stand among the reactants, as in patents.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from rdkit import Chem, RDLogger
from rdkit.Chem import AllChem

from papers.truth.smiles import ARROW, atoms_of, bonds_of, tokens_of

SEED = 0
FILE = Path(__file__).with_name("reactions.json")
# Groups in front of a ring, and those that also fit into a branch.
ON_RINGS = ("F", "Cl", "C", "CO", "FC(F)(F)", "N#C", "CC", "CN(C)", "CS", "CC(C)")
IN_BRANCHES = ("F", "Cl", "C")
ARYL = (
    "c1ccc({})cc1", "{x}c1ccc({})cc1", "{x}c1cccc({})c1", "{x}c1ccccc1{}", "{x}c1ccc({})nc1", "c1ccc2cc({})ccc2c1",
    "{x}c1csc({})c1", "{x}c1ccc({})c({y})c1",
)  # fmt: skip
ALKYL = (
    "CCC{}", "CC(C)C{}", "C1CCC({})CC1", "C1CCOC({})C1", "CC(C)(C)C{}", "COCC{}", "{x}c1ccc(C{})cc1", "C=CCC{}",
    "CSCC{}", "C1CC1C{}", "CC#CC{}", "{x}c1cccc(CC{})c1",
)  # fmt: skip
AMINES = ("C1COCCN1", "C1CCNCC1", "CN1CCNCC1", "CCNC", "C1CCNC1", "CC1CCNCC1", "CNCC(C)C", "OCC1CCNCC1")
SOLVENTS = ("CN(C)C=O", "ClCCl", "C1CCOC1", "CCN(CC)CC", "CO", "CC#N", "O=C([O-])[O-].[K+].[K+]", "Cc1ccccc1")
# Name: the molecules, with a place for what is drawn at random, and the reaction. R: any group, A: an aromatic one,
# K: an alkyl one, M: an amine.
TEMPLATES: dict[str, tuple[tuple[str, ...], str]] = {
    "esterification": (("R C(=O)O", "K O"), "[C:1](=[O:2])[OX2H1].[OX2H1:4][CX4:5]>>[C:1](=[O:2])[O:4][C:5]"),
    "amide coupling": (("R C(=O)O", "M"), "[C:1](=[O:2])[OX2H1].[NX3;H2,H1:3]>>[C:1](=[O:2])[N:3]"),
    "acylation": (("R C(=O)Cl", "A N"), "[C:1](=[O:2])Cl.[NX3;H2,H1:3]>>[C:1](=[O:2])[N:3]"),
    "Suzuki coupling": (("A Br", "A B(O)O"), "[c:1]Br.[c:2]B(O)O>>[c:1]-[c:2]"),
    "SN2": (("K Br", "M"), "[CX4;H2,H1:1]Br.[NX3;H1:2]>>[C:1][N:2]"),
    "ether": (("K Br", "A O"), "[CX4;H2,H1:1]Br.[OX2H1:2][c:3]>>[C:1][O:2][c:3]"),
    "thioether": (("K Br", "A S"), "[CX4;H2,H1:1]Br.[SX2H1:2][c:3]>>[C:1][S:2][c:3]"),
    "reductive amination": (("A C=O", "M"), "[CX3H1:1]=O.[NX3;H2,H1:2]>>[CH2:1][N:2]"),
    "hydrolysis": (("R C(=O)OC", "[OH-]", "[Li+]"), "[C:1](=[O:2])[OX2][CH3].[OH-:3]>>[C:1](=[O:2])[OH1+0:3]"),
    "Boc removal": (("R N(C)C(=O)OC(C)(C)C", "O=C(O)C(F)(F)F"), "[N:1]C(=O)OC(C)(C)C>>[N:1]"),
    "sulfonamide": (("A S(=O)(=O)Cl", "M"), "[S:1](=[O:2])(=[O:3])Cl.[NX3;H2,H1:4]>>[S:1](=[O:2])(=[O:3])[N:4]"),
    "urea": (("A N=C=O", "M"), "[N:1]=[C:2]=[O:3].[NX3;H2,H1:4]>>[N:1][C:2](=[O:3])[N:4]"),
    "nitro reduction": (("A [N+](=O)[O-]", "[Pd]"), "[c:1][N+:2](=O)[O-]>>[c:1][NH2+0:2]"),
    "oxidation": (("K O", "O=[Mn]=O"), "[CX4;H2:1][OX2H1:2]>>[CH1:1]=[O:2]"),
}
# Atoms of the product, by their number in the template, whose source the mechanism leaves open.
OPEN = {"hydrolysis": {3}}


def molecule(draw: random.Random, words: str) -> str:
    """The SMILES of a molecule of a template."""
    kind, _, rest = words.partition(" ")
    if kind == "M" and not rest:
        return draw.choice(AMINES)
    if not rest:
        return words
    frames = {"A": ARYL, "K": ALKYL, "R": ARYL + ALKYL}[kind]
    frame = draw.choice(frames).replace("{x}", draw.choice(ON_RINGS)).replace("{y}", draw.choice(IN_BRANCHES))
    return frame.replace("{}", rest)


def in_order(mol: Any) -> tuple[str, list[int]]:
    """The canonical SMILES, and the molecule's atoms in its order."""
    smiles = Chem.MolToSmiles(mol)
    return smiles, list(mol.GetPropsAsDict(True, True)["_smilesAtomOutputOrder"])


def reaction(draw: random.Random, name: str) -> dict[str, Any] | None:
    """One reaction, or None where the drawn molecules react in no way or in several."""
    words, smarts = TEMPLATES[name]
    reactants = [Chem.MolFromSmiles(molecule(draw, part)) for part in words]
    rule = AllChem.ReactionFromSmarts(smarts)
    reacting = reactants[: rule.GetNumReactantTemplates()]
    outcomes = [outcome[0] for outcome in rule.RunReactants(reacting)]
    for outcome in outcomes:
        Chem.SanitizeMol(outcome)
    if not outcomes or len({Chem.MolToSmiles(outcome) for outcome in outcomes}) > 1:
        return None
    others = [part for mol in draw.sample(SOLVENTS, draw.randrange(3)) for part in mol.split(".")]
    molecules = [*reactants, *map(Chem.MolFromSmiles, others)]
    # rxnmapper sorts the molecules by their SMILES.
    listed = sorted(((*in_order(mol), number) for number, mol in enumerate(molecules)), key=lambda one: one[0])
    return _described(name, listed, outcomes[0], molecules)


def _described(name: str, listed: list[Any], product: Any, molecules: list[Any]) -> dict[str, Any]:
    """The reaction's SMILES, and for each atom of the product the atoms that it may have come from."""
    places: dict[tuple[int, int], int] = {}
    alike: dict[tuple[str, int], list[int]] = {}
    for smiles, order, number in listed:
        ranks = list(Chem.CanonicalRankAtoms(molecules[number], breakTies=False))
        for atom in order:
            places[number, atom] = len(places)
            alike.setdefault((smiles, ranks[atom]), []).append(places[number, atom])
    names = {number: smiles for smiles, _, number in listed}
    smiles, order = in_order(product)
    ranks = list(Chem.CanonicalRankAtoms(product, breakTies=False))
    of_class: dict[int, set[int]] = {}
    for atom in product.GetAtoms():
        number, old = atom.GetIntProp("react_idx"), atom.GetIntProp("react_atom_idx")
        is_open = atom.HasProp("old_mapno") and atom.GetIntProp("old_mapno") in OPEN.get(name, ())
        rank = list(Chem.CanonicalRankAtoms(molecules[number], breakTies=False))[old]
        sources = set() if is_open else set(alike[names[number], rank])
        of_class.setdefault(ranks[atom.GetIdx()], set()).update(sources)
    whole = ".".join(one[0] for one in listed) + ARROW + smiles
    _check(whole, molecules)
    return {"template": name, "reaction": whole, "sources": [sorted(of_class[ranks[atom]]) for atom in order]}


def _check(whole: str, molecules: list[Any]) -> None:
    """Our reading of the SMILES has rdkit's atoms and bonds."""
    tokens = tokens_of(whole)
    before = tokens[: tokens.index(ARROW)]
    atoms = atoms_of(before)
    assert len(atoms) == sum(mol.GetNumAtoms() for mol in molecules), whole
    assert len(bonds_of(before)) == sum(mol.GetNumBonds() for mol in molecules), whole


def main() -> None:
    """Write the file."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1200
    RDLogger.DisableLog("rdApp.*")
    made: dict[str, dict[str, Any]] = {}
    names = list(TEMPLATES)
    for number in range(100 * count):
        if len(made) == count:
            break
        one = reaction(random.Random(f"{SEED} {number}"), names[number % len(names)])
        if one is not None:
            made.setdefault(one["reaction"], one)
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in made.values())
    FILE.write_text(f'{{"seed": {SEED}, "reactions": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"wrote {FILE.name}: {len(made)} reactions of {len({one['template'] for one in made.values()})} templates")


if __name__ == "__main__":
    main()
