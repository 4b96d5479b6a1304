"""Every attention on every layout against the exact reference: outputs, gradients, and who must not see whom."""

from __future__ import annotations

import json
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacp.attention import reference
from megacp.attention.core import build_attention
from megacp.attention.kernels import Spans
from megacp.attention.ring import Pack, block, own_block, step
from megacp.batch import PackedSeqParams, Sample, shard, token_index
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid
from tests.spawn import run

GOLDEN = Path(__file__).parent / "golden"
NO_GRID = cast(Grid, SimpleNamespace())
HEAD_DIM = 16

BACKENDS = [("native", "p2p")]
PACKS = {
    "dense": [64],
    "dense long": [528],
    "dense rows": [64] * 3,
    "odd": [1, 37, 2, 150, 5],
    "empty end": [30, 61, 0],
    "tiny": [1 + i % 7 for i in range(200)],
    "long tail": [3, 290, 9, 1],
}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (3, 1)}


class Case(NamedTuple):
    backend: str
    comm_type: str
    pack: str
    heads: str
    mask: str
    dtype: str = "float32"


def cases(dtype: str) -> list[Case]:
    heads = HEADS if dtype == "float32" else ["GQA"]
    table = product(BACKENDS, PACKS, heads, ("causal", "no_mask"))
    return [Case(*kind, pack, head, mask, dtype) for kind, pack, head, mask in table]


def padded(lengths: list[int], cp: int) -> list[int]:
    """Each sequence on a multiple of 2*cp; the framework's trailing piece of real length 0 has some room."""
    return [-(-max(length, 1) // (2 * cp)) * 2 * cp for length in lengths]


def world() -> CPGroup:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return CPGroup((0,), 0)
    return CPGroup(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def layout(lengths: list[int], cp: CPGroup) -> tuple[PackedSeqParams, Tensor, Tensor]:
    """The packed record of the door, which rows of the pack this rank holds, and which rows are real."""
    room = padded(lengths, cp.size)
    real, offsets = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (lengths, room))
    blank = torch.zeros(sum(room))
    batch = shard(Sample(blank.long(), blank.long(), blank, real, offsets), cp)
    mask = torch.cat([torch.arange(b) < a for a, b in zip(lengths, room, strict=True)])
    return batch.packed, token_index(offsets, cp.rank, cp.size), mask


def attention_of(case: Case, heads: tuple[int, int], cp: CPGroup) -> Any:
    model = ModelConfig(
        num_layers=1,
        hidden_size=HEAD_DIM * heads[0],
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        vocab_size=8,
        attn_mask_type=cast(Any, case.mask),
        attention_backend=cast(Any, case.backend),
    )
    parallel = ParallelConfig(context_parallel_size=cp.size, cp_comm_type=case.comm_type)
    return build_attention(model, parallel, 1, NO_GRID)


def inputs(rows: int, heads: tuple[int, int], seed: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, float64 [rows, heads, D]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, n, HEAD_DIM, generator=generator, dtype=torch.float64)
        for n in (heads[0], heads[1], heads[1], heads[0])
    ]


def errors(case: Case) -> tuple[float, list[tuple[float, float]], bool]:
    """This rank's largest error of the output on real rows; per gradient squared norms of error and value; finite?"""
    cp, heads, lengths = world(), HEADS[case.heads], PACKS[case.pack]
    packed, index, real = layout(lengths, cp)
    q, k, v, dout = inputs(len(real), heads, 1)
    dout *= real[:, None, None]
    dtype = getattr(torch, case.dtype)
    local = [x[index].to(dtype).requires_grad_() for x in (q, k, v)]
    whole = [x.requires_grad_() for x in (q, k, v)]
    room = padded(lengths, cp.size)
    expected = reference.attention(q, k, v, lengths, room, causal=case.mask == "causal")
    wanted = torch.autograd.grad(expected, whole, dout)
    out = attention_of(case, heads, cp)(*local, packed, cp)
    got = torch.autograd.grad(out, local, dout[index].to(dtype))
    worst = (out - expected[index])[real[index]].abs().max().item() if real[index].any() else 0.0
    norms = [
        ((a - b[index]).square().sum().item(), b[index].square().sum().item()) for a, b in zip(got, wanted, strict=True)
    ]
    return worst, norms, all(bool(x.isfinite().all()) for x in (out, *got))


def all_errors(table: list[Case]) -> list[tuple[float, list[tuple[float, float]], bool]]:
    return [errors(case) for case in table]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_equals_reference(cp: int, dtype: str) -> None:
    table = cases(dtype)
    ranks = run(all_errors, cp, table) if cp > 1 else [all_errors(table)]
    out_bound, grad_bound = (1e-5, 1e-4) if dtype == "float32" else (1e-10, 1e-10)
    for case, *results in zip(table, *ranks, strict=True):
        assert all(finite for _, _, finite in results), case
        assert max(worst for worst, _, _ in results) < out_bound, case
        for name, parts in zip("qkv", zip(*(norms for _, norms, _ in results), strict=True), strict=True):
            error, value = (sum(x) ** 0.5 for x in zip(*parts, strict=True))
            assert error <= grad_bound * (value + 1e-3), (case, name, error, value)


def leaks() -> list[str]:
    """Outputs that moved though nothing they may see did."""
    cp, found = world(), []
    lengths = [40, 1, 530, 7, 12]
    packed, index, _ = layout(lengths, cp)
    room = padded(lengths, cp.size)
    starts = list(accumulate(room, initial=0))
    for kind, mask in product(BACKENDS, ("causal", "no_mask")):
        case = Case(*kind, "", "GQA", mask)
        attention = attention_of(case, (4, 2), cp)
        before = [x.float() for x in inputs(sum(room), (4, 2), 2)[:3]]
        reference_out = attention(*(x[index] for x in before), packed, cp)
        for number in (0, 2, 3):
            begin, end = starts[number], starts[number] + lengths[number]
            token = begin + (end - begin) // 2
            causal = mask == "causal"
            for first, may_move in ((begin, begin), (token, token if causal else begin)):
                moved = [x.clone() for x in before]
                for x in moved:
                    x[first : end if first == begin else first + 1] += 1
                out = attention(*(x[index] for x in moved), packed, cp)
                changed = (out != reference_out).flatten(1).any(1)
                allowed = (index >= may_move) & (index < starts[number + 1])
                found += [f"{case} {first} {int(row)}" for row in index[changed & ~allowed]]
                if not changed[index == token].all():
                    found.append(f"{case}: token {token} does not see itself")
    return found


def padding_leaks() -> bool:
    """Whether NaN in padded rows reaches a real one."""
    cp = world()
    lengths = [5, 1, 43]
    packed, index, real = layout(lengths, cp)
    here = real[index]
    clean = []
    for kind, mask in product(BACKENDS, ("causal", "no_mask")):
        case = Case(*kind, "", "GQA", mask)
        q, k, v, _ = (x.float() for x in inputs(len(real), (4, 2), 3))
        before = attention_of(case, (4, 2), cp)(q[index], k[index], v[index], packed, cp)
        k[~real] += 100
        v[~real] -= 100
        after = attention_of(case, (4, 2), cp)(q[index], k[index], v[index], packed, cp)
        clean.append(torch.equal(before[here], after[here]))
    return not all(clean)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_sees_only_its_own(cp: int) -> None:
    assert not any(run(leaks, cp) if cp > 1 else [leaks()])
    assert not any(run(padding_leaks, cp) if cp > 1 else [padding_leaks()])


def recomputed() -> bool:
    """Gradients under activation recomputation, and of a second backward, equal those of the first."""
    cp = world()
    packed, index, _ = layout([40, 24], cp)
    attention = attention_of(Case("native", "p2p", "", "GQA", "causal"), (4, 2), cp)
    q, k, v, dout = (x[index].float() for x in inputs(int(packed.cu_seqlens_q[-1]), (4, 2), 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, packed, cp)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, dout)
    later = torch.autograd.grad(checkpoint(attention, *leaves, packed, cp, use_reentrant=False), leaves, dout)
    return all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, later, strict=True))


