"""Tiny models as transformers saves them, and what their folders hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools import convert_hf

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
# transformers' kind of model -> its configuration. The first sequence below is longer than every original context and
# window.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **YARN}}),
    "llama-yarn-factor": ("llama", {"rope_parameters": {"rope_type": "yarn", **YARN, "attention_factor": 1.3}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral-unwindowed": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 48}),
}
GPT2_SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 130, "n_positions": 64, "attn_pdrop": 0.0}


def make(folder: Path, kind: str, dtype: torch.dtype = torch.float32, shard_size: str = "30KB") -> Path:
    """A folder that transformers saved, of random weights wide enough that logits differ by about 1."""
    transformers = pytest.importorskip("transformers")
    model_type, changes = MODELS[kind]
    sizes = GPT2_SIZES if model_type == "gpt2" else SIZES
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def convert(*arguments: object) -> int:
    return convert_hf.main([str(argument) for argument in arguments])


def check_same(one: Path, other: Path) -> None:
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert config_of(one) == config_of(other)
