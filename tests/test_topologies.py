"""Names of TPU slices, and what they stand for."""

import math
import os
import sys

import pytest

from normstudy import topologies
from normstudy.errors import UserError


@pytest.mark.parametrize(
    "name, chips, topology",
    [
        ("v4-8", 4, "v4:2x2x1"),
        ("v4-32", 16, "v4:2x2x4"),
        ("v4-384", 192, "v4:4x4x12"),
        ("v5e-1", 1, "v5e:1x1"),
        ("v5e-16", 16, "v5e:4x4"),
        ("v5e-128", 128, "v5e:8x16"),
        ("v5p-64", 32, "v5:2x4x4"),
        ("v5p-896", 448, "v5:4x4x28"),
        ("v5p-1536", 768, "v5:8x8x12"),
        ("v5p-12288", 6144, "v5:16x16x24"),
        ("v6e-16", 16, "v6e:4x4"),
        ("v6e-256", 256, "v6e:16x16"),
    ],
)
def test_name_gives_chips_and_topology(name, chips, topology):
    """As in Google's tables of configurations."""
    found = topologies.slice_of(name)
    assert found.chips == chips and found.topology["topology_name"] == topology


def test_v4_and_v5p_count_tensorcores_and_the_others_chips():
    for family, own in topologies.FAMILIES.items():
        for name, shape in topologies.names(family).items():
            cores = {"TensorCores": own.cores, "chips": 1}[own.counts]
            assert int(name.split("-")[1]) == cores * math.prod(shape)


def test_every_slice_lies_within_its_pod():
    for family, own in topologies.FAMILIES.items():
        found = topologies.names(family).values()
        assert len(found) >= 8 and max(map(math.prod, found)) == own.most
        for shape in found:
            assert all(a <= b for a, b in zip(shape, own.pod, strict=True))


def test_links_wrap_around_where_the_torus_is_closed():
    wraps = {
        name: topologies.slice_of(name).topology["wrap"]
        for name in ("v4-64", "v4-128", "v5e-64", "v5e-128", "v6e-256")
    }
    assert wraps == {
        "v4-64": (False, False, False), "v4-128": (True, True, True),
        "v5e-64": (False, False, False), "v5e-128": (False, True, False),
        "v6e-256": (True, True, False),
    }  # fmt: skip


def test_unknown_name_lists_the_valid_ones():
    with pytest.raises(UserError, match=r"unknown TPU 'v4-9'.*Valid: v4-8, v4-16, v4-32, v4-64"):
        topologies.slice_of("v4-9")
    with pytest.raises(UserError, match=r"unknown TPU 'h100'. Valid: v4-N, v5e-N, v5p-N, v6e-N"):
        topologies.slice_of("h100")


def test_jax_that_was_imported_with_another_environment_is_refused(monkeypatch):
    assert "jax" in sys.modules
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(UserError, match="jax was imported before"):
        topologies.prepare()
    assert os.environ["JAX_PLATFORMS"] == "tpu"
