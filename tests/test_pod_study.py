"""The study itself on two processes, launched as on a pod and preempted twice."""

import json
import os
import signal

import pytest
from pod import Pod, ended, wait_for

pytestmark = pytest.mark.fault


@pytest.fixture
def two(tmp_path):
    pod = Pod(tmp_path, workers=2)
    quick = {
        "JAX_PLATFORMS": "cpu",  # libtpu, where it is installed, looks for a TPU for half a minute
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    pod.env["FAKE_WORKER_ENV"] = json.dumps(quick)
    yield pod
    pod.close()


def attempt_logs(pod):
    """What worker 0 said in each attempt, the oldest first."""
    paths = pod.logs.glob("*/worker_0.log")
    return [path.read_text() for path in sorted(paths, key=lambda path: path.stat().st_ctime_ns)]


def preempt(pod, worker):
    """What a cloud does: SIGTERM, to one of the workers."""
    holder = pod.homes[worker] / "normstudy/holder.pid"
    os.kill(int(holder.read_text().split()[0]), signal.SIGTERM)


def test_a_study_on_two_processes_is_preempted_twice_and_comes_to_its_end(two):
    """Each has a home of its own, and file:/// stands for gs://: they share nothing else."""
    out = f"file://{two.out}"
    study = ["python", "experiments/reproduce.py", "--preset", "smoke", "--layers", 2, "--steps", 5,
             "--arms", "post+warmup", "--warmup", 1, "--no-draw", "--out", out]  # fmt: skip
    running = two.start("supervise.sh", "--retries", 0, "--", *study)
    for attempt, worker in enumerate([1, 0]):
        # they have met, and the first step is being compiled
        wait_for(lambda attempt=attempt: "mesh: " in "".join(attempt_logs(two)[attempt:]), 240)
        preempt(two, worker)
    ran = ended(running, limit_s=400)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [attempt["exit_code"] for attempt in two.attempts()] == [75, 75, 0]
    (metrics,) = two.out.glob("arms/*/seed0/metrics.jsonl")
    assert (two.out / "summary.md").exists()
    copies = [home / ".cache" / "normstudy" / "remote" for home in two.homes]
    assert [copy.exists() for copy in copies] == [True, False]  # process 0 alone writes
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(5))
