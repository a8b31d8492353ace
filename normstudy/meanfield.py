"""What infinite width predicts at step 0, for any row of the placements table. NumPy only.

In a wide layer the channels of the stream are independent and alike, so the covariance over
positions is all there is to know of it: C_ij = E[x_i x_j], and G_ij = E[g_i g_j] of the gradients
that come down. Each operation of a branch says what it does to both, and to the tangent: the change
dx_i = sum_j K_ij g_j + noise (covariance R) that an update of the matrices below gives the stream.
The row's equation is run as it stands, on a x + b f in the place of the stream.

    N  positions of the batch, B * T        C, G, K, R  (N, N)

Left out: attention is the mean over the positions so far, as for small logits, so queries and keys
neither choose nor pass anything on (with Xavier's, the branch share of attention over positions
that differ is 1.5 times what this says); the gains of norms stay where they are; a norm's two lost
directions and fluctuations between channels, O(1/D) in a block and O(L/D) over all.

Sources: C and G, Poole et al. 2016 (1606.05340) and Schoenholz et al. 2017 (1611.01232); in
attention, Noci et al. 2022 (2206.03126); K is the neural tangent kernel, Jacot et al. 2018
(1806.07572). R, derived here, is needed because x_L is as wide as the layers: for W^T W g it
is the second moment of the Marchenko-Pastur law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from normstudy import config, placements
from normstudy.errors import UserError
from normstudy.kernels import KERNELS, Kernels
from normstudy.placements import Placement

# ---------------------------------------------------------------------------- what moves


class Tangent(NamedTuple):
    """dx_i = sum_j K_ij g_j + noise, g the gradient at the same place; per unit learning rate."""

    K: np.ndarray
    R: np.ndarray  # covariance of the noise, which is independent of g

    def covariance(self, G: np.ndarray) -> np.ndarray:
        return self.K @ G @ self.K.T + self.R


# how a matrix moves along its gradient, from C at its input and G at its output:
# (factor on the gradient, correlation of the move with the gradient)
Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]


def sgd_step(C: np.ndarray, G: np.ndarray) -> tuple[float, float]:
    """The gradient itself."""
    return 1.0, 1.0


def sign_step(C: np.ndarray, G: np.ndarray) -> tuple[float, float]:
    """sign(gradient), Adam's first step; sqrt(2 / pi) / rms of its entries by Bussgang 1952.

    An output channel's entries have a scale of their own, the root of a quadratic form in its g:
    a chi-square law with n degrees of freedom, n by Satterthwaite 1946. n = 1 for one position.
    """
    product = C @ G
    square = float(np.trace(product))
    if square <= 0:
        return 0.0, 1.0  # sign(0) = 0
    n = max(square**2 / float(np.sum(product * product.T)), 1.0)
    correlation = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) * math.sqrt(2 / n)
    return math.sqrt(2 / (math.pi * square)), correlation


STEPS: dict[str, Step] = {"sgd": sgd_step, "sign": sign_step}

# -------------------------------------------------------------------- operations of a branch


class Matrix(NamedTuple):
    """y = W^T x, entries of W independent, mean 0. The gradient of W is x g^T."""

    role: str
    fan_in: int
    fan_out: int
    std: float

    def up(self, C: np.ndarray) -> np.ndarray:
        return self.fan_in * self.std**2 * C

    def down(self, C: np.ndarray, G: np.ndarray) -> np.ndarray:
        return self.fan_out * self.std**2 * G

    def tangent(self, below: Tangent, C: np.ndarray, G: np.ndarray, step: Step) -> Tangent:
        gain = self.fan_in * self.std**2
        factor, correlation = step(C, G)
        own = factor * self.fan_in * C
        return Tangent(
            gain * below.K + correlation * own,
            gain * below.covariance(self.down(C, G)) + (1 - correlation**2) * own @ G @ own.T,
        )

    def gradient(self, C: np.ndarray, G: np.ndarray) -> float:
        """Frobenius norm of the gradient."""
        return math.sqrt(self.fan_in * self.fan_out * max(float(np.sum(C * G)), 0.0))


class Mixing(NamedTuple):
    """y_i = sum_j A_ij x_j: attention whose weights do not depend on x."""

    A: np.ndarray

    def up(self, C: np.ndarray) -> np.ndarray:
        return self.A @ C @ self.A.T

    def down(self, C: np.ndarray, G: np.ndarray) -> np.ndarray:
        return self.A.T @ G @ self.A

    def tangent(self, below: Tangent, C: np.ndarray, G: np.ndarray, step: Step) -> Tangent:
        return Tangent(*(self.A @ part @ self.A.T for part in below))


class Pointwise(NamedTuple):
    """y = phi(x), entry by entry."""

    kernels: Kernels

    def up(self, C: np.ndarray) -> np.ndarray:
        return self.kernels.values(C)

    def down(self, C: np.ndarray, G: np.ndarray) -> np.ndarray:
        return self.kernels.slopes(C) * G

    def tangent(self, below: Tangent, C: np.ndarray, G: np.ndarray, step: Step) -> Tangent:
        slopes = self.kernels.slopes(
            C
        )  # that slopes differ between channels adds 1% to R: left out
        return Tangent(*(slopes * part for part in below))


Branch = tuple[Matrix, Mixing | Pointwise, Matrix]


def branches(model: config.Model, stds: dict[str, float], batch: int) -> dict[str, Branch]:
    """Attention and MLP as operations on the positions of `batch` sequences."""
    D, F, T = model.width, model.ff, model.context
    mean_so_far = np.tril(np.ones((T, T))) / np.arange(1.0, T + 1)[:, None]
    return {
        "attn": (
            Matrix("v", D, D, stds["v"]),
            Mixing(np.kron(np.eye(batch), mean_so_far)),
            Matrix("o", D, D, stds["o"]),
        ),
        "mlp": (
            Matrix("up", D, F, stds["up"]),
            Pointwise(KERNELS[model.activation]),
            Matrix("down", F, D, stds["down"]),
        ),
    }


# ------------------------------------------------------------------------------ the equation


class Form:
    """x * input + f * branch, coefficients by position: what a row's equation works on."""

    __array_ufunc__ = None  # a NumPy scalar times a form is a form

    def __init__(self, x: np.ndarray, f: np.ndarray):
        self.x, self.f = x, f

    def __add__(self, other: Form | float) -> Form:
        if not isinstance(other, Form):  # a bias, which starts at 0
            if other != 0:
                raise ValueError("mean field: the equation may add no constant but 0")
            return self
        return Form(self.x + other.x, self.f + other.f)

    def __mul__(self, factor: float | int | np.ndarray) -> Form:
        return Form(self.x * factor, self.f * factor)

    __rmul__ = __mul__

    def __sub__(self, other: Form) -> Form:
        return self + (-1.0) * other

    def __truediv__(self, divisor: float | int | np.ndarray) -> Form:
        return self * (1.0 / divisor)


