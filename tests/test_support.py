"""Wrong configs are refused at once, with the rule, the numbers and what would do; right ones pass."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacp import support
from megacp.config import Config, ConfigError, load_config
from megacp.support_attention import ATTENTION_RULES
from megacp.support_backend import BACKEND_RULES
from megacp.support_data import SFT_RULES, loss_masks_exist

RIGHT: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "vocab_size": 1000},
    "data": {"data_path": "corpus/text", "seq_length": 128, "tokenizer_model": "corpus/tokenizer.model"},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 10},
    "train": {"global_batch_size": 8, "train_iters": 100},
}


def write_pair(prefix: str, dtype_code: int = 8, header: bytes | None = None) -> None:
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    if header is None:
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, dtype_code, 0, 1)
    Path(prefix + ".idx").write_bytes(header)
    Path(prefix + ".bin").write_bytes(b"")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the right config, its data, and files that are wrong in one way each."""
    monkeypatch.chdir(tmp_path)
    Path("right.yaml").write_text(yaml.safe_dump(RIGHT))
    write_pair("corpus/text")
    write_pair("corpus/other", dtype_code=4)
    write_pair("corpus/bytes", dtype_code=1)
    write_pair("corpus/floats", dtype_code=7)
    write_pair("corpus/short", header=b"MMIDIDX\x00\x00\x01")
    write_pair("corpus/foreign", header=b"not an index of tokens at all")
    write_pair("corpus/no_bin")
    Path("corpus/no_bin.bin").unlink()
    Path("corpus/tokenizer.model").write_bytes(b"")


TP, CP, PP = (f"parallel.{axis}_parallel_size" for axis in ("tensor_model", "context", "pipeline_model"))
LLAMA3 = "model.rope_scaling={type: llama3, factor: 8, low_freq_factor: %s, high_freq_factor: %s}"

