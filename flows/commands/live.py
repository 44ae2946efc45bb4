"""Draws a run while it goes: one line a stage, and for RL its reward, lag and effective share."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.events import Event

STAGE_TITLES = {
    "data": "data prep",
    "sft": "SFT reference",
    "rl": "async RL",
    "evaluation": "held-out evaluation",
    "quantize": "quantise, parity",
    "package": "Jetson bundle",
}
BESIDE_TITLES = {"challenge": "against champion"}
"""What some runs do beside the stages; shown once it begins."""
TITLES = {**STAGE_TITLES, **BESIDE_TITLES}
PLAIN_PERIOD_S = 15.0
REFRESH_HZ = 4
SPARKS = "▁▂▃▄▅▆▇█"
HISTORY = 40
LIVE_METRICS = {
    "reward": "reward_mean",
    "accuracy": "accuracy",
    "lag": "staleness_mean",
    "lag max": "staleness_max",
    "effective": "effective_share",
    "tool use": "tool_call_share",
    "KL": "kl_k1_mean",
    "overlap": "overlap_share",
    "tok/s": "rollout_tokens_per_s",
}
"""Short name → metric of the RL stage, in the order shown."""


@dataclass
class StageView:
    """What is known of one stage."""

    state: str = "waiting"
    done: int = 0
    total: int = 0
    message: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    step: int | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)

    def elapsed_s(self, now_s: float) -> float | None:
        """Seconds it has run, None before its start."""
        if self.started_s is None:
            return None
        return (self.ended_s or now_s) - self.started_s


def spark(values: list[float]) -> str:
    """A curve of one line, lowest to highest; flat where all are equal."""
    recent = values[-HISTORY:]
    low, high = min(recent, default=0.0), max(recent, default=0.0)
    span = (high - low) or 1.0
    return "".join(SPARKS[int((v - low) / span * (len(SPARKS) - 1))] for v in recent)


def live_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics a person watches, under short names; unknown ones are left out."""
    found = {name: values.get(metric) for name, metric in LIVE_METRICS.items()}
    return {name: value for name, value in found.items() if value is not None}


class RunView:
    """Listens to a run; on a terminal it redraws one picture, elsewhere it prints lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stages = {name: StageView() for name in STAGE_TITLES}
        self.warnings: list[str] = []
        self._printed_s: dict[str, float] = {}
        self._live = (
            Live(get_renderable=self.picture, console=console, refresh_per_second=REFRESH_HZ)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> "RunView":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        if event.stage in BESIDE_TITLES:
            self.stages.setdefault(event.stage, StageView())
        view = self.stages.get(event.stage or "")
        if view is not None:
            if view.state == "reused" and event.kind == "stage_finished":
                return  # nothing ran: "reused" is the whole story
            self._update(view, event)
        if event.kind == "warning" and event.message not in self.warnings:
            self.warnings.append(event.message)
        if self._live is None:
            self._print_line(event)

    def _update(self, view: StageView, event: Event) -> None:
        now_s = time.monotonic()
        if event.kind == "stage_started":
            view.state, view.started_s, view.ended_s = "running", now_s, None
        elif event.kind in ("stage_finished", "stage_reused", "stage_failed"):
            view.state = event.kind.removeprefix("stage_")
            view.ended_s = now_s
        elif event.kind == "progress":
            view.done, view.total = event.done or 0, event.total or 0
        elif event.kind == "metrics":
            view.step = event.step
            view.values.update(event.values)
            reward = live_values(event.values).get("reward")
            if reward is not None:
                view.rewards.append(reward)
        if event.message:
            view.message = event.message

    def picture(self) -> Group:
        """The whole picture as it stands."""
        now_s = time.monotonic()
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for name, view in self.stages.items():
            elapsed_s = view.elapsed_s(now_s)
            table.add_row(
                _mark(view.state),
                TITLES[name],
                ProgressBar(total=view.total, completed=view.done, width=24)
                if view.state == "running" and view.total
                else Text(view.state, style="dim"),
                "" if elapsed_s is None else f"{elapsed_s:.0f} s",
                Text(view.message, style="dim", overflow="ellipsis", no_wrap=True),
            )
        return Group(table, *self._rl_lines(), *self._warning_lines())

    def _rl_lines(self) -> list[Text]:
        view = self.stages["rl"]
        shown = live_values(view.values)
        if not shown:
            return []
        facts = "   ".join(f"{name} {value:.4g}" for name, value in shown.items())
        lines = [Text(f"  step {view.step}   {facts}", style="cyan")]
        if len(view.rewards) > 1:
            lines.append(Text(f"  reward {spark(view.rewards)}", style="cyan"))
        return lines

    def _warning_lines(self) -> list[Text]:
        return [Text(f"! {text}", style="yellow") for text in self.warnings[-3:]]

    def _print_line(self, event: Event) -> None:
        """One line for what starts and ends; progress and metrics now and then."""
        if event.kind in ("progress", "metrics"):
            self._print_sparingly(event)
            return
        title = TITLES.get(event.stage or "", event.stage or "")
        word = event.kind.removeprefix("stage_").replace("_", " ")
        text = event.message.removeprefix(f"{word}: ")
        message = f": {escape(text)}" if text else ""
        self.console.print(f"{title} {word}{message}".lstrip(), soft_wrap=True)

    def _print_sparingly(self, event: Event) -> None:
        now_s, stage = time.monotonic(), event.stage or ""
        if now_s - self._printed_s.get(stage, float("-inf")) < PLAIN_PERIOD_S:
            return
        view = self.stages.get(stage)
        if view is None:
            return
        self._printed_s[stage] = now_s
        facts = "  ".join(f"{n} {v:.4g}" for n, v in live_values(view.values).items())
        share = f"{view.done}/{view.total} " if view.total else ""
        self.console.print(
            f"{TITLES[stage]} {share}{escape(view.message)}  {facts}".rstrip(),
            soft_wrap=True,
        )


def _mark(state: str) -> Text:
    marks = {
        "waiting": Text("·", style="dim"),
        "running": Text("▸", style="cyan"),
        "finished": Text("✓", style="green"),
        "reused": Text("=", style="green"),
        "failed": Text("✗", style="bold red"),
    }
    return marks.get(state, Text("?"))
