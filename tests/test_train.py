"""Training: the golden step, resuming, devices, what is recorded when it breaks."""

import json
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from normstudy import (
    checkpoint,
    config,
    figures,
    frames,
    inits,
    mesh,
    model,
    programs,
    record,
    train,
)
from normstudy.errors import Interrupted, UserError

GOLDEN = {
    "loss": [5.816884, 5.9241595, 5.7586365],
    "gradient_norm": [1.6059266, 1.3013227, 1.1560479],
}
GOLDEN_PROBE = {  # step 0, by layer
    "jacobian_to_end": [1.4367921, 1.0393649],
    "skip_gain": [0.7221163, 0.76635313],
    "stream_gradient": [0.19964442, 0.12620045, 0.13342583],
}


def rows(folder, without=("seconds",)) -> list[dict]:
    found = record.read_rows(folder / record.METRICS)
    return [{k: v for k, v in row.items() if k not in without} for row in found]


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def final_state(run, folder):
    compiled, _ = programs.of(run)
    return checkpoint.restore(folder, checkpoint.latest(folder), compiled.abstract)


def assert_golden(name, found, golden):
    # 1e-4: other versions of XLA add float32 in another order, three updates of Adam deep
    np.testing.assert_allclose(found, golden, rtol=1e-4, err_msg=(
        f"{name} changed. If model, init, data order, optimizer or probe vectors were meant to "
        f"change, say so in CHANGELOG.md and put these numbers into this file: {found}"
    ))  # fmt: skip


def test_first_updates_are_the_golden_ones(finished):
    _, folder, _ = finished
    for name, golden in GOLDEN.items():
        assert_golden(name, [row[name] for row in rows(folder)[:3]], golden)


def test_first_probe_is_the_golden_one(finished):
    _, folder, _ = finished
    probe = record.read_rows(folder / record.PROBES)[0]
    for name, golden in GOLDEN_PROBE.items():
        assert_golden(name, probe[name], golden)


def test_probe_vectors_depend_on_seed_and_step():
    keys = [
        train.probe_key(tiny.run(seed=seed), step)
        for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    drawn = {tuple(np.asarray(jax.random.bits(key, (4,))).tolist()) for key in keys}
    assert len(drawn) == 4


def test_run_folder_holds_all_that_it_should(finished):
    run, folder, result = finished
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "probes.jsonl", "outcome.json", "attempts.jsonl", "ckpt",
        "tb", "lock",
    }  # fmt: skip
    assert checkpoint.steps(folder) == [3, 6, 8]
    assert [row["step"] for row in rows(folder)] == list(range(8))
    assert [row["step"] for row in record.read_rows(folder / record.PROBES)] == [0, 1, 2, 3, 5, 7]
    assert record.load_config(folder) == run
    assert record.read_json(folder / record.OUTCOME) == result
    identity = record.read_json(folder / record.CONFIG)
    assert identity["h1_nats"] == result["h1"]
    assert identity["placement"] == {
        "equation": "n.post(x + f(x))", "skip_norms": ["post"],
        **dict.fromkeys(("alpha", "beta", "branch", "before", "after"), 1.0),
    }  # fmt: skip
    assert identity["devices"].startswith("8 of 8 cpu devices")


def test_result_says_what_the_log_says(finished):
    _, folder, result = finished
    losses = [row["loss"] for row in rows(folder)]
    assert result["word"] == "undecided" and result["steps_done"] == 8
    assert result["last_loss"] == pytest.approx(np.mean(losses), rel=1e-6)  # float32
    assert result["stopped_because"] == "all steps done"
    assert np.log(256) * 0.9 < result["val_loss"] < np.log(256) * 1.2


def test_logged_rate_is_the_audited_rate(finished):
    run, folder, _ = finished
    rates = train.schedules.table(run.optim, run.model.width, run.steps)
    assert [row["lr"] for row in rows(folder)] == rates.tolist()


