"""Rotary embedding against golden tables, transformers' scaling rules, exact arithmetic and a plain formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megacp.batch import token_index
from megacp.config import ModelConfig, RopeScaling
from megacp.model.rope import attention_factor, inverse_frequencies, rotary_table, rotate, split_rotate

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "rope.json").read_text())["cases"]
ARRAYS = np.load(GOLDEN / "rope.npz")
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def array(name: str) -> Tensor:
    return torch.from_numpy(ARRAYS[name])


def without_counterpart(case: dict[str, Any]) -> str | None:
    """Why a golden case is left out."""
    if case.get("rotary_interleaved") or case.get("kwargs", {}).get("rotary_interleaved"):
        return "neighbouring dimensions as pairs: ours are halves alone"
    if case.get("mla_rotary_interleaved"):
        return "multi-latent attention's order of dimensions: no such attention here"
    return None


def golden(kind: str) -> list[Any]:
    chosen = [case for case in CASES if case["kind"] == kind and without_counterpart(case) is None]
    return [pytest.param(case, id=case["name"]) for case in chosen]


def config(head_dim: int, percent: float = 1.0, base: float = 10000.0, **scaling: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        vocab_size=8,
        rotary_percent=percent,
        rotary_base=base,
        rope_scaling=RopeScaling(**scaling),
    )


def test_what_is_left_out() -> None:
    """Every other case of the golden file is compared below."""
    left_out = {case["name"] for case in CASES if without_counterpart(case)}
    compared = {
        param.id for kind in ("rotary_embedding", "yarn_embedding", "apply_bshd", "apply_thd") for param in golden(kind)
    }
    assert compared | left_out == {case["name"] for case in CASES}
    assert compared == {
        *("base", "half", "base5e5", "interp", "yarn", "yarn_ms", "yarn_noround", "thd/i0/max_seq/16-16"),
        *(f"bshd/i0m0d16r{r}s{scale}" for r in (16, 8) for scale in (1.0, 1.25)),
    }


def halves(rotated: Tensor, half: int) -> Tensor:
    """Pairs that lie side by side, put half a head apart, where the reference leaves them."""
    pairs, rest = rotated[..., : 2 * half], rotated[..., 2 * half :]
    return torch.cat([pairs[..., ::2], pairs[..., 1::2], rest], dim=-1)


def assert_table(angles: Tensor, positions: Tensor, frequencies: Tensor) -> None:
    """angles [T, 1, 1, R] as Megatron-LM keeps them: both halves alike."""
    half = frequencies.shape[0]
    assert torch.equal(angles[..., :half], angles[..., half:])
    turn = rotary_table(positions, frequencies, 1.0, torch.float32)
    torch.testing.assert_close(turn.real, angles[:, 0, :, :half].cos(), **CLOSE)
    torch.testing.assert_close(turn.imag, angles[:, 0, :, :half].sin(), **CLOSE)


@pytest.mark.parametrize("case", golden("rotary_embedding"))
def test_golden_tables(case: dict[str, Any]) -> None:
    kwargs, name, length = case["kwargs"], f"emb/{case['name']}", case["seq_len"]
    factor = kwargs.get("seq_len_interpolation_factor", 1.0)
    scaling = {"type": "linear", "factor": factor} if factor > 1 else {}
    model = config(kwargs["kv_channels"], kwargs["rotary_percent"], float(kwargs.get("rotary_base", 1e4)), **scaling)
    frequencies = inverse_frequencies(model)
    # Megatron-LM divides positions rather than frequencies.
    torch.testing.assert_close((frequencies * factor).float(), array(f"{name}/inv_freq"), **CLOSE)
    assert_table(array(f"{name}/full"), torch.arange(length), frequencies)
    assert_table(array(f"{name}/offset7"), torch.arange(7, 23), frequencies)
    turn = rotary_table(torch.arange(16), frequencies, 1.0, torch.float32)
    torch.testing.assert_close(turn[:, 0].real, array(f"{name}/cos16"), **CLOSE)
    torch.testing.assert_close(turn[:, 0].imag, array(f"{name}/sin16"), **CLOSE)
    for size in case["cp_sizes"]:
        for rank in range(size):
            positions = token_index(torch.tensor([0, length]), rank, size)
            assert_table(array(f"{name}/cp{size}r{rank}"), positions, frequencies)


@pytest.mark.parametrize("case", golden("yarn_embedding"))
def test_golden_yarn_tables(case: dict[str, Any]) -> None:
    kwargs = {"mscale": 1.0, "mscale_all_dim": 0.0, **case["kwargs"]}  # the reference's defaults
    head_dim, base = kwargs.pop("kv_channels"), kwargs.pop("rotary_base", 10000.0)
    model = config(head_dim, base=base, type="yarn", factor=kwargs.pop("scaling_factor"), **kwargs)
    frequencies = inverse_frequencies(model)
    assert_table(array(f"emb/{case['name']}/full"), torch.arange(case["seq_len"]), frequencies)
    assert_table(array(f"emb/{case['name']}/cp4r1"), token_index(torch.tensor([0, 48]), 1, 4), frequencies)
    assert attention_factor(model.rope_scaling) == pytest.approx(case["concentration_factor"], rel=1e-12)


@pytest.mark.parametrize("case", golden("apply_bshd"))
def test_golden_rotation(case: dict[str, Any]) -> None:
    x, angles = array(f"{case['name']}/t"), array(f"{case['name']}/freqs")[:, 0]
    half = angles.shape[-1] // 2
    turn = torch.polar(torch.full_like(angles[..., :half], case["mscale"]), angles[..., :half])
    out = halves(rotate(x.flatten(1, 2), turn), half).view_as(x)
    torch.testing.assert_close(out, array(f"{case['name']}/out"), **CLOSE)


@pytest.mark.parametrize("case", golden("apply_thd"))
def test_golden_rotation_of_packs(case: dict[str, Any]) -> None:
    """Positions restart at each sequence; every context-parallel rank rotates its own tokens."""
    offsets, angles = torch.tensor(case["cu_seqlens"]), array(f"{case['name']}/freqs")[:, 0]
    half = angles.shape[-1] // 2
    for size in case["cp_sizes"]:
        for rank in range(size):
            index = token_index(offsets, rank, size)
            sequence = torch.searchsorted(offsets[1:], index, right=True)
            own = angles[index - offsets[sequence], :, :half]
            out = halves(rotate(array(f"{case['name']}/t_full")[index], torch.polar(torch.ones_like(own), own)), half)
            torch.testing.assert_close(out, array(f"{case['name']}/cp{size}r{rank}"), **CLOSE)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"original_max_position_embeddings": 4096}
SCALINGS = {
    "linear": ({"type": "linear", "factor": 8.0}, {}),
    "llama3": ({"type": "llama3", "factor": 8.0, **LLAMA3}, {}),
    "llama3-steep": (
        {"type": "llama3", "factor": 32.0, **LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
        {},
    ),
    "yarn": ({"type": "yarn", "factor": 16.0, **YARN}, {}),
    "yarn-betas": ({"type": "yarn", "factor": 40.0, **YARN, "beta_fast": 64.0, "beta_slow": 2.0}, {}),
    "yarn-deepseek": ({"type": "yarn", "factor": 40.0, **YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, {}),
    "yarn-exact-ends": (
        {"type": "yarn", "factor": 4.0, **YARN, "correction_range_round_to_int": False},
        {"truncate": False},
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_scaling_equals_that_of_transformers(scaling: str, base: float) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, extra = SCALINGS[scaling]
    renamed = {key: value for key, value in ours.items() if key not in ("type", "correction_range_round_to_int")}
    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": ours["type"], "rope_theta": base, **renamed, **extra},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[ours["type"]](theirs, torch.device("cpu"))
    model = config(64, base=base, **ours)
    torch.testing.assert_close(inverse_frequencies(model).float(), frequencies, rtol=1e-5, atol=0)
    assert attention_factor(model.rope_scaling) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("head_dim", "percent", "dims"), [(16, 0.5, 8), (100, 0.58, 58), (96, 0.333333, 32)])
def test_rotated_share_of_a_head(head_dim: int, percent: float, dims: int) -> None:
    """0.58 * 100 is 57.99.. in floating point, but means 58."""
    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    torch.testing.assert_close(inverse_frequencies(config(head_dim, percent)), 10000.0**-exponents)


def test_a_position_of_a_million_is_exact() -> None:
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 40
    positions = [0, 1, 131_071, 999_999, 1_048_576]
    frequencies = inverse_frequencies(config(128, base=500000.0))
    turn = rotary_table(torch.tensor(positions), frequencies, 1.0, torch.float64)
    for row, position in enumerate(positions):
        for i in range(64):
            angle = position * mpmath.power(500000, mpmath.mpf(-2 * i) / 128)
            assert abs(turn[row, 0, i].real.item() - mpmath.cos(angle)) < 1e-9
            assert abs(turn[row, 0, i].imag.item() - mpmath.sin(angle)) < 1e-9
    single = rotary_table(torch.tensor(positions), frequencies, 1.0, torch.float32)
    assert torch.equal(single, turn.to(torch.complex64))


def test_scores_depend_on_the_distance_alone() -> None:
    """Far out as near the start: q at m and k at n give the score of m + 1e6 and n + 1e6."""
    torch.manual_seed(0)
    q, k = torch.randn(6, 2, 64, dtype=torch.float64), torch.randn(6, 2, 64, dtype=torch.float64)
    frequencies = inverse_frequencies(config(64, type="llama3", factor=8.0))

    def scores(shift: int) -> Tensor:
        positions = torch.tensor([0, 1, 5, 9, 200, 4000]) + shift
        table = rotary_table(positions, frequencies, 1.0, torch.float64)
        return torch.einsum("qnd,knd->nqk", rotate(q, table), rotate(k, table))

    torch.testing.assert_close(scores(1_000_000), scores(0), rtol=0, atol=1e-7)
    assert not torch.allclose(scores(0), torch.einsum("qnd,knd->nqk", q, k))


def plain(x: Tensor, turn: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin, as Hugging Face's Llama has it."""
    half = turn.shape[-1]
    cos, sin = turn.real.repeat(1, 1, 2), turn.imag.repeat(1, 1, 2)
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    swapped = torch.cat([-head[..., half:], head[..., :half]], dim=-1)
    return torch.cat([head * cos + swapped * sin, rest], dim=-1)


