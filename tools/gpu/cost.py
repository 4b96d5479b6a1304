"""What things cost on the device: memory by sequence length, attention against PyTorch's own, RoPE's share of a layer.

Legend: T tokens, H hidden, N query heads, K key/value heads, D head width, F inner width of the MLP; those of one layer
of Llama 3 8B on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacp.attention.core import build_attention
from megacp.batch import Batch
from megacp.config import Config, ParallelConfig
from megacp.grid import CPGroup, Grid
from megacp.model.gpt import GPT
from megacp.model.layer import Layer, Noise
from megacp.model.rope import rotary_table, split_rotate
from tools.gpu.device import Device
from tools.gpu.exact import empty_batch, inputs, model_of
from tools.gpu.report import MEASURED, Row, checked, skipped
from tools.gpu.training import load, settings

ALONE = CPGroup((0,), 0)
# How far memory may lie from the formula, and bytes a token of one length from those of another.
FORMULA_BOUND, LINEAR_BOUND = 0.1, 0.05
PEERS = {
    "PyTorch's choice": None,
    "PyTorch's flash": SDPBackend.FLASH_ATTENTION,
    "PyTorch's cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def llama(kind: str, length: int, layers: int = 1, **train: Any) -> Config:
    """Layers of Llama 3 8B, with a vocabulary that costs nothing; tiny ones on a CPU."""
    device = Device(kind)
    sizes = (4096, 32, 8, 14336) if device.cuda else (64, 4, 2, 96)
    names = ("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
    model = {**dict(zip(names, sizes, strict=True)), "num_layers": layers, "vocab_size": 128}
    return load(settings(model, length, kind, str(device.dtype).removeprefix("torch."), **train))


# --- memory


def check_memory(kind: str, tolerance: float) -> Iterator[Row]:
    """Of attention alone and of layers, at lengths whose square would not fit anywhere."""
    device = Device(kind)
    measures = {
        "attention forward and backward": attention_memory,
        "kept by a layer": kept_memory,
        "kept by a recomputed layer": recomputed_memory,
    }
    for check, measure in measures.items():
        per_token = []
        for length in [32768, 65536, 131072] if device.cuda else [64]:
            name = f"{check}, {length} tokens"
            try:
                row = measure(device, length, name, tolerance)
            except torch.OutOfMemoryError as error:
                row = skipped("memory", f"does not fit: {str(error).splitlines()[0]}", name)
            yield row
            if row.numbers.get("bytes"):
                per_token.append(row.numbers["bytes"] / length)
        if len(per_token) > 1:
            spread = max(per_token) / min(per_token) - 1
            words = f"{min(per_token) / 1024:.1f} to {max(per_token) / 1024:.1f} KiB a token"
            yield checked("memory", f"{check}: linear in length", {"spread": spread}, LINEAR_BOUND * tolerance, words)


def compared(check: str, measured: int | None, formula: int, tolerance: float) -> Row:
    """Bytes against what the formula says."""
    expected = f"formula {formula / 2**30:.3f} GiB"
    if measured is None:
        return skipped("memory", f"nobody counts bytes on a CPU; {expected}", check)
    off = abs(measured / formula - 1)
    row = checked("memory", check, {"off": off}, FORMULA_BOUND * tolerance, f"{measured / 2**30:.3f} GiB, {expected}")
    row.numbers.update(bytes=measured, formula=formula)
    return row


def attention_memory(device: Device, length: int, check: str, tolerance: float) -> Row:
    """Forward and backward beyond q, k, v and the output's gradient.

    Per token the output (2ND bytes), dq (2ND), dk and dv (4KD), what the flash kernel's backward pass works with (dq in
    fp32, 4ND; dk and dv for each query head, 4ND, before they are summed over a group) and three fp32 numbers a head:
    the log-sum-exp, its copy, and the sum of dout * out.
    """
    heads, width = ((32, 8), 128) if device.cuda else ((4, 2), 16)
    attend, tensors = attention(device, length, heads, width)
    peak = device.peak(lambda: torch.autograd.grad(attend(), tensors[:3], tensors[3]))
    formula = length * (2 * heads[0] * width * (1 + 1 + 2 + 2) + 4 * heads[1] * width + 12 * heads[0])
    return compared(check, peak, formula, tolerance)


def attention(
    device: Device, length: int, heads: tuple[int, int], width: int
) -> tuple[Callable[[], Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Causal attention of one rank without partners over one sequence; its q, k, v and the gradient of its output."""
    parallel = ParallelConfig()
    core = build_attention(model_of(heads, width, attention_backend="native"), parallel, 1, Grid.create(parallel))
    q, k, v, dout = inputs(length, length, heads, width, device, device.dtype)
    for x in (q, k, v):
        x.requires_grad_()
    packed = empty_batch([length], [length], ALONE).to(device.kind).packed
    return lambda: core(q, k, v, packed, ALONE), (q, k, v, dout)


