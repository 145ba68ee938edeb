"""beta, Delta, alpha_opt and the derivatives at initialisation, each against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from attnlab.dynamics import probes
from attnlab.dynamics.initial import logit_derivative, theta_derivative
from attnlab.dynamics.optimal import optimal_attention
from attnlab.dynamics.probes import class_probe, lexical_probe, proxy_probe
from attnlab.dynamics.saliency import gradient_saliency
from tests.tolerance import assert_close


class Network(nn.Module):
    """N of section 2.1: one hidden layer over [h, s], here for 11 words."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(3 + 5, 7), nn.Linear(7, 11)
        self.most = 0

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        self.most = max(self.most, len(h))
        return self.output(torch.relu(self.hidden(torch.cat([h, s], -1))))


@pytest.mark.parametrize("logits", [1 << 24, 60])
def test_lexical_probe_is_equation_4(logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes.LOGITS, "cpu", logits)
    network = Network().double()
    h, s = torch.randn(2, 7, 3).double(), torch.randn(2, 5, 5).double()
    y = torch.randint(0, 11, (2, 5))
    y[1, 3:] = -100
    visible = torch.arange(7) < torch.tensor([[7], [4]])
    beta = lexical_probe(network, h, s, y, key_visible=visible, vocabulary=11)
    for b in range(2):
        for t in range(5):
            for k in range(7):
                shown = bool(visible[b, k]) and y[b, t] >= 0
                p = network(h[b, k][None], s[b, t][None]).softmax(-1)[0, y[b, t]] if shown else torch.zeros(())
                assert beta[b, t, k].item() == pytest.approx(p.item(), rel=1e-9)
    assert not beta.requires_grad
    assert network.most <= max(1, logits // 11)
    logs = lexical_probe(network, h, s, y, key_visible=visible, vocabulary=11, log=True)
    assert_close(logs.exp(), beta)


def test_lexical_probe_refuses_wrong_sizes() -> None:
    h, s = torch.randn(1, 2, 3), torch.randn(1, 1, 5)
    with pytest.raises(ValueError, match="y has the id 11, beyond the 11"):
        lexical_probe(Network(), h, s, torch.tensor([[11]]), vocabulary=11)
    with pytest.raises(ValueError, match=r"\(pairs, vocabulary\) = \(2, 13\), got"):
        lexical_probe(Network(), h, s, torch.tensor([[1]]), vocabulary=13)
    assert lexical_probe(Network(), h[:, :0], s, torch.tensor([[1]]), vocabulary=11).shape == (1, 1, 0)


def test_proxy_probe_is_equation_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes.LOGITS, "cpu", 30)
    weight, embedding = torch.randn(11, 3).double(), torch.randn(13, 3).double()
    x, y = torch.randint(0, 13, (2, 7)), torch.randint(0, 11, (2, 5))
    x[1, 5:], y[0, 4] = -1, -1
    beta = proxy_probe(weight, embedding, x, y)
    for b in range(2):
        for t in range(5):
            for k in range(7):
                p = (weight @ embedding[x[b, k]]).softmax(0)[y[b, t]] if x[b, k] >= 0 <= y[b, t] else 0.0
                assert beta[b, t, k].item() == pytest.approx(float(p), rel=1e-9)


def test_equation_12_holds() -> None:
    """The probability of the right class is sigmoid of alpha's mean of the logits of beta."""
    weight, h, y = torch.randn(5).double(), torch.randn(3, 7, 5).double(), torch.tensor([0, 1, 1])
    alpha = torch.randn(3, 7).double().softmax(1)
    beta = class_probe(weight, h, y, bias=0.3)
    positive = torch.sigmoid((alpha.unsqueeze(1) @ h).squeeze(1) @ weight + 0.3)
    right = torch.where(y == 1, positive, 1 - positive)
    assert_close(torch.sigmoid((alpha * beta.logit()).sum(1)), right)
    assert_close(class_probe(weight, h, 1 - y, bias=0.3), 1 - beta)
    with pytest.raises(ValueError, match="0 or 1, got -1"):
        class_probe(weight, h, torch.tensor([0, -1, 1]))


def test_saliency_is_negated_once() -> None:
    """For one linear layer, Delta_l = e_l . W (y - p) by hand; a word of the right class has a positive one."""
    weight, e, y = torch.randn(2, 5).double(), torch.randn(3, 7, 5).double(), torch.tensor([0, 1, 1])

    def nll(embeddings: Tensor) -> Tensor:
        return nn.functional.cross_entropy(embeddings.mean(1) @ weight.T, y, reduction="none")

    error = nn.functional.one_hot(y, 2).double() - (e.mean(1) @ weight.T).softmax(1)
    expected = (e / 7 @ weight.T @ error.unsqueeze(2)).squeeze(2)
    with torch.no_grad():
        assert_close(gradient_saliency(nll, e), expected)
    speaks = torch.zeros(3, 7, 5).double()
    speaks[:, 2] = weight[y] - weight[1 - y]
    assert (gradient_saliency(nll, speaks)[:, 2] > 0).all()


