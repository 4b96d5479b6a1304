"""The rules of support.py about attention backends: what native attention and TransformerEngine (TE) can compute.

Native attention runs everywhere and knows the plain softmax only. TE needs GPUs, and what it can do depends on its
release: FIRST_RELEASE, PACKED_SOFTMAX and EXCHANGES are all that the product knows of that (tests/golden/te_api.json).
TE's rules are pure functions of the configuration and a release, so that they can be asked about any.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any, NamedTuple

from megacp.support_attention import COMM_TYPES, comm_types, local_heads, windowed
from megacp.support_data import Problems, Rule, any_of, multiples_near

NATIVE = "model.attention_backend native"

# The oldest release that is called, and the first ones with an argument that not all later ones have.
OLDEST = "1.8"
FIRST_RELEASE = {
    "cp_comm_type": "1.10",
    "pad_between_seqs": "2.2",
    "softmax_type": "2.8",
    "softcap": "2.20",
}
# The first release whose kernels take another softmax for packed sequences.
PACKED_SOFTMAX = "2.12"


class Exchange(NamedTuple):
    """The first releases in which a cp_comm_type serves equal rows, packed sequences (thd), a window; None: not yet."""

    rows: str
    packed: str
    window: str | None


EXCHANGES = {
    "p2p": Exchange("1.8", "1.8", None),
    "all_gather": Exchange("1.10", "2.18", "2.0"),
    "a2a": Exchange("1.11", "2.10", "1.11"),
    "a2a+p2p": Exchange("1.12", "2.19", None),
}


def te_version() -> str | None:
    """The installed release of TransformerEngine; None where it, or its part for PyTorch, is missing."""
    # Wheels come in parts, CUDA's and PyTorch's in packages of their own; a build from source is one package.
    parts = ["transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch"]
    installed = {}
    for name in ("transformer-engine", *parts):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if parts[2] not in installed and installed.keys() & set(parts):
        return None
    return installed.get("transformer-engine")


def release(version: str) -> tuple[int, ...]:
    """`2.20.0.dev0+abc` -> (2, 20, 0); () for what is no version, older than any."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def has(version: str, first: str) -> bool:
    """Whether `version` is `first` or later."""
    return release(version) >= release(first)


def te_serves(config: Any) -> bool:
    """Whether attention_backend auto is to choose TransformerEngine where there are GPUs."""
    return config.train.device != "cpu" and next(te_problems(config, te_version()), None) is None


def backend_for(config: Any, cuda: bool) -> str:
    """model.attention_backend with auto decided, once it is known whether there are GPUs.

    One backend serves all layers, so a release of TransformerEngine that lacks one layer's type serves none.
    """
    backend = config.model.attention_backend
    if backend != "auto":
        return backend
    return "transformer_engine" if cuda and te_serves(config) else "native"


# --- which backend


def native_attention_serves(config: Any, world_size: int | None) -> Problems:
    backend = config.model.attention_backend
    if backend == "native":
        yield from native_problems(config)
    elif backend == "auto" and next(native_problems(config), None) and not te_serves(config):
        reason = next(te_problems(config, te_version()), "train.device = cpu")
        yield from native_problems(config, reason.partition(": ")[0])


def native_problems(config: Any, why_not_te: str | None = None) -> Problems:
    """What native attention cannot compute, nowhere; `why_not_te` where attention_backend auto had no choice."""
    m = config.model
    if why_not_te is None:
        kernels, way = "with native attention: PyTorch's flash kernels", ", or attention_backend transformer_engine"
    else:
        kernels, way = f"needs TransformerEngine ({why_not_te}): native attention's flash kernels", ""
    if m.softmax_type == "off-by-one":
        yield f"model.softmax_type = off-by-one {kernels} have the plain softmax only, use vanilla{way}"
    if m.attn_logit_softcapping is not None:
        yield f"model.attn_logit_softcapping = {m.attn_logit_softcapping:g} {kernels} cap no scores, leave it out{way}"
    if m.attention_dropout > 0:
        yield (
            f"model.attention_dropout = {m.attention_dropout:g} {kernels} have no dropout, set it to 0 and use "
            f"model.hidden_dropout{way}"
        )


