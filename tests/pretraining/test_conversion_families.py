"""``attnlab convert`` alone converts models of many families: heads of several sizes, grouped and not, with dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attnlab as al
from attnlab.cli import main
from attnlab.training import read_result
from tests.adapters.test_load import save

# Biases and learned places; rotary on a part of a head; keys that are normalised; one key head for all.
FAMILIES = ("gpt2", "gpt_neox", "qwen3", "opt", "gpt_bigcode", "granite")
WAYS = {"plan": ("--budget", "0.6"), "select": ("-m", "abc-select:slots=6,window=8,sinks=2,block=2")}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", list(WAYS))
def test_a_family_is_converted_by_the_command_alone(family: str, way: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / family)
    draw = torch.Generator().manual_seed(0)
    words = [("a", "b", ".")[i] for i in torch.randint(3, (12_000,), generator=draw).tolist()]
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(words[i : i + 50]) for i in range(0, len(words), 50)))
    training = ("--lengths", "64", "--batch", "128", "--tokens", "512", "--device", "cpu")
    run = tmp_path / "run"
    assert (
        main(["convert", str(model), *WAYS[way], "--text", str(tmp_path / "text.txt"), *training, "--out", str(run)])
        == 0
    )
    result = read_result(run)
    assert result is not None
    assert result["saved"]["kl"] <= result["saved"]["kl_at_start"]
    share = result["cache"][-1]["bytes"] / result["cache"][-1]["softmax_bytes"]
    assert share <= 0.6
    converted = al.load_model(run).model
    assert al.is_converted(converted)
    prompt = torch.tensor([[4, 5, 4, 3, 5]])
    tokens = converted.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(tokens, converted.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=False))
