from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.linalg.basic_solution import basic_solution
from attnlab.linalg.caratheodory import caratheodory
from attnlab.linalg.sparse_simplex import sparse_simplex
from attnlab.mechanisms.value_aware import value_aware_distance
from tests.mechanisms.test_top_r import call_with_alpha
from tests.quick_cases import in_turn
from tests.tolerance import assert_close

SECTION_3 = ([0.25, 0.35, 0.4], [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])


def weights(spec: str, call: al.AttentionCall) -> list[float]:
    return [round(w, 6) for w in al.mechanism(spec).weights(call).flatten().tolist()]


def test_section_3_example_reverses_the_order() -> None:
    call = call_with_alpha(*SECTION_3)
    o = al.Softmax()(call)
    squared = (value_aware_distance(o, call.v) + o.square().sum()).flatten()
    assert_close(squared, torch.tensor([2.4925, 3.1925, 3.7925], dtype=torch.float64))
    assert weights("top-r:r=1", call) == [0, 0, 1]
    assert weights("value-aware:r=1", call) == [1, 0, 0]


def test_the_oblivious_error_is_unbounded() -> None:
    errors = []
    for largest in (3.0, 30.0, 300.0):
        alpha, values = SECTION_3
        call = call_with_alpha(alpha, [*values[:2], [0.0, 0.0, largest]])
        o = al.Softmax()(call)
        errors.append(
            float((al.mechanism("top-r:r=1")(call) - o).norm() - (al.mechanism("value-aware:r=1")(call) - o).norm())
        )
    assert 0 < errors[0] < errors[1] / 5 < errors[2] / 50


def test_degree_0_takes_the_shortest_value_and_a_high_degree_the_largest_alpha() -> None:
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 1.2, 1.5], dtype=torch.float64).view(1, 1, 3, 1)
    v = torch.diag(torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)).view(1, 1, 3, 3)
    call = al.AttentionCall(q, k, v)
    assert weights("value-aware:r=1,kernel=poly,degree=0", call) == [0, 1, 0]
    assert weights("value-aware:r=1,kernel=poly,degree=20", call) == [0, 0, 1]
    assert weights("top-r:r=1,kernel=poly,degree=20", call) == [0, 0, 1]


def test_orthonormal_values_give_the_same_support_and_spread_the_lost_mass_equally() -> None:
    call = call_with_alpha([0.4, 0.3, 0.2, 0.1], torch.eye(4).tolist())
    assert weights("value-aware:r=1", call) == weights("top-r:r=1", call) == [1, 0, 0, 0]
    assert weights("value-aware:r=2", call) == [0.55, 0.45, 0, 0]
    assert weights("top-r:r=2", call) == [0.571429, 0.428571, 0, 0]
    assert weights("value-aware:r=3", call) == [0.433333, 0.333333, 0.233333, 0]


