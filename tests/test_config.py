"""Reading configs: overrides, types, names and YAML, each mistake one clear line."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from megacp.config import Config, ConfigError, ModelConfig, ParallelConfig, load_config

RIGHT = """\
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 1000}
data: {data_path: corpus/text, seq_length: 128}
optimizer: {lr: 3e-4}
train: {global_batch_size: 4, train_iters: 10}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "right.yaml"
    path.write_text(RIGHT)
    return path


def load(path: Path, *overrides: str) -> Config:
    return load_config(path, overrides, 1, check_files=False)


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, *overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_defaults_and_values(path: Path) -> None:
    config = load(path)
    assert config.model.num_layers == 2 and config.data.data_path == "corpus/text"
    assert config.optimizer.lr == 3e-4
    assert config.parallel.context_parallel_size == 1 and config.logging.log_interval == 1


def test_defaults_are_not_shared(path: Path) -> None:
    load(path).train.recompute_modules.append("mlp")
    assert load(path).train.recompute_modules == ["core_attn"]


@pytest.mark.parametrize(
    ("override", "part", "key", "value"),
    [
        ("train.train_iters=7", "train", "train_iters", 7),
        ("optimizer.lr=1e-3", "optimizer", "lr", 1e-3),
        ("optimizer.lr=1.E-3", "optimizer", "lr", 1e-3),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("checkpoint.save=runs/a=b", "checkpoint", "save", "runs/a=b"),
        ("checkpoint.save=", "checkpoint", "save", None),
        ("checkpoint.save=null", "checkpoint", "save", None),
        ("data.data_path=[0.5, a, 1, b]", "data", "data_path", [0.5, "a", 1, "b"]),
        ("model.swiglu=false", "model", "swiglu", False),
        ("parallel.order=tp-cp-dp-pp-ep", "parallel", "order", "tp-cp-dp-pp-ep"),
    ],
)
def test_override(path: Path, override: str, part: str, key: str, value: object) -> None:
    found = getattr(getattr(load(path, override), part), key)
    assert found == value and type(found) in (type(value), float)


def test_later_override_wins_and_nested_ones_reach(path: Path) -> None:
    config = load(path, "train.seed=1", "model.rope_scaling.type=yarn", "model.rope_scaling.factor=4", "train.seed=2")
    assert config.train.seed == 2
    assert config.model.rope_scaling.type == "yarn" and config.model.rope_scaling.factor == 4.0


@pytest.mark.parametrize("override", ["train_iters=1", "train.train_iters", "train.=1", ".train=1", "=", "train=1"])
def test_malformed_override(path: Path, override: str) -> None:
    assert "must read part.key=value, e.g. train.train_iters=100" in refusal(path, override)


def test_override_below_a_value(path: Path) -> None:
    assert "override 'train.seed.low=1': seed is not a part" in refusal(path, "train.seed=3", "train.seed.low=1")


def test_override_that_is_not_yaml(path: Path) -> None:
    for value in ("[a", "!!bool maybe", "!!timestamp x", '!!int ""', "2020-13-45"):
        assert f"'train.seed={value}': the value is not valid YAML" in refusal(path, f"train.seed={value}")
    assert "the value is not valid YAML" in refusal(path, f"train.seed={'[' * 5000}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.hiden_size=4", "unknown key model.hiden_size; did you mean model.hidden_size?"),
        ("model.train_iters=4", "unknown key model.train_iters; did you mean train.train_iters?"),
        ("train.factor=4", "unknown key train.factor; did you mean model.rope_scaling.factor?"),
        ("train.tensor_parallel_size=4", "did you mean parallel.tensor_model_parallel_size?"),
        ("model.rope_scaling.fctor=4", "did you mean model.rope_scaling.factor?"),
        ("modl.num_layers=4", "unknown key modl; did you mean model?"),
        ("foo.bar=4", "unknown key foo; the parts are model, parallel, data, optimizer, train, checkpoint, logging"),
        ("checkpoint.qqq=4", "unknown key checkpoint.qqq; there are save, load, finetune, save_interval, keep_last"),
    ],
)
def test_unknown_key(path: Path, override: str, expected: str) -> None:
    assert expected in refusal(path, override)


