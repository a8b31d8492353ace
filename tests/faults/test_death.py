"""Processes that are killed, asked to stop, stuck or left alone: no hang, and nothing is lost."""

import os
import random
import signal
import time

import harness
import pytest
from harness import HEARTBEAT, KILL, TERM, rows

pytestmark = pytest.mark.fault

EVERY = ("--checkpoint-every", "1")
GRACE = 10.0  # seconds that a process takes to leave when its main thread is stuck


def test_F3_kill_in_a_save_loses_at_most_that_save(world, whole):
    """Eight times, at moments drawn from a seed, in one run with a checkpoint after every step."""
    moments = random.Random(0)
    wide = ("--width", "256", "--ff", "512", "--steps", "30", *EVERY)
    reference = world.path / "reference"
    assert world.train(*wide, run=reference) == [0]
    last, kills = 0, 0
    while kills < 8:
        (process,) = world.start(*wide)
        log = world.run / "metrics.jsonl"
        begun = len(rows_whole(log)) if log.exists() else 0
        harness.wait_for(
            lambda log=log, begun=begun: log.exists() and len(rows_whole(log)) > begun + 1,
            harness.LIMIT, "two steps",
        )  # fmt: skip
        time.sleep(moments.uniform(0, 0.4))
        process.send(KILL)
        process.wait()
        kills += 1
        sound = [own for own in harness.steps(world.run) if sealed(world.run, own)]
        newest = sound[-1] if sound else 0
        assert newest >= last, "a checkpoint was lost"
        # rows are written as steps end, so the save of the last but one was over or in flight
        assert newest >= len(rows_whole(log)) - 2
        last = newest
        if newest >= 25:
            break
    assert kills >= 3
    assert world.train(*wide) == [0]
    assert harness.leftovers(world.run) == []
    assert rows(world.run) == rows(reference)
    assert harness.arrays(world.run, 30) == harness.arrays(reference, 30)
    assert world.command("verify", str(world.run)).wait() == 0


def sealed(run, step):
    return (run / "ckpt" / str(step) / "manifest.json").exists()


def rows_whole(log):
    """Lines but for a torn last one."""
    return log.read_text().split("\n")[:-1]


def test_F4_step_that_orbax_finished_and_we_did_not_seal_does_not_count(world, whole):
    (process,) = world.start(fault="sleep:seal")
    world.reached("seal")
    assert harness.steps(world.run) == [3] and not sealed(world.run, 3)
    process.send(KILL)
    process.wait()
    (process,) = world.start()
    assert process.wait() == 0
    told = [line for line in process.said.splitlines() if "is left out" in line]
    assert len(told) == 1 and "checkpoint 3 of" in told[0] and "never finished" in told[0]
    assert rows(world.run) == rows(whole())
    assert harness.arrays(world.run, 12) == harness.arrays(whole(), 12)
    assert harness.attempts(world.run) == ["lost", "done"]


def test_F22_kill_between_a_seal_and_the_deletion_of_older_steps_loses_neither(world, whole):
    keep = ("--keep", "1")
    (process,) = world.start(*keep, fault="sleep:delete")
    world.reached("delete")
    assert harness.steps(world.run) == [3, 6] and sealed(world.run, 3) and sealed(world.run, 6)
    process.send(KILL)
    process.wait()
    assert world.command("verify", str(world.run)).wait() == 0
    assert world.train(*keep) == [0]
    assert harness.steps(world.run) == [12]
    assert rows(world.run) == rows(whole())
    assert harness.arrays(world.run, 12) == harness.arrays(whole(), 12)
    assert world.command("verify", str(world.run)).wait() == 0


def test_F5_SIGTERM_saves_at_the_next_step_and_says_75(world):
    (process,) = world.start(fault="slow:0.5")
    world.reached("step-4")
    process.send(TERM)
    assert process.wait() == 75
    assert harness.steps(world.run)[-1] in (5, 6, 7)
    assert harness.attempts(world.run) == ["preempted"]
    assert "The same command goes on" in process.said
    assert not (world.run / "outcome.json").exists()


