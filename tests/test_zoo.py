"""Every row of the placements table against its paper, written out once more in NumPy."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from normstudy import config, inits, optim, placements, programs, theory, train
from normstudy.errors import UserError
from normstudy.norms import Norm
from normstudy.placements import PLACEMENTS, Gain, Placement
from normstudy.theory import no_constants

LAYERS = 5  # Mix-LN: one block of post-norm


# ----------------------------------------------------------------- the network, in NumPy float64


def layer_norm(x, scale, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + bias


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(u):
    return u / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


class Weights:
    """One sublayer of one layer: weights by name, its branch, its norms and its gains."""

    def __init__(self, leaves, layer, name, heads, gain_of_block=None):
        start = f"layers/{name}/"
        own = {p.removeprefix(start): v[layer] for p, v in leaves.items() if p.startswith(start)}
        self.own, self.heads = own, heads
        shared = {p.removeprefix("layers/gain/"): v[layer] for p, v in leaves.items()
                  if p.startswith("layers/gain/")}  # fmt: skip
        gains = {p.removeprefix("gain/"): v for p, v in own.items() if p.startswith("gain/")}
        self.g = SimpleNamespace(**gains, **shared)

    def norm(self, name, x):
        scale = self.own[f"{name}/scale"]
        if f"{name}/slope" in self.own:
            return scale * np.tanh(self.own[f"{name}/slope"] * x) + self.own[f"{name}/bias"]
        if scale.ndim == 0:  # ScaleNorm; eps as RMSNorm's
            return scale * x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-5 * x.shape[-1])
        return layer_norm(x, scale, self.own[f"{name}/bias"])

    def attn(self, x, mid=lambda y: y, qkv=lambda name, h: h):
        B, T, D = x.shape
        split = lambda w: (x @ w).reshape(B, T, self.heads, D // self.heads)
        q, k, v = (qkv(name, split(self.own[name])) for name in "qkv")
        s = np.einsum("bthk,bshk->bhts", q, k) / math.sqrt(D // self.heads)
        s = np.where(np.tri(T, dtype=bool), s, -np.inf)
        y = np.einsum("bhts,bshk->bthk", softmax(s), v).reshape(B, T, D)
        return mid(y) @ self.own["o"]

    def mlp(self, x, mid=lambda y: y):
        return mid(gelu(x @ self.own["up"])) @ self.own["down"]


def both(one):
    """The same equation for attention and MLP: one(x, f, w, i) with i = 1.. the block."""
    return lambda x, a, m, i: one(one(x, a.attn, a, i), m.mlp, m, i)


def pre(x, f, w, i):
    return x + f(w.norm("pre", x))


def post(x, f, w, i):
    return w.norm("post", x + f(x))


def normformer(x, a, m, i):
    heads = np.repeat(a.g.heads, x.shape[-1] // a.heads)
    x = x + a.norm("post", a.attn(a.norm("pre", x), mid=lambda y: heads * y))
    return m.g.alpha * x + m.mlp(m.norm("pre", x), mid=lambda y: m.norm("mid", y))


def hybridnorm(x, a, m, i):
    y = x + a.attn(x, qkv=lambda name, h: a.norm(f"{name}_norm", h))
    return m.norm("pre", y) + m.mlp(m.norm("pre", y))


def keel(x, a, m, i):
    if i == 1:  # no outer norm on the first attention, alpha 1 in the first block
        x = x + a.attn(a.norm("pre", x))
        return m.norm("post", x + m.mlp(m.norm("pre", x)))
    x = a.norm("post", 2 * LAYERS * x + a.attn(a.norm("pre", x)))
    return m.norm("post", 2 * LAYERS * x + m.mlp(m.norm("pre", x)))


def mixed(x, a, m, i):
    return both(post if i <= LAYERS // 4 else pre)(x, a, m, i)


PAPERS = {
    "pre": both(pre),
    "pre-gpt2": both(pre),
    "pre-olmo": both(pre),
    "post": both(post),
    "post-gpt2": both(post),
    "ds-init": both(post),
    "deepnorm": both(lambda x, f, w, i: w.norm("post", (2 * LAYERS) ** 0.25 * x + f(x))),
    "admin": both(lambda x, f, w, i: w.norm("post", w.g.alpha * x + f(x))),
    "admin-profiled": both(lambda x, f, w, i: w.norm("post", w.g.alpha * x + f(x))),
    "keel": keel,
    "t-fixup": both(lambda x, f, w, i: x + f(x)),
    "fixup": both(lambda x, f, w, i: x + w.g.gain * f(x + w.g.into) + w.g.onto),
    "rezero": both(lambda x, f, w, i: x + w.g.gain * f(x)),
    "skipinit": both(lambda x, f, w, i: x + w.g.gain * f(x)),
    "layerscale": both(lambda x, f, w, i: x + w.g.gain * f(w.norm("pre", x))),
    "scalenorm": both(pre),
    "dyt": both(pre),
    "peri": both(lambda x, f, w, i: x + w.norm("post", f(w.norm("pre", x)))),
    "sandwich": both(lambda x, f, w, i: x + w.norm("post", f(w.norm("pre", x)))),
    "reordered": both(lambda x, f, w, i: x + w.norm("post", f(x))),
    "sub-ln": both(lambda x, f, w, i: x + f(w.norm("pre", x), lambda y: w.norm("mid", y))),
    "normformer": normformer,
    "hybridnorm": hybridnorm,
    "mix-ln": mixed,
    "lns": both(lambda x, f, w, i: x + f(w.norm("pre", x) / math.sqrt(i))),
    "depth-mup": both(lambda x, f, w, i: x + f(w.norm("pre", x)) / math.sqrt(LAYERS / 2)),
    "completep": both(lambda x, f, w, i: x + f(w.norm("pre", x)) / (LAYERS / 2)),
}


def written_out(cfg, model, x):
    leaves = tiny.leaves(model)
    for layer in range(cfg.layers):
        a, m = (Weights(leaves, layer, name, cfg.heads) for name in ("attn", "mlp"))
        x = PAPERS[cfg.placement](x, a, m, layer + 1)
    return x


@pytest.mark.parametrize("name", list(PLACEMENTS))
def test_stack_is_the_paper_s_equation_in_every_layer(name, x64):
    cfg = tiny.model_config(placement=name, layers=LAYERS)
    model = tiny.model(cfg, dtype=np.float64)
    x = np.random.default_rng(0).normal(size=(2, cfg.context, cfg.width))
    top, streams, _ = model.stack(jnp.asarray(x))
    # float64, ten sublayers: rounding alone
    np.testing.assert_allclose(top, written_out(cfg, model, x), rtol=1e-10, atol=1e-11)
    assert streams.shape == (LAYERS + 1, *x.shape)


# ----------------------------------------------------------------------------- exact constants


def test_deepnorm_has_the_paper_s_constants():
    assert theory.deepnorm_decoder(48)[:2] == pytest.approx((3.13017, 0.225901), rel=4e-6)
    assert theory.deepnorm_decoder(12)[:2] == pytest.approx((2.21336, 0.319472), rel=2e-6)
    encoder, decoder = theory.deepnorm_encoder_decoder(12, 12)
    assert encoder.beta == pytest.approx(0.400198, rel=2e-6)
    assert encoder.alpha == pytest.approx(0.81 * 12 ** (5 / 16), rel=1e-12)
    assert decoder[:2] == pytest.approx((36**0.25, 144**-0.25), rel=1e-12)


def test_deepnorm_is_none_of_its_wrong_copies():
    encoder, _ = theory.deepnorm_encoder_decoder(12, 12)
    assert encoder.beta / (1.15 * (12**5) ** (-1 / 16)) == pytest.approx(0.87 / 1.15)  # torchscale
    assert theory.deepnorm_decoder(12).beta < 1  # Mix-LN's and LNS's deeppost: (8L)^(+1/4)
    assert theory.deepnorm_decoder(12).alpha != pytest.approx(2.828, rel=0.1)  # theirs, any depth
    # KEEL's text: L^-0.25 of the sublayers is sqrt 2 above the original's beta
    assert (2 * 48) ** -0.25 / theory.deepnorm_decoder(48).beta == pytest.approx(2**0.5)


def test_admin_sub_ln_and_t_fixup_have_the_constants_of_their_code():
    assert theory.admin(48).alpha == pytest.approx(4.494833, rel=1e-6)
    assert theory.sub_ln(48).beta == pytest.approx(math.sqrt(math.log(96)), rel=1e-12)
    assert theory.sub_ln(48).beta > 1
    assert theory.t_fixup(48).beta == pytest.approx(0.67 * 48**-0.25, rel=1e-12)
    assert theory.t_fixup_scales(48) == dict.fromkeys(("embed", "positions"), (9 * 48) ** -0.25)


def test_keel_counts_sublayers_and_spares_its_first_block():
    c = theory.keel(48)
    assert (c.alpha[1:] == 96).all() and (c.alpha[0] == 1).all()
    assert c.after[0].tolist() == [0.0, 1.0] and (c.after[1:] == 1).all()


@pytest.mark.parametrize("layers, posts", [(4, 1), (12, 3), (48, 12), (50, 12), (3, 0)])
def test_mix_ln_is_post_norm_in_the_first_quarter(layers, posts):
    c = theory.mix_ln(layers)
    assert (c.after + c.before == 1).all()
    assert c.after.sum() == 2 * posts and (c.after[:posts] == 1).all()


def test_scales_follow_the_block_where_the_paper_says_so():
    assert theory.out_scales(48) == dict.fromkeys(("o", "down"), 1 / math.sqrt(96))
    np.testing.assert_allclose(theory.out_scales_by_block(3)["o"], 1 / np.sqrt([2, 4, 6]))
    assert set(theory.out_scales_by_block(3)) == {"o", "down"}
    np.testing.assert_allclose(theory.ds_scales(3)["q"], 1 / np.sqrt([1, 2, 3]))
    assert set(theory.ds_scales(3)) == {"q", "k", "v", "o", "up", "down"}
    np.testing.assert_allclose(theory.layer_norm_scaling(3).branch[:, 1], 1 / np.sqrt([1, 2, 3]))
    fixup = theory.fixup_scales(32)
    assert (fixup["o"], fixup["down"]) == (0.0, 0.0)
    assert fixup["up"] == pytest.approx(64**-0.5) and fixup["v"] == pytest.approx(0.5)  # 64^-1/6
    # SmallInit N(0, 2 / (5 D)) beside Xavier's N(0, 1 / D)
    assert theory.small_scales(1)["q"] * theory.xavier_std(40, 40) == pytest.approx(math.sqrt(0.01))


DRAWN = ("deepnorm", "pre-olmo", "ds-init", "t-fixup", "fixup", "scalenorm", "normformer", "admin")


@pytest.mark.parametrize("name", DRAWN)  # rows that scale in ways of their own
def test_parameters_at_step_0_are_those_of_the_row(name):
    """Standard deviations by role and layer, gains at their start; Q and K take no beta."""
    run = tiny.run(placement=name, layers=6, width=32, ff=64)
    place, stds = PLACEMENTS[name], programs.standard_deviations(run)
    state = programs.initial_state(run, programs.of(run)[0])
    leaves = tiny.leaves(state.model)
    plain = inits.standard_deviations(run.model, run.init, 1.0)
    beta, scales = place.constants(6).beta, place.init(6)
    for path, leaf in leaves.items():
        names = path.split("/")
        role = names[-1]
        if role in plain and names[0] == "layers":
            factor = beta if role in ("v", "o", "up", "down") else 1.0
            expected = np.broadcast_to(plain[role] * factor * scales.get(role, 1.0), 6)
            np.testing.assert_allclose(expected, np.broadcast_to(stds[role], 6), rtol=1e-12)
            # 1024 entries or more: a std scatters by 2%
            np.testing.assert_allclose(leaf.std((1, 2)), expected, rtol=0.12)
        if "gain" in names:
            np.testing.assert_allclose(leaf, place.starts(6)[role], rtol=1e-6)
        if role == "scale":  # ScaleNorm: +sqrt(D), which public code had with the wrong sign
            assert (leaf == (np.float32(32**0.5) if place.kind == "scale" else 1.0)).all()


def test_depth_is_not_counted_twice():
    for name in ("lns", "depth-mup", "completep", "deepnorm", "pre-gpt2"):
        with pytest.raises(UserError, match="count twice"):
            programs.standard_deviations(tiny.run(placement=name, depth_scaled=True))
    for name in ("pre", "post", "peri", "layerscale"):
        assert not PLACEMENTS[name].counts_depth()
        programs.standard_deviations(tiny.run(placement=name, depth_scaled=True))
    with pytest.raises(UserError, match="count twice"):
        train.check(tiny.run(placement="lns", depth_scaled=True))


# -------------------------------------------------------------------------------- equivalences


def top(monkeypatch, place, x, like="post", **changes):
    """x_L under a row, with the weights that the row `like` draws."""
    weights = tiny.leaves(tiny.model(tiny.model_config(placement=like), dtype=np.float64))
    monkeypatch.setitem(PLACEMENTS, "tried", place)
    cfg = tiny.model_config(placement="tried", **changes)
    model = tiny.model(cfg, dtype=np.float64, jitter=0.0)
    model = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(weights.get("/".join(tiny.path_names(path)), leaf)), model
    )
    return np.asarray(model.stack(jnp.asarray(x))[0])


X = np.random.default_rng(3).normal(size=(2, 8, 8))
POST = PLACEMENTS["post"]
PRE = PLACEMENTS["pre"]


# fmt: off
UNDONE = [
        pytest.param(Placement(lambda x, f, n, c: n.post(c.alpha * x + f(x)), ("post",), False, no_constants, "2022"), "post", id="DeepNorm, alpha 1 = Post-LN"),  # noqa: E501
        pytest.param(Placement(lambda x, f, n, c: n.post(c.alpha * x + f(x), c.after), ("post",), False, no_constants, "2026"), "post", id="KEEL, alpha 1, no inner norm = Post-LN"),  # noqa: E501
        pytest.param(Placement(PLACEMENTS["mix-ln"].equation, ("pre", "post"), True, lambda L: theory.mix_ln(L, 0.0), "2024"), "pre", id="Mix-LN, share 0 = Pre-LN"),  # noqa: E501
        pytest.param(Placement(PLACEMENTS["mix-ln"].equation, ("pre", "post"), False, lambda L: theory.mix_ln(L, 1.0), "2024"), "post", id="Mix-LN, share 1 = Post-LN"),  # noqa: E501
        pytest.param(Placement(PLACEMENTS["layerscale"].equation, ("pre",), True, no_constants, "2021", gains={"gain": Gain("D", 1.0)}), "pre", id="LayerScale at 1 = Pre-LN"),  # noqa: E501
]
# fmt: on


@pytest.mark.parametrize("place, like", UNDONE)
def test_row_with_its_constants_undone_is(place, like, monkeypatch, x64):
    expected = top(monkeypatch, PLACEMENTS[like], X, like)
    np.testing.assert_allclose(top(monkeypatch, place, X, like), expected, rtol=1e-12, atol=1e-12)


def test_layer_norm_scaling_on_block_1_is_pre_norm(monkeypatch, x64):
    one = {"layers": 1}
    weights = tiny.model(tiny.model_config(placement="pre", **one), dtype=np.float64)
    cfg = tiny.model_config(placement="lns", **one)
    lns = tiny.model(cfg, dtype=np.float64)
    tiny.assert_bit_equal(weights, lns)
    np.testing.assert_array_equal(weights.stack(jnp.asarray(X))[0], lns.stack(jnp.asarray(X))[0])


@pytest.mark.parametrize("name", ["rezero", "skipinit", "fixup"])
def test_stack_is_the_identity_at_step_0(name):
    run = tiny.run(placement=name)
    state = programs.initial_state(run, programs.of(run)[0])
    x = jnp.asarray(X, jnp.float32)
    np.testing.assert_array_equal(state.model.stack(x)[0], x)


def test_hybridnorm_mlp_is_post_norm_shifted_by_a_norm(x64):
    """y = LN(x); x <- y + f(y), then LN, is LN(y + f(y)) of y = LN(x): Post-LN but for the ends."""
    sublayer, post = (
        tiny.layer(
            tiny.model(tiny.model_config(placement=name), dtype=np.float64, jitter=0.0), 0
        ).mlp
        for name in ("hybridnorm", "post")
    )
    y = layer_norm(X, 1.0, 0.0)
    post.f = sublayer.f
    shifted = layer_norm(np.asarray(sublayer(jnp.asarray(X))[0]), 1.0, 0.0)
    np.testing.assert_allclose(post(jnp.asarray(y))[0], shifted, rtol=0, atol=1e-11)


# -------------------------------------------------------------------- what else a row may ask for


def test_admin_s_profile_is_its_recursion(x64):
    """omega_1 = 1, omega_{i+1}^2 = Var(omega_i x_{i-1}) + Var f_i, in NumPy."""
    cfg = tiny.model_config(placement="admin-profiled", layers=3)
    model = tiny.model(cfg, dtype=np.float64, jitter=0.0)
    tokens = tiny.tokens(cfg, 4)[:, :-1]
    found = tiny.leaves(model.profiled(tokens))
    leaves, x, omega = tiny.leaves(model), np.asarray(model.start(tokens)), 1.0
    for layer in range(3):
        for name in ("attn", "mlp"):
            w = Weights(leaves, layer, name, cfg.heads)
            alphas = found[f"layers/{name}/gain/alpha"][layer]
            np.testing.assert_allclose(alphas, omega, rtol=1e-10)
            branch = getattr(w, name)(x)
            both = np.var(omega * x, -1).mean() + np.var(branch, -1).mean()
            x = w.norm("post", omega * x + branch)
            omega = math.sqrt(both)
    others = {path for path in leaves if not path.endswith("alpha")}
    for path in others:
        np.testing.assert_array_equal(found[path], leaves[path])


def test_profiled_state_knows_the_first_batch():
    run = tiny.run(placement="admin-profiled")
    state = programs.initial_state(run, programs.of(run)[0])
    alphas = tiny.leaves(state.model)
    first, last = (alphas[f"layers/{name}/gain/alpha"] for name in ("attn", "mlp"))
    assert (first[0] == 1).all() and (last[0] > 1).all() and (last[1] > last[0]).all()


@pytest.mark.parametrize("tuning", [theory.depth_mup_tuning(8), theory.complete_p_tuning(8)])
def test_tuning_changes_rate_and_epsilon_of_the_layers_alone(tuning, x64):
    cfg, own = tiny.model_config(), config.Optim(eps=1e-3)
    model = tiny.model(cfg, dtype=np.float64)
    waves = lambda leaf: 1e-3 * jnp.sin(1 + jnp.arange(leaf.size)).reshape(leaf.shape)
    gradients = jax.tree.map(waves, model)
    tuned, plain = optim.direction(own, tuning), optim.direction(own)
    smaller = optim.direction(config.Optim(eps=own.eps * tuning.eps))
    found, by_plain, by_smaller = (
        tiny.leaves(t.update(gradients, t.init(model), model)[0]) for t in (tuned, plain, smaller)
    )
    for path in found:
        layers = path.startswith("layers")
        expected = tuning.rate * by_smaller[path] if layers else by_plain[path]
        np.testing.assert_allclose(found[path], expected, rtol=1e-10, err_msg=path)
    assert theory.complete_p_tuning(8) == (1.0, 0.25)
    assert theory.depth_mup_tuning(8) == (0.5, 0.5)


def test_sharpness_of_a_tuned_row_is_seen_through_its_tuning():
    """P of the layers is what the direction divides the gradient by."""
    run = tiny.run(placement="depth-mup", layers=8, eps=1e-3)
    model = tiny.model(run.model)
    transform = programs.direction(run.model, run.optim)
    gradients = jax.tree.map(lambda leaf: 1e-3 * jnp.cos(leaf), model)
    direction, after = transform.update(gradients, transform.init(model), model)
    nu, count = (optax.tree.get(after, name) for name in ("nu", "count"))
    tuning = theory.depth_mup_tuning(8)
    plain = programs.curvature.adam_preconditioner(nu, count, 0.9, 0.999, 1e-3)
    divided = optim.times_layers(plain, tuning.eps / tuning.rate)
    # Adam's first moment after one step is (1 - b1) g, its correction the same factor
    of_gradient = jax.tree.map(lambda d, p: d * p / (1 - 0.9), direction, divided)
    theirs = tiny.leaves(gradients)
    for path, own in tiny.leaves(of_gradient).items():
        np.testing.assert_allclose(own, theirs[path], rtol=2e-4, atol=1e-9, err_msg=path)  # float32


@pytest.mark.parametrize("kind", ["scale", "tanh"])
def test_jacobian_of_the_norm_is_its_derivative(kind, x64):
    norm = Norm(kind, 6, 1e-5)
    x = jnp.asarray(np.random.default_rng(1).normal(size=6))
    np.testing.assert_allclose(norm.jacobian(x), jax.jacrev(norm)(x), rtol=1e-8, atol=1e-10)


def test_scale_norm_puts_out_vectors_of_length_g():
    norm = Norm("scale", 16, 1e-12)
    y = norm(jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32))
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), 4.0, rtol=1e-5)  # sqrt(16) at init


def test_row_that_uses_a_gain_it_does_not_declare_is_refused():
    with pytest.raises(ValueError, match="does not declare"):
        Placement(lambda x, f, n, c: x + c.gate * f(x), (), True, no_constants, "a source")


def test_row_that_declares_a_gain_it_does_not_use_is_refused():
    with pytest.raises(ValueError, match="declares others"):
        Placement(lambda x, f, n, c: x + f(x), (), True, no_constants, "a source",
                  gains={"gain": Gain("", 0.0)})  # fmt: skip


def test_what_the_table_leaves_out_has_a_reason():
    assert all(reason for reason in placements.LEFT_OUT.values())
    assert not set(placements.LEFT_OUT) & set(PLACEMENTS)