def test_logged_norms_are_those_of_the_parameters(finished):
    """Of the last checkpoint before a probe: weights there, by layer and matrix."""
    run, folder, _ = finished
    compiled, _ = programs.of(run)
    state = checkpoint.restore(folder, 3, compiled.abstract)
    (probe,) = [row for row in record.read_rows(folder / record.PROBES) if row["step"] == 3]
    for path, leaf in tiny.leaves(state.model.layers).items():
        by_hand = np.sqrt((leaf.astype(float) ** 2).reshape(run.model.layers, -1).sum(1))
        found = probe["weight/" + path.replace("/", ".")]
        np.testing.assert_allclose(found, by_hand, rtol=1e-6, err_msg=path)


def test_update_is_minus_rate_times_adam_s_direction(finished):
    """At update 1 Adam's direction is the sign of the gradient."""
    run, folder, _ = finished
    probe = record.read_rows(folder / record.PROBES)[0]
    for path, shape in (("attn.q", (8, 8)), ("mlp.up", (8, 16))):
        expected = run.optim.lr * np.sqrt(np.prod(shape))
        # eps = 1e-8 beside gradients of about 1e-3, some far smaller
        np.testing.assert_allclose(probe[f"update/{path}"], expected, rtol=1e-2)


def test_probe_loss_at_step_0_is_the_loss_of_the_initial_model(finished):
    run, folder, _ = finished
    compiled, devices = programs.of(run)
    feed = train.data.feed(run)
    state = programs.initial_state(run, compiled)
    expected = compiled.loss(state.model, mesh.put_batch(devices, feed.probe_batch))
    found = record.read_rows(folder / record.PROBES)[0]["probe_loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32, another program


@pytest.fixture
def stopping_at(monkeypatch):
    """A function: while step `at` is logged, `do` happens."""

    def arrange(at, do):
        write = train.RunLog.write

        def wrapped(self, step, lr, values):
            write(self, step, lr, values)
            if step == at:
                do()

        monkeypatch.setattr(train.RunLog, "write", wrapped)
        return lambda: monkeypatch.setattr(train.RunLog, "write", write)

    return arrange


def killed():
    raise RuntimeError("power cut")


@pytest.mark.parametrize(
    "do, error",
    [(lambda: signal.raise_signal(signal.SIGINT), Interrupted), (killed, RuntimeError)],
    ids=["interrupted", "killed"],
)
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    finished, tmp_path, stopping_at, do, error
):
    run, whole, result = finished
    folder = tmp_path / "run"
    restore = stopping_at(4, do)
    with pytest.raises(error) as raised:
        train.train(run, folder, "tiny")
    restore()
    assert not (folder / record.OUTCOME).exists()
    if error is Interrupted:
        saved = checkpoint.latest(folder)
        assert f"interrupted at step {saved}" in str(raised.value)
        assert [row["step"] for row in rows(folder)] == list(range(saved))
    else:
        assert checkpoint.latest(folder) == 3
        assert len(rows(folder)) == 5  # two steps past the checkpoint: they are written again
    assert train.train(run, folder, "tiny") == result
    assert rows(folder) == rows(whole)
    assert (folder / record.PROBES).read_bytes() == (whole / record.PROBES).read_bytes()
    tiny.assert_bit_equal(final_state(run, folder), final_state(run, whole))
    assert_board_equals_logs(folder)


def test_torn_last_lines_do_not_stop_a_resume(finished, tmp_path, stopping_at):
    run, whole, _ = finished
    folder = tmp_path / "run"
    restore = stopping_at(4, killed)
    with pytest.raises(RuntimeError):
        train.train(run, folder, "tiny")
    restore()
    for name in (record.METRICS, record.PROBES):
        with (folder / name).open("a") as file:
            file.write('{"step": 5, "lo')
    train.train(run, folder, "tiny")
    assert rows(folder) == rows(whole)