def model_and_batch(config: Config, kind: str, draw: bool = False) -> tuple[GPT, Batch]:
    """A model and a batch for it. Weights of zero need as much memory as others, but less power, and so less time."""
    model = GPT(config.model, config.parallel, config.train, Grid.create(config.parallel), kind, draw=draw)
    length = config.data.seq_length
    return model, empty_batch([length], [length], ALONE).to(kind)


def kept_memory(device: Device, length: int, check: str, tolerance: float) -> Row:
    """What one layer more keeps for its backward pass without recomputation.

    In bf16, per token: the residual stream before each half of the layer and its norms (4H), q and the attention's
    output (2ND), k and v (2KD), the MLP's two inner products and their product (3F); fp32 a log-sum-exp for each head
    and a statistic for each norm.
    """
    kept = [forward_memory(device, llama(device.kind, length, layers)) for layers in (1, 2)]
    m = llama(device.kind, length).model
    heads, groups = m.num_attention_heads * m.head_dim, m.kv_heads * m.head_dim
    halves = 4 * m.hidden_size + 2 * heads + 2 * groups + 3 * m.ffn_size
    formula = length * (2 * halves + 4 * m.num_attention_heads + 8)
    measured = None if kept[0] is None or kept[1] is None else kept[1] - kept[0]
    return compared(check, measured, formula, tolerance)


def forward_memory(device: Device, config: Config) -> int | None:
    """Bytes alive between forward and backward pass."""
    model, batch = model_and_batch(config, device.kind)
    before = device.allocated()
    hidden = model(batch)
    after = device.allocated()
    del hidden
    return None if before is None or after is None else after - before


def recomputed_memory(device: Device, length: int, check: str, tolerance: float) -> Row:
    """What one layer more keeps under full recomputation: its input, 2H bytes a token; and the peak of two layers."""
    kept = [
        forward_memory(device, llama(device.kind, length, layers, recompute_granularity="full")) for layers in (1, 2)
    ]
    config = llama(device.kind, length, 2, recompute_granularity="full")
    model, batch = model_and_batch(config, device.kind)
    peak = device.peak(lambda: model(batch).sum().backward())
    measured = None if kept[0] is None or kept[1] is None else kept[1] - kept[0]
    formula = 2 * length * config.model.hidden_size
    row = compared(check, measured, formula, tolerance)
    if peak is None:
        return row
    row.numbers["peak_bytes"] = peak
    return replace(row, result=f"{row.result}; peak of two layers {peak / 2**30:.1f} GiB")


# --- speed