@pytest.mark.parametrize("d", [1, 2, 7])
@pytest.mark.parametrize("n_k", [3, 10, 53])
def test_caratheodory_is_exact_on_at_most_d_plus_1_keys(d: int, n_k: int) -> None:
    v = torch.randn(2, n_k, d, dtype=torch.float64)
    w = torch.randn(2, 5, n_k, dtype=torch.float64).mul(2).softmax(-1)
    reduced = caratheodory(w, v)
    assert (reduced >= 0).all()
    assert ((reduced > 0).sum(-1) <= d + 1).all()
    assert_close(reduced.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    assert_close(reduced @ v, w @ v)


def degenerate_values(kind: str) -> Tensor:
    v = torch.randn(1, 31, 5, dtype=torch.float64)
    if kind == "identical":
        return v[:, :1].expand(1, 31, 5).contiguous()
    if kind == "zero":
        return torch.zeros_like(v)
    if kind == "a line":
        return v[..., :1] * torch.randn(1, 1, 5, dtype=torch.float64)
    if kind == "duplicates":
        return v[:, torch.arange(31) % 4]
    if kind == "a tiny direction":
        return v * torch.tensor([1, 1, 1, 1, 1e-7], dtype=torch.float64)
    return v * 1e150


@pytest.mark.parametrize("kind", ["identical", "zero", "a line", "duplicates", "a tiny direction", "huge"])
def test_caratheodory_on_degenerate_values(kind: str) -> None:
    v = degenerate_values(kind)
    w = torch.randn(1, 7, 31, dtype=torch.float64).softmax(-1)
    reduced = caratheodory(w, v)
    assert (reduced >= 0).all()
    assert ((reduced > 0).sum(-1) <= 6).all()
    assert_close(reduced.sum(-1), torch.ones(1, 7, dtype=torch.float64))
    assert_close(reduced @ v / v.abs().max().clamp_min(1), w @ v / v.abs().max().clamp_min(1))


@pytest.mark.parametrize(("seed", "dtype"), in_turn([59, 40], [torch.float32, torch.float64]))
def test_weights_are_exact_where_values_repeat_as_tokens_do(seed: int, dtype: torch.dtype) -> None:
    """The elimination loses digits on these draws: a row of W @ v was off by 7e-3 and its sum by 1e-2."""
    torch.manual_seed(seed)
    embeddings = torch.randn(120, 64)
    tokens = torch.multinomial(1 / torch.arange(1.0, 121.0), 300, replacement=True)
    q, k = torch.randn(300, 16) * 1.5, torch.randn(300, 16)
    call = al.AttentionCall(*(t.to(dtype)[None, None] for t in (q, k, embeddings[tokens])), causal=True)
    mech = al.mechanism("value-aware:r=d+1")
    W = mech.weights(call)
    assert (W >= 0).all()
    assert ((W > 0).sum(-1) <= 65).all()
    assert_close(W @ call.v, mech(call), what="W @ v")
    assert_close(W.sum(-1), torch.ones(1, 1, 300), what="the sum of a row", dtype=dtype)


def test_a_row_without_an_exact_solution_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.linalg.caratheodory.VERIFIED", -1.0)
    v = torch.randn(1, 31, 5, dtype=torch.float64)[:, torch.arange(31) % 4]
    w = torch.randn(1, 7, 31, dtype=torch.float64).softmax(-1)
    assert torch.equal(caratheodory(w, v), w)


def test_a_basic_solution_stands_on_independent_points() -> None:
    points = torch.randn(4, 3, dtype=torch.float64)[torch.arange(40) % 4]
    w = torch.rand(40, dtype=torch.float64)
    x = basic_solution(points, w @ points, tolerance=1e-12)
    assert x is not None
    assert (x >= 0).all()
    assert (x > 0).sum() <= 3
    assert_close(x @ points, w @ points)
    assert basic_solution(points.abs(), -torch.ones(3, dtype=torch.float64), tolerance=1e-12) is None


def test_exact_weights_are_read_and_the_output_is_differentiated() -> None:
    q, k, v = (torch.randn(1, 1, 5, 2, requires_grad=True) for _ in range(3))
    mech, call = al.mechanism("value-aware:r=d+1"), al.AttentionCall(q, k, v)
    assert not mech.weights(call).requires_grad
    of_q, of_k = torch.autograd.grad(mech(call).square().sum(), (q, k))
    assert (of_q != 0).any()
    assert (of_k != 0).any()


@pytest.mark.parametrize("scale", [1.0, 9.0])
def test_caratheodory_is_exact_to_rounding_and_a_row_does_not_see_the_others(scale: float) -> None:
    """Group 1 has every value four times over, which the quick way cannot do."""
    v = torch.randn(2, 101, 17, dtype=torch.float64)
    v[1] = v[1, torch.arange(101) % 25]
    w = torch.randn(2, 7, 101, dtype=torch.float64).mul(scale).softmax(-1)
    reduced = caratheodory(w, v, block=3)
    assert (reduced >= 0).all()
    assert ((reduced > 0).sum(-1) <= 18).all()
    assert (reduced @ v - w @ v).abs().max() < 1e-12
    assert (reduced.sum(-1) - 1).abs().max() < 1e-12
    alone = torch.stack([caratheodory(w[:, i : i + 1], v).squeeze(1) for i in range(7)], 1)
    assert torch.equal(alone > 0, reduced > 0)


@pytest.mark.parametrize("seed", [2, 3])
def test_the_slow_way_does_not_gather_rounding(seed: int) -> None:
    """Hundreds of steps over values that come back seven times: as they are, off by 1e-9 with these seeds."""
    torch.manual_seed(seed)
    v = torch.randn(2, 301, 32, dtype=torch.float64)[:, torch.arange(301) % 41]
    w = torch.randn(2, 53, 301, dtype=torch.float64).softmax(-1)
    reduced = caratheodory(w, v)
    assert (reduced >= 0).all()
    assert ((reduced > 0).sum(-1) <= 33).all()
    assert (reduced @ v - w @ v).abs().max() < 1e-14
    assert (reduced.sum(-1) - 1).abs().max() < 1e-14


def test_the_slow_way_is_for_rows_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: Tensor) -> None:
        raise RuntimeError("the slow way was taken")

    monkeypatch.setattr("attnlab.linalg.caratheodory.by_any_basis", slow)
    v = torch.randn(1, 61, 7, dtype=torch.float64)
    w = torch.randn(1, 11, 61, dtype=torch.float64).softmax(-1)
    assert_close(caratheodory(w, v) @ v, w @ v)
    with pytest.raises(RuntimeError, match="slow way"):
        caratheodory(w, v[:, torch.arange(61) % 5])


