"""The kernels of abc-select against its PyTorch path in float64: through Triton's interpreter, or on a GPU."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import attnlab as al
from attnlab.attention import AttentionCall, grouped, ungrouped
from attnlab.kernels.select import attention, select_attention, supports
from attnlab.mechanisms._bounded import selected
from attnlab.mechanisms._bounded.continued import fitted_window
from attnlab.mechanisms._bounded.selected import LARGEST, Selection, Tokens, attend, read_at_most
from attnlab.mechanisms._device import without_kernels
from tests.kernels.abc.cases import poisoned, relative
from tests.kernels.bounds import BOUND, DEVICE, assert_compiled_gradients_equal
from tests.kernels.hopper import said_without_interpreter


@dataclass(frozen=True)
class Case:
    """One call: sizes, the scale of queries, and what scores are like."""

    heads: int = 1
    groups: int = 1
    length: int = 103
    d: int = 16
    e: int = 16
    slots: int = 5
    window: int = 16
    block: int = 16
    sinks: int = 3
    learn: bool = True
    scale: float = 1.0
    recency: float = 0.0
    ties: bool = False
    views: bool = False
    batch: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def how(self) -> dict[str, int]:
        window, block = fitted_window(self.window, self.block, self.length)
        return {"slots": self.slots, "window": window, "block": block, "sinks": min(self.sinks, self.length)}


CASES = (
    Case(),
    Case(heads=3, learn=False),
    Case(heads=3, d=32, e=24, slots=9, window=32, sinks=0, length=150, ties=True),
    Case(heads=4, groups=2, views=True, d=24, window=48, length=133, recency=30.0, batch=2),
    # Blocks that no tile is a multiple of, and one longer than a segment.
    Case(block=3, window=6, length=97, slots=7),
    Case(block=1, window=1, sinks=1, length=70, slots=2, learn=False),
    Case(block=70, window=70, length=200, slots=20, recency=9.0),
    Case(block=128, window=128, length=300, slots=4, sinks=1),
    # More keys in a list than a tile has.
    Case(slots=81, window=16, length=260, recency=4.0),
    Case(slots=70, sinks=20, window=16, length=180, learn=False),
    # No key is dropped, some are, and none leaves the window.
    Case(slots=90, length=80),
    Case(slots=40, length=70, sinks=0),
    Case(length=5, window=32),
    Case(length=64, window=64, block=16),
    Case(scale=60.0, slots=9, length=130),
    Case(dtype=torch.float16, d=32, e=32, heads=3),
)
LARGE = (
    Case(heads=9, groups=3, length=2048, d=64, e=64, slots=56, window=64, sinks=4, batch=2, views=True),
    Case(heads=9, groups=3, length=1000, d=64, e=64, slots=56, window=64, sinks=4, batch=2, recency=40.0),
    Case(heads=8, groups=8, length=1024, d=128, e=128, slots=56, window=64, sinks=4),
    Case(heads=8, groups=2, length=700, d=128, e=64, slots=240, window=128, block=64, sinks=4, learn=False),
    Case(heads=4, groups=4, length=515, d=32, e=32, slots=120, window=16, sinks=0, scale=8.0),
    Case(heads=2, groups=1, length=1500, d=80, e=80, slots=64, window=256, block=32, sinks=4),
)


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and scores; with ``views`` some heads of larger tensors, laid out as a model has them."""
    torch.manual_seed(0)

    def heads(count: int, width: int) -> Tensor:
        if case.views:
            return torch.randn(case.batch, case.length, count + 3, width)[:, :, 2 : 2 + count].transpose(1, 2)
        return torch.randn(case.batch, count, case.length, width)

    score = torch.randn(case.batch, case.groups, case.length)
    score = score.round() if case.ties else score
    score = score + case.recency * torch.arange(case.length) / 256
    made = [heads(case.heads, case.d) * case.scale, heads(case.groups, case.d), heads(case.groups, case.e)]
    return [t.requires_grad_() for t in (*(t.to(DEVICE, case.dtype) for t in made), score.to(DEVICE))]


def tokens_of(tensors: list[Tensor]) -> Tokens:
    """Keys, values and scores with their places."""
    _, k, v, score = tensors
    return Tokens(k, v, score, torch.arange(k.shape[2], dtype=torch.int32, device=k.device).expand(k.shape[:3]))


