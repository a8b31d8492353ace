"""Standard deviations at step 0: by role, by hand, and as drawn; the same bits on every mesh."""

import jax
import numpy as np
import pytest
import tiny

from normstudy import config, inits, programs, theory
from normstudy.placements import PLACEMENTS

CFG = config.Model(layers=8, width=64, heads=4, ff=256, vocab=256, context=16)


def over_xavier(init: config.Init, beta: float = 1.0, cfg: config.Model = CFG) -> dict[str, float]:
    return inits.gains_over_xavier(cfg, inits.standard_deviations(cfg, init, beta))


def test_xavier_std_by_role():
    found = inits.standard_deviations(CFG, config.Init(), 1.0)
    square, rectangle = (2 / 128) ** 0.5, (2 / 320) ** 0.5
    expected = dict.fromkeys(("q", "k", "v", "o"), square)
    expected |= dict.fromkeys(("up", "down"), rectangle)
    expected |= dict.fromkeys(("embed", "positions", "readout"), 64**-0.5)
    assert found == pytest.approx(expected, rel=1e-15)


def test_kaiming_takes_fan_in_alone():
    found = inits.standard_deviations(CFG, config.Init(init="kaiming"), 1.0)
    assert found["up"] == theory.kaiming_std(64)
    assert found["down"] == theory.kaiming_std(256)
    assert found["q"] == theory.kaiming_std(64)


def test_beta_scales_v_o_up_down_and_never_q_k():
    found = over_xavier(config.Init(), beta=0.25)
    assert found == pytest.approx({"q": 1, "k": 1, "v": 0.25, "o": 0.25, "up": 0.25, "down": 0.25})


def test_beta_of_the_config_multiplies_that_of_the_placement():
    found = over_xavier(config.Init(beta=0.5), beta=0.25)
    assert found == pytest.approx({"q": 1, "k": 1} | dict.fromkeys(("v", "o", "up", "down"), 0.125))


def test_depth_scale_reaches_o_and_down_alone():
    found = over_xavier(config.Init(depth_scaled=True))
    quarter = 1 / 4  # 1 / sqrt(2 * 8)
    assert found == pytest.approx({"q": 1, "k": 1, "v": 1, "o": quarter, "up": 1, "down": quarter})


def test_gain_scales_every_branch_matrix_and_nothing_else():
    plain = inits.standard_deviations(CFG, config.Init(), 1.0)
    halved = inits.standard_deviations(CFG, config.Init(gain=0.5), 1.0)
    ratios = {name: halved[name] / plain[name] for name in plain}
    branch = dict.fromkeys(("q", "k", "v", "o", "up", "down"), 0.5)
    assert ratios == pytest.approx(branch | dict.fromkeys(("embed", "positions", "readout"), 1.0))


def test_factors_multiply():
    found = over_xavier(config.Init(gain=0.5, depth_scaled=True), beta=0.1)
    assert found["o"] == pytest.approx(0.5 * 0.25 * 0.1)
    assert found["v"] == pytest.approx(0.5 * 0.1)
    assert found["q"] == pytest.approx(0.5)


def test_embed_std_sets_both_tables_and_not_the_readout():
    found = inits.standard_deviations(CFG, config.Init(embed_std=0.3), 1.0)
    assert (found["embed"], found["positions"], found["readout"]) == (0.3, 0.3, 64**-0.5)


def test_std_0_02_is_an_init_gain_of_its_own_at_every_width():
    """GPT-2's 0.02 is 0.16 of Xavier at width 64, but 0.55 to 0.64 at GPT-2's widths."""

    def gain(width: int) -> float:
        cfg = config.Model(width=width, heads=1, ff=4 * width)
        return over_xavier(config.Init(init="normal", init_std=0.02), cfg=cfg)["q"]

    assert gain(64) == pytest.approx(0.16, rel=1e-12)
    assert all(0.55 < gain(width) < 0.64 + 1e-12 for width in (768, 896, 1024))


def test_describe_groups_equal_gains():
    stds = inits.standard_deviations(CFG, config.Init(depth_scaled=True), 1.0)
    assert inits.describe(CFG, stds) == "q k v up 1, o down 0.25 x Xavier std"


@pytest.mark.parametrize("name", list(PLACEMENTS))
def test_beta_of_the_row_enters_the_run(name):
    run = tiny.run(placement=name, layers=12)
    beta, scales = PLACEMENTS[name].constants(12).beta, PLACEMENTS[name].init(12)
    stds = programs.standard_deviations(run)
    for role, factor in (("v", beta), ("q", 1.0)):
        expected = theory.xavier_std(8, 8) * factor * scales.get(role, 1.0)
        np.testing.assert_allclose(stds[role], expected, rtol=1e-12)


@pytest.fixture(scope="module")
def drawn(wide):
    """{mesh: state at step 0} of one run, compiled with the optimizations of a real one."""
    optimized = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    found = {}
    for name, run in wide.items():
        args = jax.random.key(run.seed), programs.standard_deviations(run)
        program = programs.of(run)[0].init.lower(*args).compile(optimized)
        found[name] = program(*args)
    return found


def test_parameters_are_drawn_with_the_std_of_their_role(wide, drawn):
    stds = programs.standard_deviations(wide["data"])
    for path, leaf in tiny.leaves(drawn["data"].model).items():
        role = path.split("/")[-1]
        if role in stds:
            # standard error of a sample std: 1 / sqrt(2 n); five of them, and of a mean
            assert leaf.std() == pytest.approx(stds[role], rel=5 / np.sqrt(2 * leaf.size)), path
            assert abs(leaf.mean()) < 5 * stds[role] / np.sqrt(leaf.size), path
            assert abs(leaf / stds[role]).max() > 2.5, path  # a normal law, not a uniform one
        else:
            assert (leaf == (role == "scale")).all(), path


def test_layers_are_drawn_independently(drawn):
    q = tiny.leaves(drawn["data"].model)["layers/attn/q"]
    k = tiny.leaves(drawn["data"].model)["layers/attn/k"]
    for a, b in ((q[0], q[1]), (q[0], k[0])):
        # correlation of n independent pairs: 1 / sqrt(n), five of them
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


def test_parameters_are_bit_equal_on_every_mesh(drawn):
    assert not drawn["mixed"].model.layers.attn.f.q[...].sharding.is_fully_replicated
    assert not drawn["fsdp"].model.layers.attn.f.q[...].sharding.is_fully_replicated
    tiny.assert_bit_equal(drawn["data"], drawn["mixed"])
    tiny.assert_bit_equal(drawn["data"], drawn["fsdp"])


def test_another_seed_gives_other_parameters(wide, drawn):
    run = config.override(wide["data"], seed=1)
    other = programs.initial_state(run, programs.of(run)[0])
    for path, leaf in tiny.leaves(other.model).items():
        same = tiny.leaves(drawn["data"].model)[path]
        assert (leaf == same).all() == path.endswith(("scale", "bias")), path
