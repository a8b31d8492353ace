"""The wiring check says what a sublayer computes: right ones are themselves, wrong ones are named.

The wrong wirings are those of public bug reports and of published code.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from normstudy import config, inits, tables, theory, wiring
from normstudy.errors import UserError
from normstudy.model import Sublayer
from normstudy.placements import PLACEMENTS
from normstudy.wiring import Where

ALPHA, BETA = theory.deepnorm_decoder(24)[:2]  # 2.632, 0.2686
# float32: rounding of one norm and one add is some 1e-7 of the output; a median over positions
CLOSE = {"rel": 1e-5}


def layer(v, eps=1e-5):
    centred = v - v.mean(-1, keepdims=True)
    return centred / ((centred * centred).mean(-1, keepdims=True) + eps) ** 0.5


def rms(v, eps=1e-5):
    return v / ((v * v).mean(-1, keepdims=True) + eps) ** 0.5


NORM = {None: lambda v: v, "layer": layer, "rms": rms}


def declared(placement, layers=24, width=8, **changes):
    return config.Model(placement=placement, layers=layers, width=width, heads=1, **changes)


def stack(*sublayers):
    """Sublayers as attention, MLP, attention, MLP, ..."""
    return {Where(i // 2, ("attn", "mlp")[i % 2]): apply for i, apply in enumerate(sublayers)}


def verdict(apply, placement, **changes):
    """What is said of one sublayer, after where it is and what was declared."""
    (finding,) = wiring.check(stack(apply), declared(placement, **changes)).findings
    assert finding.where == "sublayer 1 (layer 0 attn)"
    head, what = finding.what.split(", ", 1)
    assert head == f"declared {placement}"
    return what


def normalised_skip(x, f):
    x = layer(x)
    return x + f(x)


def called_twice(x, f):
    return x + f(f(layer(x)))


RIGHT = {
    "pre": (lambda x, f, n: x + f(n(x)), "x + f(norm(x))", 1.0),
    "post": (lambda x, f, n: n(x + f(x)), "norm(x + f(x))", 1.0),
    "deepnorm": (lambda x, f, n: n(ALPHA * x + f(x)), "norm(2.632 x + f(x))", ALPHA),
}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_wiring_reads_as_itself_and_as_its_row_alone(name, norm):
    equation, text, ratio = RIGHT[name]
    apply = lambda x, f: equation(x, f, NORM[norm])
    reading = wiring.read_sublayer(apply, 8)
    assert reading.text == text and reading.ratio == pytest.approx(ratio, **CLOSE)
    assert set(reading.norms.values()) == {norm}
    for other in RIGHT:
        report = wiring.check(stack(apply, apply), declared(other, norm=norm))
        assert report.agrees == (other == name)
        assert set(report.names.values()) == {name}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", RIGHT)
def test_row_of_the_table_reads_as_the_same_wiring(name, norm):
    equation, text, _ = RIGHT[name]
    row = wiring.read_row(PLACEMENTS[name], 24, norm, wiring.probe(8))
    assert row.text == text
    reading = wiring.read_sublayer(lambda x, f: equation(x, f, NORM[norm]), 8)
    assert wiring.differences(reading, row) == []


@pytest.mark.parametrize("before", NORM)
@pytest.mark.parametrize("after, skip, branch", wiring.EQUATIONS)
def test_every_equation_of_the_family_reads_as_itself(after, skip, branch, before):
    """No two of them can be taken for each other."""
    a, b, c = 1.7, 0.6, 0.8

    def apply(x, f):
        y = 0.0 if branch == wiring.MISSING else b * NORM[branch](f(c * NORM[before](x)))
        y = y if skip == wiring.MISSING else a * NORM[skip](x) + y
        return NORM[after](y)

    known = wiring.probe(8)  # float32 in NumPy: nothing to compile
    found = wiring.read(wiring.observe(apply, known), known)
    there = [norm != wiring.MISSING for norm in (skip, branch)]
    assert found.understood and found.after.norm == after
    assert [bool(term.factor) for term in (found.skip, found.branch)] == there
    if there[0]:
        assert found.skip.norm == skip
    if there[1]:
        assert found.branch.norm == branch
        assert found.before is not None and found.before.norm == before
        assert found.before.factor == pytest.approx(c, **CLOSE)
    if all(there):
        assert found.ratio == pytest.approx(a / b, **CLOSE)
    if after is None and there[0]:
        assert found.skip.factor == pytest.approx(a, **CLOSE)


@pytest.mark.parametrize(
    "apply, placement, words",
    [
        pytest.param(
            normalised_skip, "pre",
            "wired as norm(x) + f(norm(x)) (normalised skip: post-norm but for the stack's ends): "
            "the skip starts after the norm",
            id="pytorch/pytorch#61165",
        ),
        pytest.param(
            lambda x, f: layer(f(x)), "post",
            "wired as norm(f(x)): missing residual",
            id="OpenNMT/OpenNMT-py#2199",
        ),
        pytest.param(
            lambda x, f: layer(x + ALPHA * f(x)), "deepnorm",
            "wired as norm(0.3799 x + f(x)) (post-norm): "
            "alpha 2.632 expected on the skip, found 0.3799: alpha sits on the branch",
            id="labmlai#145 after the first fix",
        ),
        pytest.param(
            lambda x, f: x + ALPHA * f(x), "deepnorm",
            "wired as x + 2.632 f(x) (no norm): norm never applied; "
            "alpha 2.632 expected on the skip, found 0.3799: alpha sits on the branch",
            id="labmlai#145",
        ),
        pytest.param(
            lambda x, f: ALPHA * x + f(layer(x)), "deepnorm",
            "wired as 2.632 x + f(norm(x)) (pre-norm): a norm before the branch, none declared; "
            "no norm after the add; "
            "no norm on the skip path, which grows 2.632-fold at each sublayer",
            id="torchscale decoder",
        ),
        pytest.param(
            lambda x, f: ALPHA * x + f(layer(x)), "pre",
            "wired as 2.632 x + f(norm(x)) (pre-norm): "
            "the skip is multiplied by 2.632, 1 declared; "
            "no norm on the skip path, which grows 2.632-fold at each sublayer",
            id="torchscale decoder, taken for pre",
        ),
        pytest.param(
            lambda x, f: layer((2 * 32) ** 0.25 * x + f(x)), "deepnorm",
            "wired as norm(2.828 x + f(x)) (post-norm): "
            "alpha 2.632 expected on the skip, found 2.828: alpha of 32 layers",
            id="pixeli99/MixLN",
        ),
        pytest.param(
            lambda x, f: layer(x + f(x)), "deepnorm",
            "wired as norm(x + f(x)) (post): "
            "alpha 2.632 expected on the skip, found 1: alpha is missing",
            id="alpha forgotten",
        ),
        pytest.param(
            lambda x, f: layer(x + f(x)), "pre",
            "wired as norm(x + f(x)) (post): a norm after the add, none declared; "
            "no norm before the branch",
            id="flag ignored",
        ),
        pytest.param(
            lambda x, f: layer(96 * x + f(x)), "post",
            "wired as norm(96 x + f(x)) (post-norm): skip-to-branch ratio 96, 1 declared",
            id="alpha that is not declared",
        ),
        pytest.param(
            lambda x, f: x + layer(f(layer(x))), "pre",
            "wired as x + norm(f(norm(x))) (peri): "
            "a norm on the branch's output, none declared",
            id="peri-norm",
        ),
        pytest.param(
            lambda x, f: x + layer(f(x)), "post",
            "wired as x + norm(f(x)) (reordered): "
            "a norm on the branch's output, none declared; no norm after the add",
            id="OLMo 2",
        ),
        pytest.param(
            lambda x, f: x + f(layer(x) / 2), "pre",
            "wired as x + f(0.5 norm(x)) (pre-norm): "
            "the branch reads 0.5 norm(x), norm(x) declared",
            id="LayerNorm scaling at layer 4",
        ),
        pytest.param(
            lambda x, f: x + 1e-6 * f(layer(x)), "pre",
            "wired as x + 1e-06 f(norm(x)) (pre-norm): "
            "the branch is multiplied by 1e-06, 1 declared",
            id="LayerScale",
        ),
        pytest.param(
            lambda x, f: 0.5 * layer(x + f(x)), "post",
            "wired as 0.5 norm(x + f(x)) (post-norm): "
            "the norm after the add has gain 0.5, 1 declared",
            id="gain not 1",
        ),
        pytest.param(
            lambda x, f: rms(x + f(x)), "post",
            "wired as norm(x + f(x)) (post): rms norm after the add, layer norm declared",
            id="another norm",
        ),
        pytest.param(
            lambda x, f: (f(layer(x)), x)[1], "pre",
            "wired as x: the branch is called, but not added",
            id="branch dropped",
        ),
        pytest.param(
            lambda x, f: layer(x), "post",
            "wired as norm(x): the branch is never called",
            id="branch forgotten",
        ),
        pytest.param(
            lambda x, f: 0 * f(x), "post",
            "wired as 0: missing residual; the branch is called, but not added; "
            "norm never applied",
            id="nothing left",
        ),
        pytest.param(
            called_twice, "pre",
            "wired as x + f(?): the branch is called 2 times",
            id="called twice",
        ),
        pytest.param(
            lambda x, f: x + f(layer(x) ** 2), "pre",
            "wired as x + f(?): the branch reads neither x nor norm(x)",
            id="another input",
        ),
        pytest.param(
            lambda x, f: x + f(layer(x)) / 0, "pre",
            "not understood (residual inf): the output is not finite",
            id="not finite",
        ),
        pytest.param(
            lambda x, f: x + f(layer(x)) * jnp.nan, "pre",
            "not understood (residual inf): the output is not finite",
            id="not a number",
        ),
        pytest.param(
            lambda x, f: x + f(layer(x) * jnp.nan), "pre",
            "wired as x + f(?): the branch reads neither x nor norm(x)",
            id="branch given no number",
        ),
    ],
)  # fmt: skip
def test_wrong_wiring_has_its_own_verdict(apply, placement, words):
    assert verdict(apply, placement) == words


@pytest.mark.parametrize(
    "apply",
    [
        lambda x, f: layer(x + f(x) ** 2),
        lambda x, f: layer(x + f(x)) * jnp.linspace(0.9, 1.1, x.shape[-1])[None, None],
        lambda x, f: x + jnp.tanh(f(layer(x))),
        lambda x, f: jnp.flip(x, 1) + f(layer(x)),
        lambda x, f: x + f(layer(x)) * x.mean(-1, keepdims=True),
    ],
)
def test_what_no_equation_reproduces_is_not_guessed_at(apply):
    reading = wiring.read_sublayer(apply, 8)
    assert not reading.understood and reading.residual > 0.01
    assert reading.text == f"not understood (residual {reading.residual:.2g})"
    assert reading.skip_starts == "?" and reading.ratio is None and reading.family == ""
    assert not reading.skip.factor and not reading.branch.factor and not reading.after.norm
    what = verdict(apply, "post")
    assert what.startswith(f"{reading.text}: no equation of the family comes nearer than ")


def test_sublayer_without_residual_is_found_where_it_is():
    post, bug = lambda x, f: layer(x + f(x)), lambda x, f: layer(f(x))
    report = wiring.check(stack(post, bug, *[post] * 10), declared("post", layers=6))
    assert report.sentences() == [
        "sublayer 2 (layer 0 mlp): declared post, wired as norm(f(x)): missing residual"
    ]
    assert [row["placement"] for row in report.rows()] == ["post", "", *["post"] * 10]
    assert report.rows()[1]["skip starts at"] == "missing"


def test_the_same_verdict_on_many_sublayers_is_one_sentence():
    post, bug = lambda x, f: layer(x + f(x)), lambda x, f: layer(f(x))
    report = wiring.check(stack(bug, bug, bug, post, bug, post, post, post, bug, post),
                          declared("post", layers=5))  # fmt: skip
    assert [finding.where for finding in report.findings] == [
        "attn of layers 0-2, 4 and mlp of layer 0"
    ]


def test_report_is_a_table():
    report = wiring.check(stack(normalised_skip), declared("pre"))
    (row,) = report.rows()
    assert row["skip/branch"] == pytest.approx(1.0, **CLOSE) and row["residual"] < 1e-5
    del row["skip/branch"], row["residual"]
    assert row == {
        "layer": 0,
        "sublayer": "attn",
        "wired as": "norm(x) + f(norm(x))",
        "placement": "normalised skip: post-norm but for the stack's ends",
        "skip starts at": "norm(x)",
        "branch reads": "norm(x)",
        "norms": "layer on the skip, layer before the branch",
    }
    assert "norm(x) + f(norm(x))" in tables.text(report.rows())


def test_epsilon_does_not_count():
    """Libraries differ in it: 1e-12 (BERT) to 1e-3 (Keras)."""
    for eps in (1e-12, 1e-3):
        report = wiring.check(stack(lambda x, f, e=eps: layer(x + f(x), e)), declared("post"))
        assert report.agrees


def test_bfloat16_is_read_within_its_own_rounding():
    def half(equation):
        return lambda x, f: equation(x.astype(jnp.bfloat16), f)

    right = half(lambda x, f: layer(ALPHA * x + f(x)))
    assert wiring.check(stack(right), declared("deepnorm")).agrees
    wrong = half(lambda x, f: layer(x + ALPHA * f(x)))
    assert "alpha" in verdict(wrong, "deepnorm")
    assert verdict(half(normalised_skip), "pre").endswith("the skip starts after the norm")


def test_row_outside_the_family_is_held_to_its_numbers(monkeypatch):
    row = dataclasses.replace(
        PLACEMENTS["pre"], equation=lambda x, f, n, c: x + f(n.pre(x)) * f(n.pre(x)),
    )  # fmt: skip
    monkeypatch.setitem(PLACEMENTS, "squared", row)
    squared = lambda x, f: x + f(layer(x)) * f(layer(x))
    agreed = wiring.check(stack(squared), declared("squared"))
    assert agreed.sentences() == [f"1 of 1 sublayers wired as declared (squared): {row.text}"]
    assert verdict(lambda x, f: x + f(layer(x)), "squared").endswith(
        f"of the output away from {row.text}"
    )


def test_narrow_stream_is_refused():
    with pytest.raises(UserError, match="width 3"):
        wiring.read_sublayer(normalised_skip, 3)


def test_unknown_placement_lists_the_rows():
    with pytest.raises(UserError, match=", ".join(PLACEMENTS)):
        wiring.check(stack(normalised_skip), declared("club-sandwich"))


# -------------------------------------------------------------------------------------- the readout

READOUT = np.random.default_rng(0).normal(size=(8, 11)).astype(np.float32)


@pytest.mark.parametrize(
    "read_out, normed",
    [
        (lambda x: layer(x) @ READOUT, True),
        (lambda x: rms(x) @ READOUT, True),
        (lambda x: layer(x) @ READOUT + 1.0, True),
        (lambda x: jnp.tanh(rms(x) @ READOUT), True),
        (lambda x: x @ READOUT, False),
        (lambda x: x @ READOUT + 1.0, False),
        (lambda x: x.astype(jnp.bfloat16) @ READOUT.astype(jnp.bfloat16), False),
        (lambda x: layer(x).astype(jnp.bfloat16) @ READOUT.astype(jnp.bfloat16), True),
        (lambda x: 30.0 * jnp.tanh(x @ READOUT / 5e3), None),
        (lambda x: layer(x) @ (0 * READOUT), None),
    ],
)
def test_final_norm_is_known_by_how_logits_scale(read_out, normed):
    assert wiring.final_norm(read_out, 8) is normed


def test_pre_norm_without_final_norm_is_found_before_training():
    """PaddlePaddle/PaddleNLP#571."""
    pre = lambda x, f: x + f(layer(x))
    report = wiring.check(stack(pre, pre), declared("pre"), lambda x: x @ READOUT)
    assert report.final_norm is False
    assert report.sentences() == [
        "readout: pre-norm without final norm: nothing normalises the stream here"
    ]
    assert wiring.check(stack(pre), declared("pre"), lambda x: layer(x) @ READOUT).agrees


