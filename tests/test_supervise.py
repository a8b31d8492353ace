"""supervise.sh: what is tried again, what is not, and what is written down about it."""

import os
import signal

import pytest
from pod import DONE, SAVED, Pod, answers, ended, states, wait_for

BUG, BAD_INPUT, TOO_LARGE, PEER_DIED = ({"exit": code} for code in (1, 2, 3, 134))
LOST = {"err": "connection closed\n", "exit": 255}


@pytest.fixture
def pod(tmp_path):
    pod = Pod(tmp_path)
    yield pod
    pod.close()


def plan(pod, *runs, rules=()):
    """What the program on the worker answers, run by run; copying and setting up succeed."""
    quick = [answers("scp|worker.sh install", DONE), answers("worker.sh run", *runs)]
    pod.play(*rules, *quick)
    # nobody unpacks the archive, and to make it takes longer than the rest
    (pod.folder.parent / "bin/tar").write_text("#!/bin/sh\n")
    (pod.folder.parent / "bin/tar").chmod(0o755)


def naps(pod):
    """The waits asked for, in seconds, where POLL_SECONDS is 10."""
    path = pod.folder / "naps"
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def clock(pod):
    """Settings under which every wait is written down and over at once."""
    sleep = pod.folder / "sleep"
    sleep.write_text(f'#!/bin/sh\necho "$1" >>{pod.folder}/naps\n')
    sleep.chmod(0o755)
    return {"SLEEP": str(sleep), "POLL_SECONDS": "10"}


def reasons(pod):
    return [(attempt["exit_code"], attempt["why"]) for attempt in pod.attempts()]


def test_two_preemptions_then_done_is_0(pod, clock):
    plan(pod, SAVED, SAVED, DONE)
    ran = pod.run("supervise.sh", "--retries", 0, **clock)
    assert ran.returncode == 0, ran.stderr
    assert reasons(pod) == [(75, "preempted, saved"), (75, "preempted, saved"), (0, "done")]
    assert not pod.calls("delete")
    # at once the first time; what ends within a minute again and again must not spin
    assert naps(pod) == ["10"]


def test_failures_are_tried_again_later_each_time_and_preemptions_are_free(pod, clock):
    plan(pod, BUG, SAVED, BUG, SAVED, BUG, DONE)
    assert pod.run("supervise.sh", "--retries", 3, **clock).returncode == 0
    assert naps(pod) == ["10", "20", "40"]


def test_each_attempt_is_the_same_command(pod):
    plan(pod, SAVED, DONE)
    pod.run("supervise.sh", "--seeds", 3)
    first, second = (
        next(w for w in argv if "worker.sh run" in w) for argv in pod.calls("worker.sh run")
    )
    program = f"python experiments/reproduce.py --preset tpu --out {pod.out} --seeds 3"
    assert first.endswith(program) and second.endswith(program)
    assert first != second  # the attempts have names of their own: the second does not attach


def test_a_failure_that_stays_is_given_up_after_the_retries(pod):
    plan(pod, BUG)
    ran = pod.run("supervise.sh", "--retries", 1)
    assert ran.returncode == 1
    assert reasons(pod) == [(1, "exit code 1")] * 2


def test_success_at_the_last_retry_is_0(pod):
    plan(pod, PEER_DIED, DONE)
    assert pod.run("supervise.sh", "--retries", 1).returncode == 0
    assert [code for code, _ in reasons(pod)] == [134, 0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (BAD_INPUT, "bad input"),
        (TOO_LARGE, "does not fit in memory"),
        ({"exit": 130}, "interrupted"),
    ],
)
def test_what_cannot_get_better_is_not_tried_again(pod, answer, why):
    plan(pod, answer)
    assert pod.run("supervise.sh").returncode == answer["exit"]
    assert reasons(pod) == [(answer["exit"], why)]


@pytest.mark.parametrize(
    ("state", "queue", "machines"),
    [
        ("SUSPENDED", ["ACTIVE"] + ["SUSPENDED"] * 3 + ["ACTIVE"], ["READY", "NONE", "READY"]),
        ("NONE", ["ACTIVE", "NONE", "NONE", "ACTIVE"], ["READY", "NONE", "NONE", "READY"]),
    ],
)
def test_a_pod_that_is_gone_is_made_again_free_of_charge(pod, state, queue, machines):
    plan(pod, LOST, DONE, rules=[states(*queue), states(*machines, of="tpu-vm")])
    ran = pod.run("supervise.sh", "--retries", 0)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert reasons(pod) == [(255, f"the pod is gone ({state})"), (0, "done")]
    assert len(pod.calls("queued-resources create")) == 1


