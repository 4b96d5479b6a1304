"""The tool that compares attention with float64: what it finds, what it refuses, how its ranks end."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacp.attention import reference
from megacp.attention.core import build_attention
from megacp.batch import PackedSeqParams
from megacp.grid import CPGroup
from tests.spawn import run
from tools import attention_errors, verify_attention

ROOT = Path(__file__).parent.parent
SMALL = ["--comm-type", "p2p", "--lengths", "100", "37", "1", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]


@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, None), (True, (5, 0)), (False, (3, 9)), (True, (0, 0))]
)
@pytest.mark.parametrize("scores", [64, 2**22])
def test_dense_is_the_reference(
    causal: bool, window: tuple[int, int] | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and a few rows at a time."""
    monkeypatch.setattr(attention_errors, "SCORES", scores)
    q, dout = (torch.randn(21, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    k, v = (torch.randn(21, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = reference.attention(q, k, v, [21], causal=causal, window=window, softmax_scale=0.3)
    expected = (out, *torch.autograd.grad(out, (q, k, v), dout))
    left, right = (n if n >= 0 else torch.inf for n in window or (-1, -1))
    with torch.no_grad():
        got = attention_errors.dense(q, k, v, dout, scale=0.3, left=left, right=0 if causal else right)
    for name, one, other in zip(attention_errors.TENSORS, got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0, msg=name)


class Perturbed(torch.nn.Module):
    """Attention with a fault in one number of the output or of a gradient of some rank."""

    def __init__(self, attention: Any, tensor: str, rank: int, row: int, head: int, amount: float) -> None:
        super().__init__()
        self.attention, self.tensor, self.rank, self.place, self.amount = (
            attention,
            tensor,
            rank,
            (row, head, 3),
            amount,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: CPGroup) -> Tensor:
        def spoil(x: Tensor) -> Tensor:
            spoilt = x.clone()
            spoilt[self.place] += self.amount
            return spoilt

        here = cp.size > 1 and cp.rank == self.rank
        if here and self.tensor != "out":
            {"dq": q, "dk": k, "dv": v}[self.tensor].register_hook(spoil)
        out = self.attention(q, k, v, packed, cp)
        return spoil(out) if here and self.tensor == "out" else out


def lines(arguments: list[str], fault: tuple[str, int, int, int, float] | None = None) -> list[str]:
    """What the tool says FAIL of, on the ranks of the pool."""
    options = verify_attention.parser().parse_args(arguments)
    verify_attention.complete(options)
    configs, refused = verify_attention.allowed(options)
    assert not refused
    if fault:
        attention_errors.build_attention = lambda *given: Perturbed(build_attention(*given), *fault)
    try:
        return verify_attention.verify(options, configs, refused, torch.device("cpu"))
    finally:
        attention_errors.build_attention = build_attention


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_right_attention_passes(dtype: str) -> None:
    every = [*SMALL, "--comm-type", "all", "--hierarchy", "2", "2", "--cp", "4", "--dtype", dtype]
    windows = ["--mask", "no_mask", "--window", "9", "30"]
    for extra in (["--lengths", "100", "0", "37", "1"], ["--mask", "no_mask"], windows, ["--lengths", "1", "1"]):
        assert run(lines, 4, [*every, *extra]) == [[]] * 4


# cp 4 and lengths 100, 37, 1 padded to 104, 40, 8: rank 2 holds tokens 26..38 and 65..77 of the first sequence, then
# tokens 10..14 and 25..29 of the second, then token 2 and 5, both padding, of the third.
FAULTS = {
    "output": (("out", 2, 3, 1, 1e-3), "sequence 0, token 29 of 100, head 1, rank 2"),
    "second half": (("out", 2, 13, 3, 1e-3), "sequence 0, token 65 of 100, head 3, rank 2"),
    "gradient of q": (("dq", 2, 26 + 1, 0, 1e-2), "sequence 1, token 11 of 37, head 0, rank 2"),
    "gradient of k": (("dk", 2, 26 + 5, 1, 1e-2), "sequence 1, token 25 of 37, head 1, rank 2"),
    "gradient of v": (("dv", 0, 0, 1, 1e-2), "sequence 0, token 0 of 100, head 1, rank 0"),
    "padding": (("dk", 2, 36, 1, 1e-2), "sequence 2, token 2 of 1 (padding), head 1, rank 2"),
    "nan": (("out", 1, 0, 2, float("nan")), "sequence 0, token 13 of 100, head 2, rank 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(name: str) -> None:
    fault, where = FAULTS[name]
    told = run(lines, 4, [*SMALL, "--cp", "4"], fault)
    assert all(ours == told[0] for ours in told)
    (line,) = told[0]
    assert line.split()[:2] == ["p2p", fault[0]] and f"  {where}: FAIL, " in line


def test_a_fault_is_found_in_bfloat16() -> None:
    fault = ("out", 1, 5, 0, 0.1)
    told = run(lines, 2, [*SMALL, "--cp", "2", "--dtype", "bfloat16"], fault)
    assert "token 30 of 100, head 0, rank 1: FAIL, " in told[0][0]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as exit:
        verify_attention.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert exit.value.code == 2 and not said.out and said.err.count("\n") == 1
    return said.err


def test_mistakes_are_told_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_attention, "launch", lambda *_: pytest.fail("started"))
    a2a = ("--comm-type", "a2a")
    assert "model.num_attention_heads" in refusal(capsys, *a2a, "--heads", 6, "--cp", 4)
    assert "hierarchical_context_parallel_sizes" in refusal(
        capsys, "--comm-type", "a2a+p2p", "--cp", 4, "--hierarchy", 2, 3
    )
    assert "does nothing without --comm-type a2a+p2p" in refusal(capsys, *a2a, "--hierarchy", 2, 2)
    assert "num_query_groups = 3 must divide" in refusal(capsys, *a2a, "--kv-heads", 3)
    assert "use lengths of 1 to 65,536" in refusal(capsys, *a2a, "--lengths", 100_000)
    assert "use lengths of 1 to 46,340" in refusal(capsys, *a2a, "--lengths", 0, 0)
    assert "softmax_scale = -1.0: " in refusal(capsys, *a2a, "--softmax-scale", -1)
    assert "invalid choice: 'ring'" in refusal(capsys, "--comm-type", "ring")
    if not torch.cuda.is_available():
        assert "no CUDA device" in refusal(capsys, "--device", "cuda")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--cp 2, but there are 3 ranks" in refusal(capsys, "--cp", 2)


def test_what_the_numbers_forbid_is_skipped() -> None:
    options = verify_attention.parser().parse_args(["--cp", "4", "--heads", "6", "--comm-type", "all"])
    verify_attention.complete(options)
    configs, refused = verify_attention.allowed(options)
    assert [*configs] == ["p2p", "all_gather"] and [*refused] == ["a2a", "a2a+p2p"]
    assert "model.num_attention_heads" in refused["a2a"]


def sleeping(*scripts: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(["sh", "-c", script]) for script in scripts]


def test_waiting_for_ranks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify_attention, "GRACE", 0.2)
    assert verify_attention.wait(sleeping("exit 0", "exit 0")) == 0
    assert verify_attention.wait(sleeping("exit 0", "exit 1")) == 1
    begin = time.monotonic()
    ranks = sleeping("exec sleep 60", "kill -9 $$")
    assert verify_attention.wait(ranks) == 1
    assert time.monotonic() - begin < 20 and capfd.readouterr().err == "rank 1 died of signal 9\n"
    ranks[0].kill()
    ranks[0].wait()


def test_command_on_two_ranks() -> None:
    command = [sys.executable, str(ROOT / "tools/verify_attention.py"), *SMALL, "--cp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    title, heading, *table, verdict = done.stdout.splitlines()
    assert title.startswith("cp 2, gloo, cpu, ") and title.endswith("138 tokens in 3 sequences, padded to 144")
    assert heading.split()[:2] == ["type", "tensor"] and verdict == "PASS: p2p"
    assert [line.split()[:2] for line in table] == [["p2p", tensor] for tensor in attention_errors.TENSORS]
    assert all(line.endswith(": PASS") for line in table)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ('raise KeyError("no such kernel")', "rank 1 on .*: KeyError: 'no such kernel'"),
        ("time.sleep(60)", "rank 0 on .*"),
    ],
)
def test_a_rank_that_fails_ends_all(fault: str, message: str, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, sys, time
            sys.path.insert(0, {str(ROOT)!r})
            from tools import attention_errors, verify_attention

            def broken(*_):
                {fault}

            if os.environ.get("RANK") == "1":
                attention_errors.build_attention = broken
            sys.exit(verify_attention.main())
        """)
    )
    command = [sys.executable, str(script), *SMALL, "--cp", "2", "--timeout", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "PASS" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert re.match(message, line), line
