"""Where transformers keeps each tensor of a model: our global name -> name, rows and orientation of theirs.

GPT-2 fuses q, k, v and keeps linear weights transposed, [inputs, outputs] (transformers/pytorch_utils.py, Conv1D); all
else is one tensor of theirs for one of ours.
"""

from __future__ import annotations

from typing import NamedTuple

from megacp.config import ModelConfig
from megacp.convert.hf_keys import GPT2

HEAD = "lm_head.weight"
_TOP = {
    "embedding.word.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": HEAD,
}
_LAYER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_GPT2_TOP = {
    "embedding.word.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": HEAD,
}
_GPT2_LAYER = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    **{f"attention.{part}": "attn.c_attn" for part in "qkv"},
    "attention.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


class Place(NamedTuple):
    """Where a tensor of ours lies: rows `first` to first + shape[0] of theirs, turned as ours is.

    shape   global shape of ours
    rows    rows of theirs, turned
    turned  whether theirs is transposed
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    first: int = 0
    turned: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = (self.rows, *self.shape[1:])
        return shape[::-1] if self.turned else shape


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of every tensor of a model, the vocabulary unpadded; as megacp/model names them."""
    hidden, inner, dim, m = model.hidden_size, model.ffn_size, model.head_dim, model
    queries, keys = m.num_attention_heads * dim, m.kv_heads * dim
    linear = {"attention.q": (queries, hidden), "attention.k": (keys, hidden), "attention.v": (keys, hidden)}
    linear |= {"attention.o": (hidden, queries), "mlp.up": (inner, hidden), "mlp.down": (hidden, inner)}
    if m.swiglu:
        linear["mlp.gate"] = (inner, hidden)
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    if m.qk_layernorm:
        norms |= {"attention.q_norm": dim, "attention.k_norm": dim}
    biased = set(linear) if m.add_bias_linear else {f"attention.{part}" for part in "qkv"} if m.add_qkv_bias else set()
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    layer |= {f"{name}.bias": (linear[name][0],) for name in linear if name in biased}
    kinds = ("weight", "bias") if m.normalization == "LayerNorm" else ("weight",)
    layer |= {f"{name}.{kind}": (width,) for name, width in norms.items() for kind in kinds}
    found: dict[str, tuple[int, ...]] = {"embedding.word.weight": (m.vocab_size, hidden)}
    if m.position_embedding_type == "learned_absolute":
        found["embedding.position.weight"] = (m.max_position_embeddings or 0, hidden)
    for number in range(m.num_layers):
        found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    found |= {f"final_norm.{kind}": (hidden,) for kind in kinds}
    if m.untie_embeddings_and_output_weights:
        found["head.weight"] = (m.vocab_size, hidden)
    return found


def places(model: ModelConfig, architecture: str) -> dict[str, Place]:
    """Our global name -> where `architecture` of transformers keeps it."""
    place = _gpt2_place if architecture == GPT2 else _llama_place
    return {name: place(name, shape) for name, shape in shapes(model).items()}


def _llama_place(name: str, shape: tuple[int, ...]) -> Place:
    if name in _TOP:
        return Place(_TOP[name], shape, shape[0])
    _, number, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return Place(f"model.layers.{number}.{_LAYER[module]}.{kind}", shape, shape[0])


def _gpt2_place(name: str, shape: tuple[int, ...]) -> Place:
    if name in _GPT2_TOP:
        return Place(_GPT2_TOP[name], shape, shape[0])
    _, number, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    fused = module[-1] in "qkv" and module[:-1] == "attention."
    first, rows = ("qkv".index(module[-1]) * shape[0], 3 * shape[0]) if fused else (0, shape[0])
    return Place(f"transformer.h.{number}.{_GPT2_LAYER[module]}.{kind}", shape, rows, first, turned=len(shape) == 2)
