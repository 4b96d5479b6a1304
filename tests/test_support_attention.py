"""Who may exchange what with whom, and who may see whom: wrong configs are refused with what would do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from megacp import support
from megacp.support_attention import ATTENTION_RULES, COMM_TYPES, hierarchy_multiplies_to_cp, ulysses_splits_heads
from tests.test_support import CP, TP, parsed

KIND, SIZES = "parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"

# (overrides, what the message must contain), of a model of 2 layers and 8 heads.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "misspelt type": ([f"{KIND}=allgather"], ["cp_comm_type = allgather", "did you mean all_gather?", "a2a+p2p"]),
    "unknown type": ([f"{KIND}=ulysses"], ["cp_comm_type = ulysses", "use p2p, all_gather, a2a or a2a+p2p"]),
    "unknown type of a layer": ([f"{KIND}=[p2p, P2P]"], ["cp_comm_type = P2P is not known", "did you mean p2p?"]),
    "unknown type of a run": ([f"{KIND}=[[p2p, 1], [a2b, 1]]"], ["cp_comm_type = a2b is not known"]),
    "too few types": ([f"{KIND}=[p2p]"], ["cp_comm_type lists 1 types", "num_layers = 2", "give 2"]),
    "too many types": ([f"{KIND}=[[p2p, 2], [a2a, 2]]"], ["cp_comm_type lists 4 types", "num_layers = 2"]),
    "a run of no layers": ([f"{KIND}=[[a2a, 0], [p2p, 2]]"], ["cp_comm_type", "['a2a', 0]", "[type, layers]"]),
    "a run of types": ([f"{KIND}=[[a2a, p2p], p2p]"], ["['a2a', 'p2p']", "[type, layers]"]),
    # the hierarchy
    "sizes without their type": (
        [f"{SIZES}=[2, 2]", CP + "=4"],
        [f"{SIZES} = [2, 2]", "a2a+p2p, there is none", "leave it out"],
    ),
    "sizes without their type in any layer": ([f"{SIZES}=[2, 2]", CP + "=4", f"{KIND}=[a2a, p2p]"], ["leave it out"]),
    "sizes missing": (
        [f"{KIND}=[p2p, a2a+p2p]", CP + "=8"],
        [f"needs {SIZES}", "context_parallel_size = 8", f"use {SIZES} = [4, 2]"],
    ),
    "no two levels to be had": (
        [f"{KIND}=a2a+p2p", CP + "=3"],
        [f"needs {SIZES}", "context_parallel_size = 3", "use cp_comm_type p2p or all_gather"],
    ),
    "a prime number of ranks": (
        [f"{KIND}=a2a+p2p", CP + "=2"],
        ["context_parallel_size = 2", "use cp_comm_type p2p, all_gather or a2a"],
    ),
    "wrong product": (
        [f"{KIND}=a2a+p2p", CP + "=8", f"{SIZES}=[2, 2]"],
        [f"{SIZES} = [2, 2]", "context_parallel_size = 8, not 2*2 = 4", f"use {SIZES} = [4, 2]"],
    ),
    "sizes of one rank": ([f"{KIND}=a2a+p2p", f"{SIZES}=[2, 2]"], ["context_parallel_size = 1, not 2*2 = 4"]),
    "three levels": (
        [f"{KIND}=a2a+p2p", CP + "=8", f"{SIZES}=[2, 2, 2]"],
        ["has 3 levels, a2a+p2p has two", f"use {SIZES} = [4, 2]"],
    ),
    "one level": ([f"{KIND}=a2a+p2p", CP + "=8", f"{SIZES}=[8]"], ["has 1 levels", f"use {SIZES} = [4, 2]"]),
    # heads
    "heads over ranks": (
        [f"{KIND}=a2a", CP + "=6"],
        ["a2a deals", "tp = 8 query heads", "context_parallel_size = 6", "of 1, 2, 4 or 8", "p2p, all_gather or"]
        + [f"a2a+p2p with {SIZES} = [2, 3]"],
    ),
    "heads of a tp rank over ranks": (
        [f"{KIND}=[p2p, a2a]", CP + "=8", TP + "=2"],
        ["tp = 4 query heads", "= 8 ranks", "a size of 1, 2 or 4", f"{SIZES} = [4, 2]"],
    ),
    "heads over ranks, no hierarchy": (
        [f"{KIND}=a2a", CP + "=5"],
        ["8 query heads", "= 5 ranks", "a size of 1, 2, 4 or 8, or cp_comm_type p2p or all_gather"],
    ),
    "heads over inner ranks": (
        [f"{KIND}=a2a+p2p", CP + "=6", f"{SIZES}=[3, 2]"],
        ["a2a+p2p deals", "8 query heads over 3 inner ranks", f"use {SIZES} = [2, 3], cp_comm_type p2p or"],
    ),
    # windows
    "window ahead": (
        ["model.window_size=[128, 5]"],
        ["window_size = [128, 5] looks 5 tokens ahead", "causal hides", "use [128, 0], or attn_mask_type no_mask"],
    ),
    "negative window": (["model.window_size=[-2, 0]"], ["window_size = [-2, 0]", "-1 for no limit", "use [-1, 0]"]),
    "window beyond numbers": (["model.window_size=[99999999999, 0]"], ["use [2147483647, 0]"]),
    "softmax with weights": (
        ["model.softmax_type=learnable"],
        ["softmax_type = learnable", "a weight per head", "vanilla", "off-by-one"],
    ),
}

RIGHT: list[list[str]] = [
    [f"{KIND}=a2a", CP + "=8"],
    [f"{KIND}=a2a", CP + "=4", TP + "=2"],
    [f"{KIND}=[[a2a, 1], [p2p, 1]]", CP + "=2"],
    [f"{KIND}=[a2a, [all_gather, 1]]", CP + "=2"],
    [f"{KIND}=a2a+p2p"],
    [f"{KIND}=a2a+p2p", f"{SIZES}=[1, 1]"],
    [f"{KIND}=a2a+p2p", CP + "=8", f"{SIZES}=[8, 1]"],
    [f"{KIND}=a2a+p2p", CP + "=6", f"{SIZES}=[1, 6]"],
    [f"{KIND}=[p2p, a2a+p2p]", CP + "=8", f"{SIZES}=[2, 4]"],
    ["model.window_size=[0, 0]", CP + "=2"],
    ["model.window_size=[128, -1]"],
    ["model.window_size=[-1, -1]"],
    ["model.window_size=[-1, 3]", "model.attn_mask_type=no_mask"],
]


def problem(overrides: list[str]) -> str | None:
    """The first line any rule has, files aside."""
    config = parsed(["data.seq_length=960", *overrides])
    assert config is not None
    return support.first_problem(config, None, check_files=False)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_attention_is_refused(case: str) -> None:
    overrides, expected = WRONG[case]
    message = problem(overrides)
    assert message is not None and "\n" not in message
    assert not [part for part in expected if part not in message], message


@pytest.mark.parametrize("overrides", RIGHT)
def test_right_attention_passes(overrides: list[str]) -> None:
    assert problem(overrides) is None


@pytest.mark.parametrize("comm_type", COMM_TYPES)
def test_every_type_passes(comm_type: str) -> None:
    sizes = [f"{SIZES}=[2, 2]"] if comm_type == "a2a+p2p" else []
    assert problem([f"{KIND}={comm_type}", CP + "=4", *sizes]) is None


def test_each_rule_refuses_something() -> None:
    configs = [parsed(overrides) for overrides, _ in WRONG.values()]
    tripped = {rule.__name__ for rule in ATTENTION_RULES for config in configs if config and list(rule(config, None))}
    assert tripped == {rule.__name__ for rule in ATTENTION_RULES}


@pytest.mark.parametrize("cp", range(2, 25))
def test_suggested_hierarchies_would_do(cp: int) -> None:
    """What is proposed for a2a and a2a+p2p passes both rules; nothing is only where nothing would."""
    for heads in (1, 2, 3, 6, 8, 12, 16, 24):
        shape = [f"model.num_attention_heads={heads}", "model.num_query_groups=null", "model.kv_channels=8"]

        def complaints(*more: str, shape: list[str] = shape) -> list[Any]:
            config = parsed([*shape, f"{CP}={cp}", *more])
            assert config is not None
            return [*hierarchy_multiplies_to_cp(config, None), *ulysses_splits_heads(config, None)]

        (missing,) = complaints(f"{KIND}=a2a+p2p")
        found = re.search(r"sizes = (\[\d+, \d+\])$", missing)
        would_do = [n for n in range(2, cp) if cp % n == 0 and heads % n == 0]
        assert bool(found) == bool(would_do)
        if found:
            assert not complaints(f"{KIND}=a2a+p2p", f"{SIZES}={found[1]}")
            inner, outer = yaml.safe_load(found[1])
            assert inner == max(would_do) and inner * outer == cp
        for line in complaints(f"{KIND}=a2a"):
            offered = re.search(r"sizes = (\[\d+, \d+\])", line)
            assert (offered and offered[1]) == (found and found[1])
            sizes = re.findall(r"\d+", line.split("a size of ")[1].split(", or cp_comm_type")[0])
            assert sizes and all(heads % int(size) == 0 for size in sizes)


def test_huge_numbers_are_answered_at_once() -> None:
    prime = 2**31 - 1
    config = parsed([f"model.num_attention_heads={prime}", f"{CP}={prime}", f"{KIND}=a2a+p2p"])
    assert config is not None and "a2a" in next(hierarchy_multiplies_to_cp(config, None))