def test_key_outside_its_part(path: Path) -> None:
    path.write_text(RIGHT + "train_iters: 5\n")
    assert "unknown key train_iters; did you mean train.train_iters?" in refusal(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.train_iters='10'", "train.train_iters = '10': must be a valid integer"),
        ("train.train_iters=1e3", "train.train_iters = 1000.0: must be a valid integer"),
        ("train.train_iters=true", "train.train_iters = True: must be a valid integer"),
        ("train.micro_batch_size=0", "train.micro_batch_size = 0: must be greater than 0"),
        ("train.compile=1", "train.compile = 1: must be a valid boolean"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': must be a valid number"),
        ("optimizer.lr=.inf", "optimizer.lr = inf: must be a finite number"),
        ("optimizer.lr=-1", "optimizer.lr = -1: must be greater than 0"),
        ("optimizer.adam_beta1=1.0", "optimizer.adam_beta1 = 1.0: must be less than 1"),
        ("model.normalization=rms", "must be 'RMSNorm' or 'LayerNorm'"),
        ("model.window_size=[1]", "must have at least 2 items"),
        ("data.data_path=5", "data.data_path = 5: must be a valid string or must be a valid list"),
        ("data.data_path=[true, a]", "data.data_path = [True, 'a']: must be a valid string or must be a valid number"),
        ("parallel.hierarchical_context_parallel_sizes=[2, 0]", "must be greater than 0"),
        ("parallel.distributed_timeout_minutes=1e9", "must be less than or equal to 525600"),
        ("parallel.distributed_timeout_minutes=1e-9", "must be greater than or equal to 0.01"),
        ("train.num_threads=5000", "train.num_threads = 5000: must be less than or equal to 4096"),
        ("train.seed=4294967296", "train.seed = 4294967296: must be less than 4294967296"),
        ("model.rope_scaling.mscale=-1", "model.rope_scaling.mscale = -1: must be greater than or equal to 0"),
        ("model.rope_scaling=yarn", "model.rope_scaling = 'yarn': must be a valid dictionary"),
    ],
)
def test_wrong_type(path: Path, override: str, expected: str) -> None:
    assert expected in refusal(path, override)


def every_number() -> list[str]:
    """Dotted names of the fields that take a number."""
    numbers, keys = (int, float), []

    def look(part: type[BaseModel], prefix: str) -> None:
        for name, field in part.model_fields.items():
            kinds = [field.annotation, *get_args(field.annotation)]
            nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
            if nested:
                look(nested[0], f"{prefix}{name}.")
            elif any(kind in numbers or get_args(kind)[:1] in [(n,) for n in numbers] for kind in kinds):
                keys.append(prefix + name)

    look(Config, "")
    return keys


@pytest.mark.parametrize("key", every_number())
def test_huge_numbers_are_answered_at_once(path: Path, key: str) -> None:
    """Taken, or refused in one line: never a traceback, never a search that has no end."""
    for number in ("9" * 20, "9" * 400, "9" * 5000, str(2**50), str(2**63 - 1), "1e308", "1e400", "-1e308", "1e-320"):
        begin = time.process_time()
        try:
            load(path, f"{key}={number}")
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
        assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.hidden_size={}"],
        ["model.num_attention_heads={}", "model.kv_channels=8", "model.num_query_groups=3"],
    ],
)
def test_nearest_divisors_of_a_large_number_are_found_at_once(path: Path, overrides: list[str]) -> None:
    """Not by trying up to its root: this is the last prime below 2^50."""
    begin = time.process_time()
    message = refusal(path, *(override.format(1_125_899_906_842_597) for override in overrides))
    assert "use 1 or 1125899906842597" in message or "or 1 or 1125899906842597 heads" in message
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("number", ["0100", "00", "-010", "1:30", "1:30.5", "0b11", "0o17", "1_000:10", "0x", "0xg"])
def test_what_only_yaml_reads_as_a_number_is_text(path: Path, number: str) -> None:
    """0100 would be 64, 1:30 would be 90."""
    refused = f"train.train_iters = {number!r}: must be a valid integer"
    assert refused in refusal(path, f"train.train_iters={number}")
    path.write_text(RIGHT.replace("train_iters: 10", f"train_iters: {number}"))
    assert refused in refusal(path)
    assert f"optimizer.lr = {number!r}: must be a valid number" in refusal(
        path, "train.train_iters=1", f"optimizer.lr={number}"
    )
    assert load(path, "train.train_iters=1", f"checkpoint.save={number}").checkpoint.save == number


@pytest.mark.parametrize(
    ("number", "value"), [("0", 0), ("-0", 0), ("100", 100), ("+7", 7), ("1_000", 1000), ("0x1F", 31)]
)
def test_every_spelling_of_an_integer(path: Path, number: str, value: int) -> None:
    assert load(path, f"train.seed={number}").train.seed == value


def test_long_values_are_cut(path: Path) -> None:
    assert len(refusal(path, f"train.train_iters={'x' * 1000}")) < 250


def test_several_mistakes_are_counted(path: Path) -> None:
    assert refusal(path, "train.seed=a", "train.compile=b").endswith("(and 1 more)")


def test_missing_key_and_missing_part(path: Path) -> None:
    path.write_text(RIGHT.replace("vocab_size: 1000", ""))
    assert "model.vocab_size is required: tokens of the tokenizer" in refusal(path)
    path.write_text(RIGHT.replace("data:", "logging: {}\n#"))
    assert "data is required" in refusal(path)