def test_ctrl_c_is_python_s_again_after_a_run(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    script(monkeypatch, [5.0] * 4)
    train.train(tiny.run(steps=4), tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before


def test_finished_run_is_skipped(finished):
    run, folder, result = finished
    before = contents(folder)
    assert train.train(run, folder, "tiny") == result
    assert contents(folder) == before


def test_folder_of_another_config_is_refused_and_left_alone(finished):
    run, folder, _ = finished
    before = contents(folder)
    with pytest.raises(UserError, match=r"seed: 0 there, 1 now"):
        train.train(config.override(run, seed=1), folder, "tiny")
    assert contents(folder) == before


def test_arms_that_differ_in_schedule_gain_and_seed_share_programs(finished, tmp_path, monkeypatch):
    run, folder, _ = finished
    arm = config.override(
        run, seed=5, gain=0.5, depth_scaled=True, init="kaiming", lr=0.003, schedule="cosine",
        warmup=3, end_fraction=0.2,
    )  # fmt: skip
    assert programs.of(arm)[0] is programs.of(run)[0]
    traced = []
    block = model.Block.__call__
    monkeypatch.setattr(
        model.Block, "__call__", lambda *args, **kw: traced.append(1) or block(*args, **kw)
    )
    train.train(arm, tmp_path / "run", "arm")
    assert traced == []  # not one call of Python: everything was compiled
    assert rows(tmp_path / "run")[0]["loss"] != rows(folder)[0]["loss"]


def test_one_device_gives_the_losses_of_eight(wide, monkeypatch):
    run = wide["mixed"]
    feed = train.data.feed(run)

    def losses(run, state):
        compiled, devices = programs.of(run)
        found = []
        for step in range(3):
            batch = mesh.put_batch(devices, feed.batches[step])
            state, values = compiled.step(state, batch, jnp.float32(0.01))
            found.append([float(values[name]) for name in ("loss", "gradient_norm")])
        return found, devices.size

    state = programs.initial_state(run, programs.of(run)[0])
    alone = jax.device_put(jax.device_get(state), jax.devices()[0])  # a copy: steps donate
    spread, devices = losses(run, state)
    assert devices == 8
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    single, devices = losses(config.override(run, data=1, fsdp=1, tensor=1), alone)
    assert devices == 1
    # float32 sums in another order; Adam divides small gradients by their own size
    np.testing.assert_allclose(spread, single, rtol=1e-4)


# ---------------------------------------------------------------------------- runs that break


def test_run_that_blows_up_is_a_result(drawn_study):
    """Adam at a rate of 1e30: the loss of step 1 is not finite."""
    folder = drawn_study[0] / "arms" / "01-post-blows-up" / "seed0"
    result = record.read_json(folder / record.OUTCOME)
    assert (result["word"], result["step"]) == ("diverged", 1)
    assert "not finite" in result["stopped_because"]
    assert [row["step"] for row in rows(folder)] == [0, 1]
    found = result["not_finite"]
    first = found["origins"][0]
    # a stream of 1e30 meets matrices of 1e30
    assert (first["kind"], first["direction"]) == ("infinite", "forward")
    assert (first["layer"], first["where"], first["operation"]) == (0, "attn/q", "matmul")
    assert first["magnitude"] > first["limit"] == float(np.finfo(np.float32).max)
    assert result["why"] == f"the loss is nan at step 1; {found['sentence']}"
    assert found["sentence"].startswith("first inf: layer 0 attn/q, matmul, ")


def test_last_checkpoint_of_a_run_that_blew_up_is_finite(drawn_study):
    folder = drawn_study[0] / "arms" / "01-post-blows-up" / "seed0"
    state = final_state(tiny.run(), folder)
    assert int(state.step) == checkpoint.latest(folder) == 1
    assert not state.alive
    for path, leaf in tiny.leaves(state).items():
        assert np.isfinite(leaf).all(), path


def linear(model, batch):
    return model["w"].sum()


def script(monkeypatch, losses, gradients=None, token_loss=linear):
    """Train on a script: step n has losses[n] and gradients[n], nothing is compiled."""
    gradients = gradients or [1.0] * len(losses)

    def step(state, batch, lr):
        n = int(state.step)
        fine = bool(state.alive and np.isfinite(losses[n]) and np.isfinite(gradients[n]))
        values = {
            "loss": np.float32(losses[n]),
            "gradient_norm": np.float32(gradients[n]),
            "update_norm": np.float32(1),
            "alive": np.bool_(fine),
            "update": {},
        }
        return state._replace(step=state.step + fine, alive=jnp.bool(fine)), values

    state = programs.State(jnp.int32(0), jnp.bool(True), {"w": jnp.ones(2)}, {"m": jnp.ones(2)})
    compiled = programs.Programs(
        init=lambda key, stds: state,
        step=step,
        measure=lambda *args: {"rms": np.ones(3, np.float32)},
        effect=lambda *args: {},
        sharpness=lambda *args: ({}, args[-1]),
        profile=lambda model, batch: model,
        loss=lambda *args: jnp.float32(5),
        abstract=state,
    )
    devices = mesh.make(config.Mesh(), 8, 8)
    monkeypatch.setattr(programs, "of", lambda run: (compiled, devices))
    monkeypatch.setattr(programs, "token_loss", token_loss)  # for the search of what broke


def test_gradient_that_is_not_finite_ends_the_run_as_diverged(tmp_path, monkeypatch):
    """The loss may stay finite for ever: the parameters no longer move."""
    root = lambda model, batch: jnp.sqrt(model["w"] - 1).sum()
    script(monkeypatch, [5.0] * 40, [1.0] * 20 + [np.inf] * 20, root)
    result = train.train(tiny.run(steps=40), tmp_path / "run")
    assert (result["word"], result["step"]) == ("diverged", 20)
    assert "gradient" in result["why"]
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(21))
    (first,) = result["not_finite"]["origins"]
    assert (first["kind"], first["operation"], first["direction"]) == (
        "infinite", "divide", "backward"
    )  # fmt: skip
    assert checkpoint.latest(tmp_path / "run") == 20


@pytest.mark.parametrize(
    "token_loss, says",
    [
        (
            lambda model, batch: 1e25 * model["w"].sum(),
            r"first inf: gradient_norm, \S+, 1\.0e50 above float32's 3\.40282e38, backward$",
        ),
        (linear, r"its replay on the CPU is finite$"),
        (
            lambda model, batch: model.nowhere,
            r"its replay on the CPU failed \(AttributeError: .*\)",
        ),
        (lambda model, batch: model["w"], r"its replay on the CPU failed \(TypeError: .*\)$"),
    ],
    ids=["norm of gradients", "finite", "failed", "no scalar"],
)
def test_what_is_known_of_a_refused_update_is_said(tmp_path, monkeypatch, token_loss, says):
    """Gradients of 1e25 are finite, their squares are not; devices need not repeat themselves."""
    script(monkeypatch, [5.0] * 8, [1.0] * 3 + [np.inf] * 5, token_loss)
    result = train.train(tiny.run(), tmp_path / "run")
    assert (result["word"], result["step"]) == ("diverged", 3)
    assert re.fullmatch(r"a gradient is not finite at step 3; " + says, result["why"])
    assert result["why"].endswith(result["not_finite"]["sentence"])
    assert bool(result["not_finite"]["origins"]) == ("first" in says)


@pytest.mark.parametrize("at", [0, 1, 7])
def test_loss_that_is_not_finite_ends_the_run_at_its_step(tmp_path, monkeypatch, at):
    losses = [5.0] * 8
    losses[at] = np.nan
    script(monkeypatch, losses)
    result = train.train(tiny.run(), tmp_path / "run")
    assert (result["word"], result["step"]) == ("diverged", at)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(at + 1))
    assert np.isnan(rows(tmp_path / "run")[-1]["loss"])
    assert at == 0 or checkpoint.latest(tmp_path / "run") == at
    json.loads((tmp_path / "run" / record.OUTCOME).read_text(), parse_constant=pytest.fail)


