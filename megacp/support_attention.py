"""The rules of support.py about attention: who exchanges what with whom, and who sees whom."""

from __future__ import annotations

import difflib
import math
from typing import Any

from megacp.support_data import Problems, Rule, any_of, divisors_near

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
HIERARCHY = "parallel.hierarchical_context_parallel_sizes"


# --- who exchanges what


def comm_types(config: Any) -> list[str]:
    """The different types among the layers, in order; empty where the list does not fit the model."""
    given = config.parallel.cp_comm_type
    if isinstance(given, str):
        return [given]  # not once per layer: their number may be a slip
    try:
        return list(dict.fromkeys(config.parallel.layer_comm_types(config.model.num_layers)))
    except ValueError:
        return []


def comm_types_are_known(config: Any, world_size: int | None) -> Problems:
    if not comm_types(config):
        try:
            config.parallel.layer_comm_types(config.model.num_layers)
        except ValueError as error:
            yield f"parallel.cp_comm_type {error}"
    for name in comm_types(config):
        if name not in COMM_TYPES:
            near = difflib.get_close_matches(name.lower(), COMM_TYPES, 1)
            hint = f"did you mean {near[0]}? There are {', '.join(COMM_TYPES)}" if near else f"use {any_of(COMM_TYPES)}"
            yield f"parallel.cp_comm_type = {name} is not known: {hint}"


def local_heads(config: Any) -> int:
    """Query heads of one tensor-parallel rank."""
    return config.model.num_attention_heads // config.parallel.tensor_model_parallel_size


def _levels(config: Any) -> list[int] | None:
    """[inner, outer] of a hierarchy that would do, with as much as possible in the cheap inner level; or None."""
    cp = config.parallel.context_parallel_size
    shared = math.gcd(cp, local_heads(config))
    if shared == cp:
        shared //= next((n for n in range(2, min(math.isqrt(cp), 100_000) + 1) if cp % n == 0), cp)
    return [shared, cp // shared] if shared > 1 else None


def _hierarchy_that_fits(config: Any) -> str:
    levels = _levels(config)
    dealt = () if local_heads(config) % config.parallel.context_parallel_size else ("a2a",)
    return f"{HIERARCHY} = {levels}" if levels else f"cp_comm_type {any_of(['p2p', 'all_gather', *dealt])}"


def hierarchy_multiplies_to_cp(config: Any, world_size: int | None) -> Problems:
    sizes, cp = config.parallel.hierarchical_context_parallel_sizes, config.parallel.context_parallel_size
    if "a2a+p2p" not in comm_types(config):
        if sizes is not None:
            yield f"{HIERARCHY} = {sizes} needs a layer of parallel.cp_comm_type a2a+p2p, there is none: leave it out"
    elif sizes is None and cp > 1:
        yield (
            f"parallel.cp_comm_type a2a+p2p needs {HIERARCHY}, [inner, outer] with the product "
            f"parallel.context_parallel_size = {cp}: use {_hierarchy_that_fits(config)}"
        )
    elif sizes is not None and len(sizes) != 2:
        yield (
            f"{HIERARCHY} = {sizes} has {len(sizes)} levels, a2a+p2p has two, [inner, outer]: "
            f"use {_hierarchy_that_fits(config)}"
        )
    elif sizes is not None and math.prod(sizes) != cp:
        factors = "*".join(map(str, sizes))
        yield (
            f"{HIERARCHY} = {sizes} must multiply to parallel.context_parallel_size = {cp}, not {factors} = "
            f"{math.prod(sizes)}: use {_hierarchy_that_fits(config)}"
        )


def ulysses_splits_heads(config: Any, world_size: int | None) -> Problems:
    """All-to-alls deal whole heads; K/V heads that are too few are repeated, query heads are not."""
    p, heads = config.parallel, local_heads(config)
    cp, sizes = p.context_parallel_size, p.hierarchical_context_parallel_sizes
    levels, given = _levels(config), f"model.num_attention_heads / tp = {heads} query heads"
    hierarchy = f"a2a+p2p with {HIERARCHY} = {levels}" if levels else None
    if "a2a" in comm_types(config) and heads % cp:
        ways = ["p2p", "all_gather", *([hierarchy] if hierarchy else [])]
        yield (
            f"parallel.cp_comm_type a2a deals {given} over parallel.context_parallel_size = {cp} ranks, which must "
            f"divide them: use a size of {divisors_near(heads, cp)}, or cp_comm_type {any_of(ways)}"
        )
    if "a2a+p2p" in comm_types(config) and sizes and heads % sizes[0]:
        ways = [*([f"{HIERARCHY} = {levels}"] if levels else []), "cp_comm_type p2p", "cp_comm_type all_gather"]
        yield (
            f"parallel.cp_comm_type a2a+p2p deals {given} over {sizes[0]} inner ranks ({HIERARCHY} = {sizes}), which "
            f"must divide them: use {any_of(ways)}"
        )


# --- who sees whom


def window_fits_mask(config: Any, world_size: int | None) -> Problems:
    window, mask = config.model.window_size, config.model.attn_mask_type
    if window is None:
        return
    left, right = window
    if not all(-1 <= n < 2**31 for n in window):
        nearest = [min(max(n, -1), 2**31 - 1) for n in window]
        yield f"model.window_size = {window} must be counts of neighbours, -1 for no limit: use {nearest}"
    elif mask == "causal" and right > 0:
        yield (
            f"model.window_size = {window} looks {right} tokens ahead, which attn_mask_type causal hides: "
            f"use [{left}, 0], or attn_mask_type no_mask"
        )


def windowed(model: Any) -> bool:
    """Whether the window hides more than the mask does."""
    left, right = model.window_size or (-1, -1)
    return left >= 0 or (right >= 0 and model.attn_mask_type != "causal")


def softmax_has_no_weights(config: Any, world_size: int | None) -> Problems:
    if config.model.softmax_type == "learnable":
        yield (
            "model.softmax_type = learnable needs a weight per head, which the model has not: use vanilla, or "
            "off-by-one with attention_backend transformer_engine"
        )


ATTENTION_RULES: tuple[Rule, ...] = (
    comm_types_are_known,
    hierarchy_multiplies_to_cp,
    ulysses_splits_heads,
    window_fits_mask,
    softmax_has_no_weights,
)
