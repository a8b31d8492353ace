"""Ends a process that has come to no step for too long, and prints where each thread stands.

A process that waits for another one that is stuck waits for ever: heartbeats do not see it, for
both are alive.
"""

from __future__ import annotations

import faulthandler

_seconds = 0.0


def start(seconds: float) -> None:
    """From here on; 0: never. The exit code is then 1."""
    global _seconds
    _seconds = seconds
    feed()


def feed() -> None:
    """Something was done: the time begins again."""
    if _seconds > 0:
        faulthandler.dump_traceback_later(_seconds, exit=True)


def stop() -> None:
    """Nothing more is waited for."""
    start(0)
    faulthandler.cancel_dump_traceback_later()
