"""The few operations whose fast form differs between a GPU and the CPU rehearsal.

Owns the choice: `cpu_backend()` is plain torch in fp32, `gpu_backend()` uses Triton, FLA and
torch.compile in bf16. It must not know the model. Invariant: both backends compute the same
functions; only rounding differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-5
HC_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KdaInputs:
    """Raw inputs of one KDA call: conv output [B, T, H, D] each, gate logits, beta logits, decay
    parameters.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True)
class Backend:
    """Operations of one device; every callable is pure."""

    dtype: torch.dtype
    kda: Callable[[KdaInputs], Tensor]
    short_conv: Callable[[Tensor, Tensor], Tensor]
    product_fp32: Callable[[Tensor, Tensor], Tensor]
    sinkhorn: Callable[[Tensor], Tensor]
    compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise the last dim in fp32, cast to x's dtype, then scale (model.md section 3)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return weight.to(x.dtype) * y.to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by an fp32 master weight cast to x's dtype."""
    return functional.linear(x, weight.to(x.dtype))


def swiglu(gate: Tensor, up: Tensor, limit: float = 10.0) -> Tensor:
    """Clamped SwiGLU: the gate has no lower clamp."""
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def recurrent_kda(x: KdaInputs) -> Tensor:
    """KDA token by token in fp32 (model.md section 4); shapes as in KdaInputs, returns [B, T, H,
    D].
    """
    heads, dim = x.q.shape[2:]
    unit = [
        a.float() * torch.rsqrt(a.float().square().sum(-1, keepdim=True) + 1e-6) for a in (x.q, x.k)
    ]
    q, k, v = unit[0] * dim**-0.5, unit[1], x.v.float()
    gate = -5.0 * torch.sigmoid(x.a_log.exp()[:, None] * (x.gate + x.dt_bias.view(heads, dim)))
    decay, beta = gate.exp(), torch.sigmoid(x.beta.float())
    state = torch.zeros(q.shape[0], heads, dim, dim, device=q.device)
    out = []
    for t in range(q.shape[1]):
        state = decay[:, t, ..., None] * state
        error = v[:, t] - (k[:, t, ..., None] * state).sum(2)
        state = state + k[:, t, ..., None] * (beta[:, t, :, None] * error)[:, :, None]
        out.append((q[:, t, ..., None] * state).sum(2))
    return torch.stack(out, 1)


def torch_conv(u: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of width 4 and SiLU; u [B, T, C], weight [C, 4]."""
    padded = functional.pad(u.mT, (3, 0))
    return functional.silu(functional.conv1d(padded, weight[:, None], groups=u.shape[-1])).mT


def torch_sinkhorn(c: Tensor) -> Tensor:
    """20 column and 19 row normalisations of [N, 4, 4] (model.md section 2)."""
    for k in range(39):
        c = c / (c.sum(1 if k % 2 == 0 else 2, keepdim=True) + HC_EPS)
    return c


def cpu_backend() -> Backend:
    """Plain torch, fp32."""
    return Backend(
        dtype=torch.float32,
        kda=recurrent_kda,
        short_conv=torch_conv,
        product_fp32=lambda x, w: x.float() @ w.t(),
        sinkhorn=torch_sinkhorn,
        compiled=lambda function: function,
    )


class ProductFp32(torch.autograd.Function):
    """bf16 x bf16 -> fp32 matrix product: the mHC coefficients are not rounded on the way."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
        """x [N, K] bf16, w [M, K] fp32 -> [N, M] fp32."""
        low = w.to(x.dtype)
        ctx.save_for_backward(x, low)
        return torch.mm(x, low.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (bf16) and w (fp32)."""
        x, low = ctx.saved_tensors
        narrow = grad.to(x.dtype)
        return narrow @ low, torch.mm(narrow.t(), x, out_dtype=torch.float32)


def pin_fla_autotuning() -> None:
    """Take one configuration per FLA kernel: its tuning of up to 36 variants costs minutes of
    compilation.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run

    def run_one(self: Autotuner, *args: object, **kwargs: object) -> object:
        if len(self.configs) > 1 and "fla" in self.fn.__module__:
            distance = lambda c: (  # noqa: E731
                abs(c.num_warps - 4),
                abs(c.num_stages - 2),
                -min(64, c.kwargs.get("BK", 64)),
                abs(c.kwargs.get("BV", 64) - 64),
            )
            self.configs = [min(self.configs, key=distance)]
        return original(self, *args, **kwargs)

    Autotuner.run = run_one


def gpu_backend() -> Backend:
    """Triton, FLA and torch.compile in bf16; imports them here so that the CPU rehearsal needs
    none.
    """
    pin_fla_autotuning()
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.kda import chunk_kda

    from training.sinkhorn_triton import Sinkhorn

    made: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}

    def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if function not in made:
            made[function] = torch.compile(function, dynamic=False)
        return made[function]

    run_kda, run_conv = torch.compiler.disable(chunk_kda), torch.compiler.disable(causal_conv1d)

    def kda(x: KdaInputs) -> Tensor:
        return run_kda(
            x.q.contiguous(),
            x.k.contiguous(),
            x.v.contiguous(),
            x.gate,
            x.beta,
            A_log=x.a_log,
            dt_bias=x.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=-5.0,
            disable_recompute=True,
        )[0]

    return Backend(
        dtype=torch.bfloat16,
        kda=kda,
        short_conv=lambda u, w: run_conv(u, w.to(u.dtype), activation="silu")[0],
        product_fp32=ProductFp32.apply,
        sinkhorn=lambda c: Sinkhorn.apply(c.contiguous()),
        compiled=compiled,
    )