def test_empty_part_is_a_part_of_defaults(path: Path) -> None:
    path.write_text(RIGHT + "logging:\nparallel:\n  # context_parallel_size: 2\n")
    assert load(path, "parallel.order=tp-cp-ep-dp-pp").parallel.context_parallel_size == 1
    path.write_text("model:\n" + RIGHT.partition("\n")[2])
    assert "model.num_layers is required" in refusal(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: [1, 2", "is not valid YAML"),
        ("model: {a: 1}\nmodel: {a: 2}\n", "key 'model' stands twice"),
        ("train:\n  seed: 1\n  seed: 2\n", "key 'seed' stands twice"),
        ("a: 2020-13-45\n", "is not valid YAML"),
        ("a: !!python/object:os.system x\n", "is not valid YAML"),
        ("a: \x00\n", "is not valid YAML"),
        ("{[a]: 1}", "is not valid YAML"),
        ("a: !!bool maybe\n", "is not valid YAML"),
        ("a: !!timestamp x\n", "is not valid YAML"),
        ('a: !!int ""\n', "is not valid YAML"),
        ("a: !!int x\n", "is not valid YAML"),
        ('a: !!float ""\n', "is not valid YAML"),
        ("a: !!binary é\n", "is not valid YAML"),
        ("a: !!set [1]\n", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        ("{a: " * 5000, "is not valid YAML"),
        ("", "is empty; it must hold the parts model, parallel"),
        ("- model\n", "must hold the parts model, parallel, data, optimizer, train, checkpoint, logging, not a list"),
        ("1: 2\n", "unknown key 1; the parts are model, parallel"),
    ],
)
def test_broken_yaml(path: Path, text: str, expected: str) -> None:
    path.write_text(text)
    message = refusal(path)
    assert expected in message and str(path) in message


def test_merge_keys(path: Path) -> None:
    path.write_text("data: &d {data_path: a, seq_length: 8}\n" + RIGHT.replace("{data_path: corpus/text,", "{<<: *d,"))
    path.write_text(path.read_text().replace("data: &d", "x: &d", 1))
    assert "unknown key x" in refusal(path)
    path.write_text(RIGHT.replace("{num_layers: 2,", "{<<: {num_layers: 3}, qk_layernorm: true,"))
    assert load(path).model.num_layers == 3


def test_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.with_name(".hidden.yaml").touch()
    assert f"there are {path}" in refusal(path.with_name("wrong.yaml"))
    assert ".hidden" not in refusal(path.with_name("wrong.yaml"))
    monkeypatch.chdir(Path(__file__).parents[1])
    assert "does not exist; there are" in (line := refusal(path.parent / "nowhere" / "wrong.yaml"))
    assert "configs/quickstart.yaml" in line
    assert "cannot be read" in refusal(path.parent)
    path.write_bytes(b"\xff\xfe\xfa")
    assert "cannot be read" in refusal(path)


@pytest.mark.parametrize(
    "key", ["data.data_path", "data.tokenizer_model", "data.data_cache_path", "checkpoint.load", "checkpoint.save"]
)
@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000], ids=["name", "path"])
def test_a_path_too_long_is_refused(path: Path, key: str, name: str) -> None:
    """Or taken, where nothing has to be there yet."""
    try:
        load_config(path, [f"{key}={name}"], 1)
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("number", ["3e-4", "3E-4", "3.e-4", "3.0e-4", "0.3e-3", ".3e-3", "+3e-4", "0.0003", "30_0e-6"])
def test_every_spelling_of_a_float(path: Path, number: str) -> None:
    assert math.isclose(load(path, f"optimizer.lr={number}").optimizer.lr, 3e-4)


def test_what_follows_from_other_values() -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    model = ModelConfig(**sizes)
    assert (model.head_dim, model.kv_heads, model.padded_vocab_size) == (16, 4, 1024)
    assert model.ffn_size == 128 and ModelConfig(**sizes, swiglu=False).ffn_size == 256
    other = ModelConfig(
        **sizes, kv_channels=32, num_query_groups=2, ffn_hidden_size=100, make_vocab_size_divisible_by=1
    )
    assert (other.head_dim, other.kv_heads, other.ffn_size, other.padded_vocab_size) == (32, 2, 100, 1000)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a2a", ["a2a"] * 4),
        (["p2p", "a2a", "p2p", "a2a+p2p"], ["p2p", "a2a", "p2p", "a2a+p2p"]),
        ([["a2a", 1], ["p2p", 3]], ["a2a", "p2p", "p2p", "p2p"]),
        (["all_gather", ["a2a", 2], "p2p"], ["all_gather", "a2a", "a2a", "p2p"]),
    ],
)
def test_comm_type_of_every_layer(given: Any, expected: list[str]) -> None:
    assert ParallelConfig(cp_comm_type=given).layer_comm_types(4) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([["a2a", 1], ["p2p", 4]], r"lists 5 types for model.num_layers = 4: give 4, .*\[\[a2a, 4\], \[p2p, 8\]\]"),
        ([["p2p", 10**12]], "lists 1000000000000 types"),
        ([], "lists 0 types"),
        ([["p2p", 0], ["a2a", 4]], r"\['p2p', 0\] is not a run of layers"),
        ([["p2p", -4]], r"\['p2p', -4\] is not a run of layers"),
        ([[4, "p2p"]], r"\[4, 'p2p'\] is not a run of layers"),
        ([[]], r"\[\] is not a run of layers"),
        ([["p2p", 2, 2]], r"\['p2p', 2, 2\] is not a run of layers"),
    ],
)
def test_comm_types_that_do_not_fit_the_layers(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(cp_comm_type=given).layer_comm_types(4)