@pytest.mark.parametrize("kernel", ["exp", "elu", "poly"])
def test_r_of_d_plus_1_equals_exact_attention(kernel: str) -> None:
    q, k, v = (torch.randn(2, h, n, 3, dtype=torch.float64) for h, n in ((6, 5), (2, 23), (2, 23)))
    call = al.AttentionCall(q, k, v, key_visible=torch.rand(2, 23) > 0.3)
    exact = al.Kernelized(kernel)(call)
    for r in ("4", "d+1", "9"):
        mech = al.mechanism(f"value-aware:r={r},kernel={kernel}")
        W = mech.weights(call)
        assert ((W > 0).sum(-1) <= 4).all()
        assert_close(mech(call), exact)
        assert_close(W @ v.repeat_interleave(3, 1), exact)


def distances(o: Tensor, v: Tensor, keys: Tensor, beta: Tensor) -> Tensor:
    chosen = v.gather(1, keys.squeeze(1).unsqueeze(-1).expand(-1, -1, v.shape[-1]))
    return ((beta @ chosen).squeeze(1) - o).norm(dim=-1)


def best_on(o: Tensor, points: Tensor) -> Tensor:
    """The distance of each o to the hull of its points, over all their faces."""
    best = torch.full(o.shape[:1], torch.inf, dtype=torch.float64)
    for size in range(1, points.shape[1] + 1):
        for subset in itertools.combinations(range(points.shape[1]), size):
            base = points[:, subset[0]]
            edges = (points[:, list(subset[1:])] - base.unsqueeze(1)).mT
            t = torch.linalg.pinv(edges) @ (o - base).unsqueeze(-1)
            inside = ((t >= -1e-12).all(1) & (t.sum(1) <= 1 + 1e-12)).squeeze(-1)
            far = (base + (edges @ t).squeeze(-1) - o).norm(dim=-1)
            best = torch.where(inside, torch.minimum(best, far), best)
    return best


def test_the_solver_keeps_its_promises() -> None:
    n, n_k, d = 41, 11, 6
    v, alpha = torch.randn(n, n_k, d, dtype=torch.float64), torch.randn(n, n_k, dtype=torch.float64).mul(2).softmax(-1)
    o = (alpha.unsqueeze(1) @ v).squeeze(1)
    seen = torch.ones(n, 1, n_k, dtype=torch.bool)
    seen[0, 0, 3] = False
    alpha[0, 3] = 0
    before = (v - o.unsqueeze(1)).norm(dim=-1).masked_fill(~seen.squeeze(1), torch.inf).amin(-1)
    for r in (2, 3, 4, 5, 6):
        keys, beta = sparse_simplex(o.unsqueeze(1), v, seen, alpha.unsqueeze(1), r)
        assert (beta >= 0).all()
        assert_close(beta.sum(-1), torch.ones(n, 1, dtype=torch.float64))
        assert 3 not in keys[0][beta[0] > 0].tolist()
        error = distances(o, v, keys, beta)
        assert (error <= before + 1e-12).all(), f"r = {r} is worse than r = {r - 1}"
        if r <= 4:
            top = alpha.topk(r).indices.unsqueeze(-1).expand(-1, -1, d)
            assert (error <= best_on(o, v.gather(1, top)) + 1e-9).all(), f"r = {r} is worse than the top r"
        before = error


def test_the_solver_finds_nearly_every_optimum() -> None:
    n, n_k, d, r = 60, 8, 5, 3
    v, alpha = torch.randn(n, n_k, d, dtype=torch.float64), torch.randn(n, n_k, dtype=torch.float64).softmax(-1)
    o = (alpha.unsqueeze(1) @ v).squeeze(1)
    keys, beta = sparse_simplex(o.unsqueeze(1), v, torch.ones(n, 1, n_k, dtype=torch.bool), alpha.unsqueeze(1), r)
    subsets = [best_on(o, v[:, list(subset)]) for subset in itertools.combinations(range(n_k), r)]
    gap = distances(o, v, keys, beta) / torch.stack(subsets).amin(0) - 1
    assert gap.min() > -1e-9
    assert gap.median() < 1e-9
    assert gap.quantile(0.95) < 0.05


def test_a_row_of_many_keys_is_searched_like_a_row_of_few_when_it_sees_few() -> None:
    n_k, few, d, r = 97, 23, 6, 3
    v, alpha = torch.randn(1, n_k, d, dtype=torch.float64), torch.randn(1, 5, n_k, dtype=torch.float64).softmax(-1)
    seen = torch.zeros(1, 5, n_k, dtype=torch.bool)
    seen[..., :few] = True
    alpha = alpha * seen
    o = alpha @ v
    keys, beta = sparse_simplex(o, v, seen, alpha, r)
    cut_keys, cut_beta = sparse_simplex(o, v[:, :few], seen[..., :few], alpha[..., :few], r)
    assert torch.equal(keys[beta > 0], cut_keys[cut_beta > 0])
    assert_close(beta, cut_beta)


