"""normstudy with one fault made in it: python child.py FAULT ARGUMENTS OF normstudy...

Nothing is faked: the process really sleeps, really computes on not-a-number, really may write no
more. FAULT: none, or some of these with commas between them:
  sleep:PLACE[:SECONDS]   in compile, probe, eval, save, seal or delete, the first time
  stuck:PROCESS:STEP      this process sleeps in Python when it logs this step
  slow:SECONDS            every step takes so much longer
  poison:STEP             the gradients of this step are not numbers
  full:BYTES[:STEP]       no file may grow beyond these bytes, until this step is logged
  tell                    leaves word of what was restored, what was drawn, who got which rows
  leave:WHEN              ends with 0 when parameters are drawn, or when the first step is logged
A note that a place was reached is left as $FAULT_NOTES/PLACE.
"""

import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path

NOTES = Path(os.environ["FAULT_NOTES"])


def main() -> None:
    faults, arguments = sys.argv[1], sys.argv[2:]
    sys.modules["torch"] = None  # tensorboardX would import it where it is, for two seconds
    import tensorboardX  # noqa: F401

    del sys.modules["torch"]
    from normstudy import cli

    for fault in faults.split(","):
        name, *values = fault.split(":")
        MAKERS[name](*values)
    sys.argv = ["normstudy", *arguments]
    cli.main()


def note(name: str, text: str = "") -> None:
    partial = NOTES / f"{name}.{os.getpid()}.partial"
    partial.write_text(text)
    partial.replace(NOTES / name)


def before(owner, name, do) -> None:
    """Call do(*arguments) before owner.name, every time."""
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        do(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner, name, do) -> None:
    """Call do(result, *arguments) after owner.name, every time."""
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        result = original(*args, **kwargs)
        do(result, *args)
        return result

    setattr(owner, name, wrapped)


def sleep(place: str, seconds: str = "1000") -> None:
    from normstudy import checkpoint, manifest, probes, programs, train

    def once(*_, **__):
        if not (NOTES / place).exists():
            note(place)
            time.sleep(float(seconds))

    owner, name = {
        "compile": (programs, "token_loss"),  # while the step is traced
        "probe": (probes, "measure"),
        "eval": (train, "_result"),
        "save": (checkpoint.Saver, "_finish"),
        "seal": (manifest, "write"),
        "delete": (checkpoint, "_delete"),  # of an older step, when the next is sealed
    }[place]
    before(owner, name, once)


def at_each_row(do) -> None:
    """do(step) when a step has been logged, in every process."""
    from normstudy import runlog

    original = runlog.RunLog.write

    def wrapped(self, step, *args):
        original(self, step, *args)
        do(step)

    runlog.RunLog.write = wrapped


def slow(seconds: str) -> None:
    at_each_row(lambda step: (note(f"step-{step}"), time.sleep(float(seconds))))


def stuck(process: str, step: str) -> None:
    import jax

    def do(at):
        if at == int(step) and jax.process_index() == int(process):
            note("stuck")
            time.sleep(1000)

    at_each_row(do)


def poison(step: str) -> None:
    import jax
    import jax.numpy as jnp

    from normstudy import mesh, programs

    update, mean = programs.update, mesh.mean_over_data

    def poisoned(state, *args, **kwargs):
        bad = jnp.where(state.step == int(step), jnp.nan, 1.0)

        def poisoned_mean(devices, f):
            def call(*given):
                loss, gradients = mean(devices, f)(*given)
                return loss, jax.tree.map(lambda g: g * bad, gradients)

            return call

        mesh.mean_over_data = poisoned_mean
        try:
            return update(state, *args, **kwargs)
        finally:
            mesh.mean_over_data = mean

    programs.update = poisoned


def full(size: str, until: str = "1000000") -> None:
    soft = int(size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def lift(step):
        if step == int(until):
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    at_each_row(lift)


def tell() -> None:
    import jax

    from normstudy import checkpoint, hosts, mesh, programs

    def digests(state) -> str:
        leaves = jax.tree_util.tree_leaves_with_path(hosts.gathered(state))
        return json.dumps(
            {
                jax.tree_util.keystr(path): hashlib.sha256(leaf.tobytes()).hexdigest()
                for path, leaf in leaves
            }
        )

    rows: list = []

    def record_rows(array, devices, batch):
        mine = sorted(
            {shard.index[0].indices(len(batch))[:2] for shard in array.addressable_shards}
        )
        rows.append({"mine": mine, "sha256": hashlib.sha256(batch.tobytes()).hexdigest()})
        note(f"rows-{jax.process_index()}", json.dumps(rows))

    after(checkpoint, "restore", lambda s, *_: note(f"restored-{jax.process_index()}", digests(s)))
    after(programs, "initial_state", lambda s, *_: note(f"drawn-{jax.process_index()}", digests(s)))
    after(mesh, "put_batch", record_rows)


def leave(when: str) -> None:
    """Nothing more is compiled than what comes before."""
    from normstudy import programs

    if when == "logged":
        at_each_row(lambda step: sys.exit(0))
    else:
        after(programs, "initial_state", lambda *_: sys.exit(0))


MAKERS = {
    "none": lambda: None,
    "sleep": sleep,
    "slow": slow,
    "stuck": stuck,
    "poison": poison,
    "full": full,
    "leave": leave,
    "tell": tell,
}

if __name__ == "__main__":
    main()