@pytest.mark.parametrize("cp", [1, 2])
def test_backward_twice_and_recomputed(cp: int) -> None:
    assert all(run(recomputed, cp) if cp > 1 else [recomputed()])


def strided() -> float:
    """Error of bfloat16 against fp32 on the same values, q, k, v cut out of one fused projection."""
    cp = world()
    packed, index, _ = layout([48, 9], cp)
    q, k, v, dout = (x[index].bfloat16() for x in inputs(sum(padded([48, 9], cp.size)), (4, 2), 5))
    fused = torch.cat([q, k, v], dim=1).requires_grad_()
    attention = attention_of(Case("native", "p2p", "", "GQA", "causal"), (4, 2), cp)
    results = []
    for x in (fused, fused.detach().float().requires_grad_()):
        out = attention(*x.split([4, 2, 2], dim=1), packed, cp)
        assert out.dtype == x.dtype
        results.append((out, *torch.autograd.grad(out, x, dout.to(x.dtype))))
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("cp", [1, 2])
def test_bfloat16_of_fused_projection(cp: int) -> None:
    assert max(run(strided, cp) if cp > 1 else [strided()]) < 2e-2


def subgroup_ring() -> bool:
    """A ring whose ranks are neither 0, 1, .. nor in order: partners must be named by their global ranks."""
    members = (3, 1)
    group = dist.new_group(list(members))
    if dist.get_rank() not in members:
        return True
    cp = CPGroup(members, members.index(dist.get_rank()), group)
    packed, index, _ = layout([64], cp)
    q, k, v, _ = inputs(64, (4, 2), 6)
    out = attention_of(Case("native", "p2p", "", "GQA", "causal"), (4, 2), cp)(q[index], k[index], v[index], packed, cp)
    return torch.allclose(out, reference.attention(q, k, v, [64])[index], atol=1e-10)


