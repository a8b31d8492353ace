"""Checkpoints that were cut, emptied, deleted or changed by a bit, full disks, and bad numbers."""

import random
import shutil

import harness
import pytest
from harness import rows

pytestmark = pytest.mark.fault


@pytest.fixture
def stopped(world, whole):
    """A run that has steps 3, 6 and 9 and goes on from there."""
    shutil.copytree(whole(), world.run)
    shutil.rmtree(world.run / "ckpt" / "12")
    (world.run / "outcome.json").unlink()
    return world.run


def data_file(step):
    files = [own for own in step.rglob("*") if own.is_file() and "/state/" in str(own)]
    return max(files, key=lambda own: (own.stat().st_size, str(own)))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, at, bit):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


DAMAGE = {
    "truncated": (data_file, cut),
    "emptied": (data_file, lambda path: path.write_bytes(b"")),
    "deleted": (data_file, lambda path: path.unlink()),
    "without _METADATA": (lambda step: step / "state" / "_METADATA", lambda path: path.unlink()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_F10_damaged_newest_step_is_told_and_the_one_before_is_taken(world, stopped, whole, kind):
    find, harm = DAMAGE[kind]
    path = find(stopped / "ckpt" / "9")
    harm(path)
    (process,) = world.start()
    assert process.wait() == 0
    told = [line for line in process.said.splitlines() if "is left out" in line]
    assert len(told) == 1 and str(path.relative_to(stopped / "ckpt" / "9")) in told[0]
    assert rows(stopped) == rows(whole())
    assert harness.arrays(stopped, 12) == harness.arrays(whole(), 12)
    assert (stopped / "ckpt" / "damaged" / "9").is_dir()  # kept, for people to look at


def test_F10_step_that_was_asked_for_by_name_is_not_replaced_by_another(world, stopped):
    cut(data_file(stopped / "ckpt" / "9"))
    process = world.command("probe", str(stopped), "--step", "9", "--what", "stream")
    assert process.wait() == 4
    assert "checkpoint 9" in process.said and "Traceback" not in process.said


def test_F10_damage_to_an_older_step_changes_nothing(world, stopped, whole):
    cut(data_file(stopped / "ckpt" / "6"))
    (process,) = world.start()
    assert process.wait() == 0
    assert "left out" not in process.said
    assert rows(stopped) == rows(whole())


def test_F11_each_of_eight_flipped_bits_is_found_and_its_array_named(world, stopped):
    """Each in a copy of the step of its own; one command looks at all."""
    chance, told = random.Random(0), {}
    step = stopped / "ckpt" / "9"
    files = sorted(own for own in (step / "state").glob("*/c/**/*") if own.is_file())
    for number, path in enumerate(chance.sample(files, 8), start=101):
        name, copy = path.relative_to(step), step.with_name(str(number))
        shutil.copytree(step, copy)
        flip(copy / name, chance.randrange(path.stat().st_size), chance.randrange(8))
        told[str(copy)] = f"(of {name.parts[1]}) is not what was saved"
    process = world.command("verify", str(stopped))
    assert process.wait() == 4 and "8 of 11 are not what was saved" in process.said
    lines = process.said.splitlines()
    for copy, problem in told.items():
        assert any(copy in line and problem in line for line in lines), copy
    alone = [world.command("verify", own) for own in (copy, str(step))]
    assert [process.wait() for process in alone] == [4, 0]


BIG = ("--width", "128", "--ff", "256")  # the largest arrays take more than the limit
LIMIT = 200_000  # bytes of one file; the logs stay below


def test_F12_save_on_a_full_disk_is_told_and_the_next_one_works(world):
    (process,) = world.start(*BIG, fault=f"full:{LIMIT}:7")
    assert process.wait() == 0, process.said
    told = [line for line in process.said.splitlines() if "could not be saved" in line]
    assert 1 <= len(told) <= 2 and "checkpoint 3 of" in told[0]
    assert harness.steps(world.run) == [9, 12] or harness.steps(world.run)[-1] == 12
    assert world.command("verify", str(world.run)).wait() == 0
    assert [row["step"] for row in rows(world.run)] == list(range(12))


def test_F12_last_save_that_fails_is_an_error_and_the_last_good_step_stays(world):
    assert world.train(*BIG, "--steps", "7") == [0]
    good = harness.arrays(world.run, 7)
    more = ("--steps", "12", "--allow-config-change", "steps")
    (process,) = world.start(*BIG, *more, fault=f"full:{LIMIT}")
    assert process.wait() == 74
    assert "checkpoint 12 of" in process.said and "the last one is 7" in process.said
    assert harness.arrays(world.run, 7) == good
    assert not (world.run / "outcome.json").exists()
    assert world.train(*BIG, *more) == [0]
    assert harness.steps(world.run)[-1] == 12


@pytest.mark.parametrize("hosts", [1, 2])
def test_F15_gradients_that_are_no_numbers_stop_the_run_before_they_do_harm(world, whole, hosts):
    codes = world.train(fault="poison:5", hosts=hosts)
    assert codes == [70] * hosts, world.last_log
    found = harness.outcome(world.run)
    assert (found["word"], found["step"]) == ("diverged", 5)
    assert found["not_finite"]["sentence"]
    assert harness.steps(world.run) == [3, 5]  # the parameters before the update that was refused
    # a program with the fault in it: its steps before agree to rounding
    before = harness.losses(whole(hosts=hosts))[:5]
    assert harness.losses(world.run)[:5] == pytest.approx(before, rel=1e-5)
    assert world.command("verify", str(world.run)).wait() == 0
