"""Signatures are checked while the tests run: those with shapes, and those without."""

from __future__ import annotations

import inspect

import pytest
import torch

import attnlab as al


def test_a_shape_that_is_not_the_signatures_is_an_error() -> None:
    q = torch.zeros(2, 3, 5, 7)
    with pytest.raises(Exception, match="Type-check error"):
        al.AttentionCall(q, q[0], q)


def test_a_type_that_is_not_the_signatures_is_an_error() -> None:
    with pytest.raises(Exception, match="violates type hint"):
        al.mechanism(3)  # type: ignore[arg-type]


def test_annotations_stay_as_they_are_written() -> None:
    assert set(map(type, inspect.get_annotations(al.mechanism).values())) == {str}
