"""rxnmapper 0.4.3 (Schwaller et al., 2021): atoms of a product, and what its own mapping makes of a reading.

The product reads head 5 of layer 10 in both directions, among atoms of one element, and maps one atom after the other:
the surest first, after which the neighbours of the two atoms are favoured and both atoms are taken.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.adapters import record
from attnlab.shapes import Float
from papers.truth.cases import Case, Target, padded, some_of
from papers.truth.config import TruthConfig
from papers.truth.readings import MAPS, recorded_stack
from papers.truth.smiles import ARROW, TOKEN, atoms_of, bonds_of, element, tokens_of

__all__ = ["SHIPPED_HEAD", "Reaction", "chemistry_cases", "map_atoms", "mapped_right", "read_reactions", "write_model"]

REACTIONS = Path(__file__).with_name("reactions.json")
# Layer and head that rxnmapper reads, and how much it favours neighbours of mapped atoms.
SHIPPED_HEAD = (10, 5)
NEIGHBOURS = 90.0
FILES = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"


@dataclass(frozen=True)
class Reaction:
    """A reaction's tokens, and for each atom of the product the reactants' atoms that it may have come from."""

    tokens: tuple[str, ...]
    sources: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Reaction:
        """A reaction of reactions.json."""
        tokens = ("[CLS]", *tokens_of(entry["reaction"]), "[SEP]")
        return cls(tokens, tuple(map(tuple, entry["sources"])))

    @cached_property
    def atoms(self) -> tuple[list[int], list[int]]:
        """The places of the reactants' atoms, and of the product's."""
        arrow = self.tokens.index(ARROW)
        atoms = [i for i in atoms_of(self.tokens) if self.tokens[i] not in ("[CLS]", "[SEP]")]
        return [i for i in atoms if i < arrow], [i for i in atoms if i > arrow]

    @cached_property
    def same_element(self) -> np.ndarray:
        """Whether an atom of the product and one of the reactants are of one element."""
        before, after = self.atoms
        kinds = [[element(self.tokens[i]) for i in side] for side in (after, before)]
        return np.array([[a == b for b in kinds[1]] for a in kinds[0]])

    @cached_property
    def neighbours(self) -> tuple[np.ndarray, np.ndarray]:
        """Which atoms are bonded: (product, product), (reactants, reactants)."""
        before, after = self.atoms
        bonds = bonds_of(["." if token in ("[CLS]", "[SEP]") else token for token in self.tokens])
        return tuple(  # type: ignore[return-value]
            np.array([[(min(a, b), max(a, b)) in bonds for b in side] for a in side]) for side in (after, before)
        )


def read_reactions(path: Path = REACTIONS) -> list[Reaction]:
    """The reactions that make_reactions wrote, in random order: the file goes round its templates."""
    made = [Reaction.of(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["reactions"]]
    random.Random(0).shuffle(made)
    return made


def chemistry_cases(
    reactions: Sequence[Reaction], vocabulary: dict[str, int], config: TruthConfig, *, masked: bool = False
) -> list[Case]:
    """Atoms of the product as targets: the model sees them, as rxnmapper has it, or one is ``masked`` in each case."""
    cases = []
    for number, reaction in enumerate(reactions):
        ids = [vocabulary.get(token, vocabulary["[UNK]"]) for token in reaction.tokens]
        before, after = reaction.atoms
        targets = []
        for atom, sources in enumerate(reaction.sources):
            places = tuple(before[i] for i in sources)
            candidates = tuple(before[i] for i in np.flatnonzero(reaction.same_element[atom]))
            # An atom that is the only one of its element, or like all others of it, tells nothing.
            if 0 < len(places) < len(candidates):
                targets.append(Target(after[atom], ids[after[atom]], places, candidates, 1))
        chosen = some_of(targets, 1 if masked else config.targets, f"{config.seed} chemistry {number}")
        for target in chosen if masked else ():
            ids[target.query] = vocabulary["[MASK]"]
        cases.append(Case(tuple(ids), chosen, (vocabulary["[MASK]"],)))
    return cases


def map_atoms(scores: Float[np.ndarray, "p r"], reaction: Reaction) -> list[int]:
    """rxnmapper's mapping (attention.py, generate_attention_guided_pxr_atom_mapping): an atom for each of the product.

    ``scores`` say how much an atom of the product and one of the reactants belong together; -1 is no atom.
    """
    product, reactants = reaction.neighbours
    allowed = scores * reaction.same_element
    favour = np.ones_like(allowed)
    mapping = [-1] * len(allowed)
    for _ in mapping:
        weighted = allowed * favour
        sums = weighted.sum(1, keepdims=True)
        shares = np.divide(weighted, sums, out=np.zeros_like(weighted), where=sums != 0)
        atom = int(shares.max(1).argmax())
        source = int(shares[atom].argmax())
        if np.isclose(shares.max(), 0):
            break
        mapping[atom] = source
        favour[np.ix_(product[atom], reactants[source])] *= NEIGHBOURS
        favour[atom] = 0
        favour[:, source] = 0
    return mapping


@torch.no_grad()
def mapped_right(model: nn.Module, reactions: Sequence[Reaction], ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """For each reading of the head that rxnmapper ships, the share of atoms that are mapped right, by reaction.

    "row" takes the reactants' atom of the highest score in the product atom's row, "both" adds the other direction, and
    "mapping" is the product's own way. Atoms with an open source do not count.
    """
    device = next(model.parameters()).device
    inputs = {name: t.to(device) for name, t in padded(ids).items()}
    with record(model, keep="all") as trace:
        model(**inputs)
    number, head = SHIPPED_HEAD
    layer = recorded_stack(trace)[number]
    right: dict[str, list[float]] = {}
    for name, reading in MAPS.items():
        maps = reading(layer)[:, head].double().cpu().numpy()
        for one, reaction in zip(maps, reactions, strict=True):
            for way, share in _shares(one, reaction).items():
                right.setdefault(f"{name}/{way}", []).append(share)
    return {name: torch.tensor(values) for name, values in right.items()}


def _shares(one: np.ndarray, reaction: Reaction) -> dict[str, float]:
    before, after = reaction.atoms
    row, column = one[np.ix_(after, before)], one[np.ix_(before, after)].T
    allowed = reaction.same_element
    chosen = {
        "row": np.where(allowed, row, -np.inf).argmax(1).tolist(),
        "both": np.where(allowed, row + column, -np.inf).argmax(1).tolist(),
        "mapping": map_atoms(row + column, reaction),
    }
    known = [i for i, sources in enumerate(reaction.sources) if sources]
    return {way: float(np.mean([atoms[i] in reaction.sources[i] for i in known])) for way, atoms in chosen.items()}


def write_model(wheel: Path, folder: Path) -> None:
    """rxnmapper's weights out of its wheel, as safetensors beside config, vocabulary and a tokenizer of SMILES.

    The wheel has them as a pickle alone; it is read with torch's loader of tensors, which runs no code.
    """
    import io
    import zipfile

    from safetensors.torch import save_file

    from attnlab.provenance import write_atomic

    if not zipfile.is_zipfile(wheel):
        raise ValueError(f"{wheel} is no wheel; fetch it by: pip download --no-deps rxnmapper==0.4.3")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        if f"{FILES}/pytorch_model.bin" not in archive.namelist():
            raise ValueError(f"{wheel} holds no {FILES}/pytorch_model.bin; it must be rxnmapper 0.4.3")
        pickled = io.BytesIO(archive.read(f"{FILES}/pytorch_model.bin"))
        weights = torch.load(pickled, weights_only=True, map_location="cpu")
        for name in ("config.json", "vocab.txt"):
            write_atomic(folder / name, archive.read(f"{FILES}/{name}"))
    # The masked LM has no pooler.
    kept = {name: t.clone().contiguous() for name, t in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """tokenizer.json: rxnmapper's expression and its vocab.txt, which the tokenizer of ALBERT does not read."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(TOKEN.pattern), "isolated")
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