def test_missing_final_norm_behind_a_post_norm_is_not_called_an_unnormalised_stream():
    post = lambda x, f: layer(x + f(x))
    _, readout = wiring.check(stack(post), declared("pre"), lambda x: x @ READOUT).findings
    assert str(readout) == (
        "readout: no final norm, one declared; the last sublayer ends in a norm"
    )


def test_final_norm_that_the_row_does_not_have_is_told():
    post = lambda x, f: layer(x + f(x))
    report = wiring.check(stack(post), declared("post"), lambda x: layer(x) @ READOUT)
    assert report.sentences() == ["readout: a final norm, none declared"]
    (silent,) = wiring.check(stack(post), declared("post"), lambda x: 0 * x @ READOUT).findings
    assert silent.what.startswith("cannot tell")


# ------------------------------------------------------------------------- the model of the package


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_deep_model_is_wired_as_its_config_says(norm):
    cfg = tiny.model_config(placement="deepnorm", layers=24, norm=norm)
    report = wiring.check_model(tiny.model(cfg, jitter=0.0), cfg)
    assert report.sentences() == [
        "48 of 48 sublayers wired as declared (deepnorm): norm(2.632 x + f(x))"
    ]
    assert report.final_norm is False and len(report.rows()) == 48


def test_model_of_another_placement_is_told_apart():
    model = tiny.model(tiny.model_config(placement="pre"), jitter=0.0)
    report = wiring.check_model(model, tiny.model_config(placement="post"))
    assert report.sentences() == [
        "attn of layers 0-1 and mlp of layers 0-1: declared post, wired as x + f(norm(x)) (pre): "
        "a norm before the branch, none declared; no norm after the add",
        "readout: a final norm, none declared",
    ]


