"""What native attention and each release of TransformerEngine are refused, and which of them `auto` is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp import support, support_backend
from megacp.config import Config
from megacp.support_backend import (
    BACKEND_RULES,
    EXCHANGES,
    FIRST_RELEASE,
    OLDEST,
    cpu_problems,
    cuda_problems,
    has,
    release,
    te_problems,
    te_serves,
    te_version,
)
from tests.te_standin import FACTS
from tests.test_support import CP, TP, parsed

KIND, SIZES = "parallel.cp_comm_type", "parallel.hierarchical_context_parallel_sizes"
NATIVE, TE = (f"model.attention_backend={name}" for name in ("native", "transformer_engine"))
GPU = ["train.device=cuda", "train.params_dtype=bfloat16"]
DOCUMENTS = "data.mask_between_documents=true"
A2AP2P = [f"{KIND}=a2a+p2p", f"{SIZES}=[2, 2]"]
WINDOW, SINK, CAP = "model.window_size=[64, 0]", "model.softmax_type=off-by-one", "model.attn_logit_softcapping=30"
DROPOUT = "model.attention_dropout=0.1"


def config_of(*overrides: str) -> Config:
    config = parsed(["data.seq_length=960", *overrides])
    assert config is not None
    return config


def problem(*overrides: str) -> str | None:
    """The first line any rule has, files aside."""
    return support.first_problem(config_of(*overrides), None, check_files=False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the installed release; at first there is none."""

    def set_to(version: str | None) -> None:
        monkeypatch.setattr(support_backend, "te_version", lambda: version)

    set_to(None)
    return set_to


# (overrides, release, what the line must contain), on four context-parallel ranks with GPUs
REFUSED: dict[str, tuple[list[str], str | None, list[str]]] = {
    "not installed": ([], None, ["not installed", "pip install -e '.[te]'", "attention_backend native"]),
    "ancient": ([], "1.7.0", ["TransformerEngine 1.7.0 is older than 1.8"]),
    "no version": ([], "unknown", ["TransformerEngine unknown is older than 1.8"]),
    "fp32": (["train.params_dtype=float32"], "2.20.2", ["params_dtype = float32", "bfloat16"]),
    "narrow heads": (["model.kv_channels=12"], "2.20.2", ["kv_channels = 12", "8 or 16"]),
    # types
    "all_gather": ([f"{KIND}=all_gather"], "1.9", ["all_gather needs TransformerEngine 1.10, 1.9 is", "p2p or model."]),
    "a2a": ([f"{KIND}=a2a"], "1.10.0", ["a2a needs TransformerEngine 1.11, 1.10.0 is", "p2p, cp_comm_type all_gather"]),
    "a2a+p2p": (A2AP2P, "1.11", ["a2a+p2p needs TransformerEngine 1.12, 1.11 is installed: upgrade it, or use"]),
    "a layer's a2a": ([f"{KIND}=[p2p, a2a]"], "1.10.0", ["a2a needs TransformerEngine 1.11"]),
    # packed sequences
    "chats by a2a": (
        [f"{KIND}=a2a", "data.sft=true"],
        "2.9.0",
        ["a2a of packed sequences (data.sft) needs", "2.10, 2.9.0 is"],
    ),
    "packed a2a": (
        [f"{KIND}=a2a", DOCUMENTS],
        "2.9.0",
        ["a2a of packed sequences (data.mask_between_documents) needs", "2.10, 2.9.0 is", "use cp_comm_type p2p or"],
    ),
    "packed all_gather": (
        [f"{KIND}=all_gather", DOCUMENTS],
        "2.17.1",
        [
            "all_gather of packed",
            "2.18, 2.17.1 is installed",
            "p2p, cp_comm_type a2a or model.attention_backend native",
        ],
    ),
    "packed a2a+p2p": ([*A2AP2P, DOCUMENTS], "2.18", ["2.19, 2.18 is installed", "p2p, cp_comm_type all_gather, cp_"]),
    "heads that a2a cannot deal": (
        ["model.num_attention_heads=6", "model.hidden_size=48", "model.num_query_groups=null", DOCUMENTS]
        + [f"{KIND}=all_gather"],
        "2.17.1",
        ["use cp_comm_type p2p or model.attention_backend native"],
    ),
    "packed by padding": (
        [f"{KIND}=all_gather", TP + "=4", "parallel.sequence_parallel=true", CP + "=8", "data.seq_length=944"],
        "2.17",
        ["packed sequences (micro_batch_size*seq_length = 944 is padded to a multiple of 2*cp*tp = 64)", "2.18"],
    ),
    # windows
    "p2p window": (
        [WINDOW],
        "2.20.2",
        ["p2p with model.window_size = [64, 0] is in no release", "all_gather, cp_comm"],
    ),
    "a2a+p2p window": ([WINDOW, *A2AP2P], "2.20.2", ["a2a+p2p with model.window_size", "all_gather", "native"]),
    "all_gather window": (
        [WINDOW, f"{KIND}=all_gather"],
        "1.13",
        ["2.0, 1.13 is installed", "use cp_comm_type a2a or"],
    ),
    "window of one side": (
        ["model.window_size=[64, -1]", "model.attn_mask_type=no_mask", f"{KIND}=a2a"],
        "2.20.2",
        ["window_size = [64, -1]", "two or none", "[64, 64] or [-1, -1]"],
    ),
    "window taken for none": (
        ["model.window_size=[-1, 0]", "model.attn_mask_type=no_mask", CP + "=1"],
        "2.20.2",
        ["window_size = [-1, 0]", "two or none", "[0, 0] or [-1, -1]"],
    ),
    # other softmaxes
    "old sink": ([SINK, CP + "=1"], "2.7", ["softmax_type = off-by-one needs", "2.8, 2.7 is installed", "use vanilla"]),
    "packed sink": ([SINK, CP + "=1", DOCUMENTS], "2.11", ["off-by-one of packed", "2.12, 2.11 is installed"]),
    "sink over a ring": ([SINK], "2.20.2", ["p2p with model.softmax_type = off-by-one", "use cp_comm_type a2a or"]),
    "old cap": ([CAP], "2.19.0", ["attn_logit_softcapping = 30 needs", "2.20, 2.19.0 is", "leave it out"]),
    "cap over ranks": ([CAP], "2.20.2", ["softcapping = 30 with parallel.context_parallel_size > 1", "leave out"]),
    "packed cap": ([CAP, DOCUMENTS, CP + "=1"], "2.20.2", ["softcapping = 30 of packed sequences", "no kernel"]),
    "cap and sink": ([CAP, SINK, CP + "=1"], "2.20.2", ["softcapping = 30 with model.softmax_type", "vanilla"]),
    "cap and dropout": (
        [CAP, DROPOUT, CP + "=1"],
        "2.20.2",
        ["softcapping = 30 with model.attention_dropout = 0.1", "use 0"],
    ),
    "recomputed dropout": (
        [DROPOUT, "train.recompute_granularity=full"],
        "2.20.2",
        ["attention_dropout = 0.1", "recompute_granularity full", "recompute_modules=[mlp]", "hidden_dropout"],
    ),
    "recomputed attention's dropout": ([DROPOUT, "train.recompute_granularity=selective"], "2.20.2", ["selective"]),
}