def check_speed(kind: str) -> Iterator[Row]:
    """Our kernels against PyTorch's scaled_dot_product_attention: what it chooses, and what it can be made to use."""
    device = Device(kind)
    heads, width = ((32, 8), 128) if device.cuda else ((4, 2), 16)
    for length in [8192, 16384, 32768] if device.cuda else [64]:
        attend, (q, k, v, dout) = attention(device, length, heads, width)

        def peer(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
            out = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        # Of causal attention: two products of 2*T^2*N*D/2 forward, five backward.
        flops = 2 * length**2 * heads[0] * width
        ours = both_times(device, attend, (q, k, v), dout)
        yield speed_row(f"ours, {length} tokens", ours, flops, None)
        for name, backend in PEERS.items() if device.cuda else [("PyTorch's choice", None)]:
            try:
                with sdpa_kernel(backend) if backend else nullcontext():
                    theirs = both_times(device, peer, (q, k, v), dout)
            except RuntimeError as error:
                yield skipped("speed", str(error).splitlines()[0], f"{name}, {length} tokens")
            else:
                yield speed_row(f"{name}, {length} tokens", theirs, flops, ours)


def both_times(
    device: Device, attend: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor
) -> tuple[float, float]:
    """Seconds of a forward pass, and of one forward and one backward pass."""
    with torch.no_grad():
        forward = device.seconds(attend)
    return forward, device.seconds(lambda: torch.autograd.grad(attend(), leaves, dout))


def speed_row(check: str, times: tuple[float, float], flops: float, ours: tuple[float, float] | None) -> Row:
    """`flops` of a forward pass; a ratio above 1 says that ours is faster."""
    rates = [flops * factor / seconds / 1e12 for factor, seconds in zip((1, 3.5), times, strict=True)]
    words = [
        f"{name} {1000 * seconds:.2f} ms, {rate:.0f} TFLOP/s"
        for name, seconds, rate in zip(("forward", "with backward"), times, rates, strict=True)
    ]
    numbers: dict[str, Any] = {"forward": times[0], "both": times[1], "tflops": rates}
    if ours:
        numbers["ratio"] = [theirs / own for theirs, own in zip(times, ours, strict=True)]
        words.append(f"its time over ours {numbers['ratio'][0]:.2f} and {numbers['ratio'][1]:.2f}")
    return Row("speed", check, "; ".join(words), MEASURED, "", numbers)


# --- RoPE


def check_rope(kind: str) -> Iterator[Row]:
    """Rotation against the whole layer, forward and backward; its own rate against the least bytes it could move."""
    device = Device(kind)
    length = 8192 if device.cuda else 64
    config = llama(kind, length)
    model, batch = model_and_batch(config, kind, draw=True)
    m, layer, frequencies = config.model, model.layers[0], model.frequencies
    assert isinstance(layer, Layer) and frequencies is not None
    turn = rotary_table(batch.position_ids, frequencies, 1.0, device.dtype)
    x = torch.randn(length, m.hidden_size, device=kind, dtype=device.dtype, requires_grad=True)
    width = (m.num_attention_heads + 2 * m.kv_heads) * m.head_dim
    qkv = torch.randn(length, width, device=kind, dtype=device.dtype, requires_grad=True)
    noise = Noise(0, (0,), (0, 0))
    dx, weights = torch.randn_like(x), list(layer.parameters())
    dqkv = [torch.randn_like(part) for part in split_rotate(qkv, turn, m.num_attention_heads, m.kv_heads)]

    def whole() -> object:
        return torch.autograd.grad(layer(x, turn, batch, noise), [x, *weights], dx)

    def rotation() -> object:
        return torch.autograd.grad(split_rotate(qkv, turn, m.num_attention_heads, m.kv_heads), qkv, dqkv)

    layer_time, rope_time = device.seconds(whole), device.seconds(rotation)
    table_time = device.seconds(lambda: rotary_table(batch.position_ids, frequencies, 1.0, device.dtype))
    moved = 4 * qkv.numel() * qkv.element_size()  # read and written, in both directions
    numbers = {"layer": layer_time, "rope": rope_time, "share": rope_time / layer_time, "table": table_time}
    words = (
        f"layer {1000 * layer_time:.2f} ms, rotation {1000 * rope_time:.2f} ms = {100 * numbers['share']:.1f} %, at "
        f"{moved / rope_time / 1e9:.0f} GB/s of what it must move; table {1000 * table_time:.2f} ms a microbatch"
    )
    yield Row("rope", f"share of a layer, {length} tokens", words, MEASURED, "", numbers)