def test_model_of_another_depth_is_told_apart():
    model = tiny.model(tiny.model_config(placement="deepnorm", layers=3), jitter=0.0)
    said = wiring.check_model(model, tiny.model_config(placement="deepnorm", layers=6)).sentences()
    assert said[0].endswith("alpha 1.861 expected on the skip, found 1.565: alpha of 3 layers")
    assert said[1] == "stack: 3 layers, 6 declared"


def test_bug_in_the_model_s_own_sublayer_is_found(monkeypatch):
    def bug(self, x, numbers, *, f, **how):
        x = self.pre(x)
        return x + f(x), {}

    monkeypatch.setattr(Sublayer, "__call__", bug)
    cfg = tiny.model_config(placement="pre", layers=3)
    (sentence,) = wiring.check_model(tiny.model(cfg, jitter=0.0), cfg).sentences()
    assert sentence.startswith("attn of layers 0-2 and mlp of layers 0-2: declared pre, wired as ")
    assert sentence.endswith("the skip starts after the norm")


def test_trained_gains_do_not_hide_the_wiring_and_are_told():
    cfg = tiny.model_config(placement="deepnorm")
    model = tiny.model(cfg, jitter=0.1)
    before = tiny.leaves(model)
    report = wiring.check_model(model, cfg)
    assert report.agrees and len(report.notes) == 1
    assert "at 1 and 0" in report.sentences()[-1]
    stds = inits.standard_deviations(cfg, config.Init(), 1.0)
    (finding,) = wiring.check_model(model, cfg, stds).findings
    assert str(finding).startswith("layers: norm gains not all 1 or biases not all 0")
    for path, leaf in tiny.leaves(model).items():  # the check leaves the model as it was
        np.testing.assert_array_equal(leaf, before[path])


