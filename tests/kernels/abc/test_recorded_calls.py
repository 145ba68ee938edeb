"""Calls that are repeated: kernels get the arguments that a plain launch would give them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnlab.kernels import launching
from attnlab.kernels.abc import abc_attention, backward_pass, forward_pass, recorded_calls

NAMES = ("weigh_logits", "write_states", "read_states", "query_gradients", "sum_back", "key_gradients")


class Kernels:
    """Kernels that only note their arguments: ``plain`` ones by name, ``direct`` ones as addresses, in order."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self.calls: list[tuple[str, dict[str, int], tuple[Any, ...]]] = []

    def kernel(self, name: str, arg_names: tuple[str, ...]) -> Any:
        kernels = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def call(**arguments: Any) -> Any:
                    is_tensor = {n: a is None or isinstance(a, Tensor) for n, a in arguments.items()}
                    tensors = [n for n in arg_names if is_tensor[n]]
                    addresses = {n: _address(arguments[n]) for n in tensors}
                    rest = [arguments[n] for n in arg_names if not is_tensor[n]]
                    kernels.ways.append("plain")
                    kernels.calls.append((name, addresses, (*grid, *rest)))

                    def run(*again: Any) -> None:
                        # grid, stream, function, metadata and three hooks come first
                        kernels.ways.append("direct")
                        addresses = dict(zip(tensors, again[9 : 9 + len(tensors)], strict=True))
                        kernels.calls.append((name, addresses, (*again[:3], *again[9 + len(tensors) :])))

                    return SimpleNamespace(run=run, function="f", packed_metadata="m")

                return call

        made: Any = Kernel()
        made.__name__, made.arg_names = name, arg_names
        return made


def _address(t: Tensor | None) -> int:
    return 0 if t is None or t.numel() == 0 else t.data_ptr()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    fakes = Kernels()
    for module in (forward_pass, backward_pass):
        for name in NAMES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fakes.kernel(name, getattr(module, name).arg_names))
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "launch_mode", lambda: "direct")
    monkeypatch.setattr(launching, "_KNOWN", {})
    monkeypatch.setattr(recorded_calls, "_RECORDED", {})
    # A CPU has no index.
    active = SimpleNamespace(get_current_device=lambda: None, get_current_stream=lambda _device: 99)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return fakes


def made(length: int = 128) -> list[Tensor]:
    # Heads side by side, as a linear projection leaves them.
    shapes = ((4, 32), (2, 32), (2, 32), (2, 16))
    return [torch.zeros(1, length, h, w).transpose(1, 2).requires_grad_() for h, w in shapes]


def both(tensors: list[Tensor], **how: Any) -> tuple[Tensor, ...]:
    out, _ = abc_attention(*tensors, **how)
    return out, *torch.autograd.grad(out, tensors, torch.zeros_like(out))


def test_the_second_call_gives_every_kernel_its_tensors_addresses(kernels: Kernels) -> None:
    """Every address lies where it lay in the plain launch, relative to its tensor or buffer."""
    both(made())
    plain, kernels.calls[:], kernels.ways[:] = list(kernels.calls), [], []
    second = made()
    results = both(second)
    assert set(kernels.ways) == {"direct"}
    assert [(name, rest) for name, _, rest in kernels.calls] == [(name, rest) for name, _, rest in plain]
    at = {name: addresses for name, addresses, _ in kernels.calls}
    inputs = dict(zip("qkvs", [t.data_ptr() for t in second], strict=True))
    outputs = dict(zip(("o", "dq", "dk", "dv", "ds"), [t.data_ptr() for t in results], strict=True))
    for addresses in at.values():
        for name, address in (inputs | outputs).items():
            assert addresses.get(name, address) == address, name
    assert {"o", "q", "k", "v", "s"} <= set(at["read_states"])
    # Kernels that share a tensor find it at one place: what one writes, the next ones read.
    for shared in ("states", "z_before", "z_after", "chunk_flags", "scores", "shares", "row_offsets", "sums"):
        assert len({addresses[shared] for addresses in at.values() if shared in addresses}) == 1, shared
    # None where there was none, and no two different tensors at one place.
    for (_, direct, _), (_, before, _) in zip(kernels.calls, plain, strict=True):
        assert [a == 0 for a in direct.values()] == [a == 0 for a in before.values()]
        assert len({a for a in direct.values() if a}) == len({a for a in before.values() if a})


def test_repeated_outputs_have_the_same_strides(kernels: Kernels) -> None:
    strides = [[t.stride() for t in both(made())] for _ in range(2)]
    assert strides[0] == strides[1]
    assert strides[0][0] == (4 * 32 * 128, 32, 4 * 32, 1)


@pytest.mark.parametrize("change", ["length", "scale", "stride", "gradients", "hidden"])
def test_another_kind_of_call_is_launched_plainly(kernels: Kernels, change: str) -> None:
    both(made())
    kernels.ways.clear()
    tensors = made(192 if change == "length" else 128)
    if change == "stride":
        tensors[1] = torch.zeros(1, 2, 128, 32, requires_grad=True)
    if change == "gradients":
        with torch.no_grad():
            abc_attention(*tensors)
    elif change == "hidden":
        abc_attention(*tensors, key_visible=torch.ones(1, 128, dtype=torch.bool))
    else:
        abc_attention(*tensors, scale=0.5 if change == "scale" else None)
    assert "plain" in kernels.ways


def test_one_tensor_as_two_inputs_is_not_recorded(kernels: Kernels) -> None:
    q, k, _, s = made()
    abc_attention(q, k, k, s)
    abc_attention(q, k, torch.zeros_like(k), s)
    reads = [addresses for name, addresses, _ in kernels.calls if name == "read_states"]
    assert reads[0]["k"] == reads[0]["v"]
    assert reads[-1]["k"] != reads[-1]["v"]


def test_addresses_that_are_no_multiples_of_16_are_launched_plainly(kernels: Kernels) -> None:
    both(made())
    kernels.ways.clear()
    odd = [torch.zeros(t.numel() + 1)[1:].view(t.transpose(1, 2).shape).transpose(1, 2) for t in made()]
    abc_attention(*(t.requires_grad_() for t in odd))
    assert set(kernels.ways) == {"plain"}


def test_the_number_of_recorded_calls_is_bounded(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_calls, "MOST", 2)
    for length in (32, 64, 96, 128):
        with torch.no_grad():
            abc_attention(*made(length))
        assert 0 < len(recorded_calls._RECORDED) <= 2


def test_no_call_is_repeated_in_plain_mode(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded call is not used any more once launches must be plain."""
    both(made())
    kernels.ways.clear()
    monkeypatch.setattr(launching, "launch_mode", lambda: "plain")
    both(made())
    assert set(kernels.ways) == {"plain"}
