"""What a Hugging Face config.json says about the mathematics, as a ModelConfig, and the way back.

The rules are those of the models in transformers (models/*/configuration_*.py, modeling_*.py and
modeling_rope_utils.py): the defaults of keys that a file leaves out, which of two spellings counts, and what a key
changes. A key that would change the mathematics in a way that is not implemented here is refused by name; one that is
not known gets a warning, as transformers passes over it too.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megacp.config import ModelConfig
from megacp.convert.hf_keys import (
    ARCHITECTURES,
    DEFAULTS,
    FULL,
    GELU,
    GPT2,
    GPT2_ALIASES,
    GPT2_NAMES,
    HARMLESS,
    LLAMA,
    MISTRAL,
    NAMES,
    ONLY,
    QWEN2,
    QWEN3,
    READ,
    REQUIRED,
    SILU,
    SLIDING,
    TANH_GELU,
)
from megacp.convert.hf_rope import read_rope, shown, stretch, write_rope


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. FileNotFoundError, ValueError where it is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no Hugging Face folder: it has no config.json")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not an object")
    return config


def model_config(folder: str | Path) -> ModelConfig:
    """The model of a Hugging Face folder: its mathematics, and its dropout and deviation of initial weights.

    ValueError names an architecture or key that is not implemented, and its value; a warning what is passed over.
    """
    model, remarks = parse(read_config(folder), f"{folder}/config.json")
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return model


def architecture_of(config: dict[str, Any], where: str = "config.json") -> str:
    """The architecture a config.json names. ValueError if there is no such here."""
    kind = config.get("model_type")
    named = config.get("architectures") or [name for name, its in ARCHITECTURES.items() if its == kind]
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in ARCHITECTURES:
        given = f"architectures = {shown(named)}" if named else f"model_type = {shown(kind)}"
        raise ValueError(f"{where}: {given} is not implemented: there are {', '.join(ARCHITECTURES)}")
    if kind not in (None, ARCHITECTURES[named[0]]):
        raise ValueError(f"{where}: model_type = {shown(kind)}, but {named[0]} is {ARCHITECTURES[named[0]]}")
    return named[0]


def parse(config: dict[str, Any], where: str = "config.json") -> tuple[ModelConfig, list[str]]:
    """The model of a config.json, and remarks about keys that were passed over. ValueError as `model_config`."""
    architecture, remarks = architecture_of(config, where), []
    names, aliases = (GPT2_NAMES, GPT2_ALIASES) if architecture == GPT2 else (NAMES, {})
    values = {**DEFAULTS[architecture], **{aliases.get(key, key): value for key, value in config.items()}}
    missing = [names[name] for name in REQUIRED if values.get(names[name]) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    try:
        _refuse(values, architecture)
        fields = {ours: values[theirs] for ours, theirs in names.items() if values.get(theirs) is not None}
        fields["untie_embeddings_and_output_weights"] = not values.get("tie_word_embeddings")
        if values["initializer_range"]:
            fields["init_method_std"] = values["initializer_range"]
        fields |= _gpt2(values, remarks) if architecture == GPT2 else _llama_like(values, architecture, remarks)
        model = ModelConfig(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        ours = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {names.get(ours, ours)} = {shown(first['input'])}: {first['msg']}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
    unknown = values.keys() - {*READ[architecture], *HARMLESS, *ONLY, *names.values()}
    for name in sorted(name for name in unknown if values[name]):
        remarks.append(
            f"{name} = {shown(values[name])} is passed over: {architecture} of transformers does not know it"
        )
    return model, [f"{where}: {remark}" for remark in remarks]


def _refuse(values: dict[str, Any], architecture: str) -> None:
    for name, allowed in ONLY.items():
        value = values.get(name)
        if value is not None and value not in allowed:
            only = f", only {shown(allowed[0])}" if allowed else ""
            raise ValueError(f"{name} = {shown(value)} is not implemented for {architecture}{only}")


def _llama_like(values: dict[str, Any], architecture: str, remarks: list[str]) -> dict[str, Any]:
    """The fields that Llama, Mistral and Qwen have in common, and theirs alone."""
    if values["hidden_act"] not in SILU:
        raise ValueError(f"hidden_act = {shown(values['hidden_act'])} is not implemented for {architecture}, only silu")
    biases = {name: bool(values.get(name)) for name in ("attention_bias", "mlp_bias")}
    if architecture == LLAMA and len(set(biases.values())) > 1:
        given = ", ".join(f"{name} = {shown(value)}" for name, value in biases.items())
        raise ValueError(f"{given}: biases in one part alone are not implemented, only in both or in neither")
    if architecture == QWEN3 and biases["attention_bias"]:
        raise ValueError(f"attention_bias = true is not implemented for {architecture}, only false")
    if values.get("attention_dropout"):
        remarks.append(_no_attention_dropout("attention_dropout", values))
    return {
        "add_bias_linear": architecture == LLAMA and all(biases.values()),
        "add_qkv_bias": architecture == QWEN2,
        "qk_layernorm": architecture == QWEN3,
        "window_size": _window(values, architecture),
        **read_rope(values, remarks),
    }


def _no_attention_dropout(name: str, values: dict[str, Any]) -> str:
    return (
        f"{name} = {shown(values[name])} acts in training alone and is left out: set model.attention_dropout to "
        "have it, flash kernels want 0"
    )


def _window(values: dict[str, Any], architecture: str) -> list[int] | None:
    """window_size: transformers' window of W tokens holds the query itself, so W - 1 are before it."""
    window, types = values.get("sliding_window"), values.get("layer_types")
    if architecture == LLAMA:
        window = None
    elif architecture == MISTRAL and types and set(types) != {FULL if window is None else SLIDING}:
        # transformers' Mistral has one kind of layer and would not look at them.
        raise ValueError(f"layer_types = {shown(types)} with sliding_window = {shown(window)} is not implemented")
    elif architecture in (QWEN2, QWEN3):
        window = _qwen_window(values, types)
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window = {shown(window)} must be 1 or more tokens")
    return None if window is None else [window - 1, 0]