def transformer_engine_serves(config: Any, world_size: int | None) -> Problems:
    if config.model.attention_backend == "transformer_engine":
        yield from te_problems(config, te_version())


def cpu_problems(config: Any) -> Problems:
    """What does not run without GPUs; for train.device = auto asked once it is known that there are none."""
    if config.model.attention_backend == "transformer_engine":
        yield "model.attention_backend = transformer_engine needs GPUs, train.device is cpu: use native or auto"
    else:
        yield from native_problems(config, "train.device is cpu" if config.model.attention_backend == "auto" else None)


def cuda_problems(config: Any) -> Problems:
    """What does not run on GPUs; for train.device = auto asked once it is known that there are some."""
    if config.model.attention_backend != "transformer_engine":
        yield from _flash_problems(config, "flash attention", "train.device=cpu")
    if config.model.attention_backend == "native":
        yield from native_problems(config)


def _flash_problems(config: Any, kernels: str, instead: str) -> Problems:
    dtype, head = config.train.params_dtype, config.model.head_dim
    if dtype != "bfloat16":
        yield f"train.params_dtype = {dtype} on GPUs: {kernels} takes bfloat16 there; use it, or {instead}"
    if head % 8 or head > 256:
        yield (
            f"model.kv_channels = {head} on GPUs: {kernels} takes multiples of 8 up to 256; "
            f"use {multiples_near(8, min(head, 256))}, or {instead}"
        )


# --- TransformerEngine


def te_problems(config: Any, version: str | None) -> Problems:
    """What TransformerEngine of this release refuses, or would do wrong in silence; None: it is not installed."""
    if version is None:
        yield f"TransformerEngine is not installed: pip install -e '.[te]', or use {NATIVE}"
    elif not has(version, OLDEST):
        yield f"TransformerEngine {version} is older than {OLDEST}: upgrade it, or use {NATIVE}"
    else:
        yield from _flash_problems(config, "TransformerEngine", "train.device=cpu")
        yield from _te_exchange_problems(config, version)
        yield from _te_mask_problems(config)
        yield from _te_softmax_problems(config, version)
        yield from _te_softcap_problems(config, version)
        yield from _te_dropout_problems(config)


def _too_old(first: str, version: str) -> str:
    return f"needs TransformerEngine {first}, {version} is installed: upgrade it, or"


def packed_because(config: Any) -> str | None:
    """Why microbatches are packed sequences (thd) where they are; equal rows without padding need no such format."""
    p, rows = config.parallel, config.train.micro_batch_size * config.data.seq_length
    for name in ("mask_between_documents", "sft"):
        if getattr(config.data, name):
            return f"data.{name}"
    multiple = 2 * p.context_parallel_size * (p.tensor_model_parallel_size if p.sequence_parallel else 1)
    if rows % multiple:
        return f"micro_batch_size*seq_length = {rows} is padded to a multiple of 2*cp*tp = {multiple}"
    return None


def _te_exchange_problems(config: Any, version: str) -> Problems:
    p, given = config.parallel, comm_types(config)
    cp = p.context_parallel_size
    if (cp == 1 and not p.hybrid_context_parallel) or not set(given) <= set(COMM_TYPES):
        return
    dealt = () if local_heads(config) % cp else ("a2a",)
    others = [name for name in ("p2p", "all_gather", *dealt) if not _exchange_problem(config, name, version)]
    instead = any_of([*(f"cp_comm_type {name}" for name in others), NATIVE])
    for name in given:
        problem = _exchange_problem(config, name, version)
        if problem:
            yield f"{problem} use {instead}"


