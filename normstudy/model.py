"""Decoder-only transformer: embed, scan the stack, read out. Taps are returned, never sown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from normstudy import config, placements
from normstudy.dims import Logits, Stream, Streams, Tokens
from normstudy.inits import matrix
from normstudy.norms import Norm
from normstudy.operations import ATTENDED, PLAIN, Operations
from normstudy.residual import Parts
from normstudy.sublayers import Attention, Mlp
from normstudy.trees import path_names

# what the backward pass does not make again: as small as the stream, and dear to make
KEPT = (ATTENDED, "branch")

Cut = tuple[str, ...]  # the sublayers through whose branches no gradient goes: attn, mlp


class Gains(nnx.Module):
    """The learned factors of an equation, by name."""

    def __init__(self, cfg: config.Model, gains: Mapping[str, placements.Gain]):
        sizes = {"": (), "D": (cfg.width,), "H": (cfg.heads,)}
        starts = placements.row(cfg.placement).starts(cfg.layers)
        for name, gain in gains.items():
            setattr(self, name, nnx.Param(jnp.full(sizes[gain.size], starts[name])))


class Sublayer(nnx.Module):
    """A branch f and its norms, joined to the stream by the placement's equation."""

    def __init__(self, cfg: config.Model, name: str, f: Any):
        self.cfg, self.name, self.f = cfg, name, f
        place = placements.row(cfg.placement)
        widths = {
            "mid": f.inner_width,
            **dict.fromkeys(("q_norm", "k_norm", "v_norm"), cfg.width // cfg.heads),
        }
        for norm in place.norms_of(name):
            width = widths.get(norm, cfg.width)
            setattr(self, norm, Norm(place.kind or cfg.norm, width, cfg.norm_eps))
        own = {key: gain for key, gain in place.gains_of(name).items() if not gain.shared}
        if own:
            self.gain = Gains(cfg, own)

    def __call__(
        self,
        x: Stream,
        numbers: Mapping[str, Array] | None = None,
        *,
        f: Callable | None = None,
        cut: bool = False,
        ops: Operations = PLAIN,
    ) -> tuple[Stream, dict[str, Array]]:
        """The stream after this sublayer, and its taps: (B, T) each.

        numbers: those of the equation that lie outside: constants of this layer, and gains that the
        block owns. f: in place of the branch. cut: stop the gradient through the branch, so that
        derivatives see the skip path alone.
        """
        x = ops.hold(x)
        place = placements.row(self.cfg.placement)
        taps: dict[str, Array] = {}
        inside = self.f if f is None else f

        def seen(skip: Array, branch: Array) -> None:
            taps["branch_variance"], taps["skip_variance"] = _variance(branch), _variance(skip)

        def norm(name: str):
            own = getattr(self, name)

            def apply(h: Array, on: Any = 1.0) -> Array:
                with jax.named_scope(f"norm_{name}"):
                    y, inverse = own.measured(h)
                gain = jnp.broadcast_to(own.gain(), inverse.shape)
                if isinstance(on, Array):  # it is there in some of the layers
                    y, inverse, gain = (
                        jnp.where(on > 0, there, gone)
                        for there, gone in ((y, h), (inverse, 1.0), (gain, 1.0))
                    )
                if inverse.ndim > 2:  # of each head
                    inverse, gain = (jnp.mean(a, -1) for a in (inverse, gain))
                taps[f"inverse_sigma_{name}"], taps[f"gain_{name}"] = inverse, gain
                return y

            def call(h: Any, on: Any = 1.0) -> Any:
                if isinstance(h, Parts):
                    return h.normed(lambda whole: apply(whole, on))
                return apply(h, on)

            return call

        def branch(h: Parts, *mid: Any, **heads: Any) -> Parts:
            mid = tuple(m if callable(m) else functools.partial(jnp.multiply, m) for m in mid)
            y = checkpoint_name(inside(h.whole(), ops, *mid, **heads), "branch")
            return Parts(None, jax.lax.stop_gradient(y) if cut else y, seen)

        c = self._numbers(numbers or {}, x)
        if isinstance(c.alpha, Array):
            rms = jnp.sqrt(jnp.mean(jnp.square(c.alpha.astype(_wide(x)))))
            taps["skip_factor"] = jnp.broadcast_to(rms, x.shape[:2])
        norms = SimpleNamespace(**{name: norm(name) for name in place.norms_of(self.name)})
        return place.of(self.name)(Parts(x, None, seen), branch, norms, c).whole(), taps

    def _numbers(self, numbers: Mapping[str, Array], x: Stream) -> SimpleNamespace:
        """All numbers of the equation, in the dtype of the stream."""
        place = placements.row(self.cfg.placement)
        constants = place.constants(self.cfg.layers)
        found: dict[str, Any] = {
            name: own
            for name, own in constants._asdict().items()
            if not isinstance(own, np.ndarray)
        }
        own = {} if not hasattr(self, "gain") else vars(self.gain)
        learned = {name: own[name][...] for name in place.gains_of(self.name) if name in own}
        for name, value in {**learned, **numbers}.items():
            size = place.gains[name].size if name in place.gains else ""
            if size == "H":
                value = jnp.repeat(value, x.shape[-1] // self.cfg.heads)
            found[name] = value.astype(x.dtype).reshape((1, 1, -1) if size else ())
        return SimpleNamespace(**found)


class Block(nnx.Module):
    """Attention, then MLP: the parameters of one layer of the stack."""

    def __init__(self, cfg: config.Model, stds: dict, key: Array):
        attn_key, mlp_key = jax.random.split(key)
        self.attn = Sublayer(cfg, "attn", Attention(cfg, stds, attn_key))
        self.mlp = Sublayer(cfg, "mlp", Mlp(cfg, stds, mlp_key))
        gains = placements.row(cfg.placement).gains
        shared = {name: gain for name, gain in gains.items() if gain.shared}
        if shared:
            self.gain = Gains(cfg, shared)


class Placed:
    """A sublayer in its layer: a function of the stream alone. Its branch f can be replaced."""

    def __init__(self, sublayer: Sublayer, numbers: Mapping[str, Array]):
        self.sublayer, self.numbers, self.f = sublayer, numbers, sublayer.f

    def __call__(
        self, x: Stream, *, cut: bool = False, ops: Operations = PLAIN
    ) -> tuple[Stream, dict[str, Array]]:
        return self.sublayer(x, self.numbers, f=self.f, cut=cut, ops=ops)


class Layer(NamedTuple):
    """One layer of the stack: its block, and the constants that are its own."""

    block: Block
    constants: dict[str, Array]  # {name: (2,)}, of attention and of the MLP

    @property
    def attn(self) -> Placed:
        return self._placed("attn")

    @property
    def mlp(self) -> Placed:
        return self._placed("mlp")

    def _placed(self, name: str) -> Placed:
        index = placements.SUBLAYERS.index(name)
        numbers = {key: own[index] for key, own in self.constants.items()}
        shared = vars(self.block.gain) if hasattr(self.block, "gain") else {}
        gains = placements.row(self.block.attn.cfg.placement).gains
        numbers |= {key: shared[key][...] for key, gain in gains.items() if gain.shared}
        return Placed(getattr(self.block, name), numbers)

    def __call__(
        self, x: Stream, *, cut: Cut = (), ops: Operations = PLAIN
    ) -> tuple[Stream, dict[str, Any]]:
        # scopes are the places that origin.py names; they change no number
        with jax.named_scope("attn"):
            x, attn = self.attn(x, cut="attn" in cut, ops=ops)
        with jax.named_scope("mlp"):
            x, mlp = self.mlp(x, cut="mlp" in cut, ops=ops)
        return x, {"attn": attn, "mlp": mlp}


class Model(nnx.Module):
    """The language model. Parameters in float32; layers are one stacked pytree, axis 0 = L."""

    def __init__(self, cfg: config.Model, stds: dict, key: Array):
        self.cfg = cfg
        embed_key, position_key, layer_key, readout_key = jax.random.split(key, 4)
        self.embed = nnx.Param(matrix(embed_key, (cfg.vocab, cfg.width), stds["embed"]))
        self.positions = nnx.Param(
            matrix(position_key, (cfg.context, cfg.width), stds["positions"])
        )
        keys = jax.random.split(layer_key, cfg.layers)
        by_layer = {
            name: jnp.broadcast_to(jnp.asarray(std, jnp.float32), cfg.layers)
            for name, std in stds.items()
        }
        self.layers = jax.vmap(lambda stds, k: Block(cfg, stds, k))(by_layer, keys)
        place = placements.row(cfg.placement)
        if place.has_final_norm(cfg):
            self.final = Norm(place.kind or cfg.norm, cfg.width, cfg.norm_eps)
        if not cfg.tied:
            self.readout = nnx.Param(matrix(readout_key, (cfg.width, cfg.vocab), stds["readout"]))

    def start(self, tokens: Tokens) -> Stream:
        """x_0 = multiplier * E[token] + P[position]. Source: Vaswani et al. 2017, section 3.4."""
        multiplier = self.cfg.embed_multiplier
        multiplier = self.cfg.width**0.5 if multiplier is None else multiplier
        with jax.named_scope("embed"):
            positions = self.positions[...][None, : tokens.shape[1]]
            x = multiplier * self.embed[...][tokens] + positions
            return x if self.cfg.dtype == "float32" else x.astype(self.cfg.dtype)

    @property
    def stacked(self) -> Layer:
        """All layers, axis 0 = L: what the stack scans, and what one layer is a slice of."""
        varying = placements.row(self.cfg.placement).constants(self.cfg.layers).varying()
        return Layer(self.layers, {name: jnp.asarray(own) for name, own in varying.items()})

    def stack(
        self,
        x: Stream,
        nudge: Streams | None = None,
        *,
        cut: Cut = (),
        ops: Operations = PLAIN,
    ) -> tuple[Stream, Streams, dict[str, Any]]:
        """(x_L, streams x_0..x_L, taps with axis 0 = L). nudge[l] is added to x_l."""

        def one(x, xs):
            layer, nudge = xs
            x = x if nudge is None else x + nudge
            y, taps = layer(x, cut=cut, ops=ops)
            return y, (x, taps)

        below = None if nudge is None else nudge[:-1]
        # the backward pass makes each layer again: on a CPU writing and reading all that a layer
        # makes costs more than making it
        policy = jax.checkpoint_policies.save_only_these_names(*KEPT)
        one = jax.checkpoint(one, prevent_cse=False, policy=policy)
        top, (inputs, taps) = jax.lax.scan(one, x, (self.stacked, below))
        top = top if nudge is None else top + nudge[-1]
        return top, jnp.concatenate([inputs, top[None]]), taps

    def profiled(self, tokens: Tokens) -> Model:
        """The same model with the gain that its placement profiles set by one forward pass.

        omega_1 = 1, omega_{i+1}^2 = Var(omega_i x_{i-1}) + Var f_i over the sublayers i. Source:
        Liu et al. 2020 (Admin, 2004.08249), section 4.2, as its code has it.
        """
        gain = placements.row(self.cfg.placement).profiled

        def one(carry, layer):
            x, omega = carry
            found = []
            for name in placements.SUBLAYERS:
                placed = getattr(layer, name)
                found.append(omega)
                given = {gain: jnp.broadcast_to(omega, self.cfg.width)}
                x, taps = Placed(placed.sublayer, {**placed.numbers, **given})(x)
                both = (jnp.mean(taps[f"{part}_variance"]) for part in ("skip", "branch"))
                omega = jnp.sqrt(sum(both))
            return (x, omega), jnp.stack(found)

        _, omegas = jax.lax.scan(one, (self.start(tokens), jnp.ones(())), self.stacked)

        def filled(path, leaf):
            names = path_names(path)
            if names[0] != "layers" or names[2:] != ("gain", gain):
                return leaf
            own = omegas[:, placements.SUBLAYERS.index(names[1]), None]
            return jnp.broadcast_to(own, leaf.shape).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(filled, self)

    def read(self, x: Stream) -> Logits:
        """Logits from x_L: final norm where there is one, then the readout."""
        if placements.row(self.cfg.placement).has_final_norm(self.cfg):
            with jax.named_scope("final_norm"):
                x = self.final(x)
        with jax.named_scope("readout"):
            readout = self.embed[...].T if self.cfg.tied else self.readout[...]
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return jnp.matmul(x, readout.astype(x.dtype), preferred_element_type=wide)

    def __call__(self, tokens: Tokens, nudge: Streams | None = None) -> Logits:
        return self.read(self.stack(self.start(tokens), nudge)[0])


def _variance(x: Stream) -> Array:
    """Variance over the channels at each position (B, T), in float32 or wider."""
    return jnp.var(x.astype(_wide(x)), -1)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