def test_run_whose_fate_is_sealed_stops_early_when_asked_to(tmp_path, monkeypatch):
    script(monkeypatch, [3.1] * 80)  # on H1, stalled from the end of warmup
    quick = train.train(tiny.run(steps=80, stop_after=10, warmup=45), tmp_path / "quick")
    assert quick["word"] == "stalled"
    assert quick["steps_done"] == 60  # warmup and ten more, looked at every tenth update
    assert "sealed" in quick["stopped_because"]
    whole = train.train(tiny.run(steps=70, stop_after=0, warmup=45), tmp_path / "whole")
    assert whole["word"] == "stalled" and whole["steps_done"] == 70


def test_step_that_is_refused_changes_no_parameter():
    """The state after a gradient that is not finite: the one before, marked as dead."""
    cfg = tiny.model_config()
    transform = train.optim.direction(config.Optim(optimizer="sgd", clip=1.0))
    params = tiny.model(cfg)
    params.readout[...] = params.readout[...] * np.inf
    state = programs.State(jnp.int32(4), jnp.bool(True), params, transform.init(params))
    step = jax.jit(lambda *args: programs.update(*args, transform=transform)[:2])
    new, scalars = step(state, tiny.tokens(cfg, 2), jnp.float32(0.1))
    assert not new.alive and int(new.step) == 4
    assert not np.isfinite(float(scalars["loss"]))
    tiny.assert_bit_equal(new.model, state.model)


