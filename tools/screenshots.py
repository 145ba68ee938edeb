"""Pictures of the pages that attnlab writes, for gallery and README: ``python -m tools.screenshots [NAME ...]``.

Each page is written by the command line, on models and texts that are here, and opened in headless Chromium. SmolLM2
(``make models``) is needed for some. Pages and runs stay in build/gallery, so that a picture can be taken again alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attnlab.adapters.load import SHIPPED
from attnlab.pages.evaluate import evaluate_page

ROOT = Path(__file__).resolve().parent.parent
OUT, WORK = ROOT / "docs" / "images", ROOT / "build" / "gallery"
BOOK = ROOT / "attnlab" / "shipped" / "text" / "shakespeare.txt"
# The text of the README's first command, and the head that looks up its answer: W, and what of it has length.
NEEDLE = "The needle is blue and the thread is red. What colour is the needle? The needle is"
LOOKS_UP = "location.hash = 'layer=18&head=6&view=map&panes=0:standard|0:norm&q=18&k=3'"
PASSAGE = (
    "The river was frozen, so the old ferry stayed in the harbour until the ice broke in spring. Then the captain "
    "counted his passengers, raised the flag, and sailed slowly past the lighthouse to his brother's town."
)


@dataclass(frozen=True)
class Picture:
    """A page of ``WORK``, how it is made, the picture's size, and JavaScript that is run on the page before."""

    page: str
    make: Callable[[], None]
    height: int = 860
    width: int = 1280
    before: str = ""


def command(*words: object) -> Callable[[], None]:
    """Runs attnlab's command line in the folder of the pages."""
    line = [sys.executable, "-m", "attnlab", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def run() -> None:
        subprocess.run(line, cwd=WORK, env=environment, check=True)

    return run


def evaluation() -> None:
    """The page of a stored evaluation of SmolLM2, which took a GPU."""
    stored = json.loads((ROOT / "benchmarks/results/evaluate_smollm2.json").read_text(encoding="utf-8"))
    (WORK / "evaluation.html").write_text(evaluate_page(stored), encoding="utf-8")


def runs(*made: Callable[[], None]) -> Callable[[], None]:
    """Several commands, one after the other."""

    def run() -> None:
        for make in made:
            make()

    return run


def trained(name: str, *options: object) -> Callable[[], None]:
    """A short training in the folder ``name``; one that is there already is kept."""
    words = ("train", "--text", BOOK, "--vocab", 400, "--steps", 120, "--batch", 8, "--length", 64, "--warmup", 10)
    return lambda: None if (WORK / name / "result.json").exists() else command(*words, "--out", name, *options)()


GUIDED = trained(
    "guided",
    "--model",
    "bert-3x128",
    "--guidance-patterns",
    "next,prev",
    "--guidance",
    "--record",
    "To be, or not to be: that is the question.",
)
PLAIN = trained("plain", "--model", "bert-3x128")
CAUSAL = trained("causal", "--model", "llama-2x64", "--task", "causal")
CONVERT = ("convert", "causal/model", "-m", "abc-select:slots=8,window=16,sinks=2", "--text", BOOK, "--tokens", "60k")
COMPARE = ("compare", SHIPPED, "--text", BOOK, "-m", "top-r:r=16", "-m", "window:r=16", "-m", "kernel:elu")
JUDGE = (
    "judge",
    "smollm2",
    "--policies",
    "streaming-llm",
    "snapkv",
    "h2o",
    "--budgets",
    0.5,
    0.25,
    "--tasks",
    "needle",
)

LAST_STEP = """(() => {
    const slider = document.querySelector("input[type=range]");
    slider.value = slider.max;
    slider.dispatchEvent(new Event("input"));
})()"""

PICTURES = {
    "demo": Picture("demo/index.html", command("demo", "--out", "demo"), height=1000),
    "compare": Picture("compare.html", command(*COMPARE, "--tokens", 1024, "--length", 128, "-o", "compare.html")),
    "explorer": Picture(
        "explorer.html",
        command("explore", "smollm2", NEEDLE, "--all", "-o", "explorer.html"),
        width=1720,
        before=LOOKS_UP,
        height=980,
    ),
    "explorer-mechanism": Picture(
        "mechanism.html", command("explore", SHIPPED, PASSAGE, "-m", "top-r:r=4", "-o", "mechanism.html")
    ),
    "explorer-run": Picture(
        "run.html", runs(GUIDED, command("explore", "guided", "-o", "run.html")), height=940, before=LAST_STEP
    ),
    "explorer-long": Picture(
        "long.html", command("explore", SHIPPED, "--long", "--text", BOOK, "--tokens", 512, "-o", "long.html")
    ),
    "evaluate": Picture("evaluation.html", evaluation),
    "judge": Picture("judge.html", command(*JUDGE, "--lengths", 256, "--cases", 4, "-o", "judge.html")),
    "audit": Picture("audit/audit.html", command("audit", SHIPPED, "--text", BOOK, "--out", "audit")),
    "report": Picture(
        "report.html", runs(GUIDED, PLAIN, command("report", "guided", "plain", "-o", "report.html")), height=1400
    ),
    "convert": Picture(
        "converted.html",
        runs(
            CAUSAL,
            command(*CONVERT, "--batch", 1024, "--lengths", "64=1", "--out", "bounded"),
            command("report", "bounded/stages/1-heads", "bounded/stages/3-logits", "-o", "converted.html"),
        ),
        height=1400,
    ),
}


def main(arguments: list[str]) -> None:
    """Makes the pages that are not there yet, and takes their pictures."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which (default: all)")
    options = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in options.names or PICTURES:
            picture = PICTURES[name]
            if not (WORK / picture.page).exists():
                picture.make()
            page = chromium.new_page(viewport={"width": picture.width, "height": picture.height})
            page.goto((WORK / picture.page).as_uri())
            page.wait_for_timeout(1500)
            page.evaluate(picture.before or "null")
            page.wait_for_timeout(500)
            page.screenshot(path=str(OUT / f"{name}.png"))
            page.close()
            # 256 colours are enough for a page, and a third of the bytes.
            Image.open(OUT / f"{name}.png").quantize(256, dither=Image.Dither.NONE).save(
                OUT / f"{name}.png", optimize=True
            )
            print(OUT / f"{name}.png", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
