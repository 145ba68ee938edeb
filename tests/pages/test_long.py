"""``explore --long``: what is read, chosen, computed and refused; how large the page is."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import attnlab as al
from attnlab.adapters import load_model
from attnlab.cli import main
from attnlab.evaluation.explore_long import LongConfig, differing_heads, explore_long, parse_zoom
from attnlab.pages.explorer import Packed
from attnlab.pages.explorer.page import SHARED, script
from attnlab.pages.html import ASSETS
from attnlab.pages.long import MODULES, long_page, pack_long
from tests.adapters.test_load import save
from tests.adapters.zoo import ALL

from .long_examples import LARGEST, MEGABYTES, NEEDLE, random_text, write_model, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("long")
    write_model(made / "model")
    write_text(made / "text.txt")
    return made


def unpack(packed: Packed, stream: dict[str, Any]) -> np.ndarray:
    """The bytes of a stream, by another way than the page's script."""
    text = packed.blobs[stream["blob"]]
    digits = np.frombuffer(text[:-1].replace(b"~", b"<"), np.uint8).reshape(-1, 5).astype(np.int64) - ord("(")
    words = digits @ (85 ** np.arange(4, -1, -1))
    raw = words.astype(">u4").tobytes()
    coded = np.frombuffer(zlib.decompress(raw[: len(raw) - int(text[-1:])]), np.uint8)
    return np.cumsum(coded, dtype=np.uint8) if stream["differences"] else coded


def test_the_page_holds_the_statistics_of_watch_and_exact_regions(folder: Path) -> None:
    loaded = load_model(folder / "model")
    zoom = parse_zoom("1.2:100-163@90-120")
    packed = explore_long(
        loaded, folder / "text.txt", name="small", config=LongConfig(tokens=300, heads=((1, 2), (0, 1)), zooms=(zoom,))
    )
    text = (folder / "text.txt").read_text()
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"][:300]])
    with torch.no_grad(), al.watch(loaded.model) as statistics, al.record(loaded.model) as trace:
        loaded.model(ids)
    meta, layer = packed.meta, statistics[1]
    assert [f"{head['layer']}.{head['head']}" for head in meta["chosen"]] == ["1.2", "0.1"]
    entry = meta["chosen"][0]
    lanes = unpack(packed, entry["values"]).reshape(-1, 300)
    for coded, (name, lane) in zip(lanes, entry["lanes"].items(), strict=True):
        expected = np.asarray(getattr(layer, name)[0, 2])
        expected = {"linear": expected, "root": np.sqrt(expected), "logarithm": np.log10(np.maximum(expected, 1e-6))}[
            lane["scale"]
        ]
        assert np.abs(lane["low"] + lane["step"] * coded - expected).max() <= 0.51 * lane["step"] + 1e-6, name
    low, high = (unpack(packed, part).astype(int) for part in entry["places"])
    places = (low + 256 * high).reshape(300, 8)
    assert np.array_equal(np.where(places == 65535, -1, places), np.asarray(layer.places[0, 2]))
    steps = np.cumsum(unpack(packed, entry["weights"]).reshape(8, 300), 0, dtype=np.uint8).T
    weights = 2.0 ** (-steps.astype(float) / 8)
    largest = np.asarray(layer.largest[0, 2])
    kept = largest > 1e-6
    assert np.abs(weights[kept] / largest[kept] - 1).max() < 0.045
    region = meta["regions"][0]
    low, high = unpack(packed, region).astype(int).reshape(2, 64, 31)
    exact = np.asarray(trace[1].weights()[0, 2, 100:164, 90:121])
    assert np.abs(region["low"] + region["step"] * (low + 256 * high) - exact).max() <= region["step"]
    shown = "".join({"0": "", "1": " ", "2": "\n"}[b] + t for b, t in zip(meta["before"], meta["tokens"], strict=True))
    assert text.startswith(shown)
    assert NEEDLE in shown


def test_heads_that_differ_are_chosen_and_copies_are_not(folder: Path) -> None:
    loaded = load_model(folder / "model")
    with torch.no_grad(), al.watch(loaded.model) as statistics:
        loaded.model(torch.randint(4, 6, (1, 130)))
    heads = {(layer.layer, head) for layer in statistics for head in range(layer.entropy.shape[1])}
    assert set(differing_heads(statistics.layers)) == heads
    # Two layers with the same numbers: no head is chosen twice.
    doubled = [statistics.layers[0], al.LayerStatistics(**vars(statistics.layers[0]) | {"layer": 1})]
    count = statistics.layers[0].entropy.shape[1]
    assert sorted(head for _, head in differing_heads(doubled, count)) == list(range(count))


