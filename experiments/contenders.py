"""What benchmark.py compares, each in a process of its own: thread pools and heaps do not meet.

A worker, `python contenders.py NAME RUN_AS_JSON`, answers in lines of JSON: one once its first step
is done, then one for every line on its stdin. It ends when its stdin does, so with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normstudy import cli, config, mesh, programs, runtime
from normstudy.errors import UserError, choose

STEPS = 3  # that a turn times, after one that it does not: a step of training comes after a step
SIDE = 2048  # of the square matrices whose product is the floor
LR = 1e-3  # of every contender


class Failed(UserError):
    """A contender that did not come to its end."""

    exit_code = 1


# -------------------------------------------------------------------------------- the parent's end


class Worker:
    """A contender in its process; a context manager, at whose end the process ends."""

    def __init__(self, name: str, run: config.Run):
        """Returns when its first step is done. Raises Failed with its last words if it dies."""
        self.name = name
        self.stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, config.to_json(run)], text=True, env=_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr,
        )  # fmt: skip
        self.peak = 0  # bytes, the largest resident size up to its last answer
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def step(self) -> float:
        """Seconds of a step. Raises Failed with its last words if it dies."""
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(file=self.process.stdin, flush=True)
        return self._answer()["seconds"]

    def close(self) -> None:
        """The end of its stdin ends it; where it is deep in a step, it is killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.stderr.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.stderr.seek(0)
            words = self.stderr.read().strip().splitlines() or ["it said nothing"]
            raise Failed(f"the contender {self.name!r} ended with exit code {code}: {words[-1]}")
        answer = json.loads(line)
        self.peak = answer["peak"]
        return answer


