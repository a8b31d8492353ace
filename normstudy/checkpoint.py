"""Checkpoints by orbax: nested dicts of plain names in RUN/ckpt/STEP. Only this room has orbax."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from normstudy.errors import UserError
from normstudy.trees import from_dict, to_dict

FOLDER = "ckpt"

# orbax tells every save at the level of a warning or of absl's info; our own lines say what matters
logging.getLogger("absl").setLevel(logging.ERROR)


def save(run_folder: Path, step: int, state: Any) -> None:
    """Write the state after `step` updates, and wait until it is whole. UserError if it is not."""
    with _open(run_folder) as checkpointer:
        found = _steps(checkpointer)
        # orbax says no to a step below the newest, and only by its return value
        if step not in found and not checkpointer.save(step, to_dict(state)):
            raise UserError(f"checkpoint {step} was not saved: {run_folder} already holds {found}")


def latest(run_folder: Path) -> int | None:
    """Step of the newest checkpoint, or None."""
    found = steps(run_folder)
    return found[-1] if found else None


def steps(run_folder: Path) -> list[int]:
    """Steps that have a checkpoint, in order."""
    if not (run_folder / FOLDER).is_dir():
        return []
    with _open(run_folder) as checkpointer:
        return _steps(checkpointer)


def restore(run_folder: Path, step: int, like: Any) -> Any:
    """The state at `step` with the structure, shapes and shardings of `like` (abstract arrays).

    Raises UserError when a path is missing or has another shape than the config gives.
    """
    with _open(run_folder) as checkpointer:
        from_dict(like, _metadata(checkpointer, run_folder, step))  # names a mismatch before orbax
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            to_dict(like),
        )
        try:
            loaded = checkpointer.load(step, wanted)
        except (ValueError, OSError, KeyError) as error:
            reason = _root(error)
            raise UserError(f"checkpoint {step} of {run_folder} is damaged: {reason}") from None
        return from_dict(like, loaded)


def locate(path: Path, step: int | None) -> tuple[Path, int]:
    """(run folder, step) for a run folder, its ckpt folder, or one checkpoint in it.

    Raises UserError when there is no checkpoint, or not that one (lists those there are).
    """
    path = path.resolve()
    if path.parent.name == FOLDER and path.name.isdigit():
        path, step = path.parent.parent, int(path.name) if step is None else step
    elif path.name == FOLDER:
        path = path.parent
    found = steps(path)
    if not found:
        runs = sorted(path.glob(f"arms/*/*/{FOLDER}"))
        hint = f"; it is a study, probe one of its runs, e.g. {runs[0].parent}" if runs else ""
        raise UserError(f"{path} holds no checkpoint (looked in {path / FOLDER}){hint}")
    if step is not None and step not in found:
        raise UserError(f"{path} has no checkpoint at step {step}; it has {found}")
    return path, found[-1] if step is None else step


def _open(run_folder: Path) -> ocp.training.Checkpointer:
    every_step: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
    return ocp.training.Checkpointer(
        str((run_folder / FOLDER).resolve()),
        save_decision_policy=every_step,
    )


def _steps(checkpointer: ocp.training.Checkpointer) -> list[int]:
    return sorted(found.step for found in checkpointer.checkpoints)


def _root(error: BaseException) -> str:
    """What orbax's pages of context began with, in one line: it names the array."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0]


def _metadata(checkpointer: ocp.training.Checkpointer, run_folder: Path, step: int) -> Any:
    try:
        tree = checkpointer.metadata(step).metadata
        if not isinstance(tree, dict):  # orbax only logs that it could not read its own file
            raise ValueError("its metadata is damaged")
        return tree
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"checkpoint {step} of {run_folder} cannot be read: {error}") from None
