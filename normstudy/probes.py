"""Measurements at every layer at once: sampler x integrand, mean and standard error.

A probe takes the model as a callable and derivatives by `nudge`: zeros added to the stream before
every block. Reductions are in float32 or wider. Definitions: quantities.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from normstudy.dims import Stream, Streams
from normstudy.trees import path_names, to_dict

BRANCHES = ("attn", "mlp")
TOGETHER = 8  # vectors in one backward pass


class Estimate(NamedTuple):
    """A norm and its standard error, one entry per layer."""

    norm: Array
    se: Array


def rademacher(key: Array, like: Array) -> Array:
    """Signs +-1 with the shape and dtype of `like`."""
    return jax.random.rademacher(key, like.shape, like.dtype)


def mean_norm(norms_KLB: Float[Array, "K L B"]) -> Estimate:
    """sqrt of the mean square over vectors K and sequences B, with its standard error.

    The sequences of the batch are fixed, so they add no sampling error of their own; the vectors'
    error is estimated within each sequence and added up (vectors are independent between them).
    """
    K, L, B = norms_KLB.shape
    scale = jnp.maximum(jnp.max(norms_KLB, (0, 2)), _tiny(norms_KLB))  # squares of 1e-20 underflow
    squares = (norms_KLB / scale.reshape(1, L, 1)) ** 2
    within = jnp.var(squares, axis=0, ddof=1) / K
    norm = jnp.sqrt(jnp.mean(squares, (0, 2)))
    se_of_mean = jnp.sqrt(jnp.sum(within, -1)) / B
    return Estimate(scale * norm, scale * se_of_mean / (2 * jnp.maximum(norm, _tiny(norm))))


def jacobian_to_end(
    stack: Callable[[Streams], Stream], nudge: Streams, key: Array, vectors: int
) -> Estimate:
    """sqrt((1/(B T D)) E ||J^T v||^2), J = d x_L / d x_l, l = 0..L-1; 1 for the identity.

    One backward pass per vector, whatever the depth.
    """
    top, pull = jax.vjp(stack, nudge)
    norms_KSB = _mapped(lambda v: _norms(pull(v)[0]), _signs(key, top, vectors))
    return mean_norm(norms_KSB[:, :-1])


class Descent(NamedTuple):
    """What cotangents become on their way down the stack, by layer."""

    loss: Float[Array, "L B"]  # norms of the loss's cotangent of x_l, root mean square
    to_end: Estimate
    skip_gain: Estimate  # to_end with no gradient through the branches
    # each part of a layer alone, all of them as "block", that less the identity as "away"
    of_parts: dict[str, Estimate]


def descend(
    parts: Mapping[str, Callable[[Any, Stream, bool], Stream]],
    layers: Any,
    inputs: Streams,
    at_top: Stream,
    key: Array,
    vectors: int,
) -> Descent:
    """Every Jacobian norm of `measure` in one pass from the top: each layer is made once for all.

    parts: the sublayers (parameters of one layer, stream, cut) -> stream, in the order in which the
    stream passes them; cut: with no gradient through the branch. layers: stacked parameters,
    axis 0 = L. inputs: x_0..x_{L-1}. at_top: d loss / d x_L.
    All norms share the same vectors: each is unbiased, and their errors go together.
    """
    signs = _signs(key, at_top, vectors)

    def layer(above, xs):
        (cotangents, skips), (own, x) = above, xs
        pulls, cuts, norms = {}, {}, {}
        for name, part in parts.items():
            cuts[name] = jax.vjp(lambda x, part=part: part(own, x, True), x)[1]
            x, pulls[name] = jax.vjp(lambda x, part=part: part(own, x, False), x)
        through = signs
        for name in reversed(list(parts)):
            both = jnp.concatenate([signs, through]) if norms else signs  # the last: the same
            pulled = _pulled(pulls[name], jnp.concatenate([cotangents, both]))
            cotangents, both = jnp.split(pulled, [len(cotangents)])
            norms[name], through = _norms(both[:vectors]), both[-vectors:]
            skips = _pulled(cuts[name], skips)
        norms |= {"block": _norms(through), "away": _norms(through - signs)}
        norms |= {"": _norms(cotangents), "skip": _norms(skips)}
        return (cotangents, skips), norms

    start = jnp.concatenate([at_top[None], signs]), signs
    _, norms_LKB = jax.lax.scan(layer, start, (layers, inputs), reverse=True)
    every = norms_LKB.pop("")
    estimates = {name: _estimate(own) for name, own in norms_LKB.items()}
    return Descent(every[:, 0], _estimate(every[:, 1:]), estimates.pop("skip"), estimates)


def token_similarity(streams: Streams) -> Float[Array, " S"]:
    """Mean cosine between the stream vectors of a sequence's positions; 1 = collapsed."""
    T = streams.shape[2]
    unit = streams / jnp.linalg.norm(streams, axis=-1, keepdims=True)
    total = jnp.sum(jnp.sum(unit, 2) ** 2, -1)  # sum over all pairs of positions, i = j included
    return jnp.mean((total - T) / (T * (T - 1)), -1)