class Sublayer(NamedTuple):
    """One sublayer, its equation solved: output = skip * x + out * f(into * x)."""

    C: np.ndarray  # of x
    branch: Branch
    into: np.ndarray  # (N,)
    skip: np.ndarray
    out: np.ndarray
    taps: dict[str, float]  # factor of each norm, branch share: as the model returns them

    def up(self) -> np.ndarray:
        """C of the output."""
        return _scaled(self.skip, self.C) + _scaled(self.out, self.inside()[-1])

    def down(self, G: np.ndarray) -> np.ndarray:
        """G of x, from that of the output: the two paths have independent weights."""
        return _scaled(self.skip, G) + _scaled(self.into, self.gradients(G, self.inside())[0])

    def tangent(self, below: Tangent, G: np.ndarray, step: Step) -> Tangent:
        """The tangent of the output. G: of the output.

        dx responds to the gradient of both paths. What answers the gradient of one and goes up the
        other is noise to it.
        """
        covariances = self.inside()
        gradients = self.gradients(G, covariances)
        crossed = self.into[:, None] * below.K * self.skip
        inner = Tangent(
            _scaled(self.into, below.K), _scaled(self.into, below.R) + crossed @ G @ crossed.T
        )
        for i, op in enumerate(self.branch):
            inner = op.tangent(inner, covariances[i], gradients[i + 1], step)
        crossed = self.skip[:, None] * below.K * self.into
        noise = _scaled(self.skip, below.R) + crossed @ gradients[0] @ crossed.T
        return Tangent(
            _scaled(self.skip, below.K) + _scaled(self.out, inner.K),
            noise + _scaled(self.out, inner.R),
        )

    def weight_gradients(self, G: np.ndarray) -> dict[str, float]:
        """{role: norm of the gradient of that matrix}. G: of the output."""
        covariances = self.inside()
        gradients = self.gradients(G, covariances)
        return {
            op.role: op.gradient(covariances[i], gradients[i + 1])
            for i, op in enumerate(self.branch)
            if isinstance(op, Matrix)
        }

    def inside(self) -> list[np.ndarray]:
        """C at the input of each operation of the branch, and at its end."""
        return _through(self.branch, _scaled(self.into, self.C))

    def gradients(self, G: np.ndarray, covariances: list[np.ndarray]) -> list[np.ndarray]:
        """G at the input of each operation of the branch, and at its end."""
        found = [_scaled(self.out, G)]
        for op, C in zip(self.branch[::-1], covariances[-2::-1], strict=True):
            found.append(op.down(C, found[-1]))
        return found[::-1]


