"""``attnlab doctor``: what is installed, what is missing for which feature, and the command that brings it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import re
import sys
from dataclasses import dataclass
from typing import Any

from attnlab import __version__
from attnlab.commands._output import Answer, styled
from attnlab.errors import first_line

__all__ = ["FEATURES", "Feature", "arguments", "run"]

OLDEST_PYTHON = (3, 10)


@dataclass(frozen=True)
class Feature:
    """What some packages are for; ``extra`` is their name in pyproject.toml, where a test compares both."""

    extra: str
    purpose: str
    packages: dict[str, str]
    # The system on which alone the packages exist.
    system: str | None = None


CORE = Feature(
    "core", "every command", {"torch": "2.6", "transformers": "5.0", "safetensors": "0.4.3", "numpy": "1.26"}
)
FEATURES = (
    Feature("kernels", "fused kernels on a GPU", {"triton": "3.4"}, system="Linux"),
    Feature(
        "train",
        "attnlab train, attnlab convert, judge --jobs",
        {
            "accelerate": "1.2",
            "joblib": "1.4",
            "tokenizers": "0.21",
            "sentencepiece": "0.2",
            "sacrebleu": "2.4",
            "scipy": "1.11",
            "tensorboard": "2.16",
        },
    ),
    Feature("eval", "attnlab evaluate", {"lm-eval": "0.4.13"}),
    Feature("notebook", "the explorer and tables in notebooks", {"anywidget": "0.9", "pandas": "2.1"}),
    Feature("ray", "many runs on several machines", {"ray": "2.40", "joblib": "1.4"}),
    Feature("gguf", "models in GGUF files, smollm2 among them", {"gguf": "0.17"}),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command has only the options that all have."""


def run(options: argparse.Namespace) -> Answer:
    """Look at the installation; the exit code is 1 if the core does not work."""
    core = _state(CORE)
    problem = _core_problem(core)
    result = {
        "attnlab": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "works": problem is None,
        "problem": problem,
        "core": core,
        "gpu": _gpu() if problem is None else None,
        "features": [_state(feature) for feature in FEATURES],
        "models": _named_models() if problem is None else {},
    }
    return Answer(result, _lines(result), code=int(problem is not None))


def _state(feature: Feature) -> dict[str, Any]:
    """Which packages of a feature are there, in which version, and the command that brings the others."""
    needed = feature.system in (None, platform.system())
    packages = {name: _package(name, least) for name, least in feature.packages.items()}
    wrong = [f'"{name}>={feature.packages[name]}"' for name, package in packages.items() if not package["ok"]]
    return {
        "name": feature.extra,
        "purpose": feature.purpose,
        "ok": needed and not wrong,
        "packages": packages,
        "remedy": f"pip install {' '.join(wrong)}" if needed and wrong else None,
    }


def _package(name: str, least: str) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "least": least, "ok": False}
    return {"version": version, "least": least, "ok": _numbers(version) >= _numbers(least)}


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with.

    >>> _numbers("2.13.0+cpu"), _numbers("5.0.0rc1")
    ((2, 13, 0), (5, 0, 0))
    """
    beginning = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, beginning.group().split("."))) if beginning else ()


def _core_problem(core: dict[str, Any]) -> str | None:
    """Why attnlab cannot work here; None where it can. The packages are imported only where they are installed."""
    if sys.version_info < OLDEST_PYTHON:
        return f"Python {platform.python_version()} is older than {'.'.join(map(str, OLDEST_PYTHON))}"
    if not core["ok"]:
        wrong = [name for name, package in core["packages"].items() if not package["ok"]]
        return f"missing or too old: {', '.join(wrong)}"
    # The package of progress bars comes with transformers.
    name = "tqdm"
    try:
        from attnlab.progress import each, showing

        with showing("importing", at_once=False):
            for name in each(tuple(CORE.packages)):
                importlib.import_module(name)
    # A broken installation fails by errors of many kinds.
    except Exception as error:
        return f"{name} is installed but cannot be imported: {first_line(error)}"
    return _attention_problem()


def _attention_problem() -> str | None:
    """What is wrong with one small attention call; None where it gives what torch's own gives."""
    import torch

    from attnlab.attention import AttentionCall
    from attnlab.registry import mechanism

    q = torch.linspace(-1, 1, 2 * 3 * 4).view(1, 2, 3, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    if not torch.allclose(mechanism("softmax")(AttentionCall(q, q, q)), expected, atol=1e-5):
        return "attention gives other numbers than torch's own"
    return None


def _gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        "memory_bytes": total,
        "free_bytes": free,
    }


def _named_models() -> dict[str, str | None]:
    """The models with a short name, and where their files are; None for one that was not fetched."""
    from attnlab.adapters.named_models import found_models

    return {name: None if file is None else str(file) for name, file in found_models().items()}


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"attnlab {result['attnlab']} on Python {result['python']}, {result['system']}"]
    good, bad = styled("works  ", "green"), styled("broken ", "red")
    lines.append(f"{good if result['works'] else bad}  core: {_versions(result['core'])}")
    if result["problem"]:
        lines.append(f"{'':<9}{result['problem']}")
    lines += _remedy(result["core"])
    gpu = result["gpu"]
    if gpu is not None:
        lines.append(
            f"{styled('works  ', 'green')}  GPU: {gpu['count']} x {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB "
            f"({gpu['free_bytes'] / 2**30:.0f} free), CUDA {gpu['cuda']}"
        )
    elif result["works"]:
        lines.append(f"{styled('none   ', 'yellow')}  GPU: torch finds none here; everything runs on the CPU")
    for feature in result["features"]:
        state = styled("works  ", "green") if feature["ok"] else styled("missing", "yellow")
        lines.append(f"{state}  {feature['name']}, for {feature['purpose']}: {_versions(feature)}")
        lines += _remedy(feature)
    for name, file in result["models"].items():
        if file is None:
            lines.append(f"{styled('missing', 'yellow')}  the model {name}")
            lines.append(f"{'':<9}$ attnlab fetch {name}")
        else:
            lines.append(f"{styled('works  ', 'green')}  the model {name}: {file}")
    return lines


def _remedy(state: dict[str, Any]) -> list[str]:
    return [f"{'':<9}$ {state['remedy']}"] if state["remedy"] else []


def _versions(state: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {package['version']}" + ("" if package["ok"] else f" (needs {package['least']})")
        if package["version"]
        else f"no {name}"
        for name, package in state["packages"].items()
    )
