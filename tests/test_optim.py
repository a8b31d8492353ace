"""Directions: adam is optax's, decay goes by role, SGD is the gradient, clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from normstudy import optim
from normstudy.config import Optim


@pytest.fixture(scope="module")
def model():
    return tiny.model(tiny.model_config())


@pytest.fixture(scope="module")
def gradients(model):
    """Two gradients with the structure of the model."""
    return [
        jax.tree.map(lambda p, s=seed: (p + s) * jnp.cos(37 * p + s), model) for seed in (1.0, 2.0)
    ]


def directions(config: Optim, model, gradients):
    transform = optim.direction(config)
    state = transform.init(model)
    found = []
    for gradient in gradients:
        direction, state = transform.update(gradient, state, model)
        found.append(direction)
    return found


def assert_close(a, b, rtol):
    left, right = tiny.leaves(a), tiny.leaves(b)
    assert left.keys() == right.keys()
    for path in left:
        np.testing.assert_allclose(left[path], right[path], rtol=rtol, atol=1e-9, err_msg=path)


def test_decay_mask_goes_by_role(model):
    decayed = {path for path, yes in tiny.leaves(optim.decayed(model)).items() if yes}
    assert decayed == {
        "readout", "layers/attn/q", "layers/attn/k", "layers/attn/v", "layers/attn/o",
        "layers/mlp/up", "layers/mlp/down",
    }  # fmt: skip


def test_norms_of_stacked_layers_have_two_dimensions_and_no_decay(model):
    """The trap: a mask by ndim >= 2 decays the scales of stacked norms."""
    scale = model.layers.attn.post.scale
    assert scale[...].ndim == 2
    assert not tiny.leaves(optim.decayed(model))["layers/attn/post/scale"]


@pytest.mark.parametrize("b1, b2, eps", [(0.9, 0.999, 1e-8), (0.5, 0.95, 1e-3)])
def test_adam_direction_is_that_of_optax_adam(model, gradients, b1, b2, eps):
    ours = directions(Optim(optimizer="adam", b1=b1, b2=b2, eps=eps), model, gradients)
    lr = 0.25  # a power of two: scaling by it rounds nothing
    reference = optax.adam(lr, b1=b1, b2=b2, eps=eps)
    state = reference.init(model)
    for gradient, direction in zip(gradients, ours, strict=True):
        update, state = reference.update(gradient, state, model)
        assert_close(jax.tree.map(lambda d: -lr * d, direction), update, rtol=1e-6)


def test_adamw_adds_decay_times_weight_to_the_matrices_alone(model, gradients):
    plain = directions(Optim(optimizer="adam"), model, gradients)
    decaying = directions(Optim(optimizer="adamw", weight_decay=0.3), model, gradients)
    mask = optim.decayed(model)
    for a, b in zip(plain, decaying, strict=True):
        expected = jax.tree.map(lambda d, p, yes: d + 0.3 * p if yes else d, a, model, mask)
        assert_close(b, expected, rtol=1e-6)


def test_adam_does_not_decay(model, gradients):
    a = directions(Optim(optimizer="adam", weight_decay=0.0), model, gradients)
    b = directions(Optim(optimizer="adam", weight_decay=0.9), model, gradients)
    tiny.assert_bit_equal(a, b)


def test_sgd_direction_is_the_gradient(model, gradients):
    for gradient, direction in zip(
        gradients, directions(Optim(optimizer="sgd"), model, gradients), strict=True
    ):
        tiny.assert_bit_equal(gradient, direction)


def test_clip_bounds_the_global_norm_and_keeps_the_direction(model, gradients):
    norm = float(optax.tree.norm(gradients[0]))
    (clipped,) = directions(Optim(optimizer="sgd", clip=norm / 4), model, gradients[:1])
    assert_close(clipped, jax.tree.map(lambda g: g / 4, gradients[0]), rtol=1e-5)
    (kept,) = directions(Optim(optimizer="sgd", clip=norm * 4), model, gradients[:1])
    tiny.assert_bit_equal(kept, gradients[0])


def test_frozen_norms_get_no_update_and_the_matrices_get_the_same(model, gradients):
    plain, kept = (
        tiny.leaves(directions(Optim(frozen=frozen), model, gradients)[-1])
        for frozen in ("", "norms")
    )
    for path, own in kept.items():
        of_norm = path.rsplit("/")[-1] in ("scale", "bias")
        np.testing.assert_array_equal(own, 0 * own if of_norm else plain[path], err_msg=path)
    assert any(path.endswith("scale") and plain[path].any() for path in plain)


def test_static_part_forgets_the_schedule_and_nothing_else():
    a = Optim(optimizer="adamw", lr=0.3, schedule="wsd", warmup=9, end_fraction=0.5,
              decay_fraction=0.4, schedule_scale=3.0, b1=0.1, b2=0.2, eps=1e-3,
              weight_decay=0.5, clip=0.7)  # fmt: skip
    b = Optim(optimizer="adamw", b1=0.1, b2=0.2, eps=1e-3, weight_decay=0.5, clip=0.7)
    assert optim.static_part(a) == b
