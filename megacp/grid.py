"""Which ranks work together: rank lists as pure arithmetic, and the live groups made from them.

Ranks form a box with the axes tp, cp, ep, dp, pp; the order string says which axis varies fastest. Two boxes
lie over the same ranks: the dense one (tp, cp, dp, pp) and, for the experts, one with its own tp, ep and dp
and the same pipelines. This is the arithmetic of Megatron-LM (megatron/core/parallel_state.py). Only
`Grid.create` needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate, chain
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacp.config import ParallelConfig
    from megacp.same_host import Readable

AXES = ("tp", "cp", "ep", "dp", "pp")


def rank_groups(sizes: dict[str, int], order: str, axes: str) -> list[list[int]]:
    """Rank lists that vary along `axes` ("tp", "dp-cp", ...) only, for a box of `sizes` laid out by `order`.

    The first axis of `order` varies fastest, both inside a list and from list to list; the order inside
    `axes` means nothing. Axes missing from `sizes` have size 1. ValueError for unknown or repeated axes, for an
    axis above 1 that `order` lacks, and for cp and ep both above 1 (they belong to different boxes).
    """
    names, wanted = _axis_names(order), _axis_names(axes)
    for axis, size in sizes.items():
        if axis not in AXES or size < 1:
            raise ValueError(f"size {axis}={size}: axes are {', '.join(AXES)}, sizes are 1 or more")
        if size > 1 and axis not in names:
            raise ValueError(f"order '{order}' lacks {axis}, whose size is {size}: add it, e.g. '{order}-{axis}'")
    if sizes.get("cp", 1) > 1 and sizes.get("ep", 1) > 1:
        raise ValueError(
            f"cp={sizes['cp']} and ep={sizes['ep']} in one box: the dense grid has cp, the expert grid ep; "
            "set one of them to 1"
        )
    return _box_groups([sizes.get(name, 1) for name in names], [name in wanted for name in names])


def _axis_names(text: str) -> list[str]:
    names = text.lower().split("-")
    if len(set(names)) < len(names) or not set(names) <= set(AXES):
        raise ValueError(f"'{text}' must name axes once each, joined by '-', out of {', '.join(AXES)}")
    return names


def _box_groups(sizes: Sequence[int], chosen: Sequence[bool]) -> list[list[int]]:
    """Lists of positions in a box (first axis fastest) that differ along the chosen axes only."""
    strides = list(accumulate(sizes, mul, initial=1))[:-1]
    axes = list(zip(sizes, strides, chosen, strict=True))
    within = _offsets([(size, stride) for size, stride, inside in axes if inside])
    starts = _offsets([(size, stride) for size, stride, inside in axes if not inside])
    return [[start + offset for offset in within] for start in starts]


def _offsets(axes: Iterable[tuple[int, int]]) -> list[int]:
    offsets = [0]
    for size, stride in axes:
        offsets = [index * stride + offset for index in range(size) for offset in offsets]
    return offsets


def hierarchical_groups(ranks: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    """For each level (innermost first, neighbours in `ranks`) the groups it splits `ranks` into.

    ValueError if the product of `sizes` is not the number of ranks.
    """
    if prod(sizes) != len(ranks):
        raise ValueError(
            f"hierarchical_context_parallel_sizes {list(sizes)} have the product {prod(sizes)}, "
            f"but there are {len(ranks)} context-parallel ranks"
        )
    levels = range(len(sizes))
    boxes = [_box_groups(sizes, [level == chosen for level in levels]) for chosen in levels]
    return [[[ranks[position] for position in group] for group in box] for box in boxes]


def power_of_two_groups(ranks: Sequence[int]) -> dict[int, list[list[int]]]:
    """size -> aligned blocks of `ranks`, for each power of two above 1 and below their number.

    Where the number is no multiple of the size, the ranks left over at the end are in no block of that size.
    """
    n = len(ranks)
    powers = [1 << exponent for exponent in range(1, n.bit_length()) if 1 << exponent < n]
    return {size: [list(ranks[start : start + size]) for start in range(0, n - size + 1, size)] for size in powers}


def grid_sizes(config: ParallelConfig, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the dense and of the expert box; dp is what the other axes leave of `world_size`.

    ValueError if nothing whole is left, or if the two boxes put different ranks into a pipeline.
    """
    pp = config.pipeline_model_parallel_size
    dense = {"tp": config.tensor_model_parallel_size, "cp": config.context_parallel_size, "pp": pp}
    etp = config.expert_tensor_parallel_size or dense["tp"]
    expert = {"tp": etp, "ep": config.expert_model_parallel_size, "pp": pp}
    for kind, box in (("dense", dense), ("expert", expert)):
        box["dp"] = _left_over(kind, box, world_size)
    if pp > 1:
        _check_pipelines(dense, expert, config.order)
    return dense, expert


