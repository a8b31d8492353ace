"""A pod of folders: the scripts of tpu_scripts/ run against tests/fake_bin, without a TPU."""

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tpu_scripts"
FAKES = Path(__file__).parent / "fake_bin"

# a shell that starts something behind itself has it ignore Ctrl-C, and all that this starts
HEARD = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
AS_IN_A_TERMINAL = [sys.executable, "-I", "-S", "-c", HEARD + "os.execv(sys.argv[1], sys.argv[1:])"]

SAVED, DONE = {"exit": 75}, {"exit": 0}


def answers(match: str, *given: dict) -> dict:
    """A rule of a scenario: calls that match get these answers, in turn."""
    return {"match": match, "answers": list(given)}


def states(*names: str, of: str = "queued-resources") -> dict:
    """A rule: what `describe` says, in turn; NONE: there is no such thing."""
    gone = {"err": "ERROR: NOT_FOUND: was not found\n", "exit": 1}
    told = [gone if name == "NONE" else {"out": f"{name}\n"} for name in names]
    return answers(rf"{of} describe .*value\(state(\.state)?\)", *told)


class Pod:
    """Workers under a folder, the commands that drive them, and what those called."""

    def __init__(self, folder: Path, workers: int = 1, ready: bool = True):
        self.folder, self.logs, self.out = folder / "pod", folder / "logs", folder / "out"
        self.log, self.scenario = folder / "calls.jsonl", folder / "scenario.json"
        self.homes = [self.folder / f"worker_{number}" for number in range(workers)]
        for home in self.homes:
            home.mkdir(parents=True)
        self.out.mkdir()
        (folder / "home").mkdir()
        fake = folder / "bin"
        fake.mkdir()
        gcloud = f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", str(FAKES / "gcloud")])} "$@"\n'  # noqa: E501
        (fake / "gcloud").write_text(gcloud)
        (fake / "gcloud").chmod(0o755)
        (folder / "huge_pages").write_text("always [madvise] never\n")
        if ready:
            (self.folder / "state").write_text("ACTIVE")
        self.play()
        self.started: list[subprocess.Popen] = []
        self.env = {
            "PATH": f"{fake}:{FAKES}:/usr/bin:/bin", "HOME": str(folder / "home"),
            "LANG": "C.UTF-8", "NAME": "norms", "ZONE": "us-central2-b", "TYPE": "v4-8",
            "OUT": str(self.out), "LOGS": str(self.logs), "SLEEP": ":",
            "FAKE_POD": str(self.folder), "FAKE_GCLOUD_LOG": str(self.log),
            "FAKE_GCLOUD_SCENARIO": str(self.scenario), "FAKE_PYTHON": sys.executable,
            "FAKE_COORDINATOR": f"localhost:{free_port()}",
            "FAKE_WORKER_ENV": json.dumps({"HUGE_PAGES": str(folder / "huge_pages")}),
        }  # fmt: skip

    def play(self, *rules: dict) -> None:
        """What gcloud answers from now on."""
        self.scenario.write_text(json.dumps(rules))
        for counter in self.folder.glob("rule_*"):
            counter.unlink()

    def start(self, *command: Any, **env: str) -> subprocess.Popen:
        """A script of tpu_scripts/ and its arguments, or a program by its absolute path."""
        process = subprocess.Popen(
            [*AS_IN_A_TERMINAL, str(SCRIPTS / command[0]), *map(str, command[1:])],
            env=self.env | env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *command: Any, limit_s: float = 60, **env: str) -> subprocess.CompletedProcess:
        """The same, until it has ended."""
        return ended(self.start(*command, **env), limit_s)

    def calls(self, word: str = "") -> list[list[str]]:
        """The arguments of each call of gcloud that has this word in it."""
        if not self.log.exists():
            return []
        lines = map(json.loads, self.log.read_text(encoding="utf-8").splitlines())
        return [argv for argv in lines if word in " ".join(argv)]

    def attempts(self) -> list[dict]:
        """The lines of attempts.jsonl."""
        lines = (self.logs / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End what is left of all that was started, by pid."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for record in self.folder.glob("connections/*"):
            self._end(int(record.name))
        for record in self.folder.glob("worker_*/normstudy/attempts/*/keeper"):
            self._end(int(record.read_text()))
        for record in self.folder.glob("worker_*/normstudy/holder.pid"):
            self._end(int(record.read_text().split()[0]))
        for process in self.started:
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # what else holds its pipes is left
                process.communicate(timeout=10)

    def _end(self, group: int) -> None:
        # a pid of long ago may be another's by now: only what ran in this pod is ended
        with contextlib.suppress(OSError):
            if f"FAKE_POD={self.folder}\0".encode() in Path(f"/proc/{group}/environ").read_bytes():
                os.killpg(group, signal.SIGKILL)


def ended(process: subprocess.Popen, limit_s: float = 60) -> subprocess.CompletedProcess:
    """What a started script printed and its exit code."""
    out, err = process.communicate(timeout=limit_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(what: Callable[[], Any], limit_s: float = 20) -> Any:
    """What it returns, once that is true."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise TimeoutError(what)


def free_port() -> int:
    """A port of this machine that nobody listens on.

    Below those that Linux lends to whoever connects (from 32768 on): one of these may be lent again
    before the process that is told of it listens.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("localhost", port))
            return port