def test_saliency_takes_one_gradient_a_target() -> None:
    e, mix = torch.randn(2, 3, 5).double(), torch.randn(5, 7).double()

    def nll(embeddings: Tensor) -> Tensor:
        return (embeddings @ mix).tanh().square().sum(1)

    delta = gradient_saliency(nll, e)
    assert delta.shape == (2, 7, 3)
    for t in range(7):
        assert_close(delta[:, t], gradient_saliency(lambda x, t=t: nll(x)[:, t], e))
    assert gradient_saliency(lambda x: nll(x)[:, :0], e).shape == (2, 0, 3)
    with pytest.raises(ValueError, match=r"\(b,\) or \(b, q\) losses for b = 2 examples, got \(\)"):
        gradient_saliency(lambda x: x.sum(), e)


def test_the_worked_example_of_a1() -> None:
    """The position of the largest beta gets nothing."""
    gamma = torch.tensor([[[0.0, 0, 0], [0, -10, 5], [0, 5, -10]]], dtype=torch.float64)
    best = optimal_attention(gamma, torch.tensor([0]), tolerance=1e-10)
    torch.testing.assert_close(best.weights, torch.tensor([[0, 0.5, 0.5]]).double(), rtol=0, atol=1e-4)
    assert best.weights[0, 0] == 0
    assert best.gap.item() < 1e-10
    beta = gamma[0].softmax(1)[:, 0]
    assert beta.argmax() == 0


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_optimal_attention_is_optimal(scale: float) -> None:
    """Neither scipy nor random weights do better; the gap bounds the distance to the optimum."""
    rows, k, v = 5, 7, 11
    gamma, bias = scale * torch.randn(rows, k, v).double(), torch.randn(rows, v).double()
    y, lengths = torch.randint(0, v, (rows,)), torch.tensor([7, 1, 3, 7, 5])
    best = optimal_attention(gamma, y, bias=bias, lengths=lengths, tolerance=1e-7)
    assert (best.gap <= 1e-7).all()
    assert_close(best.weights.sum(1), torch.ones(rows).double())
    assert (best.weights >= 0).all()
    assert (best.weights[torch.arange(k) >= lengths[:, None]] == 0).all()
    for r, n in enumerate(lengths.tolist()):

        def loss(a: object, r: int = r, n: int = n) -> float:
            weights = torch.as_tensor(a, dtype=torch.float64)
            return -(weights @ gamma[r, :n] + bias[r]).log_softmax(0)[y[r]].item()

        assert best.nll[r].item() == pytest.approx(loss(best.weights[r, :n]), rel=1e-9)
        simplex = {"type": "eq", "fun": lambda a: a.sum() - 1}
        theirs = minimize(loss, [1 / n] * n, bounds=[(0, 1)] * n, constraints=[simplex], method="SLSQP")
        assert best.nll[r].item() <= theirs.fun + 1e-5
        for a in torch.distributions.Dirichlet(torch.full((n,), 0.3)).sample((50,)).double() if n > 1 else []:
            assert best.nll[r].item() <= loss(a) + 1e-6


def test_optimal_attention_of_bad_input() -> None:
    gamma, y = torch.randn(2, 3, 5), torch.tensor([0, 4])
    best = optimal_attention(gamma, y, lengths=torch.tensor([0, 1]))
    assert best.weights.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert best.nll.isnan().tolist() == best.gap.isnan().tolist() == [True, False]
    with pytest.raises(ValueError, match="y must lie between 0 and 4, got 0 to 5"):
        optimal_attention(gamma, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="lengths must lie between 0 and 3"):
        optimal_attention(gamma, y, lengths=torch.tensor([1, 4]))
    gamma[0, 2, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        optimal_attention(gamma, y)
    assert not optimal_attention(gamma, y, lengths=torch.tensor([2, 3])).nll.isnan().any()


def proxy_flow(d: int, pairs: list[tuple[list[int], list[int]]], sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """d(logits)/d tau and d(theta)/d tau of the proxy under gradient flow, by autograd (Eqs. 14, 38)."""
    i, o = sizes
    weight = (torch.randn(o, d).double() / d**0.5).requires_grad_()
    e = (torch.randn(i, d).double() / d**0.5).requires_grad_()
    loss = -sum((e[x].mean(0) @ weight.T).log_softmax(0)[y].sum() for x, y in pairs)
    dw, de = torch.autograd.grad(torch.as_tensor(loss), (weight, e))
    logits = (e @ weight.T).detach()
    flow = -(de @ weight.T + e @ dw.T).detach()
    theta = logits.softmax(1)
    return flow, theta * (flow - (theta * flow).sum(1, keepdim=True))


def test_derivatives_at_initialisation_are_the_limit() -> None:
    """The error shrinks like 1/sqrt(d), for the logits and, with its 1/|O|, for theta."""
    pairs = [([0, 1, 1], [2, 0]), ([2], [3, 3, 1]), ([3, 0, 2, 1, 4], [6, 4])]
    counts = torch.zeros(5, 7).double()
    for x, y in pairs:
        for i in x:
            for o in y:
                counts[i, o] += 1 / len(x)
    errors = []
    for d in (100, 10_000, 1_000_000):
        logits, theta = proxy_flow(d, pairs, (5, 7))
        errors.append(
            (
                (logits - logit_derivative(counts)).abs().max().item(),
                7 * (theta - theta_derivative(counts)).abs().max().item(),
            )
        )
    for before, after in itertools.pairwise(errors):
        assert after[0] < before[0] / 3
        assert after[1] < before[1] / 3
    assert max(errors[-1]) < 0.02
    assert theta_derivative(counts).sum(1).abs().max() < 1e-12