def _qwen_window(values: dict[str, Any], types: list[str] | None) -> int | None:
    """The window of every layer. Without layer_types only layers from max_window_layers on slide."""
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    layers, first = values["num_hidden_layers"], values["max_window_layers"]
    sliding = sum(kind == SLIDING for kind in types) if types else max(0, layers - first) if window is not None else 0
    if types and (len(types) != layers or set(types) - {SLIDING, FULL}):
        raise ValueError(f"layer_types = {shown(types)} must be {SLIDING} or {FULL} for {layers} layers")
    if sliding and sliding < layers:
        reason = "layer_types" if types else f"max_window_layers = {first}"
        raise ValueError(
            f"{reason} makes {sliding} of {layers} layers {SLIDING} (sliding_window = {shown(window)}): layers of two "
            "kinds are not implemented"
        )
    if sliding and window is None:
        raise ValueError(f"layer_types are {SLIDING}, but use_sliding_window or sliding_window is not set")
    return window if sliding else None


def _gpt2(values: dict[str, Any], remarks: list[str]) -> dict[str, Any]:
    activation = values["activation_function"]
    if activation not in (*TANH_GELU, *GELU):
        raise ValueError(f"activation_function = {shown(activation)} is not implemented, only gelu_new and gelu")
    fields = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "openai_gelu": activation in TANH_GELU,
        "add_bias_linear": True,
        "softmax_scale": None if values["scale_attn_weights"] else 1.0,
    }
    if values["attn_pdrop"]:
        remarks.append(_no_attention_dropout("attn_pdrop", values))
    if values["resid_pdrop"] == values["embd_pdrop"]:
        fields["hidden_dropout"] = values["resid_pdrop"]
    else:
        given = " and ".join(f"{name} = {values[name]}" for name in ("resid_pdrop", "embd_pdrop"))
        remarks.append(f"{given} act in training alone and are left out, being different: see model.hidden_dropout")
    return fields


# --- the way back


