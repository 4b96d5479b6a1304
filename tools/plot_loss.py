"""Plot the loss of runs: python tools/plot_loss.py runs/quickstart [runs/other ...] [--out loss.png]

Reads each run's metrics.jsonl (one JSON object a line); where a resumed run repeats an iteration, the later
line counts. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

Curve = dict[int, float]


def read_curves(metrics: Path) -> dict[str, Curve]:
    """{kind: {iteration: loss}}, kind being train, valid or test.

    A last line cut short (the run is being written or was killed) is passed over; any other broken line is a
    ValueError.
    """
    curves: dict[str, Curve] = {}
    lines = metrics.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(f"{metrics}, line {number} is not JSON: {line[:60]!r}") from None
        if "lm_loss" in record:
            curves.setdefault(record["kind"], {})[record["iteration"]] = record["lm_loss"]
    if not curves:
        raise ValueError(f"{metrics} holds no loss yet")
    return curves


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start (Adam's bias correction)."""
    mean, smoothed = 0.0, []
    for n, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        smoothed.append(mean / (1 - weight**n))
    return smoothed


def plot(runs: dict[str, dict[str, Curve]], out: Path) -> None:
    """One figure with every curve; the training loss also smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    for run, curves in runs.items():
        for kind, curve in sorted(curves.items()):
            steps = sorted(curve)
            values = [curve[step] for step in steps]
            if kind == "train":
                faint = axes.plot(steps, values, alpha=0.3, linewidth=1)[0]
                axes.plot(steps, smooth(values), color=faint.get_color(), label=f"{run} {kind} (smoothed)")
            else:
                axes.plot(steps, values, marker="o", markersize=4, label=f"{run} {kind}")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plot the loss of one or more runs from their metrics.jsonl.")
    parser.add_argument("run", nargs="+", type=Path, help="folder of a run (logging.run_dir) or a metrics.jsonl")
    parser.add_argument("--out", type=Path, help="PNG to write; default: loss.png in the first run's folder")
    args = parser.parse_args(arguments)
    files = [run / "metrics.jsonl" if run.is_dir() else run for run in args.run]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        sys.exit(f"no such run: {', '.join(missing)} (is logging.run_dir set?)")
    out = args.out or files[0].parent / "loss.png"
    try:
        plot({file.parent.name: read_curves(file) for file in files}, out)
    except (ValueError, KeyError) as error:
        sys.exit(f"cannot plot: {error}")
    print(out)


if __name__ == "__main__":
    main()
