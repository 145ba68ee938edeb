"""Training the pattern classifier that ``attnlab.reading`` ships, and its scores on maps it has not seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from attnlab.devices import best_device
from attnlab.progress import note
from attnlab.provenance import write_atomic
from attnlab.reading.pattern_classifier import SHIPPED, device_of, load_classifier
from attnlab.reading.pattern_data import CLASSES, SIZE
from attnlab.reading.pattern_net import PatternNet
from attnlab.training import Recipe
from attnlab.training.side_by_side import Clock, Learner, train_learners
from papers.effective.config import SHIPPED_MAPS, EffectiveConfig
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
    "with_classifier",
]

# Maps in a batch of each member.
BATCH = 48
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
    """Learn from generated maps and from labelled real ones, if any, which fill ``real_share`` of each batch.

    Each of ``members`` starts and draws for itself; weights are a moving average over the training. ``made`` are
    pictures and labels of ``generated_pictures``, for many trainings on the same ones.
    """
    torch.manual_seed(seed)
    net = PatternNet(members).to(device)
    learner = _EnsembleLearner(net, steps)
    drawn = _DrawnMaps(made or generated_pictures(generated, seed=seed), real, real_share, members, seed, device)
    train_learners([(learner, drawn)], Clock(steps))
    net.load_state_dict(learner.average.module.state_dict())
    return net


class _EnsembleLearner(Learner):
    """The members' losses; the learning rate and Adam's momentum follow one cycle, and weights are averaged."""

    model: PatternNet

    def __init__(self, net: PatternNet, steps: int) -> None:
        recipe = Recipe(lr=2e-3, weight_decay=0.05, clip=None)
        # A captured update could not change the momentum.
        super().__init__(net, None, recipe, half=False, capture=False)
        self.average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / max(2, steps // 10)))
        self.cycle = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, recipe.lr, total_steps=steps)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.model.parameters()), "weight_decay": self.recipe.weight_decay}]

    def set_rate(self, lr: float) -> None:
        """The cycle has set it."""

    def advance(self, batch: Mapping[str, Tensor], *, step: int, steps: int) -> None:
        super().advance(batch, step=step, steps=steps)
        self.cycle.step()
        self.average.update_parameters(self.model)

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        x, y = batch["pictures"], batch["labels"]
        logits = self.model.each(x).flatten(0, 1)
        return len(x) * cross_entropy(logits, y.transpose(0, 1).flatten(0, 1), label_smoothing=0.1)


class _DrawnMaps:
    """Batches of generated and real maps, drawn and varied for each member; steps must be read in order."""

    def __init__(
        self,
        generated: tuple[Tensor, Tensor],
        real: LabelledMaps | None,
        real_share: float,
        members: int,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.members, self.device = members, device
        self.draw = torch.Generator(device).manual_seed(seed)
        self.generated, labels = (t.to(device) for t in generated)
        self.generated_labels = one_hot(labels, len(CLASSES)).float()
        # Classes that are rare among the real maps weigh more than their number.
        self.real, self.real_labels, self.odds = (t.to(device) for t in _real(real))
        self.real_count = int(BATCH * real_share) if len(self.real) else 0

    def batch(self, step: int) -> dict[str, Tensor]:
        members, real = self.members, self.real_count
        size = (members, BATCH - real)
        rows = torch.randint(len(self.generated), size, generator=self.draw, device=self.device)
        x, y = self.generated[rows], self.generated_labels[rows]
        if real:
            rows = torch.multinomial(self.odds, members * real, replacement=True, generator=self.draw)
            rows = rows.view(members, real)
            x, y = torch.cat([x, self.real[rows]], 1), torch.cat([y, self.real_labels[rows]], 1)
        stays = y[..., CLASSES.index("block")] > 0
        x = varied(x.flatten(0, 1), self.draw, stays=stays.flatten()).view_as(x)
        return {"pictures": x, "labels": y}


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
    by_family = {}
    for held in families:
        inside = [i for i, entry in enumerate(maps.entries) if _family(entry) == held]
        outside = [i for i, entry in enumerate(maps.entries) if _family(entry) != held]
        by_family[held] = scores(train_classifier(maps.at(outside), seed=seed, **training), maps.at(inside))
    return by_family


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


def with_classifier(config: EffectiveConfig, work: Path) -> EffectiveConfig:
    """The config with a classifier of the encoder's own maps, or the shipped one, and whose maps it learned from."""
    maps = our_maps()
    of_encoder = SHIPPED_MAPS if config.model is None else (Path(config.model).name,)
    own = maps.of(of_encoder) if config.classifier_maps == "own" else None
    if own is None or not own.entries:
        try:
            load_classifier()
            return replace(config, learned_from=_models_of(maps))
        except ValueError:
            own = maps
    note("training the pattern classifier")
    path = work / "classifier.safetensors"
    if not path.exists():
        save_classifier(train_classifier(own, device=best_device()), path)
    return replace(config, classifier=str(path), learned_from=_models_of(own))


def _models_of(maps: LabelledMaps) -> tuple[str, ...]:
    return tuple(sorted({entry["model"] for entry in maps.entries}))


def _real(real: LabelledMaps | None) -> tuple[Tensor, Tensor, Tensor]:
    if real is None or not len(real.entries):
        return torch.zeros(0, SIZE, SIZE), torch.zeros(0, len(CLASSES)), torch.zeros(0)
    labels = torch.tensor(real.labels())
    counts = torch.bincount(labels, minlength=len(CLASSES)).float()
    return torch.from_numpy(real.pictures).float() / 255, torch.tensor(real.answer_shares()), counts[labels].rsqrt()
