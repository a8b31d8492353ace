"""launch.sh drives real processes: workers are folders, everything else is what a TPU VM runs."""

import os
import signal

import pytest
from pod import DONE, ROOT, Pod, answers, ended, wait_for


@pytest.fixture
def two(tmp_path):
    pod = Pod(tmp_path, workers=2)
    yield pod
    pod.close()


def codes(pod, *wanted):
    """A command that ends on worker N with the N-th of these codes."""
    for home, code in zip(pod.homes, wanted, strict=True):
        (home / "code").write_text(str(code))
    return ["--", "sh", "-c", "exit $(cat ~/code)"]


def holder(home):
    """The pid of the program that runs on this worker, once it does."""
    path = home / "normstudy/holder.pid"
    return int(wait_for(lambda: path.exists() and path.read_text()).split()[0])


def lives(pid):
    """Whether a process is there and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_two_jax_processes_meet_and_two_preemptions_are_resumed(two):
    stand_in = ["python", "tests/stand_in.py", two.out, 75, 75, 0]
    ran = two.run("supervise.sh", "--", *stand_in, limit_s=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [(a["attempt"], a["exit_code"]) for a in two.attempts()] == [(1, 75), (2, 75), (3, 0)]
    sums = {path.name: path.read_text() for path in two.out.iterdir()}
    assert sums == {f"{number}.{times}": "3" for number in range(2) for times in range(3)}


def test_each_word_of_the_command_arrives_as_it_was_given(two):
    words = ["it's", 'a "b"', "$HOME", "`id`", "x  y", "*", "", "\\", "é", "a\nb", "&", "~"]
    ran = two.run("launch.sh", "--", "python", "-c", "import sys; print(sys.argv[1:])", *words)
    assert ran.returncode == 0, ran.stderr
    for worker in range(2):
        assert f"[worker {worker}] {words}" in ran.stdout


def test_each_worker_has_its_log_here_and_there(two):
    ran = two.run("launch.sh", "--", "sh", "-c", 'echo "I am $NORMSTUDY_PROCESS_ID"; echo no >&2')
    assert ran.returncode == 0, ran.stderr
    for number, home in enumerate(two.homes):
        (here,) = two.logs.glob(f"*/worker_{number}.log")
        (there,) = home.glob("normstudy/attempts/*/log")
        assert here.read_text() == there.read_text() == f"I am {number}\nno\n"
        shown = two.run("logs.sh", number, "-n", 2)
        assert shown.stdout == f"I am {number}\nno\n"


@pytest.mark.parametrize(
    ("of_workers", "of_launch"),
    [((75, 75), 75), ((0, 1), 1), ((134, 2), 2)],
)
def test_the_exit_code_is_the_workers_own(two, of_workers, of_launch):
    ran = two.run("launch.sh", *codes(two, *of_workers))
    assert ran.returncode == of_launch, ran.stdout + ran.stderr


def test_what_ran_before_is_stopped_by_its_pid_and_nothing_else_is(two):
    bystander = two.start("/bin/sleep", 60)
    first = two.start("launch.sh", "--", "sleep", "60")
    before = [holder(home) for home in two.homes]
    second = two.run("launch.sh", "--", "true")
    assert second.returncode == 0, second.stderr
    assert not any(map(lives, before))
    assert ended(first).returncode == 143
    assert lives(bystander.pid)


def test_a_pid_that_another_process_has_by_now_is_left_alone(two):
    bystander = two.start("/bin/sleep", 60)
    assert two.run("launch.sh", "--", "true").returncode == 0
    for home in two.homes:
        (home / "normstudy/holder.pid").write_text(f"{bystander.pid} 12345\n")
    assert two.run("launch.sh", "--", "true").returncode == 0
    assert lives(bystander.pid)


def test_a_program_that_ignores_being_stopped_is_killed_after_a_while(two):
    stubborn = "trap '' TERM; echo deaf; while :; do sleep 0.1; done"
    first = two.start("launch.sh", "--", "bash", "-c", stubborn)
    before = [holder(home) for home in two.homes]
    for home in two.homes:
        wait_for(
            lambda home=home: "deaf" in next(home.glob("normstudy/attempts/*/log")).read_text()
        )
    stopped = two.run("stop.sh", FAKE_WORKER_ENV='{"GRACE": "1"}')
    assert stopped.returncode == 0, stopped.stderr
    assert not any(map(lives, before))
    assert ended(first).returncode == 137


def test_a_lost_connection_neither_ends_nor_repeats_the_program(two):
    lost, over = two.folder / "lost", two.folder / "over"
    two.play(answers("--worker=0.*worker.sh run", {"drop": str(lost)}, {}))
    program = (
        f'echo once >>~/ran; while [ ! -e {over} ]; do sleep 0.1; done; exit "$(wc -l <~/ran)"'
    )
    running = two.start("launch.sh", "--", "sh", "-c", program)
    wait_for(lambda: (two.homes[0] / "ran").exists())
    lost.touch()
    log = wait_for(lambda: next(two.logs.glob("*/worker_0.log"), None))
    wait_for(lambda: "attached again" in log.read_text())
    over.touch()
    assert ended(running).returncode == 1  # both programs ran once, and said so


def test_stopping_the_launcher_lets_the_workers_save(two):
    saves = "trap 'sleep 0.3; touch ~/saved; exit 75' TERM; echo up; while :; do sleep 0.1; done"
    running = two.start("launch.sh", "--", "bash", "-c", saves)
    for home in two.homes:
        wait_for(lambda home=home: "up" in "".join(
            log.read_text() for log in home.glob("normstudy/attempts/*/log")))  # fmt: skip
    os.kill(running.pid, signal.SIGTERM)
    assert ended(running).returncode == 75
    assert all((home / "saved").exists() for home in two.homes)


def test_stopping_the_launcher_twice_does_not_wait(two):
    deaf = "trap '' TERM; echo up; sleep 60"
    env = {"FAKE_WORKER_ENV": '{"GRACE": "2"}'}
    running = two.start("launch.sh", "--", "bash", "-c", deaf, **env)
    before = [holder(home) for home in two.homes]
    os.kill(running.pid, signal.SIGTERM)
    wait_for(lambda: len(two.calls("worker.sh stop")) == 2)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(timeout=20) == 130
    assert all(map(lives, before))


def test_no_worker_starts_where_one_cannot_be_set_up(two):
    (two.homes[1] / "uv_fails").touch()
    ran = two.run("launch.sh", "--", "touch", two.out / "ran")
    # uv's own code is 2, which here would mean bad input and never be tried again
    assert ran.returncode == 1
    assert "setup: exit codes of workers 0 to 1: 0 1" in ran.stdout
    assert not (two.out / "ran").exists()


def test_a_pod_that_cannot_be_reached_is_255(two):
    two.play(answers("tpu-vm ssh", {"err": "timed out\n", "exit": 255}))
    ran = two.run("launch.sh", "--", "true")
    assert ran.returncode == 255
    assert len(two.calls("ssh")) == 5


def test_the_first_connection_is_tried_again_while_the_machine_starts(two):
    refused = {"err": "connection refused\n", "exit": 255}
    two.play(answers("--command=true", refused, refused, DONE))
    assert two.run("launch.sh", *codes(two, 0, 0)).returncode == 0


def test_settings_that_change_the_run_in_silence_are_refused(two):
    unsafe = "LIBTPU_INIT_ARGS=--xla_tpu_spmd_rng_bit_generator_unsafe=true"
    ran = two.run("launch.sh", "--", "env", unsafe, "touch", two.out / "ran")
    assert ran.returncode == 2
    assert "error: spmd_rng" in ran.stdout
    assert not (two.out / "ran").exists()


def test_the_code_that_runs_is_this_tree_without_what_it_made(two):
    assert two.run("launch.sh", "--", "test", "-e", "experiments/reproduce.py").returncode == 0
    code = two.homes[0] / "normstudy/code"
    assert (code / "normstudy/model.py").read_bytes() == (ROOT / "normstudy/model.py").read_bytes()
    assert not any((code / name).exists() for name in (".git", "runs", "build", ".pytest_cache"))