# -------------------------------------------------------------------- how large the projections are

WIDTH, FF, LAYERS = 32, 64, 4
XAVIER = {
    "q": theory.xavier_std(WIDTH, WIDTH),
    "up": theory.xavier_std(WIDTH, FF),
    "down": theory.xavier_std(FF, WIDTH),
}
for square in ("k", "v", "o"):
    XAVIER[square] = XAVIER["q"]
DEEPNET = {name: std * (1.0 if name in "qk" else BETA) for name, std in XAVIER.items()}


def layers_of(stds, fused=False):
    """Stacked layers of normal matrices with these standard deviations."""
    random = np.random.default_rng(1)
    shape = {"up": (WIDTH, FF), "down": (FF, WIDTH)}
    m = {
        name: std * random.normal(size=(LAYERS, *shape.get(name, (WIDTH, WIDTH))))
        for name, std in stds.items()
    }
    attn = {name: m[name] for name in ("q", "k", "v", "o")}
    if fused:
        attn = {"qkv": {"kernel": np.concatenate([m["q"], m["k"], m["v"]], -1)}, "o": m["o"]}
    return {"attn": attn, "mlp": {"up": m["up"], "down": m["down"], "norm": {"scale": np.ones(4)}}}


def projection_sentences(layers, stds=DEEPNET):
    found = wiring.projection_gains(layers, stds)
    return [str(finding) for finding in wiring._projection_findings(found)]