def turns(tokens: int, half: int) -> Tensor:
    angles = torch.randn(tokens, 1, half, dtype=torch.float64)
    return torch.polar(torch.full_like(angles, 1.25), angles)


@pytest.mark.parametrize("half", [4, 2])
def test_rotation_and_its_gradient(half: int) -> None:
    """Of a view with gaps, as q is inside the product of q, k and v."""
    torch.manual_seed(0)
    x = torch.randn(5, 6, 8, dtype=torch.float64, requires_grad=True)
    turn = turns(5, half)
    torch.testing.assert_close(halves(rotate(x[:, 1:4], turn), half), plain(x[:, 1:4], turn))
    assert torch.autograd.gradcheck(lambda x: rotate(x[:, 1:4], turn), (x,))


@pytest.mark.parametrize("half", [4, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)])
def test_split_and_rotation_and_their_gradient(heads: int, kv_heads: int, half: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * 8, dtype=torch.float64, requires_grad=True)
    turn = turns(5, half)
    q, k, v = split_rotate(qkv, turn, heads, kv_heads)
    parts = qkv.view(5, -1, 8).split([heads, kv_heads, kv_heads], dim=1)
    torch.testing.assert_close(halves(q, half), plain(parts[0], turn))
    torch.testing.assert_close(halves(k, half), plain(parts[1], turn))
    assert torch.equal(v, parts[2])
    assert torch.autograd.gradcheck(lambda x: split_rotate(x, turn, heads, kv_heads), (qkv,))


def test_a_part_without_gradient_counts_as_zero() -> None:
    qkv = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    q, k, _ = split_rotate(qkv, turns(3, 4), 2, 1)
    k.sum().backward()
    assert qkv.grad is not None and qkv.grad[:, 16:24].any()
    assert not qkv.grad[:, :16].any() and not qkv.grad[:, 24:].any()


def test_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, turn = torch.randn(64, 4, 16).bfloat16(), turns(64, 8)
    out = rotate(x, turn.to(torch.complex64))
    assert out.dtype == torch.bfloat16
    exact = plain(x.double(), turn)
    assert ((halves(out, 8).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
