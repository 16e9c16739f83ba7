"""Matrix products in float32 with all the processor's vector instructions.

torch multiplies with MKL, which uses 512-bit instructions on Intel's processors only. oneDNN, another library inside
torch, uses them on every processor that has them: there a product takes half the time. Other devices, types and
processors take the usual way.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if WIDE else None

NARROW = 64  # below this many terms per sum oneDNN may be slower


def fast(*tensors: Tensor) -> bool:
    return ONEDNN is not None and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def times(a: Float[Tensor, "m d"], b: Float[Tensor, "n d"]) -> Float[Tensor, "m n"]:
    """a bᵀ, without gradient."""
    return ONEDNN(a, b, None, "none", [], "") if a.shape[1] >= NARROW and fast(a, b) else a @ b.T


def linear(x: Float[Tensor, "... d"], weight: Float[Tensor, "e d"], bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, as torch.nn.functional.linear; differentiable once."""
    if torch.is_autocast_enabled(x.device.type) or not fast(x, weight) or not x.numel():
        return nn.functional.linear(x, weight, bias)
    return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return ONEDNN(x, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        g, (x, weight) = g.contiguous(), ctx.saved_tensors  # oneDNN is slow with some layouts and with narrow sums
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return times(g, weight.T) if to_x else None, g.T @ x if to_weight else None, g.sum(0) if to_bias else None