# (overrides, world size, what the message must contain); a name in the first place of a row says what is wrong.
WRONG: dict[str, tuple[list[str], int, list[str]]] = {
    # the grid
    "world size": ([TP + "=2", CP + "=2"], 6, ["world size 6", "2*2*1 = 4", "4 or 8 processes"]),
    "world too small": ([CP + "=4"], 2, ["world size 2", "1*4*1 = 4", "start 4 processes", "1 or 2"]),
    "cp that does not divide": (
        [CP + "=3", "data.seq_length=126"],
        8,
        ["world size 8", "6 or 9", f"{CP} to 1, 2, 4 or 8"],
    ),
    "heads over tp": (
        ["model.num_attention_heads=9", "model.hidden_size=90", "model.num_query_groups=null", TP + "=2"],
        2,
        [f"{TP} = 2 must divide", "num_attention_heads = 9", "use 1,", "8 or 10"],
    ),
    "kv heads over tp": ([TP + "=8"], 8, ["must divide", "num_query_groups = 4", "1, 2 or 4", "= 8"]),
    "ffn over tp": (
        [TP + "=4", "model.ffn_hidden_size=170"],
        4,
        ["= 4 must divide", "ffn_hidden_size = 170", "1 or 2", "168 or 172"],
    ),
    "vocabulary over tp": (
        [TP + "=4", "model.make_vocab_size_divisible_by=1", "model.vocab_size=1001"],
        4,
        ["padded vocabulary = 1001", "vocab_size = 1001", "make_vocab_size_divisible_by = 4"],
    ),
    "order with a stranger": (["parallel.order=tp-cp-xp-dp-pp"], 1, ["parallel.order", "'xp'", "tp-cp-ep-dp-pp"]),
    "order with a repetition": (["parallel.order=tp-cp-cp-dp-pp"], 1, ["names cp 2 times", "tp-cp-ep-dp-pp"]),
    "order lacks cp": (["parallel.order=tp-dp-pp", CP + "=2"], 2, ["lacks cp, whose size is 2", "tp-cp-ep-dp-pp"]),
    "order lacks dp": (["parallel.order=tp-cp-pp"], 4, ["lacks dp, whose size is 4"]),
    "sequence parallel alone": (["parallel.sequence_parallel=true"], 1, ["sequence_parallel", TP, "not 1", "false"]),
    "sequence length": ([CP + "=4", "data.seq_length=100"], 4, ["seq_length = 100", "2*4 = 8", "96 or 104"]),
    "sequence length, one rank": (["data.seq_length=101"], 1, ["seq_length = 101", "2*1 = 2", "100 or 102"]),
    "global batch": (
        ["train.global_batch_size=10", "train.micro_batch_size=2"],
        4,
        ["global_batch_size = 10", "2*4 = 8", "8 or 16"],
    ),
    "global batch below one round": (["train.global_batch_size=2"], 4, ["global_batch_size = 2", "1*4 = 4", "use 4"]),
    "float64 on a GPU": (
        ["train.params_dtype=float64", "train.device=cuda"],
        1,
        ["float64", "device cpu, not cuda", "float32"],
    ),
    "nccl on the CPU": (
        ["parallel.distributed_backend=nccl", "train.device=cpu"],
        1,
        ["nccl", "train.device = cpu", "gloo or auto"],
    ),
    "room without hybrid": (
        ["parallel.max_seqlen_per_dp_cp_rank=128"],
        1,
        ["max_seqlen_per_dp_cp_rank = 128 does nothing", "hybrid_context_parallel", "leave it out"],
    ),
    # the model
    "hidden over heads": (
        ["model.hidden_size=60"],
        1,
        ["hidden_size = 60", "num_attention_heads = 8", "56 or 64", "kv_channels"],
    ),
    "groups over heads": (["model.num_query_groups=3"], 1, ["num_query_groups = 3", "= 8", "1, 2, 4 or 8"]),
    "odd head": (["model.kv_channels=15"], 1, ["odd width", "kv_channels = 15", "14 or 16"]),
    "odd rotary share": (
        ["model.kv_channels=16", "model.rotary_percent=0.3"],
        1,
        ["0.3*16 = 4.8", "even", "0.25 or 0.375"],
    ),
    "rope factor": (["model.rope_scaling={type: linear, factor: 0.5}"], 1, ["factor = 0.5", "1 or more"]),
    "rope factor without a type": (["model.rope_scaling.factor=4"], 1, ["factor = 4", "linear, llama3 or yarn"]),
    "llama3 bands": ([LLAMA3 % (4, 4)], 1, ["high_freq_factor = 4", "low_freq_factor = 4", "4 and 1"]),
    "yarn without a base": (
        ["model.rope_scaling={type: yarn, factor: 2}", "model.rotary_base=1"],
        1,
        ["model.rotary_base = 1 must exceed 1", "yarn", "10000"],
    ),
    "yarn bands": (
        ["model.rope_scaling={type: yarn, factor: 2, beta_fast: 1, beta_slow: 32}"],
        1,
        ["beta_fast = 1", "beta_slow = 32", "32 and 1"],
    ),
    "scaling without rope": (
        ["model.position_embedding_type=none", "model.rope_scaling={type: yarn, factor: 2}"],
        1,
        ["rope_scaling.type yarn", "rope, not none", "use type none"],
    ),
    "positions not given": (
        ["model.position_embedding_type=learned_absolute"],
        1,
        ["max_position_embeddings = None", "seq_length = 128", "use 128 or more"],
    ),
    "too few positions": (
        ["model.position_embedding_type=learned_absolute", "model.max_position_embeddings=64"],
        1,
        ["max_position_embeddings = 64", "seq_length = 128", "or seq_length 64"],
    ),
    "two activations": (["model.openai_gelu=true"], 1, ["swiglu", "openai_gelu", "set one to false"]),
    # the optimizer
    "min_lr": (["optimizer.min_lr=0.01"], 1, ["min_lr = 0.01", "lr = 0.001", "0.001 or less"]),
    "warm-up start": (["optimizer.lr_warmup_init=0.5"], 1, ["lr_warmup_init = 0.5", "0.001 or less"]),
    "warm-up": (["train.train_iters=10"], 1, ["lr_warmup_iters = 10", "train.train_iters = 10", "0 to 9"]),
    "warm-up over decay": (["optimizer.lr_decay_iters=5"], 1, ["= 10", "optimizer.lr_decay_iters = 5", "0 to 4"]),
    "WSD without its decay": (["optimizer.lr_decay_style=WSD"], 1, ["lr_wsd_decay_iters = None", "1 to 90"]),
    "WSD decay too long": (
        ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=91"],
        1,
        ["lr_wsd_decay_iters = 91", "1 to 90"],
    ),
    "WSD's iterations without WSD": (
        ["optimizer.lr_wsd_decay_iters=9"],
        1,
        ["lr_wsd_decay_iters = 9 does nothing", "lr_decay_style cosine", "WSD, or leave it out"],
    ),
    "WSD's style without WSD": (
        ["optimizer.lr_wsd_decay_style=linear", "optimizer.lr_decay_style=constant"],
        1,
        ["lr_wsd_decay_style = linear does nothing", "lr_decay_style constant"],
    ),
    "falling weight decay": (
        ["optimizer.start_weight_decay=0.2", "optimizer.weight_decay_incr_style=linear"],
        1,
        ["end_weight_decay = 0.1", "start_weight_decay = 0.2", "use 0.2"],
    ),
    "constant weight decay that grows": (
        ["optimizer.end_weight_decay=0.2"],
        1,
        ["constant", "= 0.1", "= 0.2", "linear or cosine"],
    ),
    # the loop
    "evaluation of nothing": (["train.eval_interval=10"], 1, ["eval_interval = 10", "eval_iters", "1 or more"]),
    "evaluation at the start alone": (
        ["train.eval_on_start=true"],
        1,
        ["eval_on_start does nothing without train.eval_interval", "eval_on_start to false"],
    ),
    "evaluation without a share": (
        ["train.eval_interval=10", "train.eval_iters=1", "data.split='100,0,0'"],
        1,
        ["eval_interval = 10", "split = 100,0,0", "969,30,1"],
    ),
    "evaluation without data": (
        ["train.eval_interval=10", "train.eval_iters=1", "data.data_path=null", "data.train_data_path=corpus/text"],
        1,
        ["eval_interval = 10", "valid_data_path"],
    ),
    "recompute layers": (["train.recompute_num_layers=1"], 1, ["recompute_num_layers = 1", "full, not None"]),
    "recompute too many layers": (
        ["train.recompute_granularity=full", "train.recompute_num_layers=3"],
        1,
        ["recompute_num_layers = 3", "num_layers = 2", "2 or less"],
    ),
    "recompute modules": (["train.recompute_modules=[mlp]"], 1, ["['mlp']", "selective, not None", "leave"]),
    "recompute nothing": (
        ["train.recompute_granularity=selective", "train.recompute_modules=[]"],
        1,
        ["recompute_modules = []", "core_attn, mlp or both"],
    ),
    "saving nowhere": (["checkpoint.save_interval=10"], 1, ["save_interval = 10", "set checkpoint.save"]),
    "keeping nothing": (["checkpoint.keep_last=2"], 1, ["keep_last = 2", "set checkpoint.save"]),
    "weights from two places": (
        ["checkpoint.finetune=true", "checkpoint.load=corpus", "train.init_from=corpus"],
        1,
        ["train.init_from = corpus and checkpoint.load = corpus", "leave one of them out"],
    ),
    "fine-tuning nothing": (["checkpoint.finetune=true"], 1, ["finetune needs checkpoint.load", "finetune to false"]),
    "fine-tuning itself": (
        ["checkpoint.finetune=true", "checkpoint.save=runs/new", "checkpoint.load=runs/new"],
        1,
        ["not runs/new", "another folder than checkpoint.save"],
    ),
    "name of no project": (["logging.wandb_exp_name=one"], 1, ["wandb_exp_name = one does nothing", "wandb_project"]),
    "mode of no project": (["logging.wandb_mode=offline"], 1, ["wandb_mode = offline does nothing", "leave it out"]),
    "exit without saving": (["train.exit_interval=5"], 1, ["exit_interval = 5", "set checkpoint.save"]),
    "timed exit without saving": (["train.exit_duration_in_mins=5"], 1, ["exit_duration_in_mins = 5"]),
    # the data
    "no data": (["data.data_path=null"], 1, ["no training data", "data.data_path", "data.train_data_path"]),
    "data twice": (["data.train_data_path=corpus/text"], 1, ["data_path and data.train_data_path are both set"]),
    "validation alone": (
        ["data.data_path=null", "data.valid_data_path=corpus/text"],
        1,
        ["data.valid_data_path", "set data.train_data_path"],
    ),
    "split of words": (["data.split=most"], 1, ["split = 'most'", "1 to 3 numbers", "969,30,1"]),
    "split of nan": (["data.split='nan,1'"], 1, ["split = 'nan,1'", ">= 0"]),
    "negative split": (["data.split='-1,1'"], 1, ["split = '-1,1'", ">= 0", "969,30,1"]),
    "four splits": (["data.split='1,1,1,1'"], 1, ["split = '1,1,1,1'", "1 to 3 numbers"]),
    "split without training": (["data.split='0,1,1'"], 1, ["split = '0,1,1'", "more than 0"]),
    "empty blend": (["data.data_path=[]"], 1, ["data_path = []", "weight prefix"]),
    "half a blend": (
        ["data.data_path=[0.5, corpus/text, corpus/other]"],
        1,
        ["1 weights, 2 prefixes", "weight prefix weight prefix"],
    ),
    "weights behind": (["data.data_path=[corpus/text, 0.5]"], 1, ["not in pairs", "[0.7, a, 0.3, b]"]),
    "weights without a sum": (
        ["data.data_path=[1.7e308, corpus/text, 1.7e308, corpus/text]"],
        1,
        ["data.data_path: the weights have no finite sum", "[0.7, a, 0.3, b]"],
    ),
    "weight without end": (["data.data_path=[.inf, corpus/text]"], 1, ["data.data_path", "finite"]),
    "weight of nothing": (["data.data_path=[0, corpus/text, 1, corpus/other]"], 1, ["weight 0 must be above 0"]),
    # files
    "missing data": (["data.data_path=corpus/txt"], 1, ["corpus/txt.idx does not exist", "did you mean corpus/text?"]),
    "missing half": (["data.data_path=corpus/no_bin"], 1, ["corpus/no_bin.bin does not exist"]),
    "missing folder": (["data.data_path=corpse/text"], 1, ["no folder corpse", "tools/preprocess_data.py"]),
    "file for a prefix": (["data.data_path=corpus/text.bin"], 1, ["without its ending: corpus/text"]),
    "missing data in a blend": (
        ["data.data_path=[0.5, corpus/text, 0.5, corpus/othr]"],
        1,
        ["corpus/othr.idx does not exist", "corpus/other"],
    ),
    "vocabulary over uint16": (
        ["model.vocab_size=65536"],
        1,
        ["corpus/text.idx stores uint16", "65535", "vocab_size = 65536", "int32"],
    ),
    "vocabulary over uint8": (
        ["data.data_path=corpus/bytes"],
        1,
        ["corpus/bytes.idx stores uint8", "255", "vocab_size = 1000", "uint16"],
    ),
    "floats for tokens": (["data.data_path=corpus/floats"], 1, ["corpus/floats.idx stores no integers", "int32"]),
    "cut index": (["data.data_path=corpus/short"], 1, ["corpus/short.idx is no token index"]),
    "foreign index": (["data.data_path=corpus/foreign"], 1, ["corpus/foreign.idx is no token index", "not an in"]),
    "missing tokenizer": (
        ["data.tokenizer_model=corpus/tokeniser.model"],
        1,
        ["tokenizer_model", "corpus/tokeniser.model does not exist", "did you mean corpus/tokenizer.model?"],
    ),
    "missing checkpoint": (["checkpoint.load=runs/old"], 1, ["checkpoint.load", "no folder runs/old"]),
    # not built yet
    "pipelines": ([PP + "=2"], 2, [f"{PP} = 2 is not supported yet: set it to 1"]),
    "experts": (["parallel.expert_model_parallel_size=2"], 2, ["expert_model_parallel_size = 2 is not supported yet"]),
    "expert tp": (["parallel.expert_tensor_parallel_size=1"], 1, ["= 1 is not supported yet: leave it out"]),
    "hybrid": (["parallel.hybrid_context_parallel=true"], 1, ["hybrid_context_parallel = True is not supported yet"]),
    # types and names
    "unknown key": (["model.num_layer=2"], 1, ["unknown key model.num_layer", "model.num_layers?"]),
    "wrong type": (["train.train_iters=ten"], 1, ["train.train_iters = 'ten'", "must be a valid integer"]),
    "out of range": (["train.micro_batch_size=0"], 1, ["train.micro_batch_size = 0", "must be greater than 0"]),
    "too many workers": (["data.num_workers=2"], 1, ["data.num_workers = 2", "less than or equal to 1"]),
    "unknown choice": (["model.normalization=BatchNorm"], 1, ["'BatchNorm'", "'RMSNorm' or 'LayerNorm'"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_config_is_refused_at_once(case: str) -> None:
    overrides, world_size, expected = WRONG[case]
    begin = time.process_time()  # not the clock on the wall: other tests may share the cores
    with pytest.raises(ConfigError) as refusal:
        load_config("right.yaml", overrides, world_size)
    assert time.process_time() - begin < 1.0
    message = str(refusal.value)
    assert "\n" not in message and message.startswith("right.yaml: ")
    assert not [part for part in expected if part not in message], message


def test_each_rule_refuses_something() -> None:
    """A rule that no wrong config above or below trips is a rule nobody has seen working."""
    tripped: set[str] = set()
    own = [rule for rule in support.RULES if rule not in (*ATTENTION_RULES, *BACKEND_RULES, *SFT_RULES)]
    of_files = [rule for rule in support.FILE_RULES if rule is not loss_masks_exist]
    for overrides, world_size, _ in WRONG.values():
        if config := parsed(overrides):
            tripped |= {rule.__name__ for rule in own if list(rule(config, world_size))}
            tripped |= {rule.__name__ for rule in of_files if trips(rule, config)}
    assert {rule.__name__ for rule in (*own, *of_files)} == tripped


def trips(rule: support.Rule, config: Config) -> bool:
    try:
        return bool(list(rule(config, 1)))
    except FileNotFoundError:  # of files that an earlier rule found missing
        return False


def parsed(overrides: list[str]) -> Config | None:
    """The config without its rules; None where its types are wrong."""
    tree: dict[str, Any] = yaml.safe_load(yaml.safe_dump(RIGHT))
    for override in overrides:
        name, _, text = override.partition("=")
        *parts, key = name.split(".")
        place = tree
        for part in parts:
            place = place.setdefault(part, {})
        place[key] = yaml.safe_load(text)
    try:
        return Config.model_validate(tree)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("rule", "overrides", "expected"),
    [
        (
            support.hybrid_needs_room,
            ["parallel.hybrid_context_parallel=true"],
            ["max_seqlen_per_dp_cp_rank", "seq_length = 128"],
        ),
    ],
)
def test_rules_of_features_to_come(rule: support.Rule, overrides: list[str], expected: list[str]) -> None:
    config = parsed(overrides)
    assert config is not None
    (message,) = rule(config, None)
    assert not [part for part in expected if part not in message], message


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], None),
        ([], 8),
        ([TP + "=4", "parallel.sequence_parallel=true"], 8),
        ([CP + "=4", "data.seq_length=8"], 8),
        ([CP + "=4", "data.seq_length=101", "data.mask_between_documents=true"], 4),
        (["train.micro_batch_size=2"], 4),
        (["parallel.order=tp-cp-dp-pp"], 2),
        (["parallel.order=dp-pp-ep-cp-tp", CP + "=2", TP + "=2"], 4),
        (["parallel.order=tp-cp-ep-pp"], 1),
        (["model.hidden_size=60", "model.kv_channels=8"], 1),
        (["model.num_query_groups=8"], 8),
        (["model.num_query_groups=null"], 1),
        (["model.kv_channels=16", "model.rotary_percent=0.25"], 1),
        (["model.kv_channels=15", "model.position_embedding_type=none"], 1),
        (["model.position_embedding_type=learned_absolute", "model.max_position_embeddings=128"], 1),
        (["model.rope_scaling={type: linear, factor: 1}"], 1),
        ([LLAMA3 % (1, 1.5)], 1),
        (["model.swiglu=false", "model.openai_gelu=true", "model.hidden_dropout=0.1"], 1),
        (["optimizer.min_lr=1e-3", "optimizer.lr_warmup_init=1e-3"], 1),
        (["train.train_iters=11"], 1),
        (["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=90"], 1),
        (["optimizer.start_weight_decay=0.01", "optimizer.weight_decay_incr_style=cosine"], 1),
        (["train.eval_interval=10", "train.eval_iters=1"], 1),
        (["train.recompute_granularity=full", "train.recompute_num_layers=2"], 1),
        (["train.recompute_granularity=selective", "train.recompute_modules=[core_attn, mlp]"], 1),
        (["checkpoint.save=runs", "checkpoint.save_interval=5", "checkpoint.keep_last=1", "train.exit_interval=5"], 1),
        (["checkpoint.save=runs", "checkpoint.load=runs"], 1),
        (["checkpoint.save=runs", "checkpoint.load=runs/iter_0000005"], 1),
        (["checkpoint.load=corpus", "checkpoint.finetune=true"], 1),
        (["logging.wandb_project=tiny", "logging.wandb_mode=offline", "logging.wandb_exp_name=one"], 1),
        (["train.params_dtype=float64", "train.device=cpu"], 1),
        (["data.split='1'"], 1),
        (["data.split='.5, 0.5'"], 1),
        (["data.split=949/50/1"], 1),
        (["data.data_path=[corpus/text, corpus/other]"], 1),
        (["data.data_path=[0.5, corpus/text, 2, corpus/other]"], 1),
        (["data.data_path=['0.5', corpus/text]"], 1),
        (["data.data_path=null", "data.train_data_path=corpus/text", "data.valid_data_path=corpus/other"], 1),
        (["model.vocab_size=65535"], 1),
        (["model.vocab_size=65536", "data.data_path=corpus/other"], 1),
        (["model.vocab_size=255", "data.data_path=corpus/bytes"], 1),
        (["data.tokenizer_model=null"], 1),
    ],
)
def test_right_config_passes(overrides: list[str], world_size: int | None) -> None:
    load_config("right.yaml", overrides, world_size)


