"""ABC with learned control: a one-layer MLP of the token decides which slots it is written into, and how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

from attnlab.attention import AttentionCall, hide_unseen
from attnlab.fields import check_fields
from attnlab.mechanisms._bounded.slot_kernels import attend_by_kernel, kernel_serves
from attnlab.mechanisms._bounded.slots import FLOOR, Control, Fused, SlotMechanism, SlotState, check_slots
from attnlab.registry import register
from attnlab.shapes import Float, Int

__all__ = ["ACTIVATIONS", "AbcMlp"]

ACTIVATIONS = ("exp", "relu", "sigmoid")
# Where a gate's logit starts: a token's weight is halved after about a hundred others.
GATE = 5.0


@register(
    "abc-mlp",
    examples=(
        "abc-mlp:slots=5",
        "abc-mlp:slots=3,activation=relu",
        "abc-mlp:slots=3,activation=sigmoid",
        "abc-mlp:slots=3,normalise=write",
        "abc-mlp:slots=3,gate=true",
    ),
)
@dataclass(eq=False)
class AbcMlp(SlotMechanism, nn.Module):
    """alpha_i = exp(W_phi x_i), phi_i = alpha_i / sum_j alpha_j (ABC, Eq. 12), W_phi with a row per slot and KV head.

    W_phi is made at the first call, from ``seed``; ``tied`` layers of a model share one. ``normalise`` is "read" for
    Appendix B.1 and "write" for footnote 5; they differ only when causal. A ReLU may leave a slot empty.

    ``gate`` favours recent tokens (ABC, 4, after Peng et al., 2021): with gamma_t = sigmoid(w x_t + b) in each KV head,
    K~_t = gamma_t K~_{t-1} + (1 - gamma_t) alpha_t (x) k_t, and so V~ and the sum of alpha.
    """

    slots: int = 32
    activation: str = "exp"
    normalise: str = "read"
    tied: bool = True
    gate: bool = False
    seed: int = 0

    exempt = {
        "grouped_queries_equal_repeated_keys": "each key/value head has its own W_phi, so repeating heads adds to it"
    }

    def __post_init__(self) -> None:
        check_fields(self)
        check_slots(self.slots, self.normalise)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.gate and self.normalise != "read":
            raise ValueError(f"gate needs normalise='read': the sum of alpha must fade too, got {self.normalise!r}")
        nn.Module.__init__(self)
        self.tied_across_layers = self.tied
        self.weight: nn.Parameter | None
        self.gate_weight: nn.Parameter | None
        self.gate_bias: nn.Parameter | None
        for name in ("weight", "gate_weight", "gate_bias"):
            self.register_parameter(name, None)

    @property
    def sparse(self) -> bool:
        """Whether one slot may stay empty while another does not."""
        return self.activation == "relu"

    def cannot(self) -> dict[str, str]:
        return {**super().cannot(), "no-x": "the control is computed from what the keys were made from; pass x="}

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """log alpha from x."""
        x = self._input(call)
        kind = torch.promote_types(x.dtype, torch.float32)
        # Layers that share this control may be on several devices.
        matrix = self._matrix(call).to(x.device, kind)
        # One product for all heads: (b, k, m) @ (m, g * n).
        u = (x.to(kind) @ matrix.flatten(0, 1).mT).unflatten(-1, matrix.shape[:2]).transpose(1, 2)
        if self.activation == "sigmoid":
            u = logsigmoid(u)
        elif self.activation == "relu":
            # NaN compares as false: it is kept, and reaches the output.
            u = torch.where(u <= 0, 1, u).log().masked_fill(u <= 0, FLOOR)
        return self._gated(u, call) if self.gate else Control(u)

    def fused(self, call: AttentionCall, state: SlotState | None, *, in_place: bool = False) -> Fused:
        """By the kernels of ``attnlab.kernels.abc``, on a GPU and without a gate."""
        if self.gate:
            return None
        if self.activation != "exp":
            return super().fused(call, state, in_place=in_place)
        if not kernel_serves(call, self.slots, self.normalise):
            return None
        call = hide_unseen(call)
        x, matrix = self._input(call), self._matrix(call).to(call.q.dtype)
        log = linear(x, matrix.flatten(0, 1)).unflatten(-1, matrix.shape[:2]).transpose(1, 2)
        return attend_by_kernel(call, log, state, in_place=in_place)

    def _input(self, call: AttentionCall) -> Float[Tensor, "b k m"]:
        x = call.x
        assert x is not None, "refused before"
        if x.shape[1] != call.k.shape[2]:
            raise ValueError(
                f"abc-mlp needs the input of every key, got x for {x.shape[1]} of {call.k.shape[2]}; "
                "decode with make_cache(), which keeps the slots and not the keys"
            )
        return x

    def _gated(self, log: Float[Tensor, "b g k n"], call: AttentionCall) -> Control:
        """alpha_i (1 - gamma_i) / prod_{j <= i} gamma_j; the product up to the reader is the same for all i."""
        x = call.x
        assert x is not None, "refused before"
        groups, m = log.shape[1], x.shape[-1]
        if self.gate_weight is None or self.gate_bias is None:
            self.gate_weight = nn.Parameter(torch.zeros(groups, m, device=x.device))
            self.gate_bias = nn.Parameter(torch.full((groups,), GATE, device=x.device))
        # float64, because these logarithms add up over the whole sequence and only their differences matter.
        u = (x.to(log.dtype) @ self.gate_weight.to(log.dtype).mT + self.gate_bias.to(log.dtype)).mT.double()
        stays = logsigmoid(u)
        if call.key_visible is not None:
            stays = stays.masked_fill(~call.key_visible.unsqueeze(1), 0)
        product = stays.cumsum(-1)
        return Control(log + (logsigmoid(-u) - product).unsqueeze(-1), faded=stays.sum(-1))

    def _matrix(self, call: AttentionCall) -> Float[Tensor, "g n m"]:
        assert call.x is not None
        shape = (call.k.shape[1], self.slots, call.x.shape[-1])
        if self.weight is None:
            generator = torch.Generator("cpu").manual_seed(self.seed)
            # Logits of order 1 for inputs of order 1: slots that start alike would stay alike.
            start = torch.randn(shape, generator=generator, device="cpu") * shape[-1] ** -0.5
            self.weight = nn.Parameter(start.to(call.q.device))
        if self.weight.shape != shape:
            raise ValueError(
                f"W_phi was made for (key/value heads, slots, width of x) = {tuple(self.weight.shape)}, "
                f"this call needs {shape}; make a mechanism for each shape"
            )
        return self.weight
