"""Starts real processes, waits for what they do with a time limit, and ends them by pid."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from pod import free_port

HERE = Path(__file__).parent
LIMIT = 400.0  # seconds for one process, most of which is room for slow machines
HEARTBEAT = 10  # seconds

SHAPE = {"layers": 4, "width": 32, "heads": 4, "ff": 64, "context": 64, "batch": 8}
RUN = {"preset": "smoke", **SHAPE, "steps": 12, "checkpoint-every": 3, "eval-batches": 1}
TRAIN = ["train", *(word for name, value in RUN.items() for word in (f"--{name}", str(value)))]


@dataclasses.dataclass
class Process:
    """One that runs, or ran."""

    popen: subprocess.Popen
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code, 128 + n for signal n. Fails when it does not end in time."""
        try:
            code = self.popen.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit:.0f} s:\n{self.said}") from None
        return 128 - code if code < 0 else code


class World:
    """A folder in which processes run, one after the other or together."""

    def __init__(self, path: Path, cache: Path):
        self.path, self.cache, self.count = path, cache, 0
        self.running: list[Process] = []

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def notes(self) -> Path:
        return self.path / "notes"

    def home(self, index: int) -> Path:
        """The home folder of a process, where its run is kept in a store."""
        return self.path / f"home-{index}"

    def start(
        self, *options: str, fault="none", devices=1, hosts=1, run=None, store=False
    ) -> list[Process]:
        """`normstudy train` in so many processes of so many devices each.

        store: the run folder stands for a bucket, and each process has a home of its own.
        """
        address, started = f"localhost:{free_port()}", []
        for index in range(hosts):
            own = {"HOME": str(self.home(index)), "XDG_CACHE_HOME": ""} if store else {}
            out = f"file://{run or self.run}" if store else str(run or self.run)
            command = [*TRAIN, "--out", out, *options]
            if hosts > 1:
                command += ["--coordinator", address, "--num-processes", str(hosts)]
                command += ["--process-id", str(index), "--heartbeat", str(HEARTBEAT)]
            started.append(self.command(*command, fault=fault, devices=devices, **own))
        return started

    def command(self, *command: str, fault="none", devices=1, **variables: str) -> Process:
        """normstudy COMMAND, with a fault in it."""
        self.count += 1
        self.notes.mkdir(exist_ok=True)
        log = self.path / f"log-{self.count}"
        environment = os.environ | {
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            # also what takes less than a second: a process takes 4 seconds of a core in place of 7
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "FAULT_NOTES": str(self.notes),
            **variables,
        }
        with log.open("w") as file:
            popen = subprocess.Popen(
                [sys.executable, str(HERE / "child.py"), fault, *command],
                stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=self.path,
            )  # fmt: skip
        self.running.append(Process(popen, log))
        return self.running[-1]

    def train(self, *options: str, **how) -> list[int]:
        """Exit codes of `start`, once all have ended."""
        return [process.wait() for process in self.start(*options, **how)]

    def reached(self, note: str, limit: float = LIMIT) -> None:
        """Wait for a note of a child."""

        def there() -> bool:
            if (self.notes / note).exists():
                return True
            assert self.running[-1].popen.poll() is None, (
                f"no {note}, but the end:\n{self.last_log}"
            )
            return False

        wait_for(there, limit, note)

    def forget(self) -> None:
        """Take the notes away."""
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir()

    @property
    def last_log(self) -> str:
        return self.running[-1].said if self.running else ""

    def close(self) -> None:
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.popen.kill()
            process.popen.wait()


def wait_for(condition, limit: float, what: str) -> None:
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, f"waited {limit:.0f} s for {what}"
        time.sleep(0.02)


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The log but for its clock, floats as they stand in the file."""
    found = []
    for line in (run / name).read_text().splitlines():
        row = json.loads(line, parse_float=str)
        row.pop("seconds", None)
        found.append(row)
    return found


def losses(run: Path) -> list[float]:
    return [float(row["loss"]) for row in rows(run)]


def attempts(run: Path) -> list[str]:
    """How each attempt ended."""
    lines = (run / "attempts.jsonl").read_text().splitlines()
    return [row["how"] for row in map(json.loads, lines) if "how" in row]


def steps(run: Path) -> list[int]:
    return sorted(int(own.name) for own in (run / "ckpt").iterdir() if own.name.isdigit())


def leftovers(run: Path) -> list[str]:
    return [own.name for own in (run / "ckpt").iterdir() if "tmp" in own.name]


def arrays(run: Path, step: int) -> dict[str, str]:
    """{file of an array: sha256} of a checkpoint; the same mesh writes the same files."""
    files = json.loads((run / "ckpt" / str(step) / "manifest.json").read_text())["files"]
    found = {name: own["sha256"] for name, own in files.items() if f"{name}/".count("/c/")}
    assert len(found) > 20
    return found


def notes(world: World, name: str):
    return json.loads((world.notes / name).read_text())


def board_steps(run: Path) -> list[int]:
    """The steps that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0})
    board.Reload()
    return [event.step for event in board.Scalars("train/loss")]


def outcome(run: Path) -> dict:
    return json.loads((run / "outcome.json").read_text())


TERM, KILL = signal.SIGTERM, signal.SIGKILL