def _exchange_problem(config: Any, name: str, version: str) -> str | None:
    """Why this release cannot exchange so with cp > 1, up to what to use instead; None if it can."""
    first, m, packed = EXCHANGES[name], config.model, packed_because(config)
    what = f"parallel.cp_comm_type {name}"
    if not has(version, first.rows):
        return f"{what} {_too_old(first.rows, version)}"
    if packed and not has(version, first.packed):
        return f"{what} of packed sequences ({packed}) {_too_old(first.packed, version)}"
    if windowed(m) and first.window is None:
        return f"{what} with model.window_size = {m.window_size} is in no release of TransformerEngine:"
    if windowed(m) and first.window and not has(version, first.window):
        return f"{what} with model.window_size = {m.window_size} {_too_old(first.window, version)}"
    if m.softmax_type != "vanilla" and name != "a2a":
        return f"{what} with model.softmax_type = {m.softmax_type} is in no release of TransformerEngine:"
    return None


def _te_mask_problems(config: Any) -> Problems:
    """Without a causal mask TE wants limits on both sides or none, and takes [-1, 0] for none."""
    window = config.model.window_size or [-1, -1]
    if config.model.attn_mask_type == "no_mask" and min(window) == -1 and max(window) > -1:
        yield (
            f"model.window_size = {window} with attn_mask_type no_mask has one limit, TransformerEngine takes two or "
            f"none: use {[max(window)] * 2} or [-1, -1], or {NATIVE}"
        )


def _te_softmax_problems(config: Any, version: str) -> Problems:
    kind, packed, first = config.model.softmax_type, packed_because(config), FIRST_RELEASE["softmax_type"]
    if kind != "vanilla" and not has(version, first):
        yield f"model.softmax_type = {kind} {_too_old(first, version)} use vanilla"
    elif kind != "vanilla" and packed and not has(version, PACKED_SOFTMAX):
        what = f"model.softmax_type = {kind} of packed sequences ({packed})"
        yield f"{what} {_too_old(PACKED_SOFTMAX, version)} use vanilla"


def _te_softcap_problems(config: Any, version: str) -> Problems:
    """Only FlashAttention 2 caps scores: without gaps between sequences, and without dropout."""
    m, packed, first = config.model, packed_because(config), FIRST_RELEASE["softcap"]
    if m.attn_logit_softcapping is None:
        return
    cap = f"model.attn_logit_softcapping = {m.attn_logit_softcapping:g}"
    nowhere = "is in no kernel of TransformerEngine"
    if not has(version, first):
        yield f"{cap} {_too_old(first, version)} leave it out"
    elif config.parallel.context_parallel_size > 1:
        # Its context parallelism sets the cap to 0 instead (context_parallel.py of 2.20).
        yield f"{cap} with parallel.context_parallel_size > 1 {nowhere}: leave out one of the two"
    elif packed:
        yield f"{cap} of packed sequences ({packed}) {nowhere}: leave out one of the two"
    elif m.softmax_type != "vanilla":
        yield f"{cap} with model.softmax_type = {m.softmax_type} {nowhere}: use vanilla, or leave the cap out"
    elif m.attention_dropout > 0:
        yield f"{cap} with model.attention_dropout = {m.attention_dropout:g} {nowhere}: leave the cap out, or use 0"


def _te_dropout_problems(config: Any) -> Problems:
    """TE draws from the device's generator, whose state recomputation does not bring back."""
    dropout, t = config.model.attention_dropout, config.train
    again = t.recompute_granularity == "full" or (t.recompute_granularity and "core_attn" in t.recompute_modules)
    if dropout > 0 and again:
        yield (
            f"model.attention_dropout = {dropout:g} with train.recompute_granularity {t.recompute_granularity} would "
            "drop other weights when attention is recomputed: use selective with recompute_modules=[mlp], or "
            "model.hidden_dropout instead"
        )


BACKEND_RULES: tuple[Rule, ...] = (native_attention_serves, transformer_engine_serves)
