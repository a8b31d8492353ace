"""Decoder-only transformer: embed, scan the stack, read out. Taps are returned, never sown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from normstudy import config, placements
from normstudy.dims import Logits, Stream, Streams, Tokens
from normstudy.inits import matrix
from normstudy.norms import Norm
from normstudy.operations import ATTENDED, PLAIN, Operations
from normstudy.sublayers import Attention, Mlp

# what the backward pass does not make again: as small as the stream, and dear to make
KEPT = (ATTENDED, "branch")

Cut = tuple[str, ...]  # the sublayers through whose branches no gradient goes: attn, mlp


class Sublayer(nnx.Module):
    """A branch f and its norms, joined to the stream by the placement's equation."""

    def __init__(self, cfg: config.Model, f: nnx.Module):
        self.cfg, self.f = cfg, f
        for name in placements.row(cfg.placement).norms:
            setattr(self, name, Norm(cfg.norm, cfg.width, cfg.norm_eps))

    def __call__(
        self, x: Stream, *, cut: bool = False, ops: Operations = PLAIN
    ) -> tuple[Stream, dict[str, Array]]:
        """The stream after this sublayer, and its taps: (B, T) each.

        cut: stop the gradient through the branch, so that derivatives see the skip path alone.
        """
        x = ops.hold(x)
        place = placements.row(self.cfg.placement)
        c = place.constants(self.cfg.layers)
        taps: dict[str, Array] = {}

        def norm(name: str):
            def call(h: Stream) -> Stream:
                own = getattr(self, name)
                with jax.named_scope(f"norm_{name}"):
                    y, taps[f"inverse_sigma_{name}"] = own.measured(h)
                taps[f"gain_{name}"] = jnp.broadcast_to(own.gain(), h.shape[:-1])
                return y

            return call

        def branch(h: Stream) -> Stream:
            y = checkpoint_name(self.f(h, ops), "branch")  # type: ignore[operator]
            taps["branch_variance"], taps["skip_variance"] = _variance(y), _variance(c.alpha * x)
            return jax.lax.stop_gradient(y) if cut else y

        norms = SimpleNamespace(**{name: norm(name) for name in place.norms})
        return place.equation(x, branch, norms, c), taps


class Block(nnx.Module):
    """Attention, then MLP: one layer of the stack."""

    def __init__(self, cfg: config.Model, stds: dict, key: Array):
        attn_key, mlp_key = jax.random.split(key)
        self.attn = Sublayer(cfg, Attention(cfg, stds, attn_key))
        self.mlp = Sublayer(cfg, Mlp(cfg, stds, mlp_key))

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
        self.layers = jax.vmap(lambda k: Block(cfg, stds, k))(keys)
        if placements.row(cfg.placement).final_norm:
            self.final = Norm(cfg.norm, cfg.width, cfg.norm_eps)
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

    def stack(
        self,
        x: Stream,
        nudge: Streams | None = None,
        *,
        cut: Cut = (),
        ops: Operations = PLAIN,
    ) -> tuple[Stream, Streams, dict[str, Any]]:
        """(x_L, streams x_0..x_L, taps with axis 0 = L). nudge[l] is added to x_l."""

        def layer(x, xs):
            block, nudge = xs
            x = x if nudge is None else x + nudge
            y, taps = block(x, cut=cut, ops=ops)
            return y, (x, taps)

        below = None if nudge is None else nudge[:-1]
        # the backward pass makes each layer again: on a CPU writing and reading all that a layer
        # makes costs more than making it
        policy = jax.checkpoint_policies.save_only_these_names(*KEPT)
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
        top, (inputs, taps) = jax.lax.scan(layer, x, (self.layers, below))
        top = top if nudge is None else top + nudge[-1]
        return top, jnp.concatenate([inputs, top[None]]), taps

    def read(self, x: Stream) -> Logits:
        """Logits from x_L: final norm where the placement has one, then the readout."""
        if placements.row(self.cfg.placement).final_norm:
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
    return jnp.var(x.astype(jnp.promote_types(x.dtype, jnp.float32)), -1)
