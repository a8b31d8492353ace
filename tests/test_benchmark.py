"""The benchmark and the thousand layers: what they count is right, what cannot run is named."""

import csv
import importlib.util
import json
import math

import jax
import numpy as np
import pytest
import tiny

from normstudy import train
from normstudy.errors import UserError
from normstudy.model import Model
from normstudy.roles import ROLES, role_of
from normstudy.trees import path_names

# scripts find their neighbours beside them; here they are in sys.modules once they are loaded
work = tiny.experiment("work")
compiling, contenders = tiny.experiment("compiling"), tiny.experiment("contenders")
benchmark, thousand = tiny.experiment("benchmark"), tiny.experiment("thousand_layers")

SMALL = ["--layers", "2", "--width", "8", "--context", "8", "--batch", "16"]


@pytest.fixture
def no_torch(monkeypatch):
    """An environment with transformers and without torch, whatever this one has."""
    known, find = {"torch": None, "transformers": object()}, importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: known[name] if name in known else find(name)
    )


@pytest.fixture
def quick(monkeypatch):
    """Workers compile as this process does: without optimizing."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


# ------------------------------------------------------------------------------------- arithmetic


def test_work_of_a_step_is_that_of_a_count_by_hand():
    """2 layers of 4 squares of 8 and two 8 x 32, a readout 8 x 256; 16 sequences of 4 tokens."""
    run = benchmark.run_of(benchmark.Options(layers=2, width=8, context=4, batch=16))
    entries = 2 * (4 * 64 + 2 * 256) + 2048
    assert entries == 3584
    assert benchmark.matmul_flops(run) == 6 * 3584 * 64 == 1_376_256


def test_work_of_a_step_counts_every_matrix_of_the_model_that_multiplies():
    run = benchmark.run_of(benchmark.Options(layers=3, width=16))
    abstract = jax.eval_shape(
        lambda key: Model(run.model, dict.fromkeys(ROLES, 1.0), key), jax.random.key(0)
    )
    entries = sum(
        math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
        if ROLES[role_of(names := path_names(path))].branch or names[0] == "readout"
    )
    assert benchmark.matmul_flops(run) == 6 * entries * 16 * 64


def test_ratio_is_taken_within_the_rounds():
    """The ratios are 1, 5 and 1/2; of the medians it would be 3/2."""
    assert benchmark.paired(np.array([1.0, 10.0, 3.0]), np.array([1.0, 2.0, 6.0])) == 1


def test_contenders_take_turns(monkeypatch):
    monkeypatch.setattr(benchmark, "PAUSE", 0)
    called = []

    def contender(name):
        def call():
            called.append(name)
            return float(len(called))

        return call

    found = benchmark.interleaved({name: contender(name) for name in "abc"}, 2)
    assert called == list("abcabc")
    assert {name: list(seconds) for name, seconds in found.items()} == {
        "a": [1, 4], "b": [2, 5], "c": [3, 6],
    }  # fmt: skip


def compilations(**seconds: list[tuple[float, float]]) -> dict:
    """{depth: compilations} from l12=[(trace, compile), ...]."""
    memory = compiling.Memory(1, 2, 3)
    return {
        int(name[1:]): [compiling.Compiled(*pair, memory) for pair in pairs]
        for name, pairs in seconds.items()
    }


def test_depths_are_compared_within_the_rounds():
    taken = compilations(l12=[(1.0, 2.0), (1.0, 8.0)], l48=[(1.0, 1.0), (1.0, 2.0)])
    rows = {row["what"]: row["value"] for row in benchmark.depth_rows(taken, 48)}
    assert rows == {
        "rounds of compiling, in turns": 2,
        "tracing a plain step of 12 layers": 1,
        "compiling a plain step of 12 layers": 5,
        "tracing and compiling a plain step of 12 layers": (3 / 2 + 9 / 3) / 2,
        "tracing a plain step of 48 layers": 1,
        "compiling a plain step of 48 layers": 1.5,
    }


def test_memory_counts_what_an_output_takes_from_an_argument_once():
    """A and B of 4000 bytes each, A given away for the result."""
    a = b = np.ones(1000, np.float32)
    program = jax.jit(lambda a, b: a + b, donate_argnums=0).lower(a, b).compile()
    memory = compiling.memory_of(program)
    assert memory.arguments == 8000
    assert memory.total - memory.temporary == 8000
    assert compiling.bytes_of({"a": a, "b": [b]}) == 8000


# ------------------------------------------------------------------------------------ the contest


def test_peers_that_are_not_installed_are_named_with_what_installs_them(no_torch):
    present, absent = benchmark.entrants(compiled=True)
    assert present == []
    for name, line in zip(("torch eager", "torch compiled"), absent, strict=True):
        assert line.startswith(f"{name}, for torch cannot be imported")
        assert line.endswith("pip install -e '.[bench]'")


def test_compiled_torch_takes_part_when_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    present, (line,) = benchmark.entrants(compiled=False)
    assert present == ["torch eager"] and line.endswith("have it by: --compiled")
    assert benchmark.entrants(compiled=True) == (["torch eager", "torch compiled"], [])
    present, absent = benchmark.entrants(compiled=True, platform="gpu")
    assert present == [] and all("not beside a gpu" in line for line in absent)


def test_every_entrant_has_a_worker():
    assert {"matmul", "ours", "ours, probing", "ours, together", *benchmark.PEERS} == set(
        contenders.CONTENDERS
    )


def test_table_has_every_row_and_all_files_hold_it(tmp_path, capsys, no_torch, quick, monkeypatch):
    started = []
    start = contenders.Worker.__init__
    monkeypatch.setattr(
        contenders.Worker,
        "__init__",
        lambda self, *args: (started.append(self), start(self, *args))[1],
    )
    paths = {kind: tmp_path / f"bench.{kind}" for kind in ("json", "csv", "png")}
    benchmark.main(
        [*SMALL, "--rounds", "2", "--sections", "step", "--json", str(paths["json"]),
         "--csv", str(paths["csv"]), "--figure", str(paths["png"])]
    )  # fmt: skip
    by_name = json.loads(paths["json"].read_text(encoding="utf-8"))
    assert [worker.process.returncode for worker in started] == [0, 0, 0, 0]
    beside = "plain steps of ours (2 layers, width 8)"
    units = {what.partition("matmul: float32")[1] or what: row["unit"]
             for what, row in by_name.items()}  # fmt: skip
    assert units == {
        "rounds of 3 steps each, in turns: medians": "rounds",
        "matmul: float32": "GFLOP/s",
        "matmul: work of a plain step, attention core left out": "GFLOP",
        "matmul: that work at that rate, the floor": "seconds",
        "ours: a step": "seconds",
        "ours: of the matmul rate": "per cent",
        "ours: speed": "tokens/s",
        "ours: first step": "seconds",
        "ours: memory of the compiled step, each device": "MiB",
        "ours: peak memory of its process": "MiB",
        "ours, probing: a step": "seconds",
        "ours, probing: a step, beside ours": beside,
        "ours, probing: first step": "seconds",
        "ours, probing: memory of the compiled step, each device": "MiB",
        "ours, probing: peak memory of its process": "MiB",
        f"ours, together: a step, for each of {contenders.cores()} runs": "seconds",
        "ours, together: a step, beside ours": beside,
        "ours, together: of the matmul rate": "per cent",
        "ours, together: speed": "tokens/s",
        "ours, together: first step": "seconds",
        "ours, together: memory of the compiled step, each device": "MiB",
        "ours, together: peak memory of its process": "MiB",
    }
    assert all(row["value"] > 0 for row in by_name.values())
    with paths["csv"].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["what"], row["unit"]) for row in rows] == [
        (row["what"], row["unit"]) for row in by_name.values()
    ]
    assert paths["png"].stat().st_size > 1000
    said = capsys.readouterr().out
    assert all(what in said for what in by_name)
    assert "left out: torch eager" in said and "left out: torch compiled" in said


def test_floor_is_the_work_at_the_rate_measured_beside_it():
    run = benchmark.run_of(benchmark.Options())
    work = benchmark.matmul_flops(run)
    steps = benchmark.Steps(
        seconds={"matmul": np.array([1.0, 2.0]), "ours": np.array([4.0, 4.0])},
        facts={
            "matmul": {"flops": 2 * work, "side": 3, "devices": 5},
            "ours": {"seconds": 9.0, "memory": 2**20},
        },
        peaks={"matmul": 1, "ours": 3 * 2**20},
        floor=work / (2 * work) * np.array([1.0, 2.0]),
        left_out=[],
    )
    rows = {row["what"]: row["value"] for row in benchmark.step_rows(run, steps)}
    assert rows["matmul: that work at that rate, the floor"] == 0.75
    assert rows["ours: of the matmul rate"] == pytest.approx(100 * (0.5 / 4 + 1 / 4) / 2)
    assert rows["ours: speed"] == 16 * 64 / 4
    assert rows["ours: first step"] == 9
    assert rows["ours: peak memory of its process"] == 3


def test_contender_that_dies_says_why():
    run = benchmark.run_of(benchmark.Options(layers=2, width=8, context=8))
    with pytest.raises(contenders.Failed, match=r"'nobody' ended with exit code 2: .*unknown"):
        contenders.Worker("nobody", run)
    with contenders.Worker("matmul", run) as worker:
        assert worker.step() > 0
        assert worker.peak > 2**20
        worker.process.kill()
        with pytest.raises(contenders.Failed, match="'matmul' ended with exit code -9: it said"):
            worker.step()


@pytest.mark.parametrize(
    "given, message",
    [
        (["--sections", "step,speed"], "unknown section 'speed'"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--figure", "bench.gif"], "give a name that ends in .png"),
        (["--figure", "bench.png", "--sections", "probes"], "draws sections step and depth"),
        (["--json", "nowhere/bench.json"], "the folder nowhere does not exist"),
        (["--compiled", "--sections", "depth"], "--compiled is of section step"),
        (["--width", "10"], "width 10 is not divided by heads 4"),
        (["--layers", "0"], "layers must be positive"),
    ],
)
def test_bad_option_is_refused_before_anything_is_measured(given, message, monkeypatch):
    monkeypatch.setattr(contenders, "Worker", None)
    with pytest.raises(UserError, match=message) as error:
        benchmark.main(given)
    assert error.value.exit_code == 2


def test_cost_of_probing_is_the_difference_within_a_round_over_all_that_is_not_probing(monkeypatch):
    answers = {"plain": iter([100.0, 200.0, 100.0]), "probing": iter([112.0, 220.0, 111.0])}
    order = []

    def seconds(arguments, cache):
        if "figures" in arguments:
            return 20.0
        order.append("plain" if "--probe-every" in arguments else "probing")
        assert order[-1] in cache.name and not cache.exists()  # nothing is compiled there
        return next(answers[order[-1]])

    monkeypatch.setattr(benchmark, "_seconds", seconds)
    rows = {row["what"]: row["value"] for row in benchmark.reproduction(3)}
    least, median, most = (rows[f"what probing adds to make reproduce{which}"] for which in (
        ", least of the rounds", "", ", most of the rounds"
    ))  # fmt: skip
    np.testing.assert_allclose([least, median, most], [100 * 20 / 220, 100 * 11 / 120, 10])
    assert order == ["plain", "probing", "probing", "plain", "plain", "probing"]


def test_program_that_fails_beside_the_benchmark_says_why(tmp_path):
    with pytest.raises(
        contenders.Failed, match="ended with exit code 2: it said error: layers must be"
    ) as error:
        benchmark._seconds([str(tiny.ROOT / "experiments/reproduce.py"), "--layers", "0"], tmp_path)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("name", ["benchmark", "thousand_layers"])
def test_card_says_command_time_and_expectation(name):
    card = tiny.experiment(name).__doc__
    for heading in ("\nCommand  ", "\nTime  ", "\nExpect  "):
        assert heading in card


def test_figure_of_the_depths_alone_is_drawn(tmp_path):
    taken = compilations(l12=[(1.0, 2.0)], l48=[(1.0, 1.0)])
    options = benchmark.Options(figure=tmp_path / "bench.png", sections="depth")
    benchmark.write(benchmark.depth_rows(taken, 48), None, taken, options)
    assert (tmp_path / "bench.png").stat().st_size > 1000


# ----------------------------------------------------------------------------- the thousand layers


@pytest.fixture
def short(monkeypatch, no_start):
    """Each depth is compiled once and leaves what others have compiled; no step is a probing one,
    whose program takes longer to compile than all the rest."""
    monkeypatch.setattr(thousand, "ROUNDS", 1)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(train, "probe_steps", lambda *_: set())


def few_layers(folder, *more: str) -> list[str]:
    return [*SMALL, "--layers", "6", "--beside", "2", "--steps", "6", "--lr", "0.01",
            "--out", str(folder / "run"), *more]  # fmt: skip


def test_few_layers_train_and_every_row_is_there(tmp_path, short):
    thousand.main(few_layers(tmp_path, "--csv", str(tmp_path / "rows.csv")))
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["what"]: (float(row["value"]), row["unit"]) for row in csv.DictReader(file)}
    assert {what: unit for what, (_, unit) in rows.items()} == {
        "plain step of 2 layers: trace and compile": "seconds",
        "plain step of 2 layers: temporary memory a layer, each device": "KiB",
        "plain step of 2 layers: all its memory, each device": "MiB",
        "plain step of 6 layers: trace and compile": "seconds",
        "plain step of 6 layers: temporary memory a layer, each device": "KiB",
        "plain step of 6 layers: all its memory, each device": "MiB",
        "trace and compile, 6 layers over 2": "1",
        "parameters": "MiB",
        "optimizer state": "MiB",
        "a plain step, median of 2": "seconds",
        "loss of step 0": "nats",
        "loss of step 5": "nats",
    }
    assert all(value > 0 for value, _ in rows.values())
    assert rows["loss of step 5"] < rows["loss of step 0"]
    # Adam holds two moments of every parameter, and a count
    assert rows["optimizer state"][0] * 2**20 == pytest.approx(rows["parameters"][0] * 2**21 + 4)


def test_seconds_of_a_step_are_those_of_steps_that_compiled_nothing():
    run = thousand.run_of(thousand.Options(steps=20), layers=2)
    logged = [{"step": step, "loss": 6.0 - step, "seconds": 100.0} for step in range(4)]
    logged += [{"step": step, "loss": 1.0, "seconds": float(step)} for step in range(4, 20)]
    rows = {row["what"]: row["value"] for row in thousand.training_rows(run, logged)}
    plain = [4, *range(6, 10), *range(11, 19)]  # probed: 0 to 3, 5, 10 and the last
    assert rows["a plain step, median of 13"] == np.median(plain)
    assert rows["a probing step, median of 3"] == np.median([5, 10, 19])


def test_loss_that_rises_is_refused(tmp_path, short, monkeypatch):
    monkeypatch.setattr(thousand, "compile_rows", lambda options: [])
    with pytest.raises(thousand.Untrained, match="6 layers at lr 100: the loss") as error:
        thousand.main(few_layers(tmp_path, "--lr", "100"))
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    "losses, message",
    [
        ([5.0, 4.0, 5.0], "does not fall, from 5.000 to 5.000 nats"),
        ([5.0, math.nan], "the loss of step 1 is nan"),
        ([5.0, 4.0], "stopped after 2 of 3 steps"),
    ],
)
def test_losses_that_are_not_finite_and_falling_are_refused(losses, message):
    run = thousand.run_of(thousand.Options(steps=3), layers=6)
    thousand.check_falling([5.0, 6.0, 4.0], run)
    with pytest.raises(thousand.Untrained, match=message):
        thousand.check_falling(losses, run)


def test_thousand_layers_need_two_steps_and_a_folder_for_the_table():
    with pytest.raises(UserError, match="steps must be at least 2"):
        thousand.Options(steps=1)
    with pytest.raises(UserError, match="the folder nowhere does not exist"):
        thousand.main(["--csv", "nowhere/rows.csv"])
