"""What does not fit is said before it runs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from normstudy import memory
from normstudy.errors import OutOfMemory

ADVICE = "lower --sequences (now 8)"


@jax.jit
def large(x):
    """Needs some 4 MB for what comes out of it."""
    return jnp.outer(x, x) + 1


X = jnp.ones(1000)


def test_program_that_fits_is_compiled_and_gives_its_result():
    program = memory.compile_to_fit(large, (X,), ADVICE)
    assert float(program(X)[3, 4]) == 2


def test_program_that_does_not_fit_says_how_much_it_needs_and_what_to_do(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 4_000_000)
    memory.compile_to_fit(large, (X,), ADVICE)  # exactly what it needs
    monkeypatch.setattr(memory, "available", lambda: 3_999_999)
    with pytest.raises(OutOfMemory, match="lower --sequences") as error:
        memory.compile_to_fit(large, (X,), ADVICE)
    assert "this needs 0.0 GiB of memory and 0.0 GiB are free" in str(error.value)
    assert error.value.exit_code == 3


def test_unknown_memory_is_not_held_against_a_program(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: None)
    memory.compile_to_fit(large, (X,), ADVICE)


def test_backend_s_own_out_of_memory_becomes_a_message_with_the_advice():
    says = r"out of memory .*; lower --sequences"
    with pytest.raises(OutOfMemory, match=says) as error, memory.told(ADVICE):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 GiB\na table of allocations")
    assert "table" not in str(error.value)


def test_any_other_error_of_the_backend_passes():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory.told(ADVICE):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")


def test_what_is_available_is_a_part_of_what_the_machine_has():
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if "MemTotal" in line)
    found = memory.available()
    assert found is not None and 0 < found <= total


class Device:
    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_an_accelerator_tells_its_own_memory(monkeypatch):
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(stats)])
    assert memory.available() == 700


def test_the_tighter_of_machine_and_container_counts(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None)])
    for machine, group, expected in ((5, 3, 3), (5, None, 5), (None, None, None)):
        monkeypatch.setattr(memory, "_machine", lambda machine=machine: machine)
        monkeypatch.setattr(memory, "_control_group", lambda group=group: group)
        assert memory.available() == expected


def test_files_that_say_nothing_are_not_trusted(monkeypatch):
    """Another system than Linux, or a container without limits."""
    monkeypatch.setattr(memory, "Path", lambda *parts: Path("/nowhere"))
    assert memory._machine() is None and memory._control_group() is None


def test_container_s_cached_files_can_go(monkeypatch, tmp_path):
    for name, text in (
        ("memory.max", "1000\n"), ("memory.current", "900\n"),
        ("memory.stat", "anon 500\ninactive_file 400\nactive_file 0\n"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "Path", lambda folder, name: tmp_path / name)
    assert memory._control_group() == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._control_group() is None