def expected(case: Case, tensors: list[Tensor]) -> Tensor:
    """The output of the PyTorch path."""
    q, rules = tensors[0], Selection(**case.how, scale=case.d**-0.5)
    newest = torch.arange(case.length, device=q.device).expand(case.batch, -1)
    how = {"learn": case.learn, "size": rules.block, "states": 0}
    return ungrouped(attend(grouped(q, case.heads // case.groups), newest, tokens_of(tensors), rules, **how))


def computed(case: Case, tensors: list[Tensor]) -> Tensor:
    rules = Selection(**case.how, scale=case.d**-0.5)
    spare = read_at_most(rules, learn=case.learn) - rules.slots
    return select_attention(*tensors, **case.how, spare=spare, clamp=LARGEST)


def errors(case: Case) -> dict[str, float]:
    """Relative errors of the output and of all gradients."""
    ours = inputs(case)
    theirs = [t.detach().double().requires_grad_() for t in ours]
    if not case.learn:
        ours, theirs = ([*t[:3], t[3].detach()] for t in (ours, theirs))
    want = expected(case, theirs)
    with poisoned():
        out = computed(case, ours)
        pull = torch.randn_like(out)
        got = torch.autograd.grad(out, ours[: 3 + case.learn], pull)
    wanted = torch.autograd.grad(want, theirs[: 3 + case.learn], pull.double(), materialize_grads=True)
    result = {"out": relative(out, want)}
    return result | {name: relative(a, b) for name, a, b in zip(("dq", "dk", "dv", "du"), got, wanted, strict=False)}


def unusual(case: Case) -> str:
    """What a case has that is not usual."""
    usual = Case()
    return ",".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(usual, name)) or "usual"


@pytest.mark.parametrize("case", CASES, ids=unusual)
def test_output_and_gradients(case: Case) -> None:
    worst = errors(case)
    # Large scores are rounded to fewer digits behind the point.
    assert max(worst.values()) < BOUND[case.dtype] * max(1.0, case.scale / 10), worst


SMALL = {"CHUNK": 32, "MOST_BEST": 16, "MOST_LIVES": 32, "PIECE": 2, "SEGMENT": 32, "QUERIES": 16}


@pytest.mark.parametrize(
    "case",
    [
        Case(length=150, slots=11),
        Case(length=120, heads=2, learn=False, recency=9.0),
        Case(block=3, window=6, length=101),
    ],
    ids=unusual,
)
def test_more_tokens_than_a_program_holds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, segments and pieces of a key's rows."""
    for name, size in SMALL.items():
        monkeypatch.setattr(attention, name, size)
    # Constants of other calls are kept.
    monkeypatch.setattr(attention, "_options", attention._options.__wrapped__)
    worst = errors(case)
    assert max(worst.values()) < BOUND[torch.float32], worst


# Each compiles its own kernels, so there are few.
ON_GPU = (
    *(replace(case, dtype=torch.bfloat16) for case in LARGE),
    replace(LARGE[1], dtype=torch.float16),
    Case(block=3, window=6, length=97, slots=7, dtype=torch.bfloat16),
    Case(block=70, window=70, length=200, slots=20, recency=9.0, learn=False, dtype=torch.bfloat16),
    Case(length=5, window=32, dtype=torch.bfloat16),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=unusual)
def test_output_and_gradients_on_a_gpu(case: Case) -> None:
    worst = errors(case)
    assert max(worst.values()) < BOUND[case.dtype] * max(1.0, case.scale / 10), worst


@pytest.mark.gpu
def test_the_mechanism_learns_by_them_on_a_gpu() -> None:
    """In bfloat16 as under autocast, against PyTorch in float32: the gradients of everything that can have one."""
    q, k, v, _ = (t.detach() for t in inputs(replace(LARGE[1], dtype=torch.bfloat16)))
    x = torch.randn(2, q.shape[2], 96, device=DEVICE, dtype=torch.bfloat16)
    mech = al.AbcSelect(slots=56, window=64, sinks=4)
    pull, results = torch.randn_like(q), []
    for kernels in (True, False):
        leaves = [t.clone().requires_grad_() if kernels else t.float().requires_grad_() for t in (q, k, v, x)]
        with nullcontext() if kernels else without_kernels():
            out = mech(AttentionCall(*leaves[:3], x=leaves[3], causal=True))
        assert out.dtype == leaves[0].dtype
        results.append((out, *torch.autograd.grad(out, [*leaves, *mech.parameters()], pull.to(out.dtype))))
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < 2 * BOUND[torch.bfloat16]


@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits() -> None:
    """Sums are in a fixed order, so an interrupted run ends where another does."""
    case = replace(LARGE[0], dtype=torch.bfloat16)
    tensors = inputs(case)
    results = []
    for _ in range(3):
        out = computed(case, tensors)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Mechanisms take kernels for tensors of this device."""
    monkeypatch.setattr(selected, "kernels_take", lambda _: True)
    return monkeypatch


def call_of(length: int, **settings: object) -> AttentionCall:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, count, length, 16, device=DEVICE) for count in (2, 1, 1))
    return AttentionCall(q, k, v, x=torch.randn(2, length, 7, device=DEVICE), causal=True, **settings)


@pytest.mark.parametrize("served", [True, False])
def test_the_mechanism_takes_them_where_they_serve(served: bool, on_gpu: pytest.MonkeyPatch) -> None:
    """The same output and gradients of parameters; padding stays in PyTorch."""
    seen = None if served else torch.arange(70, device=DEVICE).expand(2, -1) > 10
    call, mech = call_of(70, key_visible=seen), al.AbcSelect(slots=3, window=16, sinks=2)
    launched = []
    on_gpu.setattr(
        "attnlab.kernels.select.select_attention",
        lambda *args, **how: launched.append(how) or select_attention(*args, **how),
    )
    by_kernel = mech(call)
    assert bool(launched) == served
    on_gpu.setattr(selected, "kernels_take", lambda _: False)
    want, pull, parameters = mech(call), torch.randn_like(by_kernel), list(mech.parameters())
    assert relative(by_kernel, want) < BOUND[torch.float32]
    got, slopes = (torch.autograd.grad(out, parameters, pull) for out in (by_kernel, want))
    for a, b in zip(got, slopes, strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("where", ["x", "k", "v", "q"])
def test_nan_reaches_the_output(where: str, on_gpu: pytest.MonkeyPatch) -> None:
    """Of what is read; scores that are no numbers are highest, so such a key is read ever after."""
    call, mech = call_of(90), al.AbcSelect(slots=2, window=16, sinks=0)
    with torch.no_grad():
        mech.weights(call)
        # The first keys are kept.
        mech.recency.fill_(-1e4)
        getattr(call, where)[0, ..., 70, :] = torch.nan
        out = mech(call)
    assert out[0, :, 70 if where == "q" else slice(70, 80)].isnan().all()
    assert where != "x" or out[0, :, 70:].isnan().all()
    assert out[0, :, :64].isfinite().all()
    assert out[1].isfinite().all()


def test_compiled_equals_eager() -> None:
    made = inputs(Case(length=40))

    def loss(*tensors: Tensor) -> Tensor:
        out = select_attention(*tensors, slots=3, window=16, block=16, sinks=1, spare=1, clamp=3.0)
        return out.square().sum()

    assert_compiled_gradients_equal(loss, made)


@pytest.mark.slow
def test_a_whole_text_is_one_graph_and_the_same_compiled() -> None:
    """In a process of its own: torch.compile cannot see through signatures that are checked."""
    command = [sys.executable, "-m", "tests.kernels.select.compiled_text"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_they_compile_for_a_gpu_that_is_not_there() -> None:
    """What Triton's interpreter takes, its compiler may refuse; shared memory is what an H100 has for a program."""
    shared = [int(line.split()[-1]) for line in said_without_interpreter("select.compiled_ahead").splitlines()]
    assert len(shared) == 63
    assert max(shared) < 232_448


def test_sizes_that_they_are_not_made_for() -> None:
    fits = {"slots": 64, "sinks": 4, "heads": 3}
    assert supports(64, 48, torch.bfloat16, **fits)
    assert not supports(64, 64, torch.float64, **fits)
    assert not supports(256, 64, torch.bfloat16, **fits)
    for name, value in (("slots", 2000), ("sinks", 100), ("heads", 5000)):
        assert not supports(64, 64, torch.bfloat16, **{**fits, name: value})
    q, k, v, score = inputs(Case(length=20))
    with pytest.raises(ValueError, match="blocks of 10, window 25"):
        select_attention(q, k, v, score, slots=2, window=25, block=10, sinks=0)
    with pytest.raises(ValueError, match="do not agree"):
        select_attention(q, k, v[:, :, 1:], score, slots=2, window=16, block=16, sinks=0)