def _environment() -> dict[str, str]:
    """Of a worker: its parent's package. OpenMP's threads are left to wait as torch has them:
    where OMP_WAIT_POLICY=PASSIVE puts them to sleep, its step takes twice its time."""
    root = str(Path(config.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the first on a GPU would take its memory
    }


# -------------------------------------------------------------------------------- the worker's end


class Contender(NamedTuple):
    """Ready to be timed."""

    step: Callable[[], Any]  # returns when all of it is done
    facts: Callable[[], dict[str, Any]] = dict  # asked once, after the first step


# what a contender needs is imported where it is made: no process holds the others' libraries


def matmul(run: config.Run) -> Contender:
    """A large float32 product on every device of the run's mesh: each has rows of its own."""
    import jax

    runtime.start(cache=False)
    devices = mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    count = devices.size
    rows = np.random.default_rng(0).standard_normal((count * SIDE, SIDE), np.float32)
    left = mesh.put_batch(devices, rows)
    right = jax.device_put(rows[:SIDE], mesh.replicated(devices))
    product = jax.jit(lambda a, b: a @ b)
    facts = {
        "flops": 2 * SIDE**3 * count,
        "side": SIDE,
        "devices": count,
        "platform": jax.default_backend(),
    }
    return Contender(lambda: product(left, right).block_until_ready(), lambda: facts)


def plain(run: config.Run) -> Contender:
    """The package's training step."""
    return _ours(run, probing=False)


def probing(run: config.Run) -> Contender:
    """The same with the probes of a run in it."""
    return _ours(run, probing=True)


def together(run: config.Run) -> Contender:
    """As many runs in one program as there are devices: each has one to itself."""
    return _ours(run, probing=False, together=True)


def _ours(run: config.Run, probing: bool, together: bool = False) -> Contender:
    # tensorboardX imports torch where it finds it: 2 s and 0.5 GB that would be put down to us
    sys.modules["torch"] = None  # type: ignore[assignment]
    import compiling
    import jax
    import jax.numpy as jnp

    runtime.start(cache=False)
    jax.config.update("jax_enable_compilation_cache", False)
    compiled, devices = programs.of(run)
    program, args = compiled.step, (mesh.put_batch(devices, tokens(run)), jnp.float32(LR))
    held_out = mesh.put_batch(devices, tokens(run)[: run.probe.probe_batch])
    unigram = jnp.full(run.model.vocab, 1 / run.model.vocab, jnp.float32)
    probe_args = held_out, unigram, jax.random.key(0)
    state, known = programs.initial_state(run, compiled), {}
    if together:
        members = devices.size
        ensemble, known = programs.ensemble_of(run, members), {"members": members}
        state = ensemble.join(*[state] * members)
        program, args = ensemble.step, (args[0], jnp.full(members, LR, jnp.float32))
    jax.block_until_ready(state)

    def step() -> None:
        nonlocal state
        found = []
        if probing:  # as train.py does it
            before = jax.tree.map(jnp.copy, state.model)
            found.append(compiled.measure(before, *probe_args))
        state, metrics = program(state, *args)
        if probing:
            found.append(compiled.effect(before, state.model, args[0]))
        jax.block_until_ready((state, metrics, found))

    def facts() -> dict[str, Any]:
        ran: list[Any] = [(program, (state, *args))]
        if probing:
            ran.append((compiled.measure, (state.model, *probe_args)))
            ran.append((compiled.effect, (state.model, state.model, args[0])))
        compiled_already = [own.lower(*given).compile() for own, given in ran]
        memory = max(compiling.memory_of(executable).total for executable in compiled_already)
        return known | {"memory": memory}

    return Contender(step, facts)


def torch_eager(run: config.Run) -> Contender:
    """transformers' GPT-2 of the same shape: the same matrices, pre-norm, biases, two norms."""
    return _torch(run, compile=False)


def torch_compiled(run: config.Run) -> Contender:
    """The same, its loss and gradient compiled by torch.compile."""
    return _torch(run, compile=True)


def _torch(run: config.Run, compile: bool) -> Contender:
    import torch  # type: ignore
    import transformers  # type: ignore

    torch.set_num_threads(cores())
    torch.manual_seed(0)
    shape = run.model
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=shape.vocab, n_positions=shape.context, n_embd=shape.width,
            n_layer=shape.layers, n_head=shape.heads, n_inner=shape.ff,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=shape.tied,
            use_cache=False, bos_token_id=0, eos_token_id=0,
        )
    ).train()  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    batch = torch.from_numpy(tokens(run)).long()
    given, wanted = batch[:, :-1], batch[:, 1:]

    def loss_of(given: Any, wanted: Any) -> Any:
        logits = model(given).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    loss = torch.compile(loss_of) if compile else loss_of

    def step() -> None:
        optimizer.zero_grad()
        loss(given, wanted).backward()
        optimizer.step()

    return Contender(step)


def tokens(run: config.Run) -> np.ndarray:
    """A batch (B, T + 1) of random tokens: what they say takes no time."""
    shape = (run.data.batch, run.model.context + 1)
    return np.random.default_rng(0).integers(0, run.model.vocab, shape, np.int32)


def cores() -> int:
    """As many as this process may use: runtime.start makes as many devices."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def peak() -> int:
    """The largest resident size of this process so far, bytes."""
    with contextlib.suppress(OSError, StopIteration):
        # Linux; its getrusage begins at the size of the parent that started the process
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


CONTENDERS: dict[str, Callable[[config.Run], Contender]] = {
    "matmul": matmul,
    "ours": plain,
    "ours, probing": probing,
    "ours, together": together,
    "torch eager": torch_eager,
    "torch compiled": torch_compiled,
}


def main(argv: Sequence[str]) -> None:
    name, run = argv
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    contender = CONTENDERS[choose("contender", name, CONTENDERS)](config.from_json(run))

    def timed(steps: int) -> dict[str, Any]:
        begin = time.perf_counter()
        for _ in range(steps):
            contender.step()
        return {"seconds": (time.perf_counter() - begin) / steps, "peak": peak()}

    print(json.dumps(timed(1) | contender.facts()), file=answers, flush=True)
    for _ in sys.stdin:
        contender.step()  # others have used the caches since
        print(json.dumps(timed(STEPS)), file=answers, flush=True)


if __name__ == "__main__":
    cli.guarded(main)
