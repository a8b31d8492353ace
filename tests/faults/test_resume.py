"""What was interrupted ends as though it never was, also on other devices."""

import json
import shutil

import harness
import pytest
from harness import TERM, rows

pytestmark = pytest.mark.fault

FSDP = ("--data", "1", "--fsdp", "8")
LAYOUTS = {  # of eight devices that trained as 4 x 2: (options, how many devices, processes)
    "one device": (("--data", "1", "--fsdp", "1"), 1, 1),
    "2 x 4": (("--data", "2", "--fsdp", "4"), 8, 1),
    "8 x 1, tensor": (("--data", "1", "--fsdp", "1", "--tensor", "8"), 8, 1),
    "4 processes": (("--data", "4", "--fsdp", "2"), 2, 4),
}


def stop_at(world, step, *options, **how):
    """Train until a step was logged, then SIGTERM to the last process. All say 75."""
    processes = world.start(*options, fault="slow:0.3", **how)
    world.reached(f"step-{step}")
    processes[-1].send(TERM)
    assert [process.wait() for process in processes] == [75] * len(processes), world.last_log
    saved = harness.steps(world.run)[-1]
    assert step < saved <= step + 4
    return saved


def assert_as_whole(run, whole):
    assert rows(run) == rows(whole)
    assert rows(run, "probes.jsonl") == rows(whole, "probes.jsonl")
    assert harness.arrays(run, 12) == harness.arrays(whole, 12)
    ours, theirs = harness.outcome(run), harness.outcome(whole)
    assert ours == theirs


@pytest.mark.parametrize(
    "how, options",
    [
        ({"devices": 1}, ()),
        ({"devices": 8}, FSDP),
        ({"devices": 1, "hosts": 2}, ()),
    ],
    ids=["F1 one device", "F2 eight devices, fsdp", "F2 two processes"],
)
def test_resumed_run_is_byte_equal_to_one_that_was_never_stopped(world, whole, how, options):
    """Parameters, optimizer, losses and probes; each step stands in the logs once."""
    stop_at(world, 5, *options, **how)
    assert world.train(*options, **how) == [0] * how.get("hosts", 1)
    assert_as_whole(world.run, whole(options=options, **how))
    assert harness.attempts(world.run) == ["preempted", "done"]


def test_F21_run_of_two_homes_is_kept_in_a_store_by_process_0_and_resumes_byte_equal(world, whole):
    """file:/// stands for gs://: nothing else is shared, and homes may get lost."""
    both = {"hosts": 2, "store": True}
    saved = stop_at(world, 5, **both)
    assert len(rows(world.run)) == saved
    assert harness.attempts(world.run) == ["preempted"]
    shutil.rmtree(world.home(0))
    assert world.train(**both) == [0, 0]
    assert_as_whole(world.run, whole(hosts=2))
    assert harness.attempts(world.run) == ["preempted", "done"]
    assert harness.board_steps(world.run) == list(range(12))
    copies = [world.home(index) / ".cache" / "normstudy" / "remote" for index in (0, 1)]
    assert list(copies[0].rglob("metrics.jsonl")) and not list(copies[0].rglob("ckpt"))
    assert not copies[1].exists()
    assert world.command("verify", f"file://{world.run}").wait() == 0


def test_F13_checkpoint_goes_on_on_any_layout_of_devices(world, tmp_path):
    """All leaves restored bit for bit, and the next losses are those of the layout before."""
    first = ("--data", "4", "--fsdp", "2")
    saved = stop_at(world, 5, *first, devices=8)
    before = harness.arrays(world.run, saved)
    assert before
    shutil.copytree(world.run, tmp_path / "same")
    fault = "tell,leave:logged"  # what comes later is compiled for nothing
    assert world.train(*first, fault=fault, devices=8, run=tmp_path / "same") == [0]
    restored = harness.notes(world, "restored-0")
    for name, (options, devices, hosts) in LAYOUTS.items():
        world.forget()
        run = tmp_path / name.replace(" ", "-")
        shutil.copytree(world.run, run)
        change = ("--allow-config-change", "data,fsdp,tensor")
        codes = world.train(*options, *change, fault=fault, devices=devices, hosts=hosts, run=run)
        assert codes == [0] * hosts, world.last_log
        for process in range(hosts):
            assert harness.notes(world, f"restored-{process}") == restored, name
        # 1e-5: float32 sums of another order, over a loss of 5
        assert harness.losses(run)[saved] == pytest.approx(
            harness.losses(tmp_path / "same")[saved], rel=1e-5
        )


