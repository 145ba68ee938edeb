"""Which of five patterns a head shows (section 3.1 of Effective; Kovaleva et al., 2019), by small ConvNets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attnlab.hf import record
from attnlab.provenance import write_atomic
from attnlab.reading.effective import effective_attention
from attnlab.reading.pattern_augment import varied
from attnlab.reading.pattern_data import CLASSES, SIZE, LabelledMaps, load_labelled, picture
from attnlab.reading.pattern_generator import generated_pictures
from attnlab.reading.pattern_net import PatternNet
from attnlab.reading.pattern_scores import score_answers
from attnlab.shapes import Bool, Float, Int

__all__ = [
    "PatternNet",
    "classify",
    "cross_validated",
    "leave_one_model_out",
    "load_classifier",
    "pattern_shares",
    "pattern_table",
    "save_classifier",
    "scores",
    "shipped_maps",
    "train_classifier",
]

SHIPPED = Path(__file__).resolve().parent.parent / "shipped" / "patterns"


def train_classifier(
    real: LabelledMaps | None = None,
    *,
    made: tuple[Tensor, Tensor] | None = None,
    generated: int = 4000,
    steps: int = 450,
    real_share: float = 0.6,
    members: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PatternNet:
    """Learn from generated maps and, where given, from labelled real ones, which fill ``real_share`` of each batch.

    Each of ``members`` starts and draws for itself; weights are a moving average over the training. ``made`` are
    pictures and labels of ``generated_pictures``, for many trainings on the same ones.
    """
    torch.manual_seed(seed)
    net = PatternNet(members).to(device)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / max(2, steps // 10)))
    chosen = torch.Generator(device).manual_seed(seed)
    others, other_labels = (t.to(device) for t in made or generated_pictures(generated, seed=seed))
    other_labels = one_hot(other_labels, len(CLASSES)).float()
    batch = 48
    # Classes that are rare among the real maps weigh more than their number.
    pictures, labels, odds = _real(real)
    pictures, labels, odds = pictures.to(device), labels.to(device), odds.to(device)
    kept = int(batch * real_share) if len(pictures) else 0
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(steps):
        at = torch.randint(len(others), (members, batch - kept), generator=chosen, device=device)
        x, y = others[at], other_labels[at]
        if kept:
            some = torch.multinomial(odds, members * kept, replacement=True, generator=chosen).view(members, kept)
            x, y = torch.cat([x, pictures[some]], 1), torch.cat([y, labels[some]], 1)
        stays = y[..., CLASSES.index("block")] > 0
        x = varied(x.flatten(0, 1), chosen, stays=stays.flatten()).view_as(x)
        loss = members * cross_entropy(net.each(x).flatten(0, 1), y.transpose(0, 1).flatten(0, 1), label_smoothing=0.1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        average.update_parameters(net)
    net.load_state_dict(average.module.state_dict())
    return net.eval()


@torch.no_grad()
def classify(
    maps: Float[Tensor, "b h n n"], *, key_visible: Bool[Tensor, "b n"] | None = None, net: PatternNet | None = None
) -> Int[Tensor, "b h"]:
    """The index in ``CLASSES`` of every head's map; padding is cut away first. By the shipped network by default."""
    net = net or load_classifier()
    rows = []
    for i, item in enumerate(maps):
        if key_visible is not None:
            item = item[:, key_visible[i]][:, :, key_visible[i]]
        rows.append(net(picture(item.cpu()).to(_place(net))).argmax(-1).to(maps.device))
    return torch.stack(rows)


def pattern_shares(classes: Int[Tensor, "*n"]) -> dict[str, float]:
    """The percentage of maps in each class, as in Table 2.

    >>> pattern_shares(torch.tensor([0, 0, 1, 4]))["vertical"]
    50.0
    """
    counts = torch.bincount(classes.flatten(), minlength=len(CLASSES))
    return {name: 100 * int(n) / max(1, int(counts.sum())) for name, n in zip(CLASSES, counts, strict=True)}


