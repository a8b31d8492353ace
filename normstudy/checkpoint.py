"""Checkpoints by orbax: nested dicts of plain names in RUN/ckpt/STEP. Only this room has orbax.

A step is whole when it has a manifest, which is written last, and sound when its files still are
what the manifest says (manifest.py).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from normstudy import hosts, manifest, preemption, remote
from normstudy.errors import Damaged, NotSaved, UserError
from normstudy.progress import say
from normstudy.trees import from_dict, to_dict

FOLDER = remote.CHECKPOINTS

# orbax tells every save at the level of a warning or of absl's info; our own lines say what matters
# (a filter, for absl sets the level anew where several processes train)
logging.getLogger("absl").addFilter(lambda line: line.levelno >= logging.ERROR)
# and takes a folder for each array, without OCDBT, for a sign of damage; the manifest knows
logging.getLogger().addFilter(lambda line: "TensorStore data files not found" not in str(line.msg))


class Saver:
    """The saves of one run, each in the background; a context manager that waits for the last.

    A save that fails is told when the next one begins, which tries again with the state of then.
    Raises NotSaved at the end when the last one failed. about: goes into every manifest.
    keep: so many of the newest stay, older ones are deleted once a newer one is sealed; 0: all.
    """

    def __init__(self, run_folder: Path, about: dict[str, Any], keep: int = 0):
        self.run_folder, self.about, self.keep = run_folder, about, keep
        self.newest = hosts.first(self._begin)
        self.checkpointer = _open(run_folder, cleanup_tmp_directories=True)
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self.pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self.failed = ""

    def save(self, step: int, state: Any) -> None:
        """Begin to save the state after `step` updates, unless it is there. The state may be given
        away as soon as this returns."""
        self.settle()
        if step == self.newest:
            return
        tree = to_dict(state)
        if jax.default_backend() == "cpu":  # orbax would read it where it lies, while steps go on
            tree = jax.tree.map(jnp.copy, tree)
        preemption.saving(+1)
        try:
            response = self.checkpointer.save_async(step, tree)
        except Exception as error:
            preemption.saving(-1)
            self._fail(step, error)
            return
        self.pending = step, self.thread.submit(self._finish, step, response)

    def settle(self) -> None:
        """Wait for the save in flight."""
        if self.pending is None:
            return
        (step, future), self.pending = self.pending, None
        try:
            future.result()
            self.newest, self.failed = step, ""
        except Exception as error:
            self._fail(step, error)

    def close(self) -> None:
        """Wait for the last save. Raises NotSaved when it failed."""
        self.settle()
        if self.failed:
            raise NotSaved(self.failed)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.settle()
        self.thread.shutdown()
        with contextlib.suppress(Exception):  # an error of a save was told by settle
            self.checkpointer.close()
        if self.failed and kind is None:
            raise NotSaved(self.failed)

    def _begin(self) -> int | None:
        """Delete what a kill left; the newest step."""
        self._delete_older()
        return latest(self.run_folder)

    def _finish(self, step: int, response: Any) -> None:
        """Wait until orbax is done, then seal the step."""
        try:
            if response is None or not response.result():
                raise OSError(f"{self.run_folder} already holds {steps(self.run_folder)}")
            if hosts.leads():
                remote.push(self.run_folder)  # a sound step has the logs that led to it
                manifest.write(_folder(self.run_folder) / str(step), {"step": step, **self.about})
                self._delete_older()
        finally:
            preemption.saving(-1)

    def _delete_older(self) -> None:
        """Called when the newest step is sealed, and sound."""
        try:
            shutil.rmtree(self.run_folder / FOLDER / "deleted", ignore_errors=True)
            for step in steps(self.run_folder)[: -self.keep] if self.keep else ():
                _delete(_folder(self.run_folder) / str(step))
        except OSError as error:
            say(f"older checkpoints of {self.run_folder} could not be deleted: {error}")

    def _fail(self, step: int, error: Exception) -> None:
        last = "there is none yet" if self.newest is None else f"the last one is {self.newest}"
        self.failed = (
            f"checkpoint {step} of {self.run_folder} could not be saved: {_root(error)}; {last}"
        )
        say(f"{self.failed}; the next one is tried when it is due")
        # orbax tells the same error once more at the next save: a new one knows nothing of it
        with contextlib.suppress(Exception):
            self.checkpointer.close()
        self.checkpointer = _open(self.run_folder, cleanup_tmp_directories=True)


def save(run_folder: Path, step: int, state: Any, about: dict[str, Any] | None = None) -> None:
    """Write the state after `step` updates, and wait until it is whole. NotSaved if it is not."""
    with Saver(run_folder, about or {}) as saver:
        saver.save(step, state)


def latest(run_folder: Path) -> int | None:
    """Step of the newest checkpoint, or None."""
    found = steps(run_folder)
    return found[-1] if found else None


def newest_sound(run_folder: Path) -> int | None:
    """Step of the newest checkpoint that is what was saved, or None. Says which ones are not."""
    for step in reversed(steps(run_folder)):
        problem = manifest.look(_folder(run_folder) / str(step)).problem
        if not problem:
            return step
        say(f"checkpoint {step} of {run_folder} is left out: {problem}")
    return None


def discard_after(run_folder: Path, step: int) -> None:
    """Put aside what lies above a step, to be trained again: RUN/ckpt/damaged/STEP."""
    for own in steps(run_folder):
        if own > step:
            damaged, number = _folder(run_folder) / "damaged", 1
            aside = damaged / str(own)
            while aside.exists():
                aside, number = damaged / f"{own}-{number}", number + 1
            damaged.mkdir(parents=True, exist_ok=True)
            (_folder(run_folder) / str(own)).rename(aside)


def steps(run_folder: Path) -> list[int]:
    """Steps that have a checkpoint, in order. What orbax is still writing has another name."""
    folder = _folder(run_folder)
    if not folder.is_dir():
        return []
    return sorted(int(own.name) for own in folder.iterdir() if own.name.isdigit())


def restore(run_folder: Path, step: int, like: Any) -> Any:
    """The state at `step` with the structure, shapes and shardings of `like` (abstract arrays).

    Raises Damaged when it is not what was saved, UserError when a path is missing or has another
    shape than the config gives.
    """
    problem = hosts.first(lambda: manifest.look(_folder(run_folder) / str(step)).problem)
    if problem:
        raise Damaged(f"checkpoint {step} of {run_folder} is damaged: {problem}")
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
            raise Damaged(f"checkpoint {step} of {run_folder} is damaged: {reason}") from None
        return from_dict(like, loaded)


def locate(path: Path, step: int | None) -> tuple[Path, int]:
    """(run folder, step) for a run folder, its ckpt folder, or one checkpoint in it.

    Raises UserError when there is no checkpoint, or not that one (lists those there are).
    """
    path = Path(os.path.abspath(path))
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


def _folder(run_folder: Path) -> Any:
    """Where the steps are: a path here or on an object store."""
    return remote.home(run_folder) / FOLDER


def _delete(step_folder: Any) -> None:
    """Delete a step so that a kill in the midst of it leaves none that looks damaged."""
    if isinstance(step_folder, Path):
        aside = step_folder.parent / "deleted"
        aside.mkdir(exist_ok=True)
        step_folder.rename(aside / step_folder.name)
        shutil.rmtree(aside)
    else:  # a store renames by copying: here it is the manifest that makes a step count
        (step_folder / manifest.NAME).unlink(missing_ok=True)
        step_folder.rmtree()


def _open(run_folder: Path, **options: Any) -> ocp.training.Checkpointer:
    every_step: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
    context, folder = ocp.Context(), _folder(run_folder)
    context.array.saving.use_ocdbt = False  # a folder for each array: damage can be told by name
    return ocp.training.Checkpointer(
        os.path.abspath(folder) if isinstance(folder, Path) else folder,
        context=context,
        save_decision_policy=every_step,
        **options,
    )


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
