"""Rotary position embedding (Su et al. 2021): rotate q and k by `batch.position_ids`.

Positions arrive cut together with the tokens, so nothing here knows of groups or offsets. Dim i is paired with dim
i + R/2 (GPT-NeoX and Hugging Face Llama), and a pair is rotated as one complex number. The rotated pairs are left lying
side by side: attention sees nothing of q and k but their products, which do not depend on the order of a head's dims,
and putting the halves back would cost as much as the rotation.

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


def rotary_table(position_ids: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Complex [T, 1, R/2]: factor * e^(i * angle) of int64 position_ids [T]; complex128 for float64, else complex64.

    Angles are taken in float64: in float32 a position of a million is already off by 0.06 radians.
    """
    angles = position_ids.double()[:, None, None] * frequencies
    turn = torch.polar(torch.full_like(angles, factor), angles)
    return turn if dtype == torch.float64 else turn.to(torch.complex64)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """x [T, n, D] -> [T, n, D] with its first R dims rotated, pair i lying at 2i and 2i + 1."""
    half, exact = turn.shape[-1], turn.real.dtype
    pairs = torch.complex(x[..., :half].to(exact), x[..., half : 2 * half].to(exact)).mul_(turn)
    rotated = torch.view_as_real(pairs).flatten(-2).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def _turn_back_into(dx: Tensor, grad: Tensor, turn: Tensor) -> None:
    """The gradient of `_turned`: grad rotated the other way, as two halves again, written to dx [T, n, D]."""
    half = turn.shape[-1]
    pairs = torch.view_as_complex(grad[..., : 2 * half].to(turn.real.dtype).unflatten(-1, (half, 2))) * turn.conj()
    dx[..., :half] = pairs.real
    dx[..., half : 2 * half] = pairs.imag
    dx[..., 2 * half :] = grad[..., 2 * half :]


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        return _turned(x, turn)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        dx = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        _turn_back_into(dx, grad.contiguous(), *ctx.saved_tensors)
        return dx, None


class _SplitRotate(Function):
    """The same for q and k inside one [T, (N+2K)*D] product, whose gradient is written in one piece."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, turn: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(turn)
        x = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        # v is copied: a view would keep the whole product alive until the backward pass.
        return _turned(q, turn), _turned(k, turn), v.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        dq, dk, dv = (grad.contiguous() for grad in grads)
        (turn,) = ctx.saved_tensors
        heads, kv_heads = dq.shape[1], dk.shape[1]
        dx = torch.empty(dq.shape[0], heads + 2 * kv_heads, dq.shape[2], dtype=dq.dtype, device=dq.device)
        _turn_back_into(dx[:, :heads], dq, turn)
        _turn_back_into(dx[:, heads : heads + kv_heads], dk, turn)
        dx[:, heads + kv_heads :] = dv
        return dx.flatten(1), None, None, None


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x [T, n, D] (q or k) rotated at its positions by `turn` [T, 1, R/2] of `rotary_table`, its pairs side by side."""
    return _Rotate.apply(x, turn)  # type: ignore[return-value]


def split_rotate(qkv: Tensor, turn: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (N+2K)*D] -> rotated q [T, N, D] and k [T, K, D], their pairs side by side; v [T, K, D] as it is."""
    return _SplitRotate.apply(qkv, turn, heads, kv_heads)  # type: ignore[return-value]
