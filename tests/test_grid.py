from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacp.config import ParallelConfig
from megacp.grid import (
    AXES,
    CPGroup,
    Grid,
    grid_sizes,
    hierarchical_groups,
    power_of_two_groups,
    rank_groups,
    world_map,
)
from tests import spawn

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text())


def groups_of(case: dict[str, Any], axes: str) -> list[list[int]]:
    groups = rank_groups({axis: case[axis] for axis in AXES}, case["order"], axes)
    return [[rank + case.get("rank_offset", 0) for rank in group] for group in groups]


def layout(**sizes: Any) -> ParallelConfig:
    names = {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "hierarchy": "hierarchical_context_parallel_sizes",
        "hybrid": "hybrid_context_parallel",
    }
    return ParallelConfig(**{names.get(name, name): value for name, value in sizes.items()})


def test_rank_groups_match_megatron() -> None:
    cases = golden("rank_groups.json")["cases"]
    assert {case["kind"] for case in cases} == {"decoder", "expert"}
    for case in cases:
        assert {axes: groups_of(case, axes) for axes in case["groups"]} == case["groups"], case["order"]


def test_large_rank_groups_match_megatron() -> None:
    cases = golden("rank_groups.json")["hashed"]
    assert cases
    for case in cases:
        for axes, digest in case["sha256"].items():
            text = json.dumps(groups_of(case, axes), separators=(",", ":"))
            assert hashlib.sha256(text.encode()).hexdigest() == digest, (case["order"], axes)


def test_order_inside_axes_does_not_matter() -> None:
    sizes = {"tp": 2, "cp": 2, "dp": 3}
    assert rank_groups(sizes, "tp-cp-ep-dp-pp", "cp-dp") == rank_groups(sizes, "TP-CP-EP-DP-PP", "dp-cp")


@pytest.mark.parametrize("case", golden("rank_groups.json")["errors"], ids=lambda case: case["order"])
def test_what_megatron_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cp=2 and ep=2 in one box|lacks (cp|pp), whose size is 2"):
        groups_of(case, "tp")


@pytest.mark.parametrize(
    "sizes, order, axes",
    [
        ({"tp": 2}, "tp-xp", "tp"),
        ({"tp": 2}, "tp-tp", "tp"),
        ({"tp": 2}, "", "tp"),
        ({"tp": 2}, "tp-dp", "tp-cp-zz"),
        ({"tp": 0}, "tp-dp", "tp"),
        ({"sp": 2}, "tp-dp", "tp"),
    ],
)
def test_malformed_boxes_are_refused(sizes: dict[str, int], order: str, axes: str) -> None:
    with pytest.raises(ValueError, match="axes"):
        rank_groups(sizes, order, axes)


def test_hierarchical_groups_match_megatron() -> None:
    cases = golden("hierarchical_groups.json")["cases"]
    assert cases
    for case in cases:
        levels = hierarchical_groups(case["ranks"], case["sizes"])
        for rank, expected in case["per_rank"].items():
            own = [[group for group in level if int(rank) in group] for level in levels]
            assert own == [[group] for group in expected]
        assert list(chain(*levels)) == [ranks for _, ranks in case["created"]]


@pytest.mark.parametrize("case", golden("hierarchical_groups.json")["errors"])
def test_hierarchy_must_multiply_to_cp(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="product 8, but there are 16 context-parallel ranks"):
        hierarchical_groups(range(case["ranks"]), case["sizes"])


def test_power_of_two_groups_match_megatron() -> None:
    for case in golden("hybrid_groups.json")["cases"]:
        blocks = power_of_two_groups(range(case["dp_cp_ranks"]))
        for rank, expected in case["per_rank"].items():
            own = {str(size): group for size, groups in blocks.items() for group in groups if int(rank) in group}
            assert own == expected


def test_power_of_two_groups_of_other_numbers_are_the_blocks_that_fit() -> None:
    assert power_of_two_groups([0, 2, 4, 6, 8, 10]) == {2: [[0, 2], [4, 6], [8, 10]], 4: [[0, 2, 4, 6]]}
    assert power_of_two_groups(range(3)) == {2: [[0, 1]]}