def test_an_encoder_is_shown_too(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    file = write_text(tmp_path / "text.txt")
    shipped = Path(al.__file__).parent / "shipped" / "mlm"
    assert main(["explore", str(shipped), "--long", "--text", str(file), "--tokens", "70", "-o", str(page)]) == 0
    meta = json.loads(re.search(r'id="attnlab-meta">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert not meta["layers"][0]["causal"]
    assert len(meta["tokens"]) == 70
    assert len(meta["chosen"]) == 16


def test_json_says_what_was_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    words = ["--text", str(folder / "text.txt"), "--heads", "1.0,0.3", "--zoom", "0.3:5-9", "-o", str(page), "--json"]
    assert main(["explore", str(folder / "model"), "--long", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["chosen"], said["regions"]) == (["1.0", "0.3"], ["0.3:5-9"])
    assert said["bytes"] == page.stat().st_size
    assert said["tokens"] == len(
        tf.AutoTokenizer.from_pretrained(folder / "model")((folder / "text.txt").read_text()).input_ids
    )


REFUSED = {
    "--long": "--long reads a file: name it with --text FILE",
    "a --long --text {text}": "leave out TEXT",
    "--long --text {text} --layers 1": "leave out --layers",
    "--long --text {text} --norm": "leave out --reading",
    "--long --text {text} --precise": "leave out --precise",
    "--long --text {text} -m softmax": "leave out --compare-mechanism",
    "a --text {text}": "--text belongs to --long",
    "a --tokens 0": "--tokens belongs to --long",
    "a --zoom 0.0:1-2": "--zoom belongs to --long",
    "--long --text {text} --tokens 0": "from 1 to 65,535 tokens, not 0",
    "--long --text {text} --tokens 513": "more than the 512 that LlamaForCausalLM reads",
    "--long --text {text} --heads 1": "heads must be LAYER.HEAD",
    "--long --text {text} --heads 3.0": "there is no layer 3: the model has 0 to 2",
    "--long --text {text} --heads 1.9": "there is no head 1.9",
    "--long --text {text} --zoom 1.9:1-2": "there is no head 1.9",
    "--long --text {text} --zoom 1.1:2-1": "ends before it begins",
    "--long --text {text} --zoom 1.1:0-512": "513 tokens long; 512 at most",
    "--long --text {text} --zoom 1.1:400-500": "ends beyond the text",
    "--long --text {text} --zoom 1.1": "LAYER.HEAD:FROM-TO",
    "--long --text {text}.no": "text.txt.no",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_shown_is_refused_in_one_line(
    words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word.format(text=folder / "text.txt") for word in words.split()]
    assert main(["explore", str(folder / "model"), *arguments, "-o", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert REFUSED[words] in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_every_family_is_shown_or_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "text.txt", tmp_path / "page.html"
    file.write_text("a b a b\n" * 10)
    model = save(name, tmp_path / "model")
    capsys.readouterr()
    words = ["--text", str(file), "--tokens", "30", "--zoom", "1.1:3-9@0-5", "-o", str(page)]
    code = main(["explore", str(model), "--long", *words])
    if name in ("t5", "bart", "marian"):
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("attnlab: ")]
        assert code == 2
        assert len(said) == 1
        assert "--long shows one text" in said[0]
    else:
        assert code == 0
        assert page.stat().st_size > 50_000


def test_every_module_of_the_page_is_among_the_shared_ones() -> None:
    names = {path.stem for path in ASSETS.glob("long*.js")}
    assert names == {*MODULES.split(), "long"} & {*SHARED}
    code = script("long", MODULES)
    assert not re.search(r"^(import|export) ", code, re.MULTILINE)


@pytest.mark.slow
def test_32768_tokens_of_270_heads_take_less_than_20_megabytes() -> None:
    assert len(long_page(pack_long(random_text(**LARGEST)))) < MEGABYTES * 1e6


def test_the_title_stands_before_the_data_so_that_it_is_painted_first() -> None:
    page = long_page(pack_long(random_text(17, layers=2, heads=3, chosen=2, squares=1)))
    assert page.index(b"<h1>random</h1>") < page.index(b'id="attnlab-meta"') < page.index(b"data-blob")
