"""Training the pattern classifier that ``attnlab.reading`` ships, and what it gets right on maps it has not seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attnlab.provenance import write_atomic
from attnlab.reading.pattern_classifier import SHIPPED, device_of
from attnlab.reading.pattern_data import CLASSES, SIZE
from attnlab.reading.pattern_net import PatternNet
from papers.effective.labelled_maps import LabelledMaps, load_labelled
from papers.effective.pattern_augment import varied
from papers.effective.pattern_generator import generated_pictures
from papers.effective.pattern_scores import score_answers

__all__ = [
    "cross_validated",
    "leave_one_model_out",
    "our_maps",
    "save_classifier",
    "scores",
    "train_classifier",
]

MAPS = Path(__file__).resolve().parent / "maps_data"


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
def scores(net: PatternNet, maps: LabelledMaps) -> dict[str, Any]:
    """Confusion matrix (rows: labels, columns: answers), F1 per class, its mean over classes present, accuracy."""
    answers = net((torch.from_numpy(maps.pictures).float() / 255).to(device_of(net))).argmax(-1).cpu()
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
            answers[fold] = net(pictures.to(device_of(net))).argmax(-1).cpu()
    return score_answers(answers, torch.tensor(maps.labels()))


def _family(entry: Mapping[str, Any]) -> str:
    return entry.get("family", entry["model"])


def save_classifier(net: PatternNet, path: Path | str | None = None) -> Path:
    """Write a network in half precision; by default as the one that the package ships."""
    from safetensors.torch import save

    path = Path(path) if path else SHIPPED / "classifier.safetensors"
    return write_atomic(path, save({name: t.half().contiguous() for name, t in net.state_dict().items()}))


def our_maps() -> LabelledMaps:
    """The labelled real maps of this repository."""
    return load_labelled(MAPS)


def _real(real: LabelledMaps | None) -> tuple[Tensor, Tensor, Tensor]:
    if real is None or not len(real.entries):
        return torch.zeros(0, SIZE, SIZE), torch.zeros(0, len(CLASSES)), torch.zeros(0)
    labels = torch.tensor(real.labels())
    counts = torch.bincount(labels, minlength=len(CLASSES)).float()
    return torch.from_numpy(real.pictures).float() / 255, torch.tensor(real.looks()), counts[labels].rsqrt()