def test_ring_of_any_ranks() -> None:
    assert all(run(subgroup_ring, 4))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_tile_the_mask(size: int, causal: bool) -> None:
    """All blocks of all ranks together compute what the mask shows once, and no whole block of what it hides."""
    lengths = (1, 23, 0, 16)
    room = tuple(padded(list(lengths), size))
    pack = Pack(lengths, room, size)
    offsets = torch.tensor([0, *accumulate(room)])
    rows = [token_index(offsets, rank, size) for rank in range(size)]
    total, own, split = (torch.zeros(sum(room), sum(room), dtype=torch.int64) for _ in range(3))

    def count(where: Tensor, spans: Spans, rank: int, number: int) -> None:
        for q, m, k, n in zip(spans.q_starts, spans.q_lengths, spans.k_starts, spans.k_lengths, strict=True):
            queries, keys = rows[rank][q : q + m], rows[(rank - number) % size][k : k + n]
            seen = torch.ones(m, n, dtype=torch.int64)
            where[queries[:, None], keys[None, :]] += seen.tril() if spans.causal else seen

    for rank, number in product(range(size), range(size)):
        count(total, block(pack, rank, number, causal), rank, number)
        if number == 0:
            count(own, block(pack, rank, 0, causal), rank, 0)
            for part in own_block(pack, rank, causal):
                count(split, part, rank, 0)
    shown = [
        reference.visible(real if real and not causal else space, space, causal)
        for real, space in zip(lengths, room, strict=True)
    ]
    assert torch.equal(total, torch.block_diag(*shown).long())
    assert torch.equal(split, own)


def test_step_table() -> None:
    whole, first, second = (0, 2), (0, 1), (1, 1)
    assert [step(1, 4, number) for number in range(4)] == [
        (whole, whole, True),
        (whole, first, False),
        (second, whole, False),
        (second, whole, False),
    ]


def test_wrong_pack_is_refused() -> None:
    packed, _, _ = layout([64], CPGroup((0,), 0))
    attention = attention_of(Case("native", "p2p", "", "MHA", "causal"), (4, 4), CPGroup((0,), 0))
    with pytest.raises(ValueError, match="64 tokens over 1 ranks does not lie in 32 queries"):
        attention(*inputs(32, (4, 4), 0)[:3], packed, CPGroup((0,), 0))


def test_choice_of_backend() -> None:
    def build(layer: int = 1, comm_type: Any = "p2p", **fields: Any) -> Any:
        model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=1, vocab_size=8, **fields)
        return build_attention(model, ParallelConfig(cp_comm_type=comm_type), layer, NO_GRID)

    assert type(build()) is type(build(1, ["p2p", "a2a"]))
    with pytest.raises(ValueError, match="a2a of layer 2 is not available: use p2p"):
        build(2, ["p2p", "a2a"])
    with pytest.raises(ValueError, match="transformer_engine is not available"):
        build(attention_backend="transformer_engine")
    with pytest.raises(ValueError, match=r"window_size \[5, 0\] is not available"):
        build(window_size=[5, 0])
    build(window_size=[-1, 0])
    assert build(kv_channels=64).scale == 0.125 and build(softmax_scale=0.3).scale == 0.3


def golden_cases() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "attention.json").read_text())["cases"]


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_reference_equals_golden(case: dict[str, Any]) -> None:
    arrays = np.load(GOLDEN / "attention.npz")

    def flat(name: str) -> Tensor:
        array = torch.from_numpy(arrays[f"{case['name']}/{name}"])
        return array.transpose(0, 1).reshape(case["S"] * case["B"], -1, case["D"])

    q, k, v = (flat(name).requires_grad_() for name in "qkv")
    out = reference.attention(
        *(q, k, v),
        case["seq_lens"] or [case["S"]] * case["B"],
        causal=case["mask"] == "causal",
        window=case["window"],
        softmax_scale=case["softmax_scale"],
    )
    grads = torch.autograd.grad(out, (q, k, v), flat("do"))
    for name, value in zip(("o", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(value, flat(name), atol=1e-10, rtol=0)


def test_reference_row_without_keys() -> None:
    q = torch.randn(4, 1, 8, requires_grad=True)
    out = reference.attention(q, q, q, [0, 2], [2, 2])
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert (out[:2] == 0).all() and grad.isfinite().all() and (grad[:2] == 0).all()
