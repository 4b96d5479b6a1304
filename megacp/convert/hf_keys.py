"""The keys of a Hugging Face config.json: architectures, names, defaults, and which of them change the mathematics."""

from __future__ import annotations

from typing import Any

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3, GPT2 = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"
# architecture -> its model_type
ARCHITECTURES = {LLAMA: "llama", MISTRAL: "mistral", QWEN2: "qwen2", QWEN3: "qwen3", GPT2: "gpt2"}

# Our name -> theirs, where the value is the same.
NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
GPT2_NAMES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "ffn_hidden_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
}
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "norm_epsilon")
# What transformers takes for a key that is left out, where that is not null or false.
_ROPE_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "hidden_act": "silu",
}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "intermediate_size": 22016}
_WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: {**_ROPE_DEFAULTS, "max_position_embeddings": 2048, "intermediate_size": 11008},
    MISTRAL: {
        **_ROPE_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "intermediate_size": 14336,
        "sliding_window": 4096,
    },
    QWEN2: {**_ROPE_DEFAULTS, **_QWEN_DEFAULTS, **_WINDOW_DEFAULTS},
    QWEN3: {**_ROPE_DEFAULTS, **_QWEN_DEFAULTS, **_WINDOW_DEFAULTS, "head_dim": 128},
    GPT2: {
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    },
}
# Other spellings that transformers takes for GPT-2's keys.
GPT2_ALIASES = {
    NAMES[ours]: GPT2_NAMES[ours]
    for ours in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
}
SLIDING, FULL = "sliding_attention", "full_attention"

# Keys that change the mathematics, with the values that are implemented beside null.
ONLY: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1,),
    "is_causal": (True,),
    "partial_rotary_factor": (1.0,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "quantization_config": (),
    "per_layer_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
}
SILU, TANH_GELU, GELU = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh"), ("gelu",)

# Further keys that hf_config.py and hf_rope.py look at.
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}
_COMMON = {"tie_word_embeddings", "initializer_range", "hidden_act", "attention_dropout", *_ROPE}
_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
READ = {
    LLAMA: {*_COMMON, "attention_bias", "mlp_bias"},
    MISTRAL: {*_COMMON, "sliding_window", "layer_types"},
    QWEN2: {*_COMMON, *_WINDOW},
    QWEN3: {*_COMMON, *_WINDOW, "attention_bias"},
    GPT2: {
        *("tie_word_embeddings", "initializer_range", "activation_function", "scale_attn_weights"),
        *("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    },
}
# Keys without an effect on the logits: tokens, heads for other tasks, generation, how transformers computes.
HARMLESS = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "tokenizer_class", "n_ctx"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    *(
        "_name_or_path",
        "name_or_path",
        "_model_name_or_path",
        "_attn_implementation",
        "attn_implementation",
        "_commit_hash",
    ),
    *("_attn_implementation_autoset", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("task_specific_params", "id2label", "label2id", "num_labels", "problem_type", "chunk_size_feed_forward"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version", "is_llama_config", "finetuning_task"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature", "top_k", "top_p"),
    *("typical_p", "repetition_penalty", "length_penalty", "num_return_sequences", "no_repeat_ngram_size"),
    *("max_new_tokens", "diversity_penalty", "num_beam_groups", "encoder_no_repeat_ngram_size"),
}