def mathematics(model: ModelConfig) -> dict[str, Any]:
    """What the logits of a model depend on beside its weights: defaults resolved, what has no effect left out.

    Names are ours, dotted under rope_scaling. Dropout, initial weights, padding and the attention code are not in it.
    """
    rope, learned = model.position_embedding_type == "rope", model.position_embedding_type == "learned_absolute"
    left, right = model.window_size or (-1, -1)
    causal = model.attn_mask_type == "causal"
    return {
        **{name: getattr(model, name) for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")},
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_size,
        "position_embedding_type": model.position_embedding_type,
        "max_position_embeddings": model.max_position_embeddings if learned else None,
        "rotary_base": model.rotary_base if rope else None,
        "rotary_percent": model.rotary_percent if rope else None,
        **(stretch(model.rope_scaling) if rope else {}),
        **{name: getattr(model, name) for name in ("normalization", "norm_epsilon", "qk_layernorm", "swiglu")},
        "openai_gelu": model.openai_gelu and not model.swiglu,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_bias_linear or model.add_qkv_bias,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "attn_mask_type": model.attn_mask_type,
        "window_size": (left, 0 if causal else right),
        "softmax_scale": model.softmax_scale or model.head_dim**-0.5,
        "softmax_type": model.softmax_type,
        "attn_logit_softcapping": model.attn_logit_softcapping,
    }


def differences(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Where the mathematics of two models differs: name -> (value of one, value of the other)."""
    ours, theirs = mathematics(one), mathematics(other)
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = {name: (ours.get(name), theirs.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if not _same(*pair)}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other


def hf_config(
    model: ModelConfig, architecture: str | None = None, like: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a model.

    `like` is the one it came from: given back unchanged while it says the same mathematics, else with what differs
    replaced. Without it, tokens are unknown (null). Without `architecture` it is that of `like`, or the first that can
    say the model. ValueError with what an architecture cannot say.
    """
    if architecture not in (None, *ARCHITECTURES):
        raise ValueError(f"architecture {architecture} is not implemented: there are {', '.join(ARCHITECTURES)}")
    base = architecture_of(like) if like else None
    if like is not None and architecture in (None, base) and not differences(parse(like)[0], model):
        return dict(like)
    gaps: dict[str, dict[str, Any]] = {}
    for name in [architecture] if architecture else sorted(ARCHITECTURES, key=lambda name: name != base):
        config = _written(model, name, like if like is not None and name == base else {})
        gaps[name] = differences(model, parse(config)[0])
        if not gaps[name]:
            return config
    nearest = min(gaps, key=lambda name: len(gaps[name]))
    lacking = ", ".join(f"{key} = {ours}" for key, (ours, _) in gaps[nearest].items())
    if architecture is None:
        raise ValueError(f"{nearest} has no {lacking}, nor has any other architecture all of the model")
    raise ValueError(f"{architecture} has no {lacking}; {hf_config(model)['architectures'][0]} has")


def _written(model: ModelConfig, architecture: str, like: dict[str, Any]) -> dict[str, Any]:
    """A config.json of `architecture` with what of `model` it has keys for; other keys are those of `like`.

    Rotary keys are spelled as transformers 4 reads them too, which would pass over rope_parameters.
    """
    gpt2 = architecture == GPT2
    names, stale = (GPT2_NAMES, {*GPT2_ALIASES}) if gpt2 else (NAMES, {"rope_parameters", "layer_types"})
    config: dict[str, Any] = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture]}
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config["attn_pdrop" if gpt2 else "attention_dropout"] = model.attention_dropout
    if gpt2:
        config |= {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout}
    config |= {key: value for key, value in like.items() if key not in stale}
    resolved = {"num_query_groups": model.kv_heads, "kv_channels": model.head_dim, "ffn_hidden_size": model.ffn_size}
    sizes = {theirs: resolved.get(ours, getattr(model, ours)) for ours, theirs in names.items()}
    config |= {theirs: value for theirs, value in sizes.items() if value is not None}
    config["initializer_range"] = model.init_method_std
    config["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    if gpt2:
        config["activation_function"] = (TANH_GELU if model.openai_gelu else GELU)[0]
        config["scale_attn_weights"] = model.softmax_scale != 1.0
        return config
    return config | {"hidden_act": SILU[0]} | write_rope(model) | _own_keys(model, architecture)


def _own_keys(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """What Llama, Mistral and Qwen have each for itself."""
    if architecture == LLAMA:
        return {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    left = model.window_size[0] if model.window_size else -1
    window: dict[str, Any] = {"sliding_window": left + 1 if left >= 0 else None}
    if architecture == MISTRAL:
        return window
    window |= {"use_sliding_window": left >= 0, "max_window_layers": 0 if left >= 0 else model.num_layers}
    return window | ({"attention_bias": False} if architecture == QWEN3 else {})