def test_F14_parameters_are_bit_equal_however_many_devices_draw_them(world):
    """1 and 8 devices, split by data, fsdp and tensor, in one process or two."""
    layouts = [
        ((), 1, 1),
        (("--data", "8"), 8, 1),
        (FSDP, 8, 1),
        (("--data", "2", "--fsdp", "2", "--tensor", "2"), 8, 1),
        ((), 1, 2),
    ]
    drawn = []
    for number, (options, devices, hosts) in enumerate(layouts):
        world.forget()
        how = {"devices": devices, "hosts": hosts, "run": world.path / str(number)}
        codes = world.train(*options, fault="tell,leave:drawn", **how)
        assert codes == [0] * hosts, world.last_log
        drawn += [harness.notes(world, f"drawn-{process}") for process in range(hosts)]
    assert len(drawn) == 6 and all(own == drawn[0] for own in drawn)


@pytest.mark.parametrize(
    "variable, value",
    [
        ("JAX_DEFAULT_PRNG_IMPL", "rbg"),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_spmd_rng_bit_generator_unsafe=true"),
    ],
)
def test_F14_settings_that_tie_parameters_to_the_mesh_are_refused(
    world, monkeypatch, variable, value
):
    monkeypatch.setenv(variable, value)
    process = world.command(*harness.TRAIN, "--out", str(world.run))
    assert process.wait() == 2
    assert "depend on the mesh" in process.said and "--allow-unsafe-rng" in process.said
    assert not world.run.exists()


def test_F16_processes_split_each_batch_without_gap_or_overlap(world):
    """Two processes together hold the batches of one, and a resumed run goes on in their order."""
    assert world.train(fault="tell") == [0]
    alone = harness.notes(world, "rows-0")
    world.forget()
    two = world.path / "two"
    assert world.train(fault="tell", hosts=2, run=two) == [0, 0]
    halves = [harness.notes(world, f"rows-{process}") for process in (0, 1)]
    assert len(alone) == len(halves[0]) == len(halves[1]) >= 12
    for whole, *parts in zip(alone, *halves, strict=True):
        assert {part["sha256"] for part in parts} == {whole["sha256"]}
        held = sorted(row for part in parts for span in part["mine"] for row in range(*span))
        assert held == list(range(8))
    assert len({own["sha256"] for own in alone[1:13]}) == 12  # no batch comes twice
    world.forget()
    again = world.path / "again"
    (process,) = world.start(fault="slow:0.3", run=again)
    world.reached("step-5")
    process.send(TERM)
    assert process.wait() == 75
    begin = harness.steps(again)[-1]
    assert world.train(fault="tell", run=again) == [0]
    later = [own["sha256"] for own in harness.notes(world, "rows-0")]
    assert later == [alone[0]["sha256"], *(own["sha256"] for own in alone[1 + begin :])]


def test_F17_other_config_on_resume_is_refused_with_the_fields_that_differ(world):
    stop_at(world, 2)
    before = {path: path.read_bytes() for path in world.run.rglob("*") if path.is_file()}
    for options, field in (
        (("--layers", "5"), "model.layers: 4 there, 5 now"),
        (("--seed", "1"), "seed: 0 there, 1 now"),
        (("--corpus", "synthetic"), "data.corpus: kjv there, synthetic now"),
    ):
        (process,) = world.start(*options)
        assert process.wait() == 2
        assert field in process.said and "nothing was written" in process.said
    assert {path: path.read_bytes() for path in world.run.rglob("*") if path.is_file()} == before
    assert world.train("--lr", "0.002", "--allow-config-change", "lr") == [0]
    identity = json.loads((world.run / "config.json").read_text())
    assert identity["config"]["optim"]["lr"] == 0.002
    assert identity["changes"][0]["fields"] == {"optim.lr": [0.001, 0.002]}