def activation_rms(streams: Streams) -> Float[Array, " S"]:
    """Root mean square of the entries of x_l, l = 0..L."""
    return frobenius(streams, (1, 2, 3)) / streams[0].size ** 0.5


def cosine(a: Array, b: Array) -> Array:
    """Mean over sequences and positions of the cosine between the vectors of two streams; their
    last three axes are B, T, D."""
    a, b = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (a, b))
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.mean(jnp.sum(a * b, -1) / lengths, (-2, -1))


def offset(streams: Streams) -> Float[Array, " S"]:
    """Mean of x_l over its channels, over their standard deviation, l = 0..L."""
    wide = streams.astype(jnp.promote_types(streams.dtype, jnp.float32))
    mean = jnp.mean(wide, -1, keepdims=True)
    scatter = frobenius(wide - mean, (1, 2, 3)) / streams.shape[-1] ** 0.5
    return frobenius(mean, (1, 2, 3)) / jnp.maximum(scatter, _tiny(scatter))


def of_taps(taps: Mapping[str, Mapping[str, Array]]) -> dict[str, Float[Array, " L"]]:
    """What a sublayer tells of itself: norm_factor_NORM/SUBLAYER, branch_share/SUBLAYER, and
    skip_factor/SUBLAYER where the alpha of its equation is learned or another in each layer.

    taps: {sublayer: {tap: (L, B, T), gains (L,)}}, see model.Sublayer.
    """
    found = {}
    for sublayer, own in taps.items():
        for name, inverse in own.items():
            if name.startswith("inverse_sigma_"):
                norm = name.removeprefix("inverse_sigma_")
                factor = jnp.mean(inverse * own[f"gain_{norm}"], (1, 2))
                found[f"norm_factor_{norm}/{sublayer}"] = factor
        branch, skip = (jnp.mean(own[f"{part}_variance"], (1, 2)) for part in ("branch", "skip"))
        found[f"branch_share/{sublayer}"] = branch / skip
        if "skip_factor" in own:
            found[f"skip_factor/{sublayer}"] = jnp.mean(own["skip_factor"], (1, 2))
    return found


def skip_gain(
    model: Any, x0: Stream, nudge: Streams, key: Array, vectors: int, cut: tuple[str, ...]
) -> Estimate:
    """`jacobian_to_end` with no gradient through the branches of the sublayers in `cut`.

    Source of the idea: google/init2winit, skip analysis.
    """
    return jacobian_to_end(lambda n: model.stack(x0, n, cut=cut)[0], nudge, key, vectors)


