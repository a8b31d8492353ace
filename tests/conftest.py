"""Strict numerics for every test in this process; eight CPU devices, so that meshes are real."""

import jax
import pytest

from normstudy import mesh

mesh.start(cpu_devices=8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def x64():
    """float64 for one test: identities are tested where rounding cannot hide an error."""
    with jax.enable_x64(True):
        yield
