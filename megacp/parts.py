"""The parts of a configuration and their fields, in Megatron-LM's argument names; one sentence each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Numbers beyond have no meaning here, and overflow in float and int64 arithmetic.
Positive = Annotated[int, Field(gt=0, le=2**50)]
Count = Annotated[int, Field(ge=0, le=2**50)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Part(BaseModel):
    """Keys with types; the sentence under a key is its description."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class RopeScaling(Part):
    """How rotary frequencies stretch to contexts longer than the model was trained on."""

    type: Literal["none", "linear", "llama3", "yarn"] = "none"
    """rule of the stretch"""
    factor: PositiveFloat = 1.0
    """context length over the original one"""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original/low are divided by factor"""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original/high are kept"""
    original_max_position_embeddings: Positive = 8192
    """context length of the original model"""
    beta_fast: PositiveFloat = 32.0
    """yarn: rotations above which a frequency is kept"""
    beta_slow: PositiveFloat = 1.0
    """yarn: rotations below which a frequency is divided by factor"""
    mscale: NonNegativeFloat | None = None
    """yarn: weight of the log-scale of q and k; None is plain YaRN"""
    mscale_all_dim: NonNegativeFloat | None = None
    """yarn: divisor counterpart of mscale (DeepSeek)"""
    correction_range_round_to_int: bool = True
    """yarn: round the ramp's ends to whole dimensions"""


class ModelConfig(Part):
    """The mathematics of the model; nothing here depends on the layout."""

    num_layers: Annotated[int, Field(gt=0, le=2**16)]
    """transformer layers"""
    hidden_size: Positive
    """width of the residual stream"""
    num_attention_heads: Positive
    """query heads"""
    num_query_groups: Positive | None = None
    """key/value heads (GQA); None: as many as query heads"""
    kv_channels: Positive | None = None
    """width of a head; None: hidden_size / num_attention_heads"""
    ffn_hidden_size: Positive | None = None
    """inner width of the MLP; None: 4*hidden_size, with swiglu 2/3 of that in multiples of 64"""
    vocab_size: Positive
    """tokens of the tokenizer, before padding"""
    make_vocab_size_divisible_by: Positive = 128
    """the embedding's rows are padded to a multiple"""
    max_position_embeddings: Positive | None = None
    """rows of learned positions; required by position_embedding_type learned_absolute"""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    """positions"""
    rotary_base: PositiveFloat = 10000.0
    """theta of RoPE"""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of each head that is rotated"""
    rope_scaling: RopeScaling = RopeScaling()
    """stretch of the rotary frequencies"""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """kind of norm"""
    norm_epsilon: PositiveFloat = 1e-5
    """added under the root of every norm"""
    qk_layernorm: bool = False
    """normalise q and k per head before RoPE"""
    swiglu: bool = True
    """gated SiLU MLP; else GELU"""
    openai_gelu: bool = False
    """tanh approximation of GELU (GPT-2)"""
    add_bias_linear: bool = False
    """biases in all linear layers but the head"""
    add_qkv_bias: bool = False
    """biases in the q, k, v projection alone"""
    untie_embeddings_and_output_weights: bool = True
    """the head has weights of its own"""
    init_method_std: PositiveFloat = 0.02
    """deviation of initial weights; outputs divide by sqrt(2L)"""
    hidden_dropout: Fraction = 0.0
    """dropout after embedding, attention and MLP"""
    attention_dropout: Fraction = 0.0
    """dropout of attention weights; flash kernels want 0"""
    attn_mask_type: Literal["causal", "no_mask"] = "causal"
    """who sees whom within a sequence"""
    window_size: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """[left, right] neighbours seen; -1 is no limit"""
    softmax_scale: PositiveFloat | None = None
    """scale of the scores; None: 1/sqrt(kv_channels)"""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """attention sinks: off-by-one adds 1 to the softmax's denominator, learnable a weight per head"""
    attn_logit_softcapping: PositiveFloat | None = None
    """scores s become cap * tanh(s / cap)"""
    attention_backend: Literal["auto", "native", "transformer_engine"] = "auto"
    """attention code"""

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(self.hidden_size * 8 / 3) // 64 * 64 or 64 if self.swiglu else 4 * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple


