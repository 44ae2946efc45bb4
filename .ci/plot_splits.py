"""Draws docs/img/throughput_by_split.svg: the model of the loop over splits of eight devices.

`.venv/bin/python .ci/plot_splits.py`. The times are round numbers, not measurements: one worker
samples a batch of 256 in 40 s, one rank trains on it in 20 s, tools take nothing or a log-normal
second in the median.
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICES = 8


def main() -> int:
    """Write the picture."""
    sys.path.insert(0, str(ROOT))
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "splits"  # the same picture gives the same bytes
    from matplotlib import pyplot

    from tasks.rl.figures import Figures, Layout, Teaching
    from tasks.rl.planner import plan
    from tasks.rl.simulated_engines import DecodeSpeed, LatencyMix, LengthMix
    from tasks.rl.simulated_work import Times, Work

    work = Work(10, 256, 8, 4, turns_mean=2.0, tokens=LengthMix(128.0, 0.5, 512))
    speed = DecodeSpeed(0.0, 40 / (256 * 256), 1024, continuous=True)
    quick = Figures("", (), Layout(1, 1), Times(speed, train_s=20.0), work, Teaching(1.0))
    slow = replace(quick, work=replace(work, tool_latency=LatencyMix(1.0, 1.0, 20.0)))
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for made, label, colour in (
        (plan(quick, (0.2, 0.28), DEVICES), "tools take no time", "#2563eb"),
        (plan(slow, (0.2, 0.28), DEVICES), "tools: median 1 s, σ = 1", "#d97706"),
    ):
        workers = [c.layout.workers for c in made.splits]
        axes.plot(workers, [c.samples_per_s for c in made.splits], "o-", color=colour, label=label)
        together = made.synchronous.samples_per_s
        axes.axhline(together, color=colour, linestyle="--", linewidth=1)
        axes.annotate("in turns", (1.02, together), color=colour, fontsize=8, va="bottom")
    axes.set_xticks(range(1, DEVICES), [f"{n} : {DEVICES - n}" for n in range(1, DEVICES)])
    axes.set_xlabel("rollout workers : learner ranks")
    axes.set_ylabel("samples per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs/img/throughput_by_split.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