def solve(
    place: Placement, c: Any, C: np.ndarray, branch: Branch, eps: float, name: str = "attn"
) -> Sublayer:
    """Run the row's equation of attn or mlp, c its numbers.

    Raises ValueError where it applies the sublayer twice.
    """
    one, zero = np.ones(len(C)), np.zeros(len(C))
    taps: dict[str, float] = {}
    calls: list[tuple[np.ndarray, np.ndarray]] = []  # of f: (into, variance of what came out)

    def norm(name: str):
        def call(h: Form, on: float = 1.0) -> Form:
            if not on:
                taps[f"norm_factor_{name}"] = 1.0
                return h
            add(h)
            of_branch = calls[0][1] if calls else zero
            factor = (h.x**2 * np.diag(C) + h.f**2 * of_branch + eps) ** -0.5
            taps[f"norm_factor_{name}"] = float(np.mean(factor))
            return h * factor

        return call

    def f(h: Form) -> Form:
        if calls or h.f.any():
            raise ValueError("mean field: the equation may apply the sublayer once, to x")
        variance = np.diag(_through(branch, _scaled(h.x, C))[-1])
        calls.append((h.x, variance))
        return Form(zero, one)

    def add(h: Form) -> None:
        """What was added to the skip path, and how much, at a norm of the sum or at the end."""
        if h.x.any() and calls and "branch_share" not in taps:
            added = np.mean(h.f**2 * calls[0][1]) / np.mean(h.x**2 * np.diag(C))
            taps["branch_share"] = float(added)

    norms = SimpleNamespace(**{own: norm(own) for own in place.norms})
    y = place.of(name)(Form(one, zero), f, norms, c)
    add(y)
    return Sublayer(C, branch, calls[0][0], y.x, y.f, taps)


# --------------------------------------------------------------------------------- the model


def predict(model: config.Model, stds: dict[str, float], batch: np.ndarray) -> dict[str, Any]:
    """The quantities of `probes.measure` at step 0 that have a mean field, under the same names.

    stds: {role: standard deviation}. batch: (B, T + 1) tokens. Beside them, also as train.py names
    them, gradient/attn.v and the like, and function_update/STEP and logit_update/STEP: relative
    change of x_L and of the logits per unit learning rate when v, o, up and down move by STEP.
    """
    place = placements.row(model.placement)
    if not has_mean_field(place):
        raise UserError(
            f"{model.placement} has no mean field here: it norms inside its branches, or by "
            "another function than a norm, or starts from a profile"
        )
    tokens, targets = batch[:, :-1], batch[:, 1:].reshape(-1)
    B, T = tokens.shape
    sublayers = list(_forward(model, place, stds, tokens))
    names = list(branches(model, stds, B))
    streams = [s.C for s in sublayers[:: len(names)]] + [sublayers[-1].up()]
    read = _read_factor(model, place, streams[-1])

    to_end = _backward(sublayers, np.eye(B * T))
    loss = _backward(sublayers, _loss_gradient(model, stds, targets, streams[-1], read))
    skip = np.cumprod([s.skip**2 for s in sublayers[::-1]], axis=0)[::-1]
    block = slice(None, None, len(names))
    found: dict[str, Any] = {
        "rms": np.sqrt([np.trace(C) / (B * T) for C in streams]),
        "similarity": np.array([_similarity(C, B) for C in streams]),
        "jacobian_to_end": np.sqrt([np.trace(G) / (B * T) for G in to_end[block]])[:-1],
        "skip_gain": np.sqrt(np.mean(skip, 1))[block],
        "stream_gradient": np.sqrt([model.width * np.trace(G) for G in loss[block]]),
    }
    for i, name in enumerate(names):
        own = sublayers[i :: len(names)]
        for tap in own[0].taps:
            found[f"{tap}/{name}"] = np.array([s.taps[tap] for s in own])
        weights = [
            s.weight_gradients(G) for s, G in zip(own, loss[i + 1 :: len(names)], strict=True)
        ]
        for role in weights[0]:
            found[f"gradient/{name}.{role}"] = np.array([w[role] for w in weights])
    for name, step in STEPS.items():
        moved = _first_step(sublayers, loss, step)
        found[f"function_update/{name}"] = _ratio(moved.covariance(loss[-1]), streams[-1])
        # what answers g, a sum of columns of the readout W, is read by W again: (W^T W)^2
        again = moved._replace(K=math.sqrt(1 + model.width / model.vocab) * moved.K)
        found[f"logit_update/{name}"] = _ratio(
            _scaled(read, again.covariance(loss[-1])), _scaled(read, streams[-1])
        )
    return found