def measure(
    model: Any, batch: Array, unigram: Array, key: Array, vectors: int, **how: Any
) -> dict[str, Any]:
    """All quantities of one probe, as a flat dict of arrays with axis 0 = layer.

    model: has start(tokens), stack(x, nudge, cut=), read(x) and stacked (its layers, axis 0 = L,
    each with its sublayers attn and mlp). batch: (B, T + 1) tokens. unigram: frequencies of the
    training split, shape (V,). how: more keywords of stack and sublayers.
    """
    tokens, targets = batch[:, :-1], batch[:, 1:]
    top, streams, taps = model.stack(model.start(tokens), **how)

    def loss(top: Stream) -> tuple[Array, Array]:
        log_p = jax.nn.log_softmax(model.read(top))
        return -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], -1)), log_p

    (probe_loss, log_p), at_top = jax.value_and_grad(loss, has_aux=True)(top)
    parts = {
        name: lambda layer, x, cut, name=name: getattr(layer, name)(x, cut=cut, **how)[0]
        for name in BRANCHES
    }
    found = descend(parts, model.stacked, streams[:-1], at_top, key, vectors)
    of_loss = jnp.concatenate([found.loss, _norms(at_top)[None]])
    return {
        "probe_loss": probe_loss,
        # KL(unigram || prediction): 0 where the model predicts letter frequencies and nothing else
        "unigram_kl": jnp.sum(jax.scipy.special.xlogy(unigram, unigram))
        - jnp.mean(log_p @ unigram),
        "stream_gradient": frobenius(of_loss, (1,)) * (top.shape[-2] * top.shape[-1]) ** 0.5,
        **_named("jacobian_to_end", found.to_end),
        **_named("jacobian_of_block", found.of_parts["block"]),
        **_named("jacobian_minus_identity", found.of_parts["away"]),
        **_named("jacobian_of_sublayer", found.of_parts["attn"], "/attn"),
        **_named("jacobian_of_sublayer", found.of_parts["mlp"], "/mlp"),
        **_named("skip_gain", found.skip_gain),
        "similarity": token_similarity(streams),
        "rms": activation_rms(streams),
        "offset": offset(streams),
        "cosine_to_next": cosine(streams[:-1], streams[1:]),
        "cosine_to_start": cosine(streams[:1], streams),
        **of_taps(taps),
    }


def by_layer(
    name: str, tree: Any, reduce: Callable[[Array, tuple[int, ...]], Array] | None = None
) -> dict[str, Array]:
    """One number for each matrix and vector of a parameter tree: its Frobenius norm, or `reduce`.

    A stacked leaf gives NAME/SUBLAYER.KIND with shape (L,), any other NAME/KIND with shape ():
    the squares of all norms add up to the square of the global one.
    """
    reduce = frobenius if reduce is None else reduce
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(to_dict(tree)):
        names = path_names(path)
        stacked = names[0] == "layers"
        axes = tuple(range(int(stacked), leaf.ndim))
        found[f"{name}/{'.'.join(names[stacked:])}"] = reduce(leaf, axes)
    return found


def frobenius(x: Array, axes: tuple[int, ...]) -> Array:
    """sqrt of the sum of squares over the axes, in float32 or wider, safe from underflow."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.maximum(jnp.max(jnp.abs(wide), axes, keepdims=True), _tiny(wide))
    return jnp.squeeze(largest, axes) * jnp.sqrt(jnp.sum((wide / largest) ** 2, axes))


def _signs(key: Array, like: Array, vectors: int) -> Array:
    """(vectors, *like.shape) random signs."""
    return jax.vmap(lambda key: rademacher(key, like))(jax.random.split(key, vectors))


def _pulled(pull: Callable[[Stream], tuple[Stream]], cotangents: Array) -> Array:
    """What each cotangent (K, B, T, D) becomes."""
    return _mapped(lambda v: pull(v)[0], cotangents)


def _mapped(f: Callable[[Stream], Array], vectors: Array) -> Array:
    """f of each: a few at a time share what f makes for all; more would only take more memory."""
    return jax.lax.map(f, vectors, batch_size=min(TOGETHER, len(vectors)))


def _estimate(norms_LKB: Float[Array, "L K B"]) -> Estimate:
    return mean_norm(jnp.swapaxes(norms_LKB, 0, 1))


def _norms(x: Array) -> Array:
    """Root mean square over the last two axes (positions, channels): the mean over sequences of
    its square is then 1/(B T D) of the sum of squares."""
    axes = (x.ndim - 2, x.ndim - 1)
    return frobenius(x, axes) / (x.shape[-2] * x.shape[-1]) ** 0.5


def _named(name: str, estimate: Estimate, suffix: str = "") -> dict[str, Array]:
    """An estimate under the names of the logs: NAME and NAME_se."""
    return {name + suffix: estimate.norm, f"{name}_se{suffix}": estimate.se}


def _tiny(x: Array) -> Any:
    """The smallest positive normal number of the dtype: what 0 is divided by."""
    return jnp.finfo(x.dtype).tiny