@pytest.mark.parametrize("fused", [False, True])
def test_matrices_of_the_declared_size_are_not_complained_of(fused):
    layers = layers_of(DEEPNET, fused)
    found = wiring.projection_gains(layers, DEEPNET)
    assert [(p.layer, p.sublayer, p.matrix) for p in found[::LAYERS]] == [
        (0, "attn", name) for name in (("o", "q", "k", "v") if fused else ("k", "o", "q", "v"))
    ] + [(0, "mlp", "down"), (0, "mlp", "up")]
    for p in found:  # 1/sqrt(2 * 1024) = 2 %: five of them
        assert p.gain == pytest.approx(1.0 if p.matrix in "qk" else BETA, rel=0.11)
    assert projection_sentences(layers) == []


def test_sizes_of_a_fresh_model_are_held_to_its_init_rule():
    cfg = tiny.model_config(placement="post", layers=6, width=16, ff=32)
    model = tiny.model(cfg, jitter=0.0)
    report = wiring.check_model(model, cfg, inits.standard_deviations(cfg, config.Init(), 1.0))
    assert report.agrees and len(report.projections) == 6 * 6
    deepnet = inits.standard_deviations(cfg, config.Init(), theory.deepnorm_decoder(6).beta)
    found = wiring.check_model(model, cfg, deepnet).findings
    assert [finding.where for finding in found] == [
        f"{matrix} of layers 0-5" for matrix in ("attn o", "attn v", "mlp down", "mlp up")
    ]
    assert all(finding.what.endswith("as if not scaled at all") for finding in found)