class ParallelConfig(Part):
    """The rank grid and how sequences are shared."""

    tensor_model_parallel_size: Positive = 1
    """ranks that share every weight matrix"""
    context_parallel_size: Positive = 1
    """ranks that share every sequence"""
    pipeline_model_parallel_size: Positive = 1
    """ranks that share the stack of layers"""
    expert_model_parallel_size: Positive = 1
    """ranks that share the experts"""
    expert_tensor_parallel_size: Positive | None = None
    """tensor parallelism inside experts; None: tp"""
    order: str = "tp-cp-ep-dp-pp"
    """which axis varies fastest over ranks, left to right"""
    sequence_parallel: bool = False
    """norms and dropout cut along the sequence over tp ranks"""
    cp_comm_type: str | list[str | list[str | int]] = "p2p"
    """context-parallel attention: one type, one per layer, or runs of layers as in [[a2a, 4], [p2p, 8]]"""
    hierarchical_context_parallel_sizes: list[Positive] | None = None
    """a2a+p2p: sizes of the levels, inner to outer; product = context_parallel_size"""
    hybrid_context_parallel: bool = False
    """choose the cp of every sample by its length"""
    max_seqlen_per_dp_cp_rank: Positive | None = None
    """hybrid: tokens one rank can hold"""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl where CUDA is"""
    distributed_timeout_minutes: Annotated[float, Field(ge=0.01, le=525_600)] = 10.0
    """a collective that takes longer is an error"""
    read_peer_memory: bool = True
    """gloo: read large tensors from the memory of ranks on the same host, where Linux allows it"""

    def layer_comm_types(self, num_layers: int) -> list[str]:
        """cp_comm_type of every layer. ValueError for a run that is not [type, layers] or a list of another length."""
        given = self.cp_comm_type
        if isinstance(given, str):
            return [given] * num_layers
        types: list[str] = []
        for item in given:
            match [item] if isinstance(item, str) else item:
                case [str() as name]:
                    types.append(name)
                case [str() as name, int() as layers] if layers > 0:
                    # A count far beyond the model is told by its sum below, not by a list of that length.
                    types += [name] * min(layers, num_layers + 1)
                case _:
                    raise ValueError(f"{item} is not a run of layers: write it [type, layers], e.g. [a2a, 4]")
        if len(types) != num_layers:
            counted = sum(item[1] if isinstance(item, list) and len(item) == 2 else 1 for item in given)  # type: ignore[misc]
            raise ValueError(
                f"lists {counted} types for model.num_layers = {num_layers}: give {num_layers}, one per layer "
                "or in runs as in [[a2a, 4], [p2p, 8]], or a single one"
            )
        return types


class DataConfig(Part):
    """Where samples come from; paths are prefixes of .bin/.idx pairs."""

    data_path: str | list[str | float] | None = None
    """prefix, list of prefixes, or weight prefix weight prefix ...; divided by `split`"""
    train_data_path: str | list[str | float] | None = None
    """training data, instead of data_path"""
    valid_data_path: str | list[str | float] | None = None
    """validation data, likewise"""
    test_data_path: str | list[str | float] | None = None
    """test data, likewise; evaluated once, at the end"""
    split: str = "969,30,1"
    """shares of train, validation, test in data_path"""
    data_cache_path: str | None = None
    """folder of cached indices; None: beside the data"""
    seq_length: Positive
    """tokens of a pretraining sample, the most in a pack of conversations"""
    tokenizer_type: Literal["ByteLevelTokenizer", "SentencePieceTokenizer", "HuggingFaceTokenizer"] = (
        "SentencePieceTokenizer"
    )
    """reader of tokenizer_model"""
    tokenizer_model: str | None = None
    """file or folder of the tokenizer; checked against vocab_size"""
    mask_between_documents: bool = False
    """documents of a sample do not see each other (reset_attention_mask + reset_position_ids)"""
    eod_mask_loss: bool = False
    """the last token of a document predicts nothing"""
    sft: bool = False
    """fine-tune on conversations: each prefix has a _loss_mask pair beside it, as tools/prepare_sft.py writes them"""
    sft_packing: bool = True
    """sft: as many conversations in a sample as fit; else one"""
    pack_multiple: Positive = 16
    """sft: a conversation takes up room in a pack in multiples of this, whatever the layout"""
    verify_peers: bool = False
    """check every step that ranks of one dp rank hold the same sample"""
    num_workers: Annotated[int, Field(ge=0, le=1)] = 1
    """0: read in the training thread; 1: prefetch the next step in one thread"""


class OptimizerConfig(Part):
    """AdamW and its schedules; steps of the schedules are iterations."""

    lr: PositiveFloat
    """learning rate after warm-up"""
    min_lr: NonNegativeFloat = 0.0
    """learning rate after decay"""
    lr_warmup_init: NonNegativeFloat = 0.0
    """learning rate at step 0 of warm-up"""
    lr_warmup_iters: Count = 0
    """iterations of linear warm-up"""
    lr_decay_iters: Positive | None = None
    """iteration at which decay ends; None: train_iters"""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """shape of the decay"""
    lr_wsd_decay_iters: Positive | None = None
    """WSD: iterations of the final decay"""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """WSD: shape of the final decay"""
    weight_decay: NonNegativeFloat = 0.1
    """decay of matrices; norms and biases have none"""
    start_weight_decay: NonNegativeFloat | None = None
    """decay at step 0; None: weight_decay"""
    end_weight_decay: NonNegativeFloat | None = None
    """decay at the end; None: weight_decay"""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """start to end"""
    adam_beta1: Fraction = 0.9
    """decay of the first moment"""
    adam_beta2: Fraction = 0.95
    """decay of the second moment"""
    adam_eps: PositiveFloat = 1e-8
    """added to the root of the second moment"""
    clip_grad: NonNegativeFloat = 1.0
    """largest global gradient norm; 0: no clipping"""
    bucket_size: Positive = 25_000_000
    """elements of a gradient bucket"""


class TrainConfig(Part):
    """The loop."""

    micro_batch_size: Positive = 1
    """samples of one forward pass on one dp rank"""
    global_batch_size: Positive
    """samples of one step over all dp ranks"""
    train_iters: Positive
    """steps of the whole run"""
    seed: Seed = 1234
    """seed of weights, sample order and dropout"""
    init_from: str | None = None
    """folder of a Hugging Face model whose weights a run begins with that finds no checkpoint"""
    params_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """dtype of weights and math"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    eval_interval: Count = 0
    """iterations between evaluations; 0: none"""
    eval_on_start: bool = False
    """evaluate before the first step too"""
    eval_iters: Count = 0
    """global batches of one evaluation, also of the one on test data at train_iters; 0: none"""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: keep only layer inputs; selective: recompute recompute_modules; None: keep all"""
    recompute_num_layers: Positive | None = None
    """full: only the first n layers of a stage; None: all"""
    recompute_modules: list[Literal["core_attn", "mlp"]] = ["core_attn"]
    """what selective recomputation drops"""
    compile: bool = False
    """torch.compile the element-wise parts of each layer"""
    loss_chunk_size: Positive = 1024
    """tokens whose logits exist at once"""
    max_consecutive_nonfinite: Positive = 10
    """skipped steps in a row after which the run stops"""
    exit_interval: Positive | None = None
    """save and exit after an iteration divisible by this"""
    exit_duration_in_mins: PositiveFloat | None = None
    """save and exit after so many minutes"""
    num_threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    """CPU threads of a process; None: cores / local ranks"""


class CheckpointConfig(Part):
    """Checkpoints: iter_NNNNNNN folders and a `latest` pointer."""

    save: str | None = None
    """folder to save to; None: never"""
    load: str | None = None
    """where to begin while `save` holds no checkpoint; a checkpoint inside `save` rolls back to it, once"""
    finetune: bool = False
    """take the weights alone from `load`: iterations, samples and optimizer state start anew"""
    save_interval: Positive | None = None
    """iterations between checkpoints; None: only at the end"""
    keep_last: Positive | None = None
    """checkpoints kept; None: all"""


class LoggingConfig(Part):
    """Where numbers go."""

    log_interval: Positive = 1
    """iterations between console lines"""
    run_dir: str | None = None
    """folder of metrics.jsonl and TensorBoard files; None: neither"""
    tensorboard: bool = True
    """write TensorBoard files into run_dir"""
    wandb_project: str | None = None
    """project of Weights & Biases; None: not used"""
    wandb_exp_name: str | None = None
    """name of the run there"""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: files only, to be synced later"""
    peak_tflops: PositiveFloat | None = None
    """TFLOP/s of one device at this dtype, for MFU"""


class Config(Part):
    """The whole run."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