def test_a_preempted_machine_counts_as_gone_while_its_request_is_active(pod):
    machines = states("READY", "PREEMPTED", "PREEMPTED", "NONE", "READY", of="tpu-vm")
    plan(pod, PEER_DIED, DONE, rules=[machines])
    assert pod.run("supervise.sh", "--retries", 0).returncode == 0
    assert reasons(pod) == [(134, "the pod is gone (PREEMPTED)"), (0, "done")]
    assert [argv[3] for argv in pod.calls("queued-resources") if argv[3] != "describe"] == [
        "delete", "create",
    ]  # fmt: skip


def test_a_lost_connection_is_judged_once_the_pod_says_what_it_is(pod):
    # READY at the start, and twice after the connection broke, before the preemption shows
    machines = states(
        "READY", "READY", "READY", "PREEMPTED", "PREEMPTED", "NONE", "READY", of="tpu-vm"
    )
    plan(pod, LOST, DONE, rules=[machines])
    assert pod.run("supervise.sh", "--retries", 0).returncode == 0


def test_a_lost_connection_to_a_healthy_pod_is_a_failure(pod):
    plan(pod, LOST)
    assert pod.run("supervise.sh", "--retries", 0).returncode == 255
    assert reasons(pod) == [(255, "exit code 255")]


def test_a_missing_pod_is_made_before_the_first_attempt(tmp_path):
    pod = Pod(tmp_path, ready=False)
    plan(pod, DONE)
    ran = pod.run("supervise.sh", PROVISION="spot")
    pod.close()
    assert ran.returncode == 0, ran.stderr
    (made,) = pod.calls("queued-resources create")
    assert "--spot" in made


def test_a_request_that_fails_uses_up_retries(pod):
    plan(pod, DONE, rules=[states("NONE", "FAILED", "FAILED", "NONE", "NONE", "ACTIVE"),
                           states("NONE", "NONE", "NONE", "READY", of="tpu-vm")])  # fmt: skip
    ran = pod.run("supervise.sh", "--retries", 1)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [code for code, _ in reasons(pod)] == [1, 0]


@pytest.mark.parametrize(("runs", "code"), [((DONE,), 0), ((BUG,), 1)])
def test_the_pod_is_deleted_at_the_end_where_asked(pod, runs, code):
    plan(pod, *runs)
    ran = pod.run("supervise.sh", "--retries", 0, "--delete-when-done")
    assert ran.returncode == code
    assert len(pod.calls("queued-resources delete")) == 1
    assert (pod.folder / "state").read_text() == "NONE"


def test_a_supervisor_started_anew_counts_on(pod):
    plan(pod, BUG, DONE)
    pod.run("supervise.sh", "--retries", 0)
    pod.run("supervise.sh", "--retries", 0)
    assert [attempt["attempt"] for attempt in pod.attempts()] == [1, 2]
    cost = pod.run("cost.sh").stdout
    assert "2 attempts so far: 0.0 chip-hours" in cost


def test_an_attempt_is_written_down_with_its_times(pod):
    plan(pod, DONE)
    pod.run("supervise.sh")
    (attempt,) = pod.attempts()
    assert list(attempt) == [
        "attempt", "start", "end", "waited", "seconds", "exit_code", "why", "chips",
    ]  # fmt: skip
    assert attempt["start"] <= attempt["end"] and attempt["start"].endswith("Z")
    assert attempt["chips"] == 4


def test_ctrl_c_lets_the_workers_save_and_does_not_start_again(pod):
    saves = "trap 'touch ~/saved; exit 75' TERM; echo up; while :; do sleep 0.1; done"
    running = pod.start("supervise.sh", "--delete-when-done", "--", "bash", "-c", saves)
    (home,) = pod.homes
    wait_for(lambda: [log for log in home.glob("normstudy/attempts/*/log") if log.read_text()])
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    assert ended(running).returncode == 75
    assert (home / "saved").exists()
    assert reasons(pod) == [(75, "stopped by hand, exit code 75")]
    assert not pod.calls("delete")  # somebody is there, and may want to go on
