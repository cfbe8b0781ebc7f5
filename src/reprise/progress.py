"""A progress bar for people at a terminal; where there is none, the log lines of each epoch say the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from reprise.config import TrainConfig
from reprise.training.loop import FitState

REFRESH_EVERY_SECONDS = 0.2


@contextmanager
def training_progress(config: TrainConfig, total_steps: int, start: FitState) -> Iterator[Callable[[FitState, float], None]]:
    """A function that takes the state and the loss after each step and draws them as a bar on stderr."""
    if not sys.stderr.isatty():
        yield lambda state, loss: None
        return
    columns = (
        TextColumn("[bold]train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[score]}  {task.fields[rate]:,.0f} examples/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=1 / REFRESH_EVERY_SECONDS) as bar:
        task = bar.add_task("train", total=total_steps, completed=start.step, loss=float("nan"), score="", rate=0.0)
        steps_before, seconds_before = start.step, start.seconds

        def show(state: FitState, loss: float) -> None:
            score = f"F1 {state.last_validation['macro_f1']:.4f}" if state.last_validation else ""
            rate = (state.step - steps_before) * config.batch_size / max(state.seconds - seconds_before, 1e-9)
            bar.update(task, completed=state.step, loss=loss, score=score, rate=rate)

        yield show
