"""Being asked to stop: SIGTERM and Ctrl-C come to a clean end at the next step, or soon anyway.

Periodic checkpoints are the guarantee; what is saved on a signal is a bonus.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from normstudy.errors import Interrupted, Preempted, UserError
from normstudy.progress import say

GRACE = 10.0  # seconds to come to the next step; after that the last checkpoint counts

_asked: list[int] = []  # the signals that came
_saves = 0  # checkpoints that are being written
_saved = threading.Condition()  # guards their number
_polls = itertools.count()  # of this process; all processes of a run poll as often
_last_words: list[Callable[[], None]] = []  # called when the process leaves in the midst of a run


def watch() -> None:
    """Take SIGTERM from here on: exit 75 (preempted, run me again); a second one: 143, at once.

    Processes that train together have jax's own watch in its place: whichever gets the signal, all
    stop at the same step.
    """
    main = threading.current_thread() is threading.main_thread()  # the only one signals reach
    if not main or jax.distributed.is_initialized():
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    # the byte is written when the signal comes, also while the main thread is deep in a compiler,
    # where Python's own handlers wait
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_listen, args=(read,), name="preemption", daemon=True).start()


def asked() -> type[UserError] | None:
    """Polled once a step: why the run should save and stop now, or None."""
    if jax.process_count() > 1:
        return Preempted if multihost_utils.reached_preemption_sync_point(next(_polls)) else None
    if signal.SIGTERM in _asked:
        return Preempted
    return Interrupted if signal.SIGINT in _asked else None


def saving(more: int) -> None:
    """+1 when a checkpoint begins to be written, -1 when it is whole or has failed: the process
    does not leave in between.
    """
    global _saves
    with _saved:
        _saves += more
        _saved.notify_all()


@contextlib.contextmanager
def at_work(last_words: Callable[[], None]) -> Iterator[None]:
    """While a run is going on: Ctrl-C once lets it save and stop at its next step, twice ends it.

    last_words: called when the process has to leave in its midst.
    """
    _last_words.append(last_words)
    alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: object) -> None:
        _asked.append(number)
        signal.signal(signal.SIGINT, before)
        say("\ninterrupt: saving at the next step (again: stop at once)")

    if alone:
        signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        _last_words.remove(last_words)
        if alone:
            signal.signal(signal.SIGINT, before)
        if signal.SIGINT in _asked:
            _asked.remove(signal.SIGINT)


def _listen(read: int) -> None:
    while byte := os.read(read, 1):
        if byte[0] != signal.SIGTERM:
            continue
        if signal.SIGTERM in _asked:
            os._exit(128 + signal.SIGTERM)
        _asked.append(signal.SIGTERM)
        say(f"SIGTERM: saving at the next step, leaving within {GRACE:.0f} s (again: at once)")
        deadline = threading.Timer(GRACE, _leave)
        deadline.daemon = True
        deadline.start()


def _leave() -> None:
    """The main thread has not come to a step: leave by the last checkpoint."""
    with _saved:
        _saved.wait_for(lambda: _saves == 0)
    for words in _last_words:
        with contextlib.suppress(Exception):
            words()
    say("preempted before the next step: the same command goes on from the last checkpoint")
    os._exit(Preempted.exit_code)
