"""Every fault happens in a folder of its own; what was compiled once is there for all."""

import harness
import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def world(tmp_path, cache):
    own = harness.World(tmp_path, cache)
    yield own
    own.close()


@pytest.fixture(scope="session")
def whole(tmp_path_factory, cache):
    """A function: the run folder of 12 steps that nothing happened to, by layout; made once."""
    made = {}

    def of(devices=1, hosts=1, options=()):
        key = (devices, hosts, tuple(options))
        if key not in made:
            world = harness.World(tmp_path_factory.mktemp("whole"), cache)
            assert world.train(*options, devices=devices, hosts=hosts) == [0] * hosts
            made[key] = world.run
        return made[key]

    return of