# ------------------------------------------------------------------------------ views and checks


def assert_board_equals_logs(folder):
    """TensorBoard's own reader sees the numbers of the JSONL logs, each step once."""
    board = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    board.Reload()

    def curve(tag):
        return {event.step: np.float32(event.value) for event in board.Scalars(tag)}

    def count(tag):
        return len(board.Scalars(tag))

    logged = rows(folder)
    for name in logged[0].keys() - {"step"}:
        expected = {row["step"]: np.float32(row[name]) for row in logged}
        assert curve(f"train/{name}") == expected, name
        assert count(f"train/{name}") == len(logged), name
    probed = record.read_rows(folder / record.PROBES)
    for name, values in probed[0].items():
        if name == "step":
            continue
        layers = range(len(values)) if isinstance(values, list) else [None]
        for layer in layers:
            tag = f"probe/{name}" if layer is None else f"{name}/layer_{layer:02d}"
            expected = {
                row["step"]: np.float32(row[name] if layer is None else row[name][layer])
                for row in probed
            }
            assert curve(tag) == expected, tag


def test_tensorboard_shows_the_numbers_of_the_logs(finished):
    assert_board_equals_logs(finished[1])


def test_tensorboard_takes_five_layers_from_bottom_to_top(tmp_path):
    from normstudy.tensorboard import Board

    board = Board(tmp_path, 0)
    board.layers(3, {"rms": np.arange(49, dtype=np.float32)})
    board.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    found = {tag: reader.Scalars(tag)[0].value for tag in reader.Tags()["scalars"]}
    assert found == {f"rms/layer_{n:02d}": n for n in (0, 12, 24, 36, 48)}


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"placement": "nowhere"}, "unknown placement 'nowhere'"),
        ({"schedule": "linear", "end_fraction": 0.0}, "at update 8 of 8"),
        ({"batch": 12, "data": 8}, "batch 12 is not divided"),
        ({"probe_batch": 12, "data": 8}, "probe_batch 12 is not divided"),
        ({"data": 3}, "the product must be 8"),
        ({"corpus": "nowhere"}, "corpus 'nowhere'"),
        ({"vocab": 100}, "raise --vocab"),
        ({"context": 1_000_000}, "too few for a batch"),
    ],
)
def test_check_refuses_what_would_stop_the_run_before_its_first_step(changes, says):
    with pytest.raises(UserError, match=says):
        train.check(tiny.run(**changes))