@torch.no_grad()
def pattern_table(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, net: PatternNet | None = None
) -> list[dict[str, Any]]:
    """Table 2 for any encoder and data: the shares of the classes among all heads' maps, standard beside effective.

    ``batches`` hold input_ids and attention_mask; ``maps`` is how many were classified.
    """
    net = net or load_classifier()
    answers: dict[str, list[Tensor]] = {"standard": [], "effective": []}
    for batch in batches:
        with record(model) as trace:
            model(**batch)
        for layer in trace:
            seen = layer.call.key_visible
            found = {"standard": layer.weights(), "effective": effective_attention(layer).weights}
            for name, maps in found.items():
                answers[name].append(classify(maps, key_visible=seen, net=net).flatten())
    if not answers["standard"]:
        raise ValueError("pattern_table was given no batch")
    joined = {name: torch.cat(parts) for name, parts in answers.items()}
    return [{"attention": name, **pattern_shares(found), "maps": len(found)} for name, found in joined.items()]


@torch.no_grad()
def scores(net: PatternNet, maps: LabelledMaps) -> dict[str, Any]:
    """Confusion matrix (rows: labels, columns: answers), F1 per class, its mean over classes present, accuracy."""
    answers = net((torch.from_numpy(maps.pictures).float() / 255).to(_place(net))).argmax(-1).cpu()
    return score_answers(answers, torch.tensor(maps.labels()))


def leave_one_model_out(maps: LabelledMaps, *, seed: int = 0, **training: Any) -> dict[str, Any]:
    """``scores`` on each model's real maps of a network that has seen generated maps and the other models' only.

    Models of one ``family`` (continued from one another) are held out together. ``training`` goes to
    ``train_classifier``.
    """
    families = sorted({_family(entry) for entry in maps.entries})
    found = {}
    for held in families:
        inside = [i for i, entry in enumerate(maps.entries) if _family(entry) == held]
        outside = [i for i, entry in enumerate(maps.entries) if _family(entry) != held]
        found[held] = scores(train_classifier(maps.at(outside), seed=seed, **training), maps.at(inside))
    return found


def cross_validated(maps: LabelledMaps, *, folds: int = 5, seed: int = 0, **training: Any) -> dict[str, Any]:
    """``scores`` on maps held out at random, the paper's way: other maps of the same models were seen in training."""
    order = torch.randperm(len(maps.entries), generator=torch.Generator().manual_seed(seed))
    answers = torch.zeros(len(order), dtype=torch.long)
    for fold in order.chunk(folds):
        kept = sorted(set(order.tolist()) - set(fold.tolist()))
        net = train_classifier(maps.at(kept), seed=seed, **training)
        pictures = torch.from_numpy(maps.pictures[fold.numpy()]).float() / 255
        with torch.no_grad():
            answers[fold] = net(pictures.to(_place(net))).argmax(-1).cpu()
    return score_answers(answers, torch.tensor(maps.labels()))


def _place(net: PatternNet) -> torch.device:
    return net.out.weight.device


def _family(entry: Mapping[str, Any]) -> str:
    return entry.get("family", entry["model"])


def save_classifier(net: PatternNet, path: Path | str | None = None) -> Path:
    """Write a network in half precision; by default as the one that the package ships."""
    from safetensors.torch import save

    path = Path(path) if path else SHIPPED / "classifier.safetensors"
    return write_atomic(path, save({name: t.half().contiguous() for name, t in net.state_dict().items()}))


def load_classifier(path: Path | str | None = None) -> PatternNet:
    """The shipped network, or one saved with ``safetensors``."""
    from safetensors.torch import load_file

    path = Path(path) if path else SHIPPED / "classifier.safetensors"
    if not path.is_file():
        raise ValueError(f"no pattern classifier at {path}; train_classifier makes one")
    stored = load_file(path)
    net = PatternNet(len(stored["out.weight"]) // len(CLASSES))
    net.load_state_dict({name: t.float() for name, t in stored.items()})
    return net.eval()


def shipped_maps() -> LabelledMaps:
    """The labelled real maps that come with the package."""
    return load_labelled(SHIPPED)


def _real(real: LabelledMaps | None) -> tuple[Tensor, Tensor, Tensor]:
    if real is None or not len(real.entries):
        return torch.zeros(0, SIZE, SIZE), torch.zeros(0, len(CLASSES)), torch.zeros(0)
    labels = torch.tensor(real.labels())
    counts = torch.bincount(labels, minlength=len(CLASSES)).float()
    return torch.from_numpy(real.pictures).float() / 255, torch.tensor(real.looks()), counts[labels].rsqrt()
