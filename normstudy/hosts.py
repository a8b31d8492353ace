"""Several processes that train as one: how they meet, and how they come to the same mind."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from normstudy import config, progress, remote
from normstudy.errors import UserError

VARIABLES = {
    "coordinator": "NORMSTUDY_COORDINATOR",
    "num_processes": "NORMSTUDY_NUM_PROCESSES",
    "process_id": "NORMSTUDY_PROCESS_ID",
}
SEEN_WITHIN = 30.0  # seconds in which a shared disk shows the others what one has written


def join(cfg: config.Launch) -> None:
    """Meet the other processes, before any call to jax that looks for devices.

    By flags or NORMSTUDY_* where these are given, by what jax finds on a TPU slice or under SLURM
    otherwise; a process that is told nothing is alone. Raises UserError for half an answer, or
    when the others do not come.
    """
    if jax.distributed.is_initialized():
        return
    told = {name: _told(cfg, name) for name in VARIABLES}
    given = {name: value for name, value in told.items() if value is not None}
    if given and len(given) < len(told):
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in told if name not in given)
        raise UserError(f"several processes need all of {_flags()}; missing: {missing}")
    if not given and not _in_cluster():
        return
    if given:
        number, index = int(told["num_processes"]), int(told["process_id"])
        if not 0 <= index < number:
            raise UserError(f"--process-id must lie in 0..{number - 1}, not {index}")
        given = {"coordinator_address": told["coordinator"], "num_processes": number}
        given["process_id"] = index
    settings: Any = jax.config  # its type leaves some out
    if settings.jax_hlo_source_file_canonicalization_regex is None:
        # all must compile the same program, and the folder of its source is a part of it: on CPUs,
        # processes with the code or jax in other folders wait for each other for ever (jax 0.12.1)
        settings.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=cfg.join_timeout,
            heartbeat_timeout_seconds=cfg.heartbeat,
            shutdown_timeout_seconds=cfg.join_timeout,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the {told['num_processes'] or 'other'} processes did not meet at "
            f"{told['coordinator'] or 'the address of the cluster'} within {cfg.join_timeout} s: "
            f"{reason}. Start all of them with the same --coordinator and --num-processes"
        ) from None
    if not leads():
        progress.mute()


def leads() -> bool:
    """Is this the process that writes? All compute, one writes."""
    return jax.process_index() == 0


def first(decide: Callable[[], Any]) -> Any:
    """What process 0 finds (JSON values), told to all; a UserError of its is raised by all."""
    if jax.process_count() == 1:
        return decide()
    answer: dict[str, Any] = {}
    if leads():
        try:
            answer["found"] = decide()
        except UserError as error:
            answer["error"], answer["exit_code"] = str(error), error.exit_code
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = np.zeros(length, np.uint8)
    if leads():
        buffer[:] = text
    answer = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())
    if "error" in answer:
        error = UserError(answer["error"])
        error.exit_code = answer["exit_code"]
        raise error
    return answer["found"]


def meet_in(folder: Path) -> None:
    """Raises UserError when the processes do not all see one and the same folder."""
    if jax.process_count() == 1:
        return
    shared = remote.home(folder)
    token = shared / f".meeting-{first(lambda: uuid.uuid4().hex)}"

    def leave_word() -> None:
        shared.mkdir(parents=True, exist_ok=True)
        token.touch()

    first(leave_word)
    until = time.monotonic() + SEEN_WITHIN
    while not token.exists() and time.monotonic() < until:
        time.sleep(0.1)
    seen = multihost_utils.process_allgather(np.bool_(token.exists()))
    first(lambda: token.unlink())
    blind = [str(index) for index, sees in enumerate(np.ravel(seen)) if not sees]
    if blind:
        raise UserError(
            f"{shared} is not one folder for all {jax.process_count()} processes: what process 0 "
            f"wrote there was not seen by process {', '.join(blind)} within {SEEN_WITHIN:.0f} s. "
            "Checkpoints are written by all: give --out on a disk that all of them mount, or gs://..."
        )


def gathered(tree: Any) -> Any:
    """The tree whole in the memory of each process, as numpy arrays."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _told(cfg: config.Launch, name: str) -> Any:
    given = getattr(cfg, name)
    if given is not None:
        return given
    value = os.environ.get(VARIABLES[name]) or None
    if value is not None and name != "coordinator" and not value.isdigit():
        raise UserError(f"{VARIABLES[name]} must be a whole number, not {value!r}")
    return value


def _flags() -> str:
    flags = [f"--{name.replace('_', '-')} ({variable})" for name, variable in VARIABLES.items()]
    return ", ".join(flags)


def _in_cluster() -> bool:
    """Under SLURM with several tasks, or on a machine with TPUs: jax finds the others itself."""
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "1"))) > 1:
        return True
    wanted = os.environ.get("JAX_PLATFORMS", "tpu")
    chips = [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
    return "tpu" in wanted and bool(chips) and _has_libtpu()


def _has_libtpu() -> bool:
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None
