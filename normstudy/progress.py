"""How a long job looks: a live bar on a terminal, plain lines in a log. Both with an ETA."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Steps of a run, or of several at once; a context manager.

    On a terminal a bar that redraws, elsewhere a line now and then.
    """

    def __init__(self, name: str, start: int, total: int, tokens_per_step: int, every: float = 15):
        self.name, self.total, self.tokens, self.every = name, total, tokens_per_step, every
        self.start = self.began = None  # set at the first report: compiling is no measure of speed
        self.said = time.monotonic()
        self.live = sys.stderr.isatty() and not _muted
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("{task.description:<26}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed}/{task.total} {task.fields[text]}  ETA"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(name, total=total, completed=start, text="")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.bar.stop()

    def at(self, step: int, losses: list[float]) -> None:
        """Report that `step` updates are done, the last at these losses (nats) of those going."""
        now = time.monotonic()
        if self.start is None or self.began is None:
            self.start, self.began = step, now
            return
        rate = (step - self.start) / max(now - self.began, 1e-9)
        spread = " to ".join(f"{loss:.3f}" for loss in sorted({min(losses), max(losses)}))
        text = f"loss {spread}  {rate * self.tokens:,.0f} tokens/s"
        if self.live:
            self.bar.update(self.task, completed=step, text=text)
        elif now - self.said >= self.every:
            self.said = now
            eta = (self.total - step) / max(rate, 1e-9)
            say(f"{self.name}: step {step}/{self.total}  {text}  ETA {eta:.0f} s")

    def say(self, line: str) -> None:
        """One plain line for people, above the bar where there is one."""
        if self.live:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            say(line)


def say(line: str) -> None:
    """One plain line for people; results go to stdout, this goes to stderr."""
    if not _muted:
        print(line, file=sys.stderr, flush=True)


_muted = False


def mute() -> None:
    """From here on this process tells nothing: of several that train together one does."""
    global _muted
    _muted = True
