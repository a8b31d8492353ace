"""Errors for people: one message, one exit code, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message says what was wrong, where, and what to do."""

    exit_code = 2


class OutOfMemory(UserError):
    """It does not fit; the message says which option makes it smaller."""

    exit_code = 3


class Wasteful(UserError):
    """A compiled program does what it must not: a bug here, not bad input."""

    exit_code = 1


class Damaged(UserError):
    """A checkpoint is not what was saved."""

    exit_code = 4


class NotFinite(UserError):
    """The loss or a gradient of the one run that was asked for is no number (EX_SOFTWARE)."""

    exit_code = 70


class NotSaved(UserError):
    """The last state of a run could not be written (EX_IOERR)."""

    exit_code = 74


class Preempted(UserError):
    """SIGTERM: everything was saved; run the same command again (EX_TEMPFAIL)."""

    exit_code = 75


class Interrupted(UserError):
    """Ctrl-C: everything was saved; the message says how to go on."""

    exit_code = 130


def choose(kind: str, name: str, valid: Iterable[str]) -> str:
    """The name itself when it is valid; else a UserError that lists the valid ones."""
    names = list(valid)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(names)}")
