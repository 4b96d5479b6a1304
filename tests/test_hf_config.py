"""What config.json files say: what is read, refused, passed over, and written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacp.config import ModelConfig, RopeScaling
from megacp.convert import hf_config
from megacp.convert.hf_keys import ARCHITECTURES, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 130,
    "max_position_embeddings": 64,
}
GPT2_SIZES = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 130, "n_positions": 64}
STRETCHES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
    "deepseek": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "given": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.25},
}


def a_config(architecture: str = LLAMA, **changes: Any) -> dict[str, Any]:
    """A config.json as saved by old releases: none of the keys whose default will do."""
    sizes = GPT2_SIZES if architecture == GPT2 else SIZES
    return {"architectures": [architecture], "model_type": ARCHITECTURES[architecture], **sizes, **changes}


def parsed(architecture: str = LLAMA, **changes: Any) -> ModelConfig:
    model, remarks = hf_config.parse(a_config(architecture, **changes))
    assert remarks == []
    return model


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- reading


def test_llama() -> None:
    model = parsed(rms_norm_eps=1e-5, tie_word_embeddings=True, initializer_range=0.01, rope_theta=5e5)
    assert model == ModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        vocab_size=130,
        max_position_embeddings=64,
        norm_epsilon=1e-5,
        rotary_base=5e5,
        init_method_std=0.01,
        untie_embeddings_and_output_weights=False,
    )
    assert parsed(attention_bias=True, mlp_bias=True).add_bias_linear


def test_keys_left_out_are_those_of_transformers() -> None:
    assert parsed().norm_epsilon == 1e-6 and parsed().untie_embeddings_and_output_weights
    bare = {key: value for key, value in a_config(LLAMA).items() if key != "num_key_value_heads"}
    assert hf_config.parse(bare)[0].kv_heads == 4
    assert parsed(QWEN2, num_key_value_heads=None).kv_heads == 4
    assert parsed(QWEN3).head_dim == 128 and parsed(LLAMA).head_dim == 8 and parsed(QWEN2, head_dim=6).head_dim == 6
    assert parsed(MISTRAL).window_size == [4095, 0] and parsed(QWEN2).window_size is None


def test_qwen() -> None:
    assert parsed(QWEN2).add_qkv_bias and not parsed(QWEN2).qk_layernorm
    assert parsed(QWEN3).qk_layernorm and not parsed(QWEN3).add_qkv_bias


def test_gpt2() -> None:
    model = parsed(GPT2, attn_pdrop=0)
    assert (model.position_embedding_type, model.normalization, model.openai_gelu) == (
        "learned_absolute",
        "LayerNorm",
        True,
    )
    assert model.add_bias_linear and not model.swiglu and not model.untie_embeddings_and_output_weights
    assert (model.ffn_size, model.hidden_dropout, model.attention_dropout) == (128, 0.1, 0.0)
    assert parsed(GPT2, attn_pdrop=0, activation_function="gelu", n_inner=40).ffn_size == 40
    assert not parsed(GPT2, attn_pdrop=0, activation_function="gelu").openai_gelu
    assert parsed(GPT2, attn_pdrop=0, scale_attn_weights=False).softmax_scale == 1.0
    aliases = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 9}
    config = {key: value for key, value in a_config(GPT2, attn_pdrop=0).items() if not key.startswith("n_")}
    model, remarks = hf_config.parse(config | aliases)
    assert (model.num_layers, model.hidden_size, model.max_position_embeddings, remarks) == (3, 16, 9, [])


@pytest.mark.parametrize(
    ("architecture", "keys", "window"),
    [
        (MISTRAL, {"sliding_window": 5}, [4, 0]),
        (MISTRAL, {"sliding_window": 1}, [0, 0]),
        (MISTRAL, {"sliding_window": None}, None),
        (MISTRAL, {"sliding_window": 5, "layer_types": ["sliding_attention"] * 4}, [4, 0]),
        (QWEN2, {"sliding_window": 5, "max_window_layers": 0}, None),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, [4, 0]),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 4}, None),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 4}, [4, 0]),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 4}, None),
        (QWEN3, {"sliding_window": None, "layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_windows(architecture: str, keys: dict[str, Any], window: list[int] | None) -> None:
    assert parsed(architecture, **keys).window_size == window


@pytest.mark.parametrize("kind", STRETCHES)
def test_rope_scaling_in_both_spellings(kind: str) -> None:
    rope = STRETCHES[kind]
    old = parsed(rope_theta=5e5, rope_scaling=rope)
    older = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    assert old == parsed(rope_theta=5e5, rope_scaling=older) == parsed(rope_parameters={**rope, "rope_theta": 5e5})
    # A theta inside counts more, and rope_scaling more than rope_parameters.
    assert old == parsed(rope_theta=1.0, rope_scaling={**rope, "rope_theta": 5e5}, rope_parameters={"rope_theta": 2.0})
    assert old.rotary_base == 5e5 and old.rope_scaling.type == rope["rope_type"]
    assert old.rope_scaling.factor == rope["factor"]


def test_rope_scaling_defaults() -> None:
    assert parsed(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rotary_base == 7.0
    assert parsed(rope_parameters={"rope_theta": 7.0}).rope_scaling == RopeScaling()
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16, "mscale": 1.0}
    scaling = parsed(rope_scaling=yarn).rope_scaling
    assert (scaling.factor, scaling.mscale, scaling.mscale_all_dim) == (4.0, None, None)
    llama3 = {**STRETCHES["llama3"], "original_max_position_embeddings": None}
    assert parsed(rope_scaling=llama3).rope_scaling.original_max_position_embeddings == 64
    assert parsed(rope_scaling=llama3, original_max_position_embeddings=8).rope_scaling == RopeScaling(
        type="llama3", factor=8.0, original_max_position_embeddings=8
    )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (LLAMA, {"architectures": ["GemmaForCausalLM"]}, r'architectures = \["GemmaForCausalLM"\] is not implemented'),
    (LLAMA, {"architectures": ["LlamaModel"]}, r'architectures = \["LlamaModel"\] is not implemented'),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures = .* is not implemented"),
    (LLAMA, {"architectures": [["x"]]}, "architectures = .* is not implemented"),
    (LLAMA, {"architectures": None, "model_type": "mamba"}, 'model_type = "mamba" is not implemented'),
    (LLAMA, {"model_type": "mistral"}, 'model_type = "mistral", but LlamaForCausalLM is llama'),
    (LLAMA, {"hidden_size": None}, "lacks hidden_size"),
    (LLAMA, {"rms_norm_eps": None}, "lacks rms_norm_eps"),
    (LLAMA, {"num_hidden_layers": "4"}, 'num_hidden_layers = "4": Input should be a valid integer'),
    (LLAMA, {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not implemented for LlamaForCausalLM, only silu'),
    (LLAMA, {"attention_bias": True}, "attention_bias = true, mlp_bias = false: biases in one part alone"),
    (LLAMA, {"mlp_bias": True}, "attention_bias = false, mlp_bias = true: biases in one part alone"),
    (QWEN3, {"attention_bias": True}, "attention_bias = true is not implemented for Qwen3ForCausalLM, only false"),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp = 2 is not implemented for LlamaForCausalLM, only 1"),
    (LLAMA, {"is_causal": False}, "is_causal = false is not implemented"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not implemented"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not implemented"),
    (LLAMA, {"quantization_config": {"bits": 4}}, r'quantization_config = \{"bits": 4\} is not implemented'),
    (LLAMA, {"num_experts": 8}, "num_experts = 8 is not implemented"),
    (MISTRAL, {"num_local_experts": 8}, "num_local_experts = 8 is not implemented"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not implemented"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling of type "dynamic" is not implemented'),
    (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, 'rope_parameters of type "longrope" is not implemented'),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters = .* only one rule for all"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling of type linear lacks factor"),
    (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": "2"}}, 'factor = "2": Input should be a valid number'),
    (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not implemented"),
    (LLAMA, {"rope_scaling": {**STRETCHES["yarn"], "attention_factor": 0.5}}, "attention_factor = 0.5 with factor = 4"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window = 0 must be 1 or more"),
    (
        MISTRAL,
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types = .* with sliding_window = 5 is not implemented",
    ),
    (
        QWEN2,
        {"use_sliding_window": True, "max_window_layers": 3},
        "max_window_layers = 3 makes 1 of 4 layers sliding_attention",
    ),
    (
        QWEN3,
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types makes 2 of 4 layers sliding_attention",
    ),
    (QWEN3, {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window or sliding_window is not set"),
    (QWEN3, {"layer_types": ["chunked_attention"] * 4}, "layer_types = .* must be sliding_attention or full_attention"),
    (GPT2, {"activation_function": "relu"}, 'activation_function = "relu" is not implemented'),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true is not implemented"),
    (GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = true is not implemented"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention = true is not implemented"),
]


@pytest.mark.parametrize(("architecture", "keys", "reason"), REFUSED)
def test_what_would_change_the_mathematics_is_refused(
    architecture: str, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, a_config(architecture, **keys))
    with pytest.raises(ValueError, match=reason) as error:
        hf_config.model_config(folder)
    assert str(error.value).startswith(f"{folder}/config.json") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "keys", "remark"),
    [
        (LLAMA, {"novelty": 3}, "novelty = 3 is passed over"),
        (LLAMA, {"sliding_window": 9}, "sliding_window = 9 is passed over"),
        (MISTRAL, {"attention_bias": True}, "attention_bias = true is passed over"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout = 0.1 acts in training alone and is left out"),
        (GPT2, {}, "attn_pdrop = 0.1 acts in training alone and is left out"),
        (GPT2, {"attn_pdrop": 0, "embd_pdrop": 0.2}, "resid_pdrop = 0.1 and embd_pdrop = 0.2 act in training alone"),
        (LLAMA, {"rope_scaling": {**STRETCHES["linear"], "beta_fast": 9}}, "rope_scaling.beta_fast = 9 is passed over"),
    ],
)
def test_what_is_passed_over_is_told(architecture: str, keys: dict[str, Any], remark: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as warned:
        hf_config.model_config(written(tmp_path, a_config(architecture, **keys)))
    (only,) = warned
    assert remark in str(only.message) and str(tmp_path) in str(only.message)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no Hugging Face folder"):
        hf_config.model_config(tmp_path)
    for text, reason in (("{", "is not JSON"), ("[1]", "holds a list"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            hf_config.model_config(tmp_path)


# --- writing

WRITTEN: list[tuple[str, dict[str, Any]]] = [
    (LLAMA, {"tie_word_embeddings": True, "rope_theta": 5e5}),
    (LLAMA, {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    *((LLAMA, {"rope_scaling": rope}) for rope in STRETCHES.values()),
    (MISTRAL, {"sliding_window": 5}),
    (QWEN2, {}),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    (QWEN3, {"head_dim": 6}),
    (GPT2, {"attn_pdrop": 0.0}),
    (GPT2, {"attn_pdrop": 0.0, "activation_function": "gelu", "tie_word_embeddings": False}),
    (GPT2, {"attn_pdrop": 0.0, "scale_attn_weights": False}),
]


@pytest.mark.parametrize(("architecture", "keys"), WRITTEN)
def test_what_is_written_says_the_same_model(architecture: str, keys: dict[str, Any]) -> None:
    """To this reader and to transformers', from the model alone and from an equal file."""
    original = a_config(architecture, **keys)
    model = hf_config.parse(original)[0]
    made = hf_config.hf_config(model)
    assert made["architectures"] == [architecture]
    assert hf_config.differences(hf_config.parse(made)[0], model) == {}
    assert hf_config.hf_config(model, like=original) == original
    transformers = pytest.importorskip("transformers")
    ours, theirs = (transformers.AutoConfig.for_model(**config).to_dict() for config in (made, original))
    silent = {"architectures", "bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "sliding_window"}
    if architecture == MISTRAL:
        silent.remove("sliding_window")
    ours, theirs = ({key: its[key] for key in its.keys() - silent} for its in (ours, theirs))
    rope, their_rope = (its.pop("rope_parameters", {}) for its in (ours, theirs))
    assert {key: rope[key] for key in their_rope} == pytest.approx(their_rope)
    for its in (ours, theirs):
        its.pop("head_dim", None)
    assert {key: (ours.get(key), value) for key, value in theirs.items() if ours.get(key) != value} == {
        **({"n_inner": (128, None)} if architecture == GPT2 else {})
    }


def test_changed_mathematics_is_written_over_the_original() -> None:
    original = a_config(
        QWEN2, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, eos_token_id=7, dtype="bfloat16"
    )
    model = hf_config.parse(original)[0]
    longer = model.model_copy(update={"rotary_base": 5e6, "hidden_dropout": 0.1})
    config = hf_config.hf_config(longer, like=original)
    assert config["rope_theta"] == 5e6 and "rope_parameters" not in config
    assert (config["eos_token_id"], config["dtype"], config["architectures"]) == (7, "bfloat16", [QWEN2])
    assert hf_config.differences(hf_config.parse(config)[0], longer) == {}
    # Dropout and initial weights are not the model's mathematics.
    assert hf_config.hf_config(model.model_copy(update={"hidden_dropout": 0.1}), like=original) == original


def test_a_named_architecture() -> None:
    model = parsed(LLAMA)
    assert hf_config.hf_config(model, MISTRAL)["sliding_window"] is None
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no add_qkv_bias = False; LlamaForCausalLM has"):
        hf_config.hf_config(model, QWEN2)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no qk_layernorm = True; Qwen3ForCausalLM has"):
        hf_config.hf_config(parsed(QWEN3), LLAMA)
    with pytest.raises(ValueError, match="architecture Gemma is not implemented"):
        hf_config.hf_config(model, "Gemma")


@pytest.mark.parametrize(
    "change",
    [
        {"swiglu": False},
        {"rotary_percent": 0.5},
        {"softmax_scale": 0.7},
        {"attn_mask_type": "no_mask"},
        {"qk_layernorm": True, "add_qkv_bias": True},
        {"attn_logit_softcapping": 30.0},
        {"position_embedding_type": "none"},
    ],
)
def test_a_model_that_no_architecture_has_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"has no .*{list(change)[0]} = .*, nor has any other") as error:
        hf_config.hf_config(ModelConfig.model_validate({**parsed(LLAMA).model_dump(), **change}))
    assert "\n" not in str(error.value)


def test_differences() -> None:
    model = parsed(LLAMA)
    resolved = {"kv_channels": 8, "window_size": [-1, 0], "openai_gelu": True, "softmax_scale": 8**-0.5}
    training = {"hidden_dropout": 0.1, "init_method_std": 0.5, "make_vocab_size_divisible_by": 8}
    assert hf_config.differences(model, model.model_copy(update={**resolved, **training})) == {}
    assert hf_config.differences(model, model.model_copy(update={"norm_epsilon": 1e-5})) == {
        "norm_epsilon": (1e-6, 1e-5)
    }
    stretched = parsed(LLAMA, rope_scaling=STRETCHES["linear"])
    assert hf_config.differences(model, stretched) == {
        "rope_scaling.type": ("none", "linear"),
        "rope_scaling.factor": (None, 4.0),
    }