def test_fused_matrix_scaled_whole_is_told_apart():
    """xformers PR#284: DeepNet scales V, not Q and K."""
    whole = DEEPNET | {"q": DEEPNET["v"], "k": DEEPNET["v"]}
    first, second = projection_sentences(layers_of(whole, fused=True))
    for matrix, said in (("q", first), ("k", second)):
        assert said.startswith(f"attn {matrix} of layers 0-3: std is 0.2")
        assert "of Xavier's, 1 declared" in said
        assert said.endswith("as if with the factor of o, v, the fused matrix scaled whole")


def test_xavier_of_a_whole_fused_matrix_is_told_apart():
    small = {n: s * (0.5**0.5 if n in "qkv" else 1.0) for n, s in DEEPNET.items()}
    said = projection_sentences(layers_of(small, fused=True))
    assert [words.split(" of")[0] for words in said] == ["attn q", "attn k", "attn v"]
    assert all(words.endswith("as if Xavier's of the whole fused matrix") for words in said)


def test_beta_with_the_wrong_sign_of_its_exponent_is_told_apart():
    """Mix-LN and LayerNorm-Scaling repositories: gain (8L)^(+1/4)."""
    wrong = {n: XAVIER[n] * (1.0 if n in "qk" else 1 / BETA) for n in XAVIER}
    said = projection_sentences(layers_of(wrong))
    assert len(said) == 4
    for words in said:
        assert f"{BETA:.4g} declared" in words
        assert words.endswith("the reciprocal, as if its exponent had the wrong sign")


def test_beta_forgotten_is_told_apart():
    said = projection_sentences(layers_of(XAVIER))
    assert len(said) == 4 and all(words.endswith("as if not scaled at all") for words in said)


def test_one_layer_of_another_size_is_named():
    layers = layers_of(DEEPNET)
    layers["mlp"]["up"][2] *= 1.5
    (words,) = projection_sentences(layers)
    assert words.startswith("mlp up of layer 2: std is ")


def test_error_too_small_for_one_layer_is_seen_in_all_together():
    """8 % is 3.6 standard errors of 1/sqrt(2 * 1024), and twice as many in four layers."""
    layers = layers_of(DEEPNET)
    layers["attn"]["q"] *= 1.08
    found = [p for p in wiring.projection_gains(layers, DEEPNET) if p.matrix == "q"]
    assert all(abs(wiring._standard_errors([p])) < wiring.SIGMAS for p in found)
    (words,) = projection_sentences(layers)
    assert words.startswith("attn q of layers 0-3: std is 1.0")


def test_fused_matrix_of_another_shape_is_refused():
    for shape in ((2, 8, 25), (2, 8, 3, 8)):
        with pytest.raises(UserError, match="attn/qkv"):
            wiring.projection_gains({"attn": {"qkv": np.ones(shape)}}, DEEPNET)


def test_wiring_enters_without_flax_model_or_training():
    done = tiny.python(
        "-c",
        "import sys, normstudy.wiring; "
        "print([n for n in ('flax', 'optax', 'normstudy.model', 'normstudy.train') "
        "if n in sys.modules])",
    )
    assert done.stdout.strip() == "[]", done.stderr