def test_F6_SIGTERM_to_one_of_two_stops_both_at_the_same_step(world):
    both = world.start("--steps", "60", fault="slow:0.3", hosts=2)
    world.reached("step-4")
    both[1].send(TERM)
    assert [process.wait() for process in both] == [75, 75]
    saved = harness.steps(world.run)[-1]
    assert sealed(world.run, saved)
    stopped = {line for own in both for line in own.said.splitlines() if "preempted at" in line}
    assert stopped == {f"preempted at step {saved}; saved. The same command goes on"}


@pytest.mark.parametrize("place", ["compile", "probe", "eval"])
def test_F7_SIGTERM_where_no_step_comes_is_obeyed_all_the_same(world, place):
    (process,) = world.start(fault=f"sleep:{place}")
    world.reached(place)
    begin = time.monotonic()
    process.send(TERM)
    assert process.wait(GRACE + 10) == 75
    assert time.monotonic() - begin < GRACE + 5
    assert harness.attempts(world.run) in ([], ["preempted"])  # []: before the first step


def test_F7_SIGTERM_in_a_save_waits_until_it_is_whole(world):
    (process,) = world.start(fault="sleep:save:14")
    world.reached("save")
    process.send(TERM)
    assert process.wait(14 + GRACE + 10) == 75
    assert sealed(world.run, 3) and harness.leftovers(world.run) == []


def test_F7_second_SIGTERM_ends_at_once(world):
    (process,) = world.start(fault="sleep:compile")
    world.reached("compile")
    process.send(TERM)
    harness.wait_for(lambda: "SIGTERM" in process.said, 10, "an answer to SIGTERM")
    begin = time.monotonic()
    process.send(TERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("lost", [1, 0], ids=["a peer", "the coordinator"])
@pytest.mark.parametrize("where", ["step", "save"])
def test_F8_lost_process_ends_the_other_in_bounded_time_and_the_next_start_goes_on(
    world, whole, lost, where
):
    fault = "slow:0.5" if where == "step" else "sleep:save"
    both = world.start(fault=fault, hosts=2)
    world.reached("step-5" if where == "step" else "save")
    begin = time.monotonic()
    both[lost].send(KILL)
    code = both[1 - lost].wait(4 * HEARTBEAT)
    assert code not in (0, 75), both[1 - lost].said
    assert time.monotonic() - begin < 3 * HEARTBEAT
    world.forget()
    assert world.train(hosts=2) == [0, 0]
    assert rows(world.run) == rows(whole(hosts=2))
    assert harness.attempts(world.run)[0] in ("lost", "failed")
    assert harness.attempts(world.run)[-1] == "done"


def test_F9_process_that_is_alive_but_stuck_ends_all_with_their_stacks(world, whole):
    whole(hosts=2)  # all is compiled
    begin = time.monotonic()
    assert world.train(fault="leave:logged", hosts=2, run=world.path / "before") == [0, 0]
    # seconds without a step; a start counts, so: twice what this machine takes for one just now
    limit = max(15, 2 * round(time.monotonic() - begin))
    both = world.start("--watchdog", str(limit), fault="stuck:1:4", hosts=2)
    world.reached("stuck")
    begin = time.monotonic()
    codes = [process.wait(limit + 15) for process in both]
    assert 0 not in codes and 75 not in codes
    assert time.monotonic() - begin < limit + 10
    assert "in do" in both[1].said and "Thread 0x" in both[1].said  # where it slept


def test_F18_log_of_a_killed_run_has_every_step_once(world, whole):
    (process,) = world.start("--checkpoint-every", "4", fault="slow:0.3")
    world.reached("step-6")
    time.sleep(0.1)
    process.send(KILL)
    process.wait()
    with (world.run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # and a line torn in the middle
    assert world.train("--checkpoint-every", "4") == [0]
    assert [row["step"] for row in rows(world.run)] == list(range(12))
    assert rows(world.run) == rows(whole())
    assert harness.board_steps(world.run) == list(range(12))


def test_F19_second_trainer_on_a_folder_is_refused_and_a_dead_one_s_lock_is_open(world):
    (first,) = world.start(fault="stuck:0:1")
    world.reached("stuck")
    (second,) = world.start()
    assert second.wait() == 2
    assert f"process {first.popen.pid} on {os.uname().nodename}" in second.said
    first.send(KILL)
    first.wait()
    assert (world.run / "lock").read_text()  # as it was left
    assert world.train() == [0]