def test_files_need_not_be_there() -> None:
    overrides = ["data.data_path=nowhere/text", "data.tokenizer_model=nowhere/model", "checkpoint.load=nowhere"]
    load_config("right.yaml", overrides, 1, check_files=False)


@pytest.mark.parametrize("number", range(1, 61))
def test_suggested_numbers_would_do(number: int) -> None:
    """Lists like `1, 3 or 9` hold true divisors and multiples, the nearest among them."""
    for wanted in (1, 2, 7, 64):
        divisors = listed(support.divisors_near(number, wanted))
        nearest = min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wanted))
        assert nearest in divisors and divisors == sorted(divisors)
        assert all(number % n == 0 for n in divisors)
        multiples = listed(support.multiples_near(number, wanted))
        assert all(n > 0 and n % number == 0 and abs(n - wanted) <= number for n in multiples)


def listed(text: str) -> list[int]:
    return [int(n) for n in text.replace(" or ", ", ").split(", ")]


def test_rules_need_neither_torch_nor_the_rest() -> None:
    code = "import sys, megacp.config; print([n for n in sys.modules if n.split('.')[0] in ('torch', 'megacp')])"
    root = Path(support.__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert sorted(yaml.safe_load(out.stdout)) == [
        "megacp",
        "megacp.config",
        "megacp.parts",
        "megacp.support",
        "megacp.support_attention",
        "megacp.support_backend",
        "megacp.support_data",
    ]
