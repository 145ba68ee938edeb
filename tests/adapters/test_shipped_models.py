"""The models that come with the package, by their names, and conversions in folders of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import attnlab as al
from attnlab.adapters import reconvert, save_conversion
from attnlab.adapters.cache_bytes import cache_bytes
from attnlab.adapters.load import max_length
from attnlab.adapters.named_models import SHIPPED_MODELS
from tests.adapters.zoo import build, inputs, real_logits
from tests.tolerance import assert_close


@pytest.fixture(scope="module")
def lm() -> al.LoadedModel:
    return al.shipped_model("lm")


@pytest.fixture(scope="module")
def bounded() -> al.LoadedModel:
    return al.shipped_model("lm-bounded")


def test_the_masked_model_is_the_default() -> None:
    assert al.shipped_model().task == al.shipped_model("mlm").task == "mlm"


def test_an_unknown_name_lists_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"no shipped model 'gpt'; there are: mlm, lm, lm-bounded"):
        al.shipped_model("gpt")


def test_the_bounded_model_is_the_causal_one_with_a_memory(lm: al.LoadedModel, bounded: al.LoadedModel) -> None:
    assert lm.task == bounded.task == "causal"
    assert al.is_converted(bounded.model)
    assert not al.is_converted(lm.model)
    own, other = lm.model.state_dict(), bounded.model.state_dict()
    assert {name for name in other if not name.startswith("attnlab.")} == own.keys()
    for name, weight in own.items():
        assert torch.equal(other[name], weight), name
    assert max_length(lm.model) == 8192
    assert cache_bytes(bounded.model, 512) == cache_bytes(bounded.model, 8192)
    assert cache_bytes(lm.model, 8192) == 16 * cache_bytes(lm.model, 512) > cache_bytes(bounded.model, 8192)


def test_a_text_that_fits_into_the_memory_is_read_as_by_all_keys(lm: al.LoadedModel, bounded: al.LoadedModel) -> None:
    mech = bounded.model.attnlab["decoder_0"]
    ids = torch.arange(5, 5 + mech.window)[None]
    assert_close(bounded.model(ids).logits, lm.model(ids).logits)


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_load_model_knows_the_names_of_the_command_line(name: str) -> None:
    loaded = al.load_model(name, dtype=torch.float16)
    assert loaded.model.dtype == torch.float16
    assert al.is_converted(loaded.model) == name.endswith("bounded")


def test_a_folder_of_the_same_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shipped-lm").mkdir()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        al.load_model("shipped-lm")


def test_a_conversion_in_a_folder_of_its_own(tmp_path: Path) -> None:
    model = build("llama")
    converted = al.convert(model, al.AbcSelect(slots=2, window=2, sinks=1, block=2), copy=True)
    # A large model's weights lie in several files, the conversion's in any of them.
    converted.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    alone = save_conversion(tmp_path / "whole", tmp_path / "alone")
    assert all(name.startswith("attnlab.") for name in load_file(alone / "model.safetensors"))
    given = inputs(model)
    reconvert(model, alone)
    assert_close(real_logits(model, given), real_logits(converted, given))
    # Beside a model of its own, a conversion belongs to that one.
    section = json.loads((alone / "config.json").read_text())
    assert section.keys() == {"attnlab"}
    (alone / "config.json").write_text(json.dumps(section | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="says nothing of a conversion"):
        reconvert(build("llama"), alone)


def test_a_conversion_that_cannot_be_kept_alone(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"holds no conversion: its config\.json has no section 'attnlab'"):
        save_conversion(tmp_path / "plain", tmp_path / "alone")
    al.convert(model, "abc-select:slots=2,window=2,sinks=1,block=2").save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="give another folder for its conversion alone"):
        save_conversion(tmp_path / "whole", tmp_path / "whole")
