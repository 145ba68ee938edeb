"""benchmarks/watch_peers.py: all ways measure the same, and its rows and ratios say what was measured."""

from __future__ import annotations

import importlib
import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def driver() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("watch_peers")


@pytest.fixture(scope="module")
def worker(driver: ModuleType) -> ModuleType:
    return importlib.import_module("watch_peers_worker")


@pytest.fixture(scope="module")
def folder(driver: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with its tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    loaded = driver.tiny_model()
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def limits() -> Iterator[None]:
    """A measurement sets the limits and the threads of its process."""
    memory, threads = resource.getrlimit(resource.RLIMIT_DATA), torch.get_num_threads()
    yield
    resource.setrlimit(resource.RLIMIT_DATA, memory)
    torch.set_num_threads(threads)


def task(**changes: Any) -> dict[str, Any]:
    return {"way": "model alone", "model": "", "ids": IDS, "repeats": 3, "seconds": 60, "gib": 64} | changes


def answer(seconds: float, loaded: float, peak: float, entropy: float = 1.0) -> dict[str, Any]:
    means = {"entropy": [[entropy]]}
    return {"fits": True, "seconds": [seconds], "loaded MiB": loaded, "peak MiB": peak, "means": means}


def test_dense_statistics_by_hand(worker: ModuleType) -> None:
    w = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
    statistics = worker.dense_statistics(w)
    assert statistics["entropy"].flatten().tolist() == pytest.approx([0.0, math.log(2)])
    assert statistics["received"].flatten().tolist() == [1.5, 0.5]
    assert statistics["recent"].flatten().tolist() == statistics["sinks"].flatten().tolist() == [1.0, 1.0]
    assert statistics["largest"].shape == statistics["places"].shape == (1, 1, 2, 2)


def test_recent_is_the_last_64(worker: ModuleType) -> None:
    uniform = torch.ones(100, 100).tril() / torch.arange(1, 101)[:, None]
    recent = worker.dense_statistics(uniform[None, None])["recent"][0, 0]
    assert recent[[62, 63, 64, 99]].tolist() == pytest.approx([1.0, 1.0, 64 / 65, 0.64])


def test_every_way_measures_the_same(worker: ModuleType, driver: ModuleType, folder: str) -> None:
    ids = torch.tensor([IDS])
    means = {}
    with torch.no_grad():
        for way, make in worker.WAYS.items():
            if way != driver.ALONE and not way.startswith(driver.LIBRARIES):
                means[way] = worker.means(make(folder)(ids))
    assert len(means) == 4
    for way, of_way in means.items():
        assert of_way["entropy"], way
        assert driver.difference(of_way, means[driver.EXACT]) < 1e-5, way


def test_a_measurement_repeats_until_its_seconds_are_over(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr(worker.time, "process_time", lambda: next(clock))
    assert worker.timed(lambda ids: [], torch.tensor([IDS]), 3, 15)[0] == [10, 10]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 GB")])
def test_a_way_without_memory_does_not_fit(
    worker: ModuleType, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(ids: Tensor) -> list[Any]:
        raise error

    monkeypatch.setitem(worker.WAYS, "model alone", lambda folder: run)
    assert worker.measured(task()) == {"fits": False}


@pytest.mark.usefixtures("limits")
def test_another_error_is_not_taken_for_memory(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ids: Tensor) -> list[Any]:
        raise RuntimeError("shapes")

    monkeypatch.setitem(worker.WAYS, "model alone", lambda folder: run)
    with pytest.raises(RuntimeError, match="shapes"):
        worker.measured(task())


def test_ratios_are_to_the_model_alone(driver: ModuleType) -> None:
    answers = {
        driver.ALONE: answer(2.0, 1000, 1100),
        driver.EXACT: answer(5.0, 1200, 1410),
        "eager, output_attentions": {"fits": False},
    }
    rows = [driver.row_of("tiny", 512, way, answers) for way in answers]
    assert rows[1]["time / model"] == 2.5
    # 210 MiB on the 1,000 of the model alone; the 200 more that were loaded are no cost of the pass.
    assert rows[1]["memory / model"] == 1.1
    assert driver.ratios(rows)[1:] == [
        {"way": driver.EXACT, "time 512": 2.5, "memory 512": 1.1},
        {"way": "eager, output_attentions", "time 512": "does not fit", "memory 512": "does not fit"},
    ]


def test_rows_of_other_lengths_stay_in_the_file(driver: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "watch_peers.json"
    for tokens, seconds in ((4096, 1.0), (512, 2.0), (4096, 3.0)):
        answers = {driver.ALONE: answer(seconds, 1, 1)}
        driver.write(file, [driver.row_of("tiny", tokens, driver.ALONE, answers)], {})
    tables = json.loads(file.read_text(encoding="utf-8"))["tables"]
    assert sorted((row["tokens"], row["s"]) for row in tables["ways"]) == [(512, 2.0), (4096, 3.0)]
    assert list(tables["ratios"][0]) == ["way", "time 512", "time 4096", "memory 512", "memory 4096"]


def test_other_statistics_end_the_run(driver: ModuleType) -> None:
    answers = {driver.ALONE: answer(1, 1, 1), driver.EXACT: answer(1, 1, 1), "nnsight, W saved": answer(1, 1, 1, 1.1)}
    rows = [driver.row_of("tiny", 512, way, answers) for way in answers]
    driver.check(rows[:2])
    with pytest.raises(SystemExit, match="nnsight, W saved at 512 tokens"):
        driver.check(rows)


def test_libraries_are_left_out_without_their_environment(driver: ModuleType) -> None:
    assert [way for way in driver.WAYS if driver.python_of(way, None) is None] == [
        way for way in driver.WAYS if way.startswith(("nnsight", "TransformerLens"))
    ]


@pytest.mark.slow
def test_a_process_of_its_own(driver: ModuleType, folder: str, tmp_path: Path) -> None:
    python = driver.python_of("eager, layer by layer", None)
    result = driver.asked(python, task(way="eager, layer by layer", model=folder, repeats=2), tmp_path)
    assert len(result["seconds"]) == 2
    assert result["peak MiB"] >= result["loaded MiB"] > 0
    assert json.loads((tmp_path / "task.json").read_text(encoding="utf-8"))["way"] == "eager, layer by layer"
