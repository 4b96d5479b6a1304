"""Every attention on every layout against the exact reference: outputs, gradients, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacp.attention import reference
from megacp.attention.core import build_attention
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid, Group, hierarchical_groups
from tests.packs import (
    HEADS,
    KINDS,
    VIEWS,
    WINDOWS,
    Case,
    Grids,
    Kind,
    View,
    assert_equal_to_reference,
    build,
    everyone,
    exact,
    inputs,
    layout,
    measure,
    parallel_of,
    results,
)
from tests.spawn import run

GOLDEN = Path(__file__).parent / "golden"

PACKS = {
    "dense": (64,),
    "dense long": (528,),
    "dense rows": (64,) * 3,
    "odd": (1, 37, 2, 150, 5),
    "empty": (30, 0, 61, 0),
    "tiny": tuple(1 + i % 7 for i in range(60)),
    "long tail": (3, 290, 9, 1),
}


def cases(cp: int) -> list[Case]:
    """The whole of kinds x dense and packed x heads x views, and every pack with every view in fp32 and float64.

    On 8 ranks less. Neighbours differ by their kind: they have the reference in common.
    """
    views, gqa = [*VIEWS.values(), *WINDOWS.values()], HEADS["GQA"]
    dense, odd = PACKS["dense rows"], PACKS["odd"]
    rows = [*product([odd], HEADS.values(), VIEWS.values(), ["float32"]), *product([odd], [gqa], views, ["float64"])]
    if cp == 8:
        rows += product([dense], [gqa], VIEWS.values(), ["float32"])
    else:
        rows += product([dense], HEADS.values(), VIEWS.values(), ["float32"])
        rows += product(PACKS.values(), [gqa], views, ["float32"])
        rows += product([dense], [gqa], views, ["float64"])
    return [
        Case(kind, pack, view, heads, dtype) for pack, heads, view, dtype in dict.fromkeys(rows) for kind in KINDS[cp]
    ]


@pytest.mark.parametrize("cp", KINDS)
def test_equals_reference(cp: int) -> None:
    assert_equal_to_reference(cases(cp), cp)


@pytest.mark.parametrize("cp", [1, 2, 4])
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    left=st.integers(0, 310),
    right=st.integers(0, 310),
    heads=st.sampled_from(["GQA", "MQA"]),
)
def test_any_pack_equals_reference(cp: int, lengths: list[int], left: int, right: int, heads: str) -> None:
    """Every kind with every kind of mask on each pack."""
    windows = [View("causal", (left, 0)), View("no_mask", (left, right)), View("no_mask", (-1, right))]
    views = [VIEWS["causal"], VIEWS["full"], *windows]
    table = [Case(kind, tuple(lengths), view, HEADS[heads]) for view in views for kind in KINDS[cp]]
    assert_equal_to_reference(table, cp)


def test_bfloat16_is_as_exact_on_many_ranks_as_on_one() -> None:
    """The same inputs; errors are those against float64, relative to the Frobenius norm.

    Where a2a repeats key/value heads, the gradients of the copies are rounded before they are summed.
    """
    packs = [(512,), (1, 37, 2, 150, 5, 290)]
    views = [VIEWS["causal"], VIEWS["full"], WINDOWS["long window"], VIEWS["two-sided"]]

    def relative(kinds: Sequence[Kind], cp: int) -> dict[Case, list[float]]:
        rows = product(packs, views, kinds, (HEADS["MHA"], HEADS["GQA"]))
        table = [Case(kind, pack, view, heads, "bfloat16", multiple=16) for pack, view, kind, heads in rows]
        errors = [[(e.square / e.exact_square) ** 0.5 for e in errors] for errors in measure(table, cp)]
        return dict(zip(table, errors, strict=True))

    alone = relative([Kind("p2p")], 1)
    assert all(1e-4 < error < 1e-2 for errors in alone.values() for error in errors)
    for cp in (2, 8):
        for case, errors in relative(KINDS[cp], cp).items():
            expected = alone[case._replace(kind=Kind("p2p"))]
            repeats = case.heads == HEADS["GQA"] and "a2a" in case.kind.comm_type
            bounds = 1.2, 1.2, *([1.7] if repeats else [1.2]) * 2
            for name, ours, theirs, bound in zip(("out", "q", "k", "v"), errors, expected, bounds, strict=True):
                assert ours <= bound * theirs, (case, name, ours, theirs)


def recomputed() -> list[tuple[Kind, bool]]:
    """Whether gradients of a second backward pass and under recomputation equal those of the first, bit for bit."""
    grids, found = Grids(), []
    cp = grids[Kind("p2p")].cp
    packed, index, real, _ = layout([40, 23], cp)
    q, k, v, dout = (x[index].float() for x in inputs(len(real), HEADS["GQA"], 4))
    for kind, view in product(KINDS[cp.size], VIEWS.values()):
        attention, cp = build(kind, grids[kind], view), grids[kind].cp
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, packed, cp)
        grads = [torch.autograd.grad(out, leaves, dout, retain_graph=True), torch.autograd.grad(out, leaves, dout)]
        again = checkpoint(attention, *leaves, packed, cp, use_reentrant=False)
        grads.append(torch.autograd.grad(again, leaves, dout))
        same = [all(map(torch.equal, grads[0], other)) for other in grads[1:]]
        found.append((kind, all(same) and torch.equal(out, again)))
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_backward_twice_and_recomputed(cp: int) -> None:
    for found in everyone(recomputed, cp):
        assert [kind for kind, same in found if not same] == []


def strided() -> list[tuple[Kind, float]]:
    """Error of bfloat16 against fp32 on the same values, q, k, v cut out of one fused projection."""
    grids, found, heads = Grids(), [], HEADS["GQA"]
    cp = grids[Kind("p2p")].cp
    packed, index, real, _ = layout([48, 9], cp)
    *qkv, dout = (x[index].bfloat16() for x in inputs(len(real), heads, 5))
    fused = torch.cat(qkv, dim=1).requires_grad_()
    for kind, view in product(KINDS[cp.size], VIEWS.values()):
        attention, pair = build(kind, grids[kind], view), []
        for x in (fused, fused.detach().float().requires_grad_()):
            out = attention(*x.split([heads[0], heads[1], heads[1]], dim=1), packed, grids[kind].cp)
            assert out.dtype == x.dtype
            pair.append((out, *torch.autograd.grad(out, x, dout.to(x.dtype))))
        found += [(kind, ((a.float() - b).norm() / b.norm()).item()) for a, b in zip(*pair, strict=True)]
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_bfloat16_of_fused_projection(cp: int) -> None:
    for found in everyone(strided, cp):
        assert [(kind, error) for kind, error in found if error > 2e-2] == []


def wrong_kinds(kinds: Sequence[Kind], grid: Grid, lengths: tuple[int, ...]) -> list[Kind]:
    """Those whose float64 results are not the exact ones."""
    packed, index, real, room = layout(lengths, grid.cp)
    given, wanted = exact(lengths, room, VIEWS["causal"], HEADS["GQA"], torch.float64)
    here, wrong = real[index], []
    for kind in kinds:
        got = results(build(kind, grid), [x[index] for x in given], packed, grid.cp)
        if not all(torch.allclose(a[here], b[index][here], atol=1e-10) for a, b in zip(got, wanted, strict=True)):
            wrong.append(kind)
    return wrong


def beside_others(kinds: Sequence[Kind]) -> list[Kind]:
    """Half of the ranks share one pack, the others another at the same time. No group is 0, 1, ..: dp is innermost."""
    grid = Grid.create(parallel_of(kinds[-1], dist.get_world_size() // 2, order="tp-dp-cp-ep-pp"))
    return wrong_kinds(kinds, grid, [(64,), (7, 30, 51)][grid.dp.rank])


@pytest.mark.parametrize(("cp", "kind"), [(2, KINDS[2][3]), (2, KINDS[2][4]), (4, KINDS[4][3])])
def test_two_groups_at_once(cp: int, kind: Kind) -> None:
    assert sum(run(beside_others, 2 * cp, [*KINDS[cp][:3], kind]), []) == []


def out_of_order(members: list[int], kinds: Sequence[Kind]) -> list[Kind]:
    def group(lists: list[list[int]]) -> Group:
        live = [dist.new_group(ranks, sort_ranks=False) if len(ranks) > 1 else None for ranks in lists]
        mine = [i for i, ranks in enumerate(lists) if dist.get_rank() in ranks]
        ranks, process_group = (lists[mine[0]], live[mine[0]]) if mine else (lists[0], None)
        return Group(tuple(ranks), ranks.index(dist.get_rank()) if mine else -1, process_group)

    levels = tuple(map(group, hierarchical_groups(members, kinds[-1].levels)))
    whole = group([members])
    cp = CPGroup(whole.ranks, whole.rank, whole.process_group, levels)
    return wrong_kinds(kinds, cast(Grid, SimpleNamespace(cp=cp)), (64,)) if cp.rank >= 0 else []


@pytest.mark.parametrize("members", [[3, 1], [2, 0, 3, 1]])
def test_ranks_in_another_order(members: list[int]) -> None:
    """Partners go by their place in the group."""
    assert sum(run(out_of_order, 4, members, KINDS[len(members)]), []) == []


@pytest.mark.parametrize("kind", KINDS[1], ids=str)
def test_wrong_pack_is_refused(kind: Kind) -> None:
    grid = Grid.create(parallel_of(kind, 1))
    attention = build(kind, grid)
    with pytest.raises(ValueError, match="64 tokens over 1 ranks does not lie in 32 queries"):
        attention(*inputs(32, HEADS["GQA"], 0)[:3], layout([64], grid.cp).packed, grid.cp)


def test_choice_of_backend() -> None:
    def choose(layer: int = 1, comm_type: Any = "p2p", **fields: Any) -> Any:
        model = ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=1, vocab_size=8, **fields)
        grid = Grid.create(ParallelConfig())
        return build_attention(model, ParallelConfig(cp_comm_type=comm_type), layer, grid)

    types = ["p2p", "all_gather", "a2a", "a2a+p2p"]
    each = [type(choose(comm_type=name)) for name in types]
    assert len(set(each)) == 4
    assert [type(choose(layer, types)) for layer in (1, 2, 3, 4)] == each
    runs = [["a2a", 2], "p2p", ["all_gather", 1]]
    assert [type(choose(layer, runs)) for layer in (1, 2, 3, 4)] == [each[2], each[2], each[0], each[1]]
    with pytest.raises(ValueError, match="a2b of layer 2 is not known: use p2p, all_gather, a2a, a2a\\+p2p"):
        choose(2, ["p2p", "a2b", "p2p", "p2p"])
    with pytest.raises(ValueError, match="lists 3 types for model.num_layers = 4"):
        choose(1, [["p2p", 3]])
    assert all(choose(comm_type=name, kv_channels=64).scale == 0.125 for name in types)
    assert all(choose(comm_type=name, softmax_scale=0.3).scale == 0.3 for name in types)


def of_three(kind: Kind, heads: tuple[int, int], levels: tuple[Group, ...] = ()) -> Tensor:
    """Refused before anything is sent: the group does not live."""
    cp = CPGroup((0, 1, 2), 0, None, levels)
    attention = build(kind, cast(Grid, SimpleNamespace(cp=cp)), heads=heads)
    return attention(*inputs(16, heads, 0)[:3], layout([48], cp).packed, cp)


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    levels = (Group((0, 1, 2), 0), Group((0,), 0))
    for kind in (Kind("a2a"), Kind("a2a+p2p", (3, 1))):
        with pytest.raises(ValueError, match="8 .*3 .*(p2p|all_gather)"):
            of_three(kind, HEADS["GQA"], levels)


def test_a_hierarchy_without_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="hierarchical_context_parallel_sizes"):
        of_three(Kind("a2a+p2p"), HEADS["6 KV"])


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
