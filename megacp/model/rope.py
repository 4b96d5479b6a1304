"""Rotary position embedding (Su et al. 2021): rotate q and k by `batch.position_ids`.

Positions arrive cut together with the tokens, so nothing here knows of groups or offsets. Halves are rotated, not
interleaved pairs (GPT-NeoX and Hugging Face Llama).

Legend: T tokens, N query heads, K KV heads, D head dim, R rotated dims of D.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megacp.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float64 [R/2]: radians a position, theta^(-2i/R), after scaling."""
    dims = round(config.head_dim * config.rotary_percent)  # 0.58 of 100 is 57.99.. in floating point
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    plain = config.rotary_base**-exponents
    scaling = config.rope_scaling
    if scaling.type == "linear":  # position interpolation, Chen et al. 2023
        return plain / scaling.factor
    if scaling.type == "llama3":
        return _llama3(plain, scaling)
    if scaling.type == "yarn":
        return _yarn(plain, scaling, dims, config.rotary_base)
    return plain


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between."""
    wavelengths = 2 * math.pi / plain
    original, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _yarn(plain: Tensor, scaling: RopeScaling, dims: int, base: float) -> Tensor:
    """YaRN (Peng et al. 2023, eq. 17-23; megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py)."""

    def dim_of(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dims * math.log(turns) / (2 * math.log(base))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


def attention_factor(scaling: RopeScaling) -> float:
    """YaRN's scale of the rotated q and k ("concentration"); 1 for other rules."""
    if scaling.type != "yarn":
        return 1.0

    def log_scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return log_scale(1.0)
    return log_scale(scaling.mscale) / log_scale(scaling.mscale_all_dim)


def rotary_table(position_ids: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [T, 1, R/2] of int64 position_ids [T].

    Angles are taken in float64: in float32 a position of a million is already off by 0.06 radians.
    """
    angles = position_ids.double()[:, None, None] * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """out = x [T, n, D] rotated by sign * angle; dims past R are copied. `out` may not overlap `x`."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=sign)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rotate_into(out, x, cos, sin, 1.0)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        dx = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        cos, sin = ctx.saved_tensors
        _rotate_into(dx, grad, cos, sin, -1.0)
        return dx, None, None


class _SplitRotate(Function):
    """The same for q and k inside one [T, (N+2K)*D] product, whose gradient is written in one piece."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        x = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        q_rotated, k_rotated = (torch.empty(part.shape, dtype=x.dtype, device=x.device) for part in (q, k))
        _rotate_into(q_rotated, q, cos, sin, 1.0)
        _rotate_into(k_rotated, k, cos, sin, 1.0)
        # v is copied: a view would keep the whole product alive until the backward pass.
        return q_rotated, k_rotated, v.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        dq, dk, dv = grads
        cos, sin = ctx.saved_tensors
        heads, kv_heads = dq.shape[1], dk.shape[1]
        dx = torch.empty(dq.shape[0], heads + 2 * kv_heads, dq.shape[2], dtype=dq.dtype, device=dq.device)
        _rotate_into(dx[:, :heads], dq, cos, sin, -1.0)
        _rotate_into(dx[:, heads : heads + kv_heads], dk, cos, sin, -1.0)
        dx[:, heads + kv_heads :] = dv
        return dx.flatten(1), None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, n, D] rotated at its positions."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[return-value]


def split_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (N+2K)*D] -> rotated q [T, N, D], rotated k [T, K, D], v [T, K, D]."""
    return _SplitRotate.apply(qkv, cos, sin, heads, kv_heads)  # type: ignore[return-value]