def _forward(
    model: config.Model, place: Placement, stds: dict[str, float], tokens: np.ndarray
) -> Iterator[Sublayer]:
    """The 2L sublayers, from the bottom."""
    B, T = tokens.shape
    token, position = tokens.reshape(-1), np.tile(np.arange(T), B)
    multiplier = model.width if model.embed_multiplier is None else model.embed_multiplier**2
    C = multiplier * stds["embed"] ** 2 * np.equal.outer(token, token)
    C = C + stds["positions"] ** 2 * np.equal.outer(position, position)
    constants, starts = place.constants(model.layers), place.starts(model.layers)
    for layer in range(model.layers):
        here = {name: np.broadcast_to(std, model.layers)[layer] for name, std in stds.items()}
        for i, (name, branch) in enumerate(branches(model, here, B).items()):
            numbers = SimpleNamespace(**constants.at(layer, i)._asdict() | starts)
            sublayer = solve(place, numbers, C, branch, model.norm_eps, name)
            yield sublayer
            C = sublayer.up()


def has_mean_field(place: Placement) -> bool:
    """Are the row's equations of norms on the stream, and its numbers known before any data?"""
    return place.kind is None and not place.profiled and not place.inner


def _backward(sublayers: Sequence[Sublayer], top: np.ndarray) -> list[np.ndarray]:
    """G at the input of each sublayer, and at the top."""
    found = [top]
    for sublayer in sublayers[::-1]:
        found.append(sublayer.down(found[-1]))
    return found[::-1]


def _first_step(sublayers: Sequence[Sublayer], loss: list[np.ndarray], step: Step) -> Tangent:
    """The tangent of x_L when every matrix of every branch moves by one step."""
    nothing = np.zeros_like(loss[0])
    tangent = Tangent(nothing, nothing)
    for sublayer, G in zip(sublayers, loss[1:], strict=True):
        tangent = sublayer.tangent(tangent, G, step)
    return tangent


def _read_factor(model: config.Model, place: Placement, C: np.ndarray) -> np.ndarray:
    """What the final norm multiplies x_L by, where there is one: (N,)."""
    return (np.diag(C) + model.norm_eps) ** -0.5 if place.has_final_norm(model) else np.ones(len(C))


def _loss_gradient(
    model: config.Model,
    stds: dict[str, float],
    targets: np.ndarray,
    C: np.ndarray,
    read: np.ndarray,
) -> np.ndarray:
    """G of d loss / d x_L, loss the mean cross-entropy; Gaussian logits, many tokens.

    At the logits g_i = (p_i - e_target) / N, and V p_i . p_j = exp(covariance of the logits).
    """
    std = stds["embed" if model.tied else "readout"]
    logits = model.width * std**2 * _scaled(read, C)
    errors = np.equal.outer(targets, targets) + (np.exp(logits) - 2.0) / model.vocab
    return _scaled(read, std**2 * errors) / len(targets) ** 2


def _similarity(C: np.ndarray, sequences: int) -> float:
    """Mean correlation of different positions of the same sequence."""
    T = len(C) // sequences
    std = np.sqrt(np.diag(C))
    pairs = np.kron(np.eye(sequences), 1.0 - np.eye(T))
    return float(np.sum(pairs * C / np.outer(std, std)) / np.sum(pairs))


def _through(branch: Branch, C: np.ndarray) -> list[np.ndarray]:
    """C at the input of each operation, and at the end."""
    found = [C]
    for op in branch:
        found.append(op.up(found[-1]))
    return found


def _scaled(a: np.ndarray, C: np.ndarray) -> np.ndarray:
    """Covariance of a_i x_i."""
    return a[:, None] * C * a


def _ratio(moved: np.ndarray, C: np.ndarray) -> float:
    return math.sqrt(np.trace(moved) / np.trace(C))
