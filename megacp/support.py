"""What may be combined: one small function per rule, run before any process group exists and without torch.

A rule is a generator: `rule(config, world_size)` yields one line per violation, with the rule, the numbers
that break it and the nearest values that would do. `world_size` is None where nobody knows it yet.
Names in messages are dotted config keys, to be pasted as overrides.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megacp.support_attention import ATTENTION_RULES
from megacp.support_backend import BACKEND_RULES, cpu_problems, cuda_problems
from megacp.support_data import (
    DATA_RULES,
    FILE_RULES,
    Problems,
    Rule,
    any_of,
    divisors_near,
    multiples_near,
    unused_loss_masks,
)

AXES = ("tp", "cp", "ep", "dp", "pp")


def first_problem(config: Any, world_size: int | None, check_files: bool = True) -> str | None:
    """The first line any rule has about `config`, or None. `check_files=False` leaves the disk alone."""
    rules = RULES + FILE_RULES if check_files else RULES
    return next((problem for rule in rules for problem in rule(config, world_size)), None)


def oversights(config: Any) -> Problems:
    """What runs, but is hardly meant."""
    model, length = config.model, config.data.seq_length
    reach, plain = model.max_position_embeddings, model.rope_scaling.type == "none"
    if model.position_embedding_type == "rope" and plain and reach is not None and reach < length:
        yield (
            f"data.seq_length = {length} exceeds model.max_position_embeddings = {reach}, what the model was made for: "
            "it has met no position beyond; see model.rope_scaling"
        )
    yield from unused_loss_masks(config)


# --- the grid


def _data_parallel_size(config: Any, world_size: int | None) -> int:
    """1 where the number of ranks is not known."""
    p = config.parallel
    ranks = p.tensor_model_parallel_size * p.context_parallel_size * p.pipeline_model_parallel_size
    return max(1, (world_size or 1) // ranks)


def world_size_is_a_multiple(config: Any, world_size: int | None) -> Problems:
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    sizes = [getattr(config.parallel, name) for name in names]
    ranks = math.prod(sizes)
    if world_size is None or world_size % ranks == 0:
        return
    ways = [f"start {multiples_near(ranks, world_size)} processes"]
    for name, size in zip(names, sizes, strict=True):
        others = ranks // size
        if size > 1 and world_size % others == 0:
            ways.append(f"set parallel.{name} to {divisors_near(world_size // others, size)}")
    factors = "*".join(map(str, sizes))
    yield (
        f"world size {world_size} must be tp*cp*pp*dp, a multiple of tp*cp*pp = {factors} = {ranks}: "
        + ", or ".join(ways)
    )


def order_names_every_axis(config: Any, world_size: int | None) -> Problems:
    """An axis may be left out where its size is 1 (Megatron-LM, parallel_state.py, RankGenerator)."""
    p = config.parallel
    given = p.order.lower().split("-")
    sizes = {
        "tp": p.tensor_model_parallel_size,
        "cp": p.context_parallel_size,
        "ep": p.expert_model_parallel_size,
        "dp": _data_parallel_size(config, world_size),
        "pp": p.pipeline_model_parallel_size,
    }
    faults = [f"does not know {axis!r}" for axis in given if axis not in AXES]
    faults += [f"names {axis} {given.count(axis)} times" for axis in AXES if given.count(axis) > 1]
    faults += [f"lacks {axis}, whose size is {size}" for axis, size in sizes.items() if size > 1 and axis not in given]
    for fault in faults:
        yield f"parallel.order = {p.order} {fault}: name tp, cp, ep, dp and pp once each, e.g. tp-cp-ep-dp-pp"


def tensor_parallel_divides(config: Any, world_size: int | None) -> Problems:
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    cut = {
        "model.num_attention_heads": m.num_attention_heads,
        "model.num_query_groups": m.kv_heads,
        "model.ffn_hidden_size": m.ffn_size,
    }
    padded, multiple = m.padded_vocab_size, m.make_vocab_size_divisible_by
    rule = f"parallel.tensor_model_parallel_size = {tp} must divide"
    allowed = divisors_near(math.gcd(padded, *cut.values()), tp)
    for name, number in cut.items():
        if number % tp:
            yield f"{rule} {name} = {number}: use {allowed}, or {name} = {multiples_near(tp, number)}"
    if padded % tp:
        yield (
            f"{rule} the padded vocabulary = {padded} (model.vocab_size = {m.vocab_size} up to a multiple of "
            f"{multiple}): use {allowed}, or model.make_vocab_size_divisible_by = {math.lcm(multiple, tp)}"
        )


def sequence_parallel_needs_tensor_parallel(config: Any, world_size: int | None) -> Problems:
    tp = config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and tp == 1:
        yield (
            f"parallel.sequence_parallel needs parallel.tensor_model_parallel_size of 2 or more, not {tp}: "
            "raise it, or set sequence_parallel to false"
        )


def sequence_splits_in_chunks(config: Any, world_size: int | None) -> Problems:
    """Two chunks per rank; masked documents and conversations are sequences of their own, which data/ pads."""
    data, cp = config.data, config.parallel.context_parallel_size
    length = data.seq_length
    if length % (2 * cp) and not (data.mask_between_documents or data.sft):
        yield (
            f"data.seq_length = {length} must be a multiple of 2 * parallel.context_parallel_size = 2*{cp} = "
            f"{2 * cp}: use {multiples_near(2 * cp, length)}"
        )


def global_batch_splits(config: Any, world_size: int | None) -> Problems:
    micro, total = config.train.micro_batch_size, config.train.global_batch_size
    dp = _data_parallel_size(config, world_size)
    if total % (micro * dp) and not config.parallel.hybrid_context_parallel:
        yield (
            f"train.global_batch_size = {total} must be a multiple of train.micro_batch_size * data parallel "
            f"size = {micro}*{dp} = {micro * dp}: use {multiples_near(micro * dp, total)}"
        )


def hybrid_needs_room(config: Any, world_size: int | None) -> Problems:
    hybrid, room = config.parallel.hybrid_context_parallel, config.parallel.max_seqlen_per_dp_cp_rank
    if room is not None and not hybrid:
        yield (
            f"parallel.max_seqlen_per_dp_cp_rank = {room} does nothing without parallel.hybrid_context_parallel: "
            "leave it out"
        )
    if hybrid and room is None:
        yield (
            "parallel.hybrid_context_parallel needs parallel.max_seqlen_per_dp_cp_rank, the tokens one rank "
            f"can hold: set it, e.g. to data.seq_length = {config.data.seq_length}"
        )


def device_fits(config: Any, world_size: int | None) -> Problems:
    device = config.train.device
    if config.train.params_dtype == "float64" and device != "cpu":
        yield f"train.params_dtype float64 needs train.device cpu, not {device}: set cpu, or use float32"
    if device != "auto":
        yield from cuda_problems(config) if device == "cuda" else cpu_problems(config)
    if config.parallel.distributed_backend == "nccl" and device == "cpu":
        yield "parallel.distributed_backend nccl needs GPUs, but train.device = cpu: use gloo or auto"


# --- the model


def heads_fill_hidden(config: Any, world_size: int | None) -> Problems:
    hidden, heads = config.model.hidden_size, config.model.num_attention_heads
    if config.model.kv_channels is None and hidden % heads:
        yield (
            f"model.hidden_size = {hidden} must be a multiple of model.num_attention_heads = {heads}: "
            f"use {multiples_near(heads, hidden)}, or {divisors_near(hidden, heads)} heads, "
            "or set model.kv_channels"
        )


def query_groups_divide_heads(config: Any, world_size: int | None) -> Problems:
    heads, groups = config.model.num_attention_heads, config.model.kv_heads
    if heads % groups:
        yield (
            f"model.num_query_groups = {groups} must divide model.num_attention_heads = {heads}: "
            f"use {divisors_near(heads, groups)}"
        )


def rotary_width_is_even(config: Any, world_size: int | None) -> Problems:
    """Rotary channels come in pairs."""
    m, head = config.model, config.model.head_dim
    if m.position_embedding_type == "rope" and head % 2:
        yield f"heads of an odd width, kv_channels = {head}, cannot be rotated: use {multiples_near(2, head)}"
        return
    width = m.rotary_percent * head
    even = round(width / 2) > 0 and math.isclose(width, 2 * round(width / 2), rel_tol=1e-6)
    if m.position_embedding_type != "rope" or even:
        return
    pairs = sorted({max(1, math.floor(width / 2)), math.ceil(width / 2)})
    percents = [f"{2 * n / head:.6g}" for n in pairs if 2 * n <= head]
    yield (
        f"model.rotary_percent * kv_channels = {m.rotary_percent:g}*{head} = {width:g} must be even: "
        f"use model.rotary_percent = {any_of(percents)}"
    )


def rope_scaling_stretches(config: Any, world_size: int | None) -> Problems:
    positions, scaling, name = (
        config.model.position_embedding_type,
        config.model.rope_scaling,
        "model.rope_scaling",
    )
    if scaling.type == "none" and scaling.factor != 1:
        yield f"{name}.factor = {scaling.factor:g} does nothing with type none: use linear, llama3 or yarn"
    if scaling.type != "none" and positions != "rope":
        yield f"{name}.type {scaling.type} needs position_embedding_type rope, not {positions}: use type none"
    if scaling.factor < 1:
        yield f"{name}.factor = {scaling.factor:g} must be 1 or more, the new context length over the old"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.type == "llama3" and high <= low:
        yield f"{name}.high_freq_factor = {high:g} must exceed low_freq_factor = {low:g}: use e.g. 4 and 1"
    fast, slow = scaling.beta_fast, scaling.beta_slow
    base = config.model.rotary_base
    if scaling.type == "yarn" and base <= 1:
        yield f"model.rotary_base = {base:g} must exceed 1 with rope_scaling.type yarn: use e.g. 10000"
    if scaling.type == "yarn" and fast <= slow:
        yield f"{name}.beta_fast = {fast:g} must exceed beta_slow = {slow:g}: use e.g. 32 and 1"


def learned_positions_reach(config: Any, world_size: int | None) -> Problems:
    rows, length = config.model.max_position_embeddings, config.data.seq_length
    if config.model.position_embedding_type == "learned_absolute" and (rows is None or rows < length):
        yield (
            f"model.max_position_embeddings = {rows} must reach data.seq_length = {length}, as positions are "
            f"learned_absolute: use {length} or more" + (f", or seq_length {rows}" if rows else "")
        )


def activation_is_one(config: Any, world_size: int | None) -> Problems:
    if config.model.swiglu and config.model.openai_gelu:
        yield "model.swiglu and model.openai_gelu are both true, an MLP has one activation: set one to false"


# --- the optimizer


def learning_rates_are_ordered(config: Any, world_size: int | None) -> Problems:
    lr = config.optimizer.lr
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(config.optimizer, name)
        if value > lr:
            yield f"optimizer.{name} = {value:g} must not exceed optimizer.lr = {lr:g}: use {lr:g} or less"


def schedule_fits(config: Any, world_size: int | None) -> Problems:
    o = config.optimizer
    source = "train.train_iters" if o.lr_decay_iters is None else "optimizer.lr_decay_iters"
    decay, warmup, final = (
        o.lr_decay_iters or config.train.train_iters,
        o.lr_warmup_iters,
        o.lr_wsd_decay_iters,
    )
    if warmup >= decay:
        yield f"optimizer.lr_warmup_iters = {warmup} must be below {source} = {decay}: use 0 to {decay - 1}"
    elif o.lr_decay_style == "WSD" and not 0 < (final or 0) <= decay - warmup:
        yield (
            f"optimizer.lr_wsd_decay_iters = {final}: WSD decays within the {decay - warmup} iterations from "
            f"lr_warmup_iters = {warmup} to {source} = {decay}: use 1 to {decay - warmup}"
        )


def wsd_decay_has_its_style(config: Any, world_size: int | None) -> Problems:
    o = config.optimizer
    given = {"lr_wsd_decay_iters": o.lr_wsd_decay_iters is not None}
    given["lr_wsd_decay_style"] = "lr_wsd_decay_style" in o.model_fields_set
    for name in [name for name, is_set in given.items() if is_set and o.lr_decay_style != "WSD"]:
        yield (
            f"optimizer.{name} = {getattr(o, name)} does nothing with optimizer.lr_decay_style {o.lr_decay_style}: "
            "set that to WSD, or leave it out"
        )


def weight_decay_rises_as_told(config: Any, world_size: int | None) -> Problems:
    o = config.optimizer
    start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
    end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
    if end < start:
        yield f"optimizer.end_weight_decay = {end:g} is below start_weight_decay = {start:g}: use {start:g}"
    elif end > start and o.weight_decay_incr_style == "constant":
        yield (
            f"optimizer.weight_decay_incr_style constant cannot go from start_weight_decay = {start:g} to "
            f"end_weight_decay = {end:g}: use linear or cosine, or leave both out"
        )


# --- the loop


def recompute_is_consistent(config: Any, world_size: int | None) -> Problems:
    train, most = config.train, config.model.num_layers
    granularity, layers, modules = (
        train.recompute_granularity,
        train.recompute_num_layers,
        train.recompute_modules,
    )
    if layers is not None and granularity != "full":
        yield (
            f"train.recompute_num_layers = {layers} needs recompute_granularity full, not {granularity}: "
            "set it to full, or leave recompute_num_layers out"
        )
    if layers is not None and layers > most:
        yield f"train.recompute_num_layers = {layers} exceeds model.num_layers = {most}: use {most} or less"
    if "recompute_modules" in train.model_fields_set and granularity != "selective":
        yield (
            f"train.recompute_modules = {modules} needs recompute_granularity selective, not {granularity}: "
            "set it to selective, or leave recompute_modules out"
        )
    if not modules or len(modules) != len(set(modules)):
        yield f"train.recompute_modules = {modules} must name a module, each once: use core_attn, mlp or both"


def saving_has_a_folder(config: Any, world_size: int | None) -> Problems:
    saving = {
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "train.exit_interval": config.train.exit_interval,
        "train.exit_duration_in_mins": config.train.exit_duration_in_mins,
    }
    for name, value in saving.items():
        if value is not None and config.checkpoint.save is None:
            yield f"{name} = {value:g} needs a folder to save to: set checkpoint.save, or leave {name} out"


def finetuning_has_weights(config: Any, world_size: int | None) -> Problems:
    c = config.checkpoint
    if c.finetune and (c.load is None or c.load == c.save):
        yield (
            f"checkpoint.finetune needs checkpoint.load, the checkpoint whose weights to take, not {c.load}: set it "
            "to another folder than checkpoint.save, or set finetune to false"
        )


def weights_come_from_one_place(config: Any, world_size: int | None) -> Problems:
    """A run goes on from `save` or, rolled back, from a checkpoint in it; any other `load` is a beginning."""
    c, source = config.checkpoint, config.train.init_from
    if source is None or c.load is None:
        return
    load = Path(c.load).resolve()
    if c.finetune or c.save is None or Path(c.save).resolve() not in (load, *load.parents):
        yield (
            f"train.init_from = {source} and checkpoint.load = {c.load} both give the weights to begin with: leave one "
            "of them out"
        )


def wandb_has_a_project(config: Any, world_size: int | None) -> Problems:
    c = config.logging
    given = {"wandb_exp_name": c.wandb_exp_name is not None, "wandb_mode": "wandb_mode" in c.model_fields_set}
    for name in [name for name, is_set in given.items() if is_set and c.wandb_project is None]:
        yield (
            f"logging.{name} = {getattr(c, name)} does nothing without logging.wandb_project: set that, or leave it out"
        )


# --- not built yet; rows go as features come


# (dotted key, values that work, what to do)
NOT_BUILT: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("parallel.pipeline_model_parallel_size", (1,), "set it to 1"),
    ("parallel.expert_model_parallel_size", (1,), "set it to 1"),
    ("parallel.expert_tensor_parallel_size", (None,), "leave it out"),
    ("parallel.hybrid_context_parallel", (False,), "set it to false"),
)


def not_built_yet(config: Any, world_size: int | None) -> Problems:
    for name, working, instead in NOT_BUILT:
        part, key = name.split(".")
        value = getattr(getattr(config, part), key)
        if value not in working:
            yield f"{name} = {value} is not supported yet: {instead}"


# What is not built is told early: nothing else about such a config matters.
RULES: tuple[Rule, ...] = (
    not_built_yet,
    heads_fill_hidden,
    query_groups_divide_heads,
    rotary_width_is_even,
    rope_scaling_stretches,
    learned_positions_reach,
    activation_is_one,
    world_size_is_a_multiple,
    order_names_every_axis,
    tensor_parallel_divides,
    sequence_parallel_needs_tensor_parallel,
    sequence_splits_in_chunks,
    global_batch_splits,
    *ATTENTION_RULES,
    *BACKEND_RULES,
    hybrid_needs_room,
    device_fits,
    learning_rates_are_ordered,
    schedule_fits,
    wsd_decay_has_its_style,
    weight_decay_rises_as_told,
    recompute_is_consistent,
    saving_has_a_folder,
    finetuning_has_weights,
    weights_come_from_one_place,
    wandb_has_a_project,
    *DATA_RULES,
)
