"""What a process sets up: devices, freed memory, the cache of programs."""

import resource
import stat

import jax
import numpy as np
import tiny

from normstudy import runtime


def test_start_leaves_a_forced_device_count_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.config, "update", lambda *args: calls.append(args))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    runtime.start(cache=False)
    assert calls == []
    monkeypatch.setenv("XLA_FLAGS", "")
    runtime.start(cpu_devices=5, cache=False)
    assert calls == [("jax_num_cpu_devices", 5)]


def test_start_may_be_called_again():
    """A study asks for the backend first, to choose its preset, and starts afterwards."""
    runtime.start(cpu_devices=8, cache=False)
    assert jax.device_count() == 8


def test_freed_memory_is_kept_for_the_next_step():
    """A block freed and asked for again has no page faults left. Below 64 MiB, as in glibc."""
    kept = runtime.keep_freed_memory()
    size = 40 * 2**20
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(size, np.uint8)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert not kept or min(faults[1:]) < size // 4096 / 100


def test_cache_is_this_user_s_and_for_such_processors(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = runtime.cache_folder()
    assert folder.parent == tmp_path / "normstudy"
    monkeypatch.setattr(runtime.Path, "read_text", lambda *args, **kw: "flags : none")
    assert runtime.cache_folder() not in (folder, folder.parent)


PROGRAM = """
from normstudy import runtime
runtime.start()
import json, jax, jax.numpy as jnp
import tiny
from normstudy import data, mesh, programs
run = tiny.run()
compiled, devices = programs.of(run)
feed, state, losses = data.feed(run), programs.initial_state(run, compiled), []
for step in range(3):
    batch = mesh.put_batch(devices, feed.batches[step])
    state, values = compiled.step(state, batch, jnp.float32(0.01))
    losses.append(float(values["loss"]))
print(json.dumps([jax.config.jax_compilation_cache_dir, losses]))
"""


def test_second_process_takes_its_programs_from_the_cache_and_has_the_same_numbers(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tiny.ROOT / "tests"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    seen, printed = [], []
    for _ in range(2):
        done = tiny.python("-c", PROGRAM)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
        folder = runtime.cache_folder()
        seen.append({path.name for path in folder.iterdir() if not path.name.endswith("-atime")})
    assert str(folder) in printed[0] and printed[0] == printed[1]
    assert seen[0] == seen[1] and any("step" in name for name in seen[0])
    assert not stat.S_IMODE(folder.stat().st_mode) & stat.S_IWOTH
