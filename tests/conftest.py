"""Strict numerics for every test in this process; eight CPU devices, so that meshes are real."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also where there is a GPU, or libtpu without a TPU

import jax
import pytest
import tiny

from normstudy import runtime, study, train

runtime.start(cpu_devices=8, cache=False)
# programs run a few times here, on tiny arrays: to optimize them takes longer than that. Processes
# that tests start are compiled as everywhere else
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """float64 for one test: identities are tested where rounding cannot hide an error."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict():
    """No implicit dtype promotion, for one test in float32.

    Not for all of them: optax's adam relies on promotion, and promote_types itself is refused then.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def one_device(monkeypatch):
    """Meshes of one device in a process that has eight."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def no_start(monkeypatch):
    """Commands called in this process find their devices started."""
    monkeypatch.setattr(runtime, "start", lambda cpu_devices=None, cache=True, launch=None: None)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """(config, run folder, outcome) of one tiny run over eight devices."""
    run, folder = tiny.run(), tmp_path_factory.mktemp("finished") / "run"
    return run, folder, train.train(run, folder, "tiny")


@pytest.fixture(scope="session")
def drawn_study(tmp_path_factory):
    """(folder, rows) of a tiny study of three arms, one of them dead, drawn and reported."""
    out = tmp_path_factory.mktemp("study") / "out"
    study.run_arms(tiny.run(), tiny.ARMS, list(tiny.ARMS), 1, out, "test")
    return out, study.sum_up(out, "A tiny study", "pytest")


@pytest.fixture(scope="session")
def wide():
    """One run on three meshes of eight devices, wide enough that its matrices are split."""
    sizes = {"width": 32, "heads": 4, "ff": 64}
    meshes = {
        "data": {"data": 8},
        "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
        "fsdp": {"data": 1, "fsdp": 8},
    }
    return {name: tiny.run(**sizes, **axes) for name, axes in meshes.items()}
