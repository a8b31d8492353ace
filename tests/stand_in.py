"""A program for tests of launching: meets its peers, adds over them, keeps what it found.

    python tests/stand_in.py FOLDER CODE...

The n-th time that it runs in FOLDER it exits with the n-th CODE; each process writes the sum over
all processes of 1 + its number to FOLDER/NUMBER.TIMES.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from normstudy import config, hosts


def main(folder: Path, codes: list[int]) -> int:
    jax.config.update("jax_platforms", "cpu")
    hosts.join(config.Launch(join_timeout=60))
    number = jax.process_index()
    times = len(list(folder.glob(f"{number}.*")))
    mesh = jax.make_mesh((jax.device_count(),), ("all",), (jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    own = np.full(jax.local_device_count(), 1 + number, np.int32)
    total = jax.jit(lambda x: x.sum())(jax.make_array_from_process_local_data(split, own))
    (folder / f"{number}.{times}").write_text(str(int(total)))
    print(f"process {jax.process_index()} of {jax.process_count()}: sum {int(total)}")
    jax.distributed.shutdown()
    return codes[times]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(code) for code in sys.argv[2:]]))
