"""Spec strings, the listing in their errors, and mechanisms of third parties."""

from __future__ import annotations

import importlib.metadata
import inspect
from dataclasses import dataclass

import pytest
import torch

import attnlab as al
from attnlab.attention import normalise, scores


def test_specs_parse_to_objects() -> None:
    assert al.mechanism("softmax") == al.Softmax()
    assert al.mechanism("kernel:poly,degree=3") == al.Kernelized("poly", degree=3)
    assert al.mechanism(" kernel : kernel=exp ".replace(" : ", ":")) == al.Kernelized("exp")
    ready = al.Kernelized("elu")
    assert al.mechanism(ready) is ready


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "sotfmax",
            r"no mechanism named 'sotfmax'; did you mean 'softmax'\? the names and their settings: .* \| softmax",
        ),
        ("kernel:cubic", "kernel must be one of elu, poly, exp, got 'cubic'"),
        ("kernel:poly,degre=2", "kernel has no setting 'degre'; usage: kernel:kernel=elu,degree=2"),
        ("kernel:poly,degree=two", "setting degree='two' must be int"),
        ("kernel:poly,degree=-1", "degree must be an int of at least 0, got -1"),
        ("kernel:poly,2", "'2' is not key=value"),
        ("kernel:kernel=elu,kernel=exp", "'kernel' is given twice"),
        ("softmax:3", "'3' is not key=value; usage: softmax"),
    ],
)
def test_a_wrong_spec_says_what_would_be_right(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        al.mechanism(spec)


def test_not_a_spec() -> None:
    # Under pytest the signature's types are checked first; a user meets the function's own sentence.
    plain = inspect.unwrap(al.mechanism)
    with pytest.raises(ValueError, match="spec string or an object, got int"):
        plain(3)


def test_spec_of_is_the_inverse() -> None:
    assert al.spec_of(al.Kernelized("poly", degree=4)) == "kernel:kernel=poly,degree=4"
    assert al.spec_of(al.Softmax()) == "softmax"


@pytest.mark.usefixtures("own_registry")
def test_a_third_party_joins_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> type:
        @al.register("squared", examples=("squared:power=2",))
        @dataclass(frozen=True)
        class Squared(al.Mechanism):
            power: float = 2.0

            def reference(self, call: al.AttentionCall) -> torch.Tensor:
                return normalise(scores(call).relu() ** self.power)

        return Squared

    class Point:
        def load(self) -> type:
            return load()

    asked = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.append(group) or [Point()])
    assert "squared:power=2" in al.all_mechanisms()
    assert asked == ["attnlab.mechanisms"]
    q = torch.ones(1, 1, 2, 1)
    assert al.mechanism("squared:power=1.0").weights(al.AttentionCall(q, q, q)).flatten().tolist() == [0.5] * 4


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_taken_once() -> None:
    al.all_mechanisms()
    with pytest.raises(ValueError, match="'softmax' is taken by Softmax"):

        @al.register("softmax")
        class Other(al.Mechanism):
            pass