def test_the_promises_hold_where_rows_see_many_keys() -> None:
    n, n_k, d = 13, 131, 9
    v, alpha = (
        torch.randn(1, n_k, d, dtype=torch.float64),
        torch.randn(1, n, n_k, dtype=torch.float64).mul(3).softmax(-1),
    )
    o, seen = alpha @ v, torch.ones(1, n, n_k, dtype=torch.bool)
    before = (v - o.transpose(0, 1)).norm(dim=-1).amin(-1)
    for r in (2, 3, 5, 8):
        keys, beta = sparse_simplex(o, v, seen, alpha, r)
        error = ((beta.unsqueeze(-2) @ v[0][keys]).squeeze(-2) - o).norm(dim=-1).squeeze(0)
        assert (error <= before + 1e-12).all(), f"r = {r} is worse than a smaller one"
        if r <= 3:
            top = v[0][alpha.topk(r).indices].squeeze(0)
            assert (error <= best_on(o.squeeze(0), top) + 1e-9).all(), f"r = {r} is worse than the top r"
        before = error


@pytest.mark.parametrize("r", ["1", "2", "d+1"])
def test_bad_input_is_defined(r: str) -> None:
    mech = al.mechanism(f"value-aware:r={r}")
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 7, 7))
    call = al.AttentionCall(q, k, v)
    hidden = replace(call, key_visible=torch.tensor([[False] * 7, [True] * 7]))
    assert (mech(hidden)[0] == 0).all()
    for same in (torch.zeros_like(v), v[:, :, :1].expand_as(v)):
        out = mech(replace(call, v=same))
        assert_close(out, same[:, :, :5])
    infinite = replace(call, q=torch.full_like(q, 1e200), k=torch.zeros_like(k))
    infinite.k[:, :, 3] = 1e200
    assert_close(mech(infinite), v[:, :, 3:4].expand(2, 3, 5, 4))
    bias = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
    bias[..., 3] = -math.inf
    assert (mech.weights(replace(call, bias=bias))[..., 3] == 0).all()


def test_more_keys_than_are_visible_is_exact() -> None:
    q, k, v = (torch.randn(2, 3, n, 11, dtype=torch.float64) for n in (5, 7, 7))
    call = al.AttentionCall(q, k, v, key_visible=torch.tensor([[True] * 3 + [False] * 4, [False] * 4 + [True] * 3]))
    for r in (3, 5, 7, 99):
        assert_close(al.mechanism(f"value-aware:r={r}")(call), al.Softmax()(call))


def test_error_falls_with_r_to_zero() -> None:
    q, k, v = (torch.randn(1, 2, 29, 5, dtype=torch.float64) for _ in range(3))
    call = al.AttentionCall(q, k, v, causal=True)
    o = al.Softmax()(call)
    errors = torch.stack([(al.mechanism(f"value-aware:r={r}")(call) - o).norm(dim=-1) for r in range(1, 7)])
    assert (errors[1:] <= errors[:-1] + 1e-9).all()
    assert errors[-1].max() < 1e-9


def test_gradient_between_1_and_d_plus_1_matches_finite_differences() -> None:
    q, k, v = (torch.randn(1, 1, n, 5, dtype=torch.float64, requires_grad=True) for n in (2, 7, 7))
    mech = al.mechanism("value-aware:r=3")
    torch.autograd.gradcheck(lambda q, k, v: mech(al.AttentionCall(q, k, v)), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("bad", ["r=0", "r=d+2", "kernel=poly,degree=1"])
def test_bad_settings_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        al.mechanism(f"value-aware:{bad}")


def test_a_long_search_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.mechanisms import value_aware

    monkeypatch.setattr(value_aware, "SLOW", 0.0)
    monkeypatch.setattr(value_aware, "_warned", [])
    q, k, v = torch.randn(3, 1, 2, 11, 5)
    call = al.AttentionCall(q, k, v)
    with pytest.warns(UserWarning, match=r"value-aware:r=3 searches .* about \d+ s .* r=1 and r=d\+1 need no"):
        al.ValueAware(r=3)(call)
    # A warning is an error in these tests, and there is no second one.
    al.ValueAware(r=3)(call)
    # Neither of these searches.
    monkeypatch.setattr(value_aware, "_warned", [])
    al.ValueAware(r=1)(call)
    al.ValueAware(r="d+1")(call)