TAKEN: list[tuple[list[str], str]] = [
    ([], "1.8"),
    ([DOCUMENTS], "1.8.0"),
    ([f"{KIND}=all_gather"], "1.10"),
    ([f"{KIND}=all_gather", DOCUMENTS], "2.18"),
    ([f"{KIND}=a2a", WINDOW], "1.11"),
    ([f"{KIND}=a2a", DOCUMENTS, WINDOW], "2.10"),
    (A2AP2P, "1.12"),
    ([*A2AP2P, DOCUMENTS], "2.19.0"),
    ([f"{KIND}=a2a", CP + "=1"], "1.8"),
    ([WINDOW, CP + "=1"], "1.8"),
    ([WINDOW, f"{KIND}=all_gather"], "2.0"),
    (["model.window_size=[-1, 0]"], "2.20.2"),
    (["model.window_size=[3, 5]", "model.attn_mask_type=no_mask", f"{KIND}=a2a"], "2.20.2"),
    ([SINK, f"{KIND}=a2a"], "2.8"),
    ([SINK, DOCUMENTS, CP + "=1"], "2.12"),
    ([CAP, CP + "=1"], "2.20.0.dev0+abc"),
    ([DROPOUT], "2.0"),
    ([DROPOUT, "train.recompute_granularity=selective", "train.recompute_modules=[mlp]"], "2.0"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_te_is_refused(case: str, installed: Any) -> None:
    overrides, version, expected = REFUSED[case]
    installed(version)
    asked = [*GPU, TE, CP + "=4", *overrides]
    message = problem(*asked)
    assert message is not None and "\n" not in message
    assert not [part for part in expected if part not in message], message
    assert message in te_problems(config_of(*asked), version)
    assert not te_serves(config_of(*asked))


@pytest.mark.parametrize(("overrides", "version"), TAKEN)
def test_te_is_taken(overrides: list[str], version: str, installed: Any) -> None:
    installed(version)
    asked = [*GPU, TE, CP + "=4", *overrides]
    assert problem(*asked) is None and te_serves(config_of(*asked))


def test_te_needs_a_gpu(installed: Any) -> None:
    installed("2.20.2")
    message = problem(TE, "train.device=cpu", "train.params_dtype=bfloat16")
    assert message and "transformer_engine needs GPUs, train.device is cpu: use native or auto" in message
    assert problem(TE, "train.device=auto", "train.params_dtype=bfloat16") is None
    assert list(cpu_problems(config_of(TE)))  # once there turns out to be none


# (overrides, what the line must contain)
NOT_NATIVE: dict[str, tuple[list[str], list[str]]] = {
    "sink": ([SINK], ["softmax_type = off-by-one", "PyTorch's flash kernels", "vanilla, or attention_backend transf"]),
    "cap": ([CAP], ["attn_logit_softcapping = 30", "flash kernels cap no scores", "transformer_engine"]),
    "dropout": ([DROPOUT], ["attention_dropout = 0.1", "have no dropout", "to 0 and use model.hidden_dropout"]),
}


@pytest.mark.parametrize("case", NOT_NATIVE)
def test_native_is_refused(case: str, installed: Any) -> None:
    overrides, expected = NOT_NATIVE[case]
    message = problem(NATIVE, *overrides)
    assert message and not [part for part in expected if part not in message], message
    message = problem(*overrides)  # auto, which has no choice
    assert message and "needs TransformerEngine (TransformerEngine is not installed): native" in message
    installed("2.20.2")
    asked = ["train.params_dtype=bfloat16", *overrides]
    message = problem("train.device=cpu", *asked)
    assert message and "needs TransformerEngine (train.device = cpu): native" in message
    assert problem(*asked) is None  # there may be GPUs
    message = next(cpu_problems(config_of(*asked)))
    assert "needs TransformerEngine (train.device is cpu): native" in message
    # What auto has become is asked again, on every device.
    assert list(cpu_problems(config_of(NATIVE, *asked))) == list(cuda_problems(config_of(NATIVE, *asked)))
    assert len(list(cpu_problems(config_of(NATIVE, *asked)))) == 1


def test_auto_never_fails_for_want_of_te(installed: Any) -> None:
    for version in (None, "1.0", "2.20.2", "what"):
        installed(version)
        for device in ("auto", "cpu", "cuda"):
            for more in ([], [WINDOW, CP + "=2"], [DOCUMENTS, f"{KIND}=all_gather", CP + "=2"]):
                assert problem(f"train.device={device}", "train.params_dtype=bfloat16", *more) is None


def test_auto_is_te_where_it_serves(installed: Any) -> None:
    assert not te_serves(config_of(*GPU))
    installed("2.20.2")
    assert te_serves(config_of(*GPU)) and te_serves(config_of("train.params_dtype=bfloat16"))
    assert not te_serves(config_of("train.params_dtype=bfloat16", "train.device=cpu"))
    assert not te_serves(config_of(*GPU, WINDOW, CP + "=2"))
    assert not te_serves(config_of("train.device=cuda"))  # float32


def test_flash_attention_on_gpus(installed: Any) -> None:
    message = problem("train.device=cuda")
    assert message and "params_dtype = float32 on GPUs" in message and "bfloat16" in message and "=cpu" in message
    message = problem(*GPU, "model.kv_channels=12")
    assert message and "kv_channels = 12" in message and "multiples of 8" in message and "8 or 16" in message
    assert not list(cuda_problems(config_of(*GPU, "parallel.distributed_backend=gloo", CP + "=2")))
    assert list(cuda_problems(config_of()))  # train.device = auto, once there turn out to be some


def test_each_rule_refuses_something(installed: Any) -> None:
    configs = [config_of(TE), config_of(NATIVE, CAP)]
    assert all(any(list(rule(config, None)) for config in configs) for rule in BACKEND_RULES)


# --- releases


def test_table_is_the_recorded_one() -> None:
    first = FACTS["first_release"]
    assert {name: first[name] for name in FIRST_RELEASE} == FIRST_RELEASE
    assert OLDEST == first["softmax_scale"] == first["cu_seqlens_q_padded/cu_seqlens_kv_padded"]
    packed, window = FACTS["thd_with_cp_first_release"], FACTS["window_with_cp_first_release"]
    for name, exchange in EXCHANGES.items():
        # "1.7 (flash), 1.8 (cuDNN)": which kernels are there is not known early, so both must do.
        assert exchange.rows == first.get(f"cp_comm_type {name}", OLDEST)
        assert exchange.packed == packed[name].split(", ")[-1].split()[0]
        assert exchange.window == (window[name] and window[name].split(", ")[-1].split()[0])


def test_releases_are_compared_as_numbers() -> None:
    assert release("2.20.0.dev0+abc") == release("v2.20.0") == (2, 20, 0) and release("dev") == ()
    assert has("2.10", "2.9") and has("2.9.1", "2.9") and has("2.9", "2.9") and has("2.20.0.dev+g1", "2.20")
    assert not has("2.9.9", "2.10") and not has("1.13", "2.0") and not has("dev", "1.8")


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({}, None),
        ({"transformer-engine": "2.3"}, "2.3"),  # built from source
        ({"transformer-engine": "2.3", "transformer-engine-cu12": "2.3", "transformer-engine-torch": "2.3"}, "2.3"),
        ({"transformer-engine": "2.3", "transformer-engine-cu13": "2.3"}, None),  # JAX's, or none
    ],
)
def test_installed_release(
    packages: dict[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in packages.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert te_version() == expected


def test_looking_for_te_imports_nothing() -> None:
    code = "import sys; from megacp.support_backend import te_version; te_version(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(support.__file__).parents[1]).returncode == 0