def test_check_passes_what_runs():
    assert train.check(tiny.run()) is None


def test_probes_are_dense_at_first_and_include_the_last_step():
    found = train.probe_steps(400, 50)
    assert found >= {0, 1, 2, 3, 5, 10, 20, 30, 50, 100, 350, 399}
    assert max(found) == 399
    assert train.probe_steps(1, 50) == {0}


def test_run_that_is_never_probed_logs_the_same_losses_and_draws_what_needs_no_probe(
    finished, tmp_path
):
    run, folder, _ = finished
    never = config.override(run, probe_every=0)
    train.train(never, tmp_path / "run", "tiny")
    assert record.read_rows(tmp_path / "run" / record.PROBES) == []
    losses = [record.column(own / record.METRICS, "loss") for own in (folder, tmp_path / "run")]
    assert losses[0] == losses[1]
    (logs,) = frames.load(tmp_path / "run")
    drawn = figures.draw_all([logs], tmp_path / "figures")
    assert [own.name for own in drawn] == ["loss", "schedules"]


def test_squares_of_all_gradient_norms_add_up_to_the_global_one(finished):
    """Also of the parameters that lie in no layer."""
    _, folder, _ = finished
    norms = {row["step"]: row["gradient_norm"] for row in record.read_rows(folder / record.METRICS)}
    for probe in record.read_rows(folder / record.PROBES):
        parts = [np.ravel(v) for name, v in probe.items() if name.startswith("gradient/")]
        total = np.linalg.norm(np.concatenate(parts))
        np.testing.assert_allclose(total, norms[probe["step"]], rtol=1e-5)


def test_clipping_logs_the_raw_norm_what_is_applied_and_how_often(tmp_path):
    """Case: clip 1, raw norm 20 -> raw 20, applied 1, clipped always."""
    run = tiny.run(clip=1e-3, steps=4)
    result = train.train(run, tmp_path / "run", "clipped")
    rows = record.read_rows(tmp_path / "run" / record.METRICS)
    assert all(row["gradient_norm"] > 1e-2 for row in rows)
    assert [row["gradient_norm_applied"] for row in rows] == [pytest.approx(1e-3)] * 4
    assert result["clip_fraction"] == 1.0
    assert "gradient_norm_applied" not in record.read_rows(tmp_path / "run" / record.PROBES)[0]


def test_sharpness_is_logged_at_every_probe_when_it_is_asked_for(tmp_path):
    run = tiny.run(curvature=True, steps=4)
    train.train(run, tmp_path / "run", "sharp")
    for probe in record.read_rows(tmp_path / "run" / record.PROBES):
        assert probe["sharpness"] > 0 and probe["sharpness_adam"] > 0
        # float32 products: a relative residual of some 1e-3 is what they allow
        assert probe["sharpness_residual"] < 0.02 * probe["sharpness"]
        threshold = (2 + 2 * run.optim.b1) / (1 - run.optim.b1)
        expected = probe["sharpness_adam"] * run.optim.lr / threshold
        assert probe["edge_ratio"] == pytest.approx(expected, rel=1e-5)


def test_gains_over_xavier_are_logged(finished):
    run, folder, _ = finished
    logged = record.read_json(folder / record.CONFIG)["gains_over_xavier"]
    assert logged == inits.gains_over_xavier(run.model, programs.standard_deviations(run))
    assert logged == pytest.approx(dict.fromkeys(("q", "k", "v", "o", "up", "down"), 1.0))


def test_run_goes_on_after_its_folder_was_moved(finished, tmp_path, stopping_at):
    run, whole, _ = finished
    restore = stopping_at(4, killed)
    with pytest.raises(RuntimeError):
        train.train(run, tmp_path / "here", "tiny")
    restore()
    shutil.move(tmp_path / "here", tmp_path / "there")
    train.train(run, tmp_path / "there", "tiny")
    assert rows(tmp_path / "there") == rows(whole)
