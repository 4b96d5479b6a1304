"""The rotary part of a Hugging Face config.json, in both of its spellings, and the way back.

transformers 5 writes `rope_parameters`, with the theta inside; before there were `rope_theta` and `rope_scaling`, and
both are read (transformers/modeling_rope_utils.py).
"""

from __future__ import annotations

import json
import math
from typing import Any

from megacp.config import ModelConfig, RopeScaling

THETA = 10000.0
# What the rule of each type depends on; the names are ours and theirs.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_POSITIONS = "original_max_position_embeddings"
# RopeScaling's fields by type; what else it has is without effect there.
_FIELDS = {
    "none": (),
    "linear": ("factor",),
    "llama3": (*_NEEDED["llama3"], _POSITIONS),
    "yarn": (
        *("factor", _POSITIONS, "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "correction_range_round_to_int"),
    ),
}


def shown(value: Any) -> str:
    """A value as its file spells it, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_rope(values: dict[str, Any], remarks: list[str]) -> dict[str, Any]:
    """rotary_base and rope_scaling of a config.json. ValueError names a rule or number that is not implemented."""
    spelling = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(spelling) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{spelling} = {shown(rope)} is not implemented, only one rule for all layers")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" and kind not in _NEEDED:
        raise ValueError(f"{spelling} of type {shown(kind)} is not implemented: there are {', '.join(_NEEDED)}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"{spelling}.partial_rotary_factor = {shown(rope['partial_rotary_factor'])} is not implemented"
        )
    for key in sorted(rope.keys() - {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_keys(kind)}):
        remarks.append(f"{spelling}.{key} = {shown(rope[key])} is passed over: type {kind} has no use for it")
    theta = rope.get("rope_theta") or values.get("rope_theta") or THETA
    if kind == "default":
        return {"rotary_base": theta, "rope_scaling": RopeScaling()}
    missing = [key for key in _NEEDED[kind] if key not in rope]
    if missing:
        raise ValueError(f"{spelling} of type {kind} lacks {', '.join(missing)}")
    given = {key: rope[key] for key in _FIELDS[kind] if rope.get(key) is not None}
    if kind != "linear":
        own = values.get(_POSITIONS) or rope.get(_POSITIONS)
        given[_POSITIONS] = own or values["max_position_embeddings"]
    scaling = _yarn(given, rope, values) if kind == "yarn" else given
    return {"rotary_base": theta, "rope_scaling": RopeScaling(type=kind, **scaling)}


def _keys(kind: str) -> tuple[str, ...]:
    return (*_FIELDS.get(kind, ()), *(("attention_factor", "truncate") if kind == "yarn" else ()))


def _yarn(given: dict[str, Any], rope: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """YaRN's numbers, of which zero means the default; an `attention_factor` becomes the mscale that makes it."""
    scaling = {key: value for key, value in given.items() if value}
    scaling.setdefault("factor", values["max_position_embeddings"] / given[_POSITIONS])
    if rope.get("truncate") is False:
        scaling["correction_range_round_to_int"] = False
    if not {"mscale", "mscale_all_dim"} <= scaling.keys():
        scaling |= {"mscale": None, "mscale_all_dim": None}
    wanted = rope.get("attention_factor")
    if wanted is not None and (wanted < 1 or scaling["factor"] <= 1):
        raise ValueError(f"attention_factor = {shown(wanted)} with factor = {scaling['factor']} is not implemented")
    if wanted is not None:
        scaling |= {"mscale": (wanted - 1) / (0.1 * math.log(scaling["factor"])), "mscale_all_dim": 0.0}
    return scaling


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """rope_theta and rope_scaling of a model, as every release of transformers reads them."""
    scaling = model.rope_scaling
    if scaling.type == "none":
        return {"rope_theta": model.rotary_base, "rope_scaling": None}
    rope = {"rope_type": scaling.type, **{key: getattr(scaling, key) for key in _FIELDS[scaling.type]}}
    if scaling.type == "yarn":
        rope["truncate"] = rope.pop("correction_range_round_to_int")
        if scaling.mscale_all_dim == 0 and scaling.mscale is not None:
            rope["attention_factor"] = 0.1 * scaling.mscale * math.log(scaling.factor) + 1.0
        if not (scaling.mscale and scaling.mscale_all_dim):
            del rope["mscale"], rope["mscale_all_dim"]
    return {"rope_theta": model.rotary_base, "rope_scaling": rope}


def stretch(scaling: RopeScaling) -> dict[str, Any]:
    """What rotary frequencies depend on beside theta, by dotted name."""
    fields = {"type": scaling.type, **{key: getattr(scaling, key) for key in _FIELDS[scaling.type]}}
    if None in (scaling.mscale, scaling.mscale_all_dim) and scaling.type == "yarn":
        fields |= {"mscale": None, "mscale_all_dim": None}
    return {f"rope_scaling.{key}": value for key, value in fields.items()}
