"""The transformer layer as mathematics: norm, attention, MLP.

Legend: T tokens of this rank, H hidden, N query heads, K KV heads, D head dim, F inner width of the MLP; N, K and F are
those of this tensor-parallel rank. The residual stream is [T, H], under sequence parallelism [T/tp, H].
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from megacp.attention.core import CoreAttention
from megacp.batch import Batch
from megacp.config import ModelConfig
from megacp.model.parallel import ColumnLinear, Layout, RowLinear, replicated_parameter
from megacp.model.rope import rotate, split_rotate


@dataclass(frozen=True)
class Noise:
    """Where dropout's random numbers come from: a fresh generator for each place, seeded by what must tell it apart.

    Keyed by the samples' global numbers, so nothing has to be saved or restored: resume and recomputation draw the same
    masks. `stream` differs between ranks that hold different tokens (cp, and tp under sequence parallelism) and agrees
    between ranks that hold the same ones.
    """

    seed: int
    ids: tuple[int, ...]
    stream: tuple[int, ...]

    def dropout(self, x: Tensor, probability: float, place: str) -> Tensor:
        key = f"{self.seed}/{self.ids}/{self.stream}/{place}".encode()
        number = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
        generator = torch.Generator(x.device).manual_seed(number)
        kept = torch.empty_like(x).bernoulli_(1 - probability, generator=generator)
        return (x * kept).div_(1 - probability)


class _RMSNorm(Function):
    """Root-mean-square norm (Zhang & Sennrich 2019) that keeps only x and one number a row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        work = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        norms = torch.linalg.vector_norm(work, dim=-1, keepdim=True)
        rstd = norms.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (work * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, rstd = ctx.saved_tensors
        work, grad = x.to(rstd.dtype), grad.to(rstd.dtype)
        scale, count = weight.to(rstd.dtype), x.shape[-1]
        product = grad * work
        # Both sums over the product are products with a vector: one pass each, without a further tensor of its size.
        dweight = rstd.flatten() @ product.flatten(0, -2)
        mean = (product @ scale).unsqueeze(-1) * rstd.pow(3).div_(count)
        dx = torch.mul(grad, scale, out=product).mul_(rstd).addcmul_(work, mean, value=-1.0)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension; `own_heads` where it sees this tp rank's heads alone."""

    def __init__(self, name: str, width: int, config: ModelConfig, layout: Layout, own_heads: bool = False):
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = replicated_parameter(f"{name}.weight", (width,), layout, value=1.0, own_heads=own_heads)
        biased = config.normalization == "LayerNorm"
        self.bias = replicated_parameter(f"{name}.bias", (width,), layout, own_heads=own_heads) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None and not x.is_cuda and x.dtype == torch.bfloat16:
            # The CPU kernel sums the gradients of weight and bias in bfloat16: half of them is lost in 8192 tokens.
            return torch.addcmul(self.bias, F.layer_norm(x, self.weight.shape, eps=self.epsilon), self.weight)
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return _RMSNorm.apply(x, self.weight, self.epsilon)  # type: ignore[return-value]


class _SwiGLU(Function):
    """silu(gate) * up of [gate; up] (Shazeer 2020), keeping the product, on a CPU silu(gate) too.

    There exponentials are dear and memory is not; on a GPU it is the other way round.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        if gate_up.is_cuda:
            ctx.save_for_backward(gate_up)
            return silu.mul_(up)
        ctx.save_for_backward(gate_up, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        gate_up, *silu = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        dgate, dup = out.chunk(2, dim=-1)
        torch.mul(grad, silu[0] if silu else F.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        return out


class MLP(nn.Module):
    """[T, H] -> [T, H]: gated SiLU, or GELU."""

    def __init__(self, name: str, config: ModelConfig, layout: Layout, output_std: float):
        super().__init__()
        self.swiglu = config.swiglu
        self.approximate = "tanh" if config.openai_gelu else "none"
        inner = ("gate", "up") if config.swiglu else ("up",)
        outputs = {f"{name}.{part}": config.ffn_size for part in inner}
        bias = config.add_bias_linear
        self.up = ColumnLinear(outputs, config.hidden_size, config.init_method_std, layout, bias)
        self.down = RowLinear(f"{name}.down", config.ffn_size, config.hidden_size, output_std, layout, bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.swiglu:
            return self.down(_SwiGLU.apply(inner))
        return self.down(F.gelu(inner, approximate=self.approximate))


class Attention(nn.Module):
    """[T, H] -> [T, H]: projections and RoPE around a core attention that owns no group."""

    def __init__(self, name: str, config: ModelConfig, layout: Layout, output_std: float, core: CoreAttention):
        super().__init__()
        dim = config.head_dim
        self.heads = config.num_attention_heads // layout.tp.size
        self.kv_heads = config.kv_heads // layout.tp.size
        self.core = core
        self.recompute_core = False
        outputs = {
            f"{name}.q": config.num_attention_heads * dim,
            f"{name}.k": config.kv_heads * dim,
            f"{name}.v": config.kv_heads * dim,
        }
        bias = config.add_bias_linear
        self.qkv = ColumnLinear(
            outputs, config.hidden_size, config.init_method_std, layout, bias or config.add_qkv_bias
        )
        self.out = RowLinear(
            f"{name}.o", config.num_attention_heads * dim, config.hidden_size, output_std, layout, bias
        )
        self.q_norm = Norm(f"{name}.q_norm", dim, config, layout, own_heads=True) if config.qk_layernorm else None
        self.k_norm = Norm(f"{name}.k_norm", dim, config, layout, own_heads=True) if config.qk_layernorm else None

    def forward(self, x: Tensor, turn: Tensor | None, batch: Batch) -> Tensor:
        qkv = self.qkv(x)
        if self.recompute_core:
            heads = checkpoint(self._attend, qkv, turn, batch, use_reentrant=False, preserve_rng_state=False)
        else:
            heads = self._attend(qkv, turn, batch)
        return self.out(heads)  # type: ignore[arg-type]

    def _attend(self, qkv: Tensor, turn: Tensor | None, batch: Batch) -> Tensor:
        """[T, (N+2K)*D] -> [T, N*D]."""
        q, k, v = self._split(qkv, turn)
        return self.core(q, k, v, batch.packed, batch.cp).flatten(1)

    def _split(self, qkv: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if turn is not None and self.q_norm is None:
            return split_rotate(qkv, turn, self.heads, self.kv_heads)
        heads = qkv.view(qkv.shape[0], self.heads + 2 * self.kv_heads, -1)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        return q, k, v


class Layer(nn.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, number: int, config: ModelConfig, layout: Layout, core: CoreAttention):
        """`number` counts from 0 over the whole model."""
        super().__init__()
        name = f"layers.{number}"
        # Megatron-LM's scaled init: 2L outputs add up in the residual stream.
        output_std = config.init_method_std / (2 * config.num_layers) ** 0.5
        self.name = name
        self.hidden_dropout = config.hidden_dropout
        self.recompute_mlp = False
        self.attention_norm = Norm(f"{name}.attention_norm", config.hidden_size, config, layout)
        self.attention = Attention(f"{name}.attention", config, layout, output_std, core)
        self.mlp_norm = Norm(f"{name}.mlp_norm", config.hidden_size, config, layout)
        self.mlp = MLP(f"{name}.mlp", config, layout, output_std)

    def forward(self, x: Tensor, turn: Tensor | None, batch: Batch, noise: Noise) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), turn, batch), noise, "attention")
        return x + self.drop(self._feed_forward(x), noise, "mlp")

    def _feed_forward(self, x: Tensor) -> Tensor:
        if self.recompute_mlp:
            return checkpoint(  # type: ignore[return-value]
                lambda x: self.mlp(self.mlp_norm(x)), x, use_reentrant=False, preserve_rng_state=False
            )
        return self.mlp(self.mlp_norm(x))

    def drop(self, x: Tensor, noise: Noise, place: str) -> Tensor:
        if not self.training or not self.hidden_dropout:
            return x
        return noise.dropout(x, self.hidden_dropout, f"{self.name}.{place}")
