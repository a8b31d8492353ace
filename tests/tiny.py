"""The smallest models and runs that still have every part, and the commands run on them."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normstudy import config, inits, placements
from normstudy.model import Model
from normstudy.norms import SLOPE
from normstudy.roles import role_of
from normstudy.trees import path_names

ROOT = Path(__file__).resolve().parents[1]

SIZES = {"layers": 2, "width": 8, "heads": 2, "ff": 16, "context": 8}

# rows with all that a row may have: norms on and off the skip path, a constant of the depth,
# constants by layer and a switched norm, norms inside a branch and gains, one gain for a block
KINDS = ("pre", "post", "deepnorm", "keel", "normformer", "rezero")

ARMS = {
    "post": lambda base: {},
    "post/blows-up": lambda base: {"lr": 1e30},
    "pre": lambda base: {"placement": "pre", "schedule": "cosine", "warmup": 3},
}


def run(**changes: Any) -> config.Run:
    """A run of eight updates, fields replaced by name."""
    plain = {
        **SIZES, "batch": 8, "probe_batch": 8, "vectors": 2, "steps": 8, "checkpoint_every": 3,
        "eval_batches": 1, "lr": 0.01,
    }  # fmt: skip
    return config.override(config.Run(), **(plain | changes))


def model_config(**changes: Any) -> config.Model:
    """The model of a tiny run, with 16 tokens."""
    return config.Model(**({"vocab": 16, **SIZES} | changes))


def model(
    cfg: config.Model,
    seed: int = 0,
    dtype: Any = np.float32,
    jitter: float = 0.1,
    stds: inits.Stds | None = None,
) -> Model:
    """A model with parameters from NumPy: nothing to compile, any dtype.

    jitter: standard deviation of norms' scales about 1, biases about 0, gains about their start.
    stds: {role: standard deviation}; default: Xavier's, without the placement's beta.
    """
    stds = stds or inits.standard_deviations(cfg, config.Init(), 1.0)
    abstract = jax.eval_shape(lambda key: Model(cfg, stds, key), jax.random.key(0))
    random = np.random.default_rng(seed)
    starts = placements.row(cfg.placement).starts(cfg.layers)

    def fill(path, leaf):
        role = role_of(path_names(path))
        normal = random.normal(size=leaf.shape)
        if role in stds:
            std = np.reshape(stds[role], (-1,) + (1,) * (normal.ndim - 1))
            return jax.numpy.asarray(std * normal, dtype)
        start = {"scale": 1.0, "slope": SLOPE} | starts
        return jax.numpy.asarray(start.get(path_names(path)[-1], 0.0) + jitter * normal, dtype)

    return jax.tree_util.tree_map_with_path(fill, abstract)


def layer(model: Model, index: int) -> Any:
    """One block of the stacked layers."""
    return jax.tree.map(lambda leaf: leaf[index], model.stacked)


def tokens(cfg: config.Model, batch: int, seed: int = 0) -> jax.Array:
    """(batch, T + 1) random tokens."""
    shape = (batch, cfg.context + 1)
    return jax.numpy.asarray(np.random.default_rng(seed).integers(0, cfg.vocab, shape, np.int32))


def jacobians(model: Model, x0: jax.Array) -> dict[str, np.ndarray]:
    """{part: (L, B, N, N)} for attn, mlp, block and to_end, N = T D, at the streams from x_0 on.

    Exact: of the sublayers by jax.jacrev, of what is made of them by the chain rule.
    """
    parts = {name: np.asarray(of) for name, of in _of_sublayers(model, x0).items()}
    parts["block"] = parts["mlp"] @ parts["attn"]
    above = list(itertools.accumulate(parts["block"][::-1], lambda top, block: top @ block))
    return parts | {"to_end": np.array(above[::-1])}


@jax.jit
def _of_sublayers(model: Model, x0: jax.Array) -> dict[str, jax.Array]:
    def jacobian(sublayer, x_BTD):
        one = jax.jacrev(lambda x: sublayer(x[None])[0][0])
        return jax.vmap(one)(x_BTD).reshape(len(x_BTD), x_BTD[0].size, x_BTD[0].size)

    def one_layer(layer, x):
        return {"attn": jacobian(layer.attn, x), "mlp": jacobian(layer.mlp, layer.attn(x)[0])}

    return jax.vmap(one_layer)(model.stacked, model.stack(x0)[1][:-1])


def paths(tree: Any) -> list[str]:
    """Plain paths of the leaves, in the order of jax.tree.leaves."""
    return ["/".join(path_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """{path: array on the host} of any pytree."""
    return dict(zip(paths(tree), map(np.asarray, jax.tree.leaves(tree)), strict=True))


def assert_bit_equal(a: Any, b: Any) -> None:
    """The same paths, dtypes and bits."""
    left, right = leaves(a), leaves(b)
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype, path
        np.testing.assert_array_equal(left[path], right[path], err_msg=path)


def experiment(name: str) -> Any:
    """experiments/NAME.py as a module; the folder is no package."""
    path = ROOT / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def python(*args: str, limit_s: float = 600) -> subprocess.CompletedProcess:
    """This interpreter on the checkout, in a process of its own; killed by its pid at the limit."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s
    )