@pytest.mark.parametrize(
    "config, world, message",
    [
        (
            layout(tp=2, cp=2),
            6,
            r"world size 6 is not a multiple of tp\*cp\*pp = 2\*2\*1 = 4 .*use 4 or 8 ranks",
        ),
        (layout(tp=4), 2, r"world size 2 is not a multiple of .* = 4 \(dense grid\): use 4 ranks"),
        (layout(tp=2, ep=4), 4, r"tp\*ep\*pp = 2\*4\*1 = 8 \(expert grid\): use 8 ranks"),
        (
            layout(cp=2, pp=2, ep=4, order="tp-cp-pp-ep-dp"),
            8,
            r"order .*\[0, 2\] a pipeline .*\[0, 1\] one of .*pp last",
        ),
        (layout(tp=2, order="dp-pp"), 4, "lacks tp, whose size is 2"),
    ],
)
def test_grids_that_do_not_fit_are_refused(config: ParallelConfig, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dense, _ = grid_sizes(config, world)
        rank_groups(dense, config.order, "tp")


def test_expert_grid_lies_over_the_dense_one() -> None:
    dense, expert = grid_sizes(layout(tp=2, cp=2, pp=2, ep=4, etp=1), 16)
    assert dense == {"tp": 2, "cp": 2, "pp": 2, "dp": 2}
    assert expert == {"tp": 1, "ep": 4, "pp": 2, "dp": 2}
    assert grid_sizes(layout(tp=2, cp=2, pp=2), 16)[1] == {"tp": 2, "ep": 1, "pp": 2, "dp": 4}


def test_world_map() -> None:
    config = layout(tp=2, pp=2, ep=2, etp=1)
    table = world_map(*grid_sizes(config, 8), config.order, ["node-a"] * 4 + ["b"] * 4)
    assert table.splitlines() == [
        "rank  host    tp  cp  ep  dp  pp",
        "   0  node-a   0   0   0   0   0",
        "   1  node-a   1   0   1   0   0",
        "   2  node-a   0   0   0   1   0",
        "   3  node-a   1   0   1   1   0",
        "   4  b        0   0   0   0   1",
        "   5  b        1   0   1   0   1",
        "   6  b        0   0   0   1   1",
        "   7  b        1   0   1   1   1",
    ]


def test_import_does_not_need_torch() -> None:
    code = "import sys, megacp.grid; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


def test_one_process_needs_no_torch_distributed() -> None:
    grid = Grid.create(layout(hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=8))
    assert grid.world_size == 1
    for name in GROUP_NAMES:
        group = getattr(grid, name)
        assert (group.ranks, group.rank, group.size, group.process_group) == ((0,), 0, 1, None)
    assert grid.cp_group([0]) is grid.cp
    with pytest.raises(ValueError, match=r"no context-parallel group of ranks \[0, 1\] was built; rank 0 is in \[0\]"):
        grid.cp_group([0, 1])
    with pytest.raises(ValueError, match="world size 1 is not a multiple"):
        Grid.create(layout(cp=2))


GROUP_NAMES = (
    "tp",
    "cp",
    "ep",
    "dp",
    "pp",
    "dp_cp",
    "expert_tp",
    "expert_dp",
    "tp_dp_cp",
    "embedding",
    "model",
)


def talk(config: ParallelConfig) -> dict[str, tuple[int, ...]]:
    """Every group sums the ranks of its members; name -> ranks of this process's groups."""
    grid = Grid.create(config)
    groups = {name: getattr(grid, name) for name in GROUP_NAMES}
    groups |= {f"level{number}": group for number, group in enumerate(grid.cp.levels)}
    groups |= {f"cp{ranks}": grid.cp_group(ranks) for ranks in grid.cp_groups}
    for name, group in groups.items():
        if group.rank < 0:
            assert name == "embedding" and group.process_group is None and grid.rank not in group.ranks
            continue
        assert group.ranks[group.rank] == grid.rank == dist.get_rank()
        assert (group.process_group is None) == (group.size == 1)
        if group.process_group is not None:
            assert dist.get_rank(group.process_group) == group.rank
            total = torch.tensor(grid.rank)
            dist.all_reduce(total, group=group.process_group)
            assert total.item() == sum(group.ranks)
    assert isinstance(grid.cp, CPGroup)
    shared = grid.dp_cp.ranks == grid.cp.ranks and grid.cp.size > 1
    assert not shared or grid.dp_cp.process_group is not grid.cp.process_group
    if grid.tp_dp_cp.ranks == grid.dp.ranks:
        assert grid.tp_dp_cp.process_group is grid.dp.process_group
    return {name: group.ranks for name, group in groups.items()}


@pytest.mark.parametrize(
    "n, config",
    [
        (8, layout(tp=2, cp=2, pp=2)),
        (8, layout(tp=2, ep=4, etp=1)),
        (8, layout(cp=4, hierarchy=[2, 2])),
        (4, layout(pp=4)),
        (2, layout(cp=2)),
    ],
    ids=["tp-cp-pp", "experts", "hierarchy", "pipeline", "cp"],
)
def test_every_group_communicates(n: int, config: ParallelConfig) -> None:
    dense, expert = grid_sizes(config, n)
    for rank, own in enumerate(spawn.run(talk, n, config)):

        def expected(axes: str, sizes: dict[str, int] = dense, rank: int = rank) -> tuple[int, ...]:
            return next(tuple(group) for group in rank_groups(sizes, config.order, axes) if rank in group)

        for name in ("tp", "cp", "dp", "pp", "dp_cp", "tp_dp_cp"):
            assert own[name] == expected(name.replace("_", "-"))
        assert own["model"] == expected("tp-pp")
        assert own["embedding"] == tuple(sorted({own["pp"][0], own["pp"][-1]}))
        names = {"expert_tp": "tp", "ep": "ep", "expert_dp": "dp"}
        assert {name: own[name] for name in names} == {name: expected(axes, expert) for name, axes in names.items()}
        if config.hierarchical_context_parallel_sizes:
            levels = hierarchical_groups(own["cp"], config.hierarchical_context_parallel_sizes)
            assert [own[f"level{number}"] for number in range(len(levels))] == [
                next(tuple(group) for group in level if rank in group) for level in levels
            ]


def test_hybrid_groups_communicate() -> None:
    results = spawn.run(talk, 6, layout(hybrid=True, max_seqlen_per_dp_cp_rank=8))
    found = [[ranks for name, ranks in own.items() if name.startswith("cp(")] for own in results]
    everyone = tuple(range(6))
    assert found[1] == [(1,), (0, 1), (0, 1, 2, 3), everyone]
    assert found[5] == [(5,), (4, 5), everyone]


def ask_for_a_group_of_others() -> None:
    grid = Grid.create(layout(hybrid=True, max_seqlen_per_dp_cp_rank=8))
    assert grid.cp_group([grid.rank]) is grid.cp
    grid.cp_group([1, 2])


def test_a_group_that_was_not_built_is_refused_by_its_ranks() -> None:
    with pytest.raises(ValueError, match=r"no context-parallel group of ranks \[1, 2\] was built"):
        spawn.run(ask_for_a_group_of_others, 4)