def _left_over(kind: str, box: dict[str, int], world_size: int) -> int:
    multiple = prod(box.values())
    if world_size % multiple:
        lower = world_size // multiple * multiple
        choices = f"{lower} or {lower + multiple}" if lower else f"{multiple}"
        raise ValueError(
            f"world size {world_size} is not a multiple of {'*'.join(box)} = "
            f"{'*'.join(map(str, box.values()))} = {multiple} ({kind} grid): use {choices} ranks"
        )
    return world_size // multiple


def _check_pipelines(dense: dict[str, int], expert: dict[str, int], order: str) -> None:
    ours, theirs = (sorted(rank_groups(box, order, "pp")) for box in (dense, expert))
    for one, other in zip(ours, theirs, strict=True):
        if one != other:
            raise ValueError(
                f"order '{order}' makes ranks {one} a pipeline of the dense grid {dense}, but {other} one of "
                f"the expert grid {expert}: put pp last in parallel.order"
            )


def world_map(dense: dict[str, int], expert: dict[str, int], order: str, hosts: Sequence[str]) -> str:
    """A table with one line per rank: its host, `hosts[rank]`, and its place along each axis."""
    columns = [_places(expert if axis == "ep" else dense, order, axis) for axis in AXES]
    rows: list[Sequence[str]] = [("rank", "host", *AXES)]
    for rank, (host, *places) in enumerate(zip(hosts, *columns, strict=True)):
        rows.append((str(rank), str(host), *map(str, places)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for rank, host, *places in rows:
        cells = [rank.rjust(widths[0]), host.ljust(widths[1]), *map(str.rjust, places, widths[2:])]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _places(sizes: dict[str, int], order: str, axis: str) -> list[int]:
    """Place of every rank along one axis."""
    places = {rank: place for group in rank_groups(sizes, order, axis) for place, rank in enumerate(group)}
    return [places[rank] for rank in range(len(places))]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. `rank` is this process's index in `ranks` (-1: not one of them).

    `process_group` is None where there is nobody to talk to: in a group of one, and for a process outside it.
    `pids` are process ids, given where gloo is spoken and all ranks can read each other's memory (same_host.py).
    """

    ranks: tuple[int, ...]
    rank: int
    process_group: Any = None
    pids: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class CPGroup(Group):
    """Ranks that share sequences; `levels` are its hierarchy, innermost first, empty without one."""

    levels: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Grid:
    """The live groups of this process.

    model       tp x pp: all that hold a share of one replica (norms, non-finite decisions)
    tp_dp_cp    all ranks of a pipeline stage
    embedding   first and last stage of this process's pipeline, which tie or share embeddings
    """

    rank: int
    world_size: int
    order: str
    sizes: dict[str, int]
    expert_sizes: dict[str, int]
    tp: Group
    cp: CPGroup
    ep: Group
    dp: Group
    pp: Group
    dp_cp: Group
    expert_tp: Group
    expert_dp: Group
    tp_dp_cp: Group
    embedding: Group
    model: Group
    cp_groups: dict[tuple[int, ...], CPGroup] = field(repr=False)

    @staticmethod
    def create(parallel_config: ParallelConfig) -> Grid:
        """Build every group, on all ranks in one order. Without torch.distributed the world is one rank."""
        import torch.distributed as dist

        from megacp.same_host import Readable, find_readable

        live = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if live else (0, 1)
        dense, expert = grid_sizes(parallel_config, world_size)
        by_reading = live and dist.get_backend() == "gloo" and parallel_config.read_peer_memory
        readable = find_readable() if by_reading else Readable()
        builder = _Builder(rank, parallel_config.distributed_timeout_minutes, readable)

        def group(axes: str, sizes: dict[str, int] = dense, name: str = "", traffic: str = "model") -> Group:
            return builder.own(name or axes, rank_groups(sizes, parallel_config.order, axes), traffic)

        cp = builder.cp(
            rank_groups(dense, parallel_config.order, "cp"), parallel_config.hierarchical_context_parallel_sizes
        )
        cp_groups = {cp.ranks: cp}
        if parallel_config.hybrid_context_parallel:
            cp_groups |= builder.hybrid(rank_groups(dense, parallel_config.order, "dp-cp"), cp_groups)
        return Grid(
            rank=rank,
            world_size=world_size,
            order=parallel_config.order,
            sizes=dense,
            expert_sizes=expert,
            cp=cp,
            cp_groups=cp_groups,
            tp=group("tp"),
            ep=group("ep", expert),
            dp=group("dp"),
            pp=group("pp"),
            dp_cp=group("dp-cp", traffic="gradients"),
            expert_tp=group("tp", expert, "expert-tp"),
            expert_dp=group("dp", expert, "expert-dp", "gradients"),
            tp_dp_cp=group("tp-dp-cp"),
            embedding=builder.embedding(rank_groups(dense, parallel_config.order, "pp")),
            model=group("tp-pp"),
        )

    def cp_group(self, ranks: Sequence[int]) -> CPGroup:
        """The context-parallel group of exactly these ranks. ValueError if this process has none such."""
        try:
            return self.cp_groups[tuple(ranks)]
        except KeyError:
            built = ", ".join(str(list(key)) for key in self.cp_groups)
            raise ValueError(
                f"no context-parallel group of ranks {list(ranks)} was built; rank {self.rank} is in {built}"
            ) from None


class _Builder:
    """Process groups by rank list, so that equal lists share one communicator.

    Gradients have communicators of their own: they are reduced in the background of the backward pass, and on
    a shared one attention would queue behind them.
    """

    def __init__(self, rank: int, timeout_minutes: float, readable: Readable) -> None:
        self.rank = rank
        self.readable = readable
        self.timeout = timedelta(minutes=timeout_minutes)
        self.built: dict[tuple[str, tuple[int, ...]], Any] = {}

    def find(self, name: str, groups: Iterable[Sequence[int]], traffic: str = "model") -> Group | None:
        """Build all `groups` (every rank must do so); the one that holds this process."""
        import torch.distributed as dist

        found = None
        for ranks in map(tuple, groups):
            key = (traffic, ranks)
            if len(ranks) > 1 and key not in self.built:
                self.built[key] = dist.new_group(list(ranks), timeout=self.timeout, group_desc=name)
            if self.rank in ranks:
                pids = self.readable.among(ranks)
                found = Group(ranks, ranks.index(self.rank), self.built.get(key), pids=pids)
        return found

    def own(self, name: str, groups: Iterable[Sequence[int]], traffic: str = "model") -> Group:
        found = self.find(name, groups, traffic)
        assert found is not None, f"{name} groups leave out rank {self.rank}"
        return found

    def cp(self, groups: Sequence[Sequence[int]], sizes: Sequence[int] | None) -> CPGroup:
        levels = []
        if sizes:
            by_level = zip(*(hierarchical_groups(ranks, sizes) for ranks in groups), strict=True)
            levels = [self.own(f"cp-level-{level}", chain(*lists)) for level, lists in enumerate(by_level)]
        whole = self.own("cp", groups)
        return CPGroup(whole.ranks, whole.rank, whole.process_group, tuple(levels), pids=whole.pids)

    def hybrid(
        self, groups: Sequence[Sequence[int]], known: dict[tuple[int, ...], CPGroup]
    ) -> dict[tuple[int, ...], CPGroup]:
        """Groups holding this process that a sample may be given (1, powers of two, all), but those known."""
        blocks = [power_of_two_groups(ranks) for ranks in groups]
        candidates: list[Sequence[Sequence[int]]] = [[[rank] for rank in chain(*groups)]]
        candidates += [list(chain(*(block[size] for block in blocks))) for size in blocks[0]]
        candidates.append(groups)
        found = [self.find("hybrid-cp", lists) for lists in candidates]
        return {
            group.ranks: CPGroup(group.ranks, group.rank, group.process_group, pids=group.pids)
            for group in found
            if group is not None and group.ranks not in known
        }

    def embedding(self, pipelines: Sequence[Sequence[int]]) -> Group:
        ends = [sorted({ranks[0], ranks[-1]}) for ranks in pipelines]
        found = self.find("embedding", ends)
        mine = next(end for end, ranks in zip(ends, pipelines, strict=True) if self.rank in ranks)
        return found or Group(tuple(mine), -1)
