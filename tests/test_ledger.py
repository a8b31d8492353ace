"""The rules of the ledger, each on runs whose verdict is plain to see; intervals against scipy."""

import itertools
import math
import random

import claims_tables as made
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from claims_tables import DENSE, RATES, USUAL, probe, probes, ramp, run, runs
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from normstudy import config, evidence, ledger, norms
from normstudy.ledger import NOT, ONLY_IF, OPEN, SUPPORTED

EMPTY = {"runs": [], "probes": [], "checks": [], "ramp": []}


def case(claim="C0", **tables):
    return ledger.Case(claim, **(EMPTY | tables))


def judged(claim, **tables):
    """(verdict, {name: number}) of one claim."""
    own = case(claim, **tables)
    verdict, measured, n = ledger.CLAIMS[claim][1](own)
    assert measured and n >= 0
    return verdict, {number.name: number for number in own.numbers}


def verdict(claim, **tables):
    return judged(claim, **tables)[0]


BOOTSTRAP = ledger._bootstrap


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No intervals in the table of M1, which take a second; they have a test of their own."""
    monkeypatch.setattr(ledger, "_bootstrap", lambda *_: (0.0, 1.0))


@pytest.fixture(scope="module")
def whole():
    """Tables of every arm of experiments/claims.py, as the ledger takes them."""
    claims = tiny.experiment("claims")
    options = claims.Options(parts=",".join(claims.PARTS))
    tables = made.whole(claims.arms_of(options, config.PRESETS["cpu"]))
    kept = {name: tables[name] for name in ("runs", "probes", "checks")}
    return kept | {"ramp": evidence.read(made.RAMP.parent, made.RAMP.stem)}


# ----------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_interval_of_k_of_n_is_clopper_and_pearson_s(n):
    for k in range(n + 1):
        rows = runs("post", words=" ".join(["trained"] * k + ["stalled"] * (n - k)))
        rows = [row | {"seed": seed} for seed, row in enumerate(rows[:n])]
        k_found = sum(row["outcome"] == "trained" for row in rows)
        found = case().count("k of n", rows, ("trained",), "here")
        exact = stats.binomtest(k_found, n).proportion_ci(method="exact")
        # scipy inverts the same distribution by a root search, good to 1e-12
        assert (found.low, found.high) == pytest.approx(tuple(exact), abs=1e-9)
        assert (found.text, found.value, found.n) == (f"{k_found} of {n}", k_found / n, n)


def test_share_of_no_seeds_is_anything():
    found = case().count("none", [], ("trained",), "here")
    assert math.isnan(found.value) and (found.low, found.high, found.n) == (0, 1, 0)


def test_mean_is_geometric_and_its_interval_is_student_s_in_the_logarithm():
    found = case().mean("x", np.exp([1.0, 2.0, 3.0]), "here")
    # of the logs: mean 2, standard deviation 1; t(0.975, 2) = 4.302653, over sqrt(3): 2.484138
    expected = np.exp([2, 2 - 2.484138, 2 + 2.484138])
    assert (found.value, found.low, found.high) == pytest.approx(tuple(expected), rel=1e-5)
    values = np.random.default_rng(0).lognormal(size=7)
    found, logs = case().mean("x", values, "here"), np.log(values)
    interval = stats.t.interval(0.95, 6, np.mean(logs), stats.sem(logs))
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(interval)), rel=1e-12)
    assert found.value == pytest.approx(stats.gmean(values), rel=1e-12)
    assert found.n == 7


def test_one_seed_has_a_value_and_no_interval():
    found = case().mean("x", [4.0, None], "here")
    assert found.value == pytest.approx(4) and found.n == 1
    assert math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(case().mean("x", [], "here").value)


small = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(small, small)
def test_area_counts_the_pairs_that_are_ordered_rightly(bad, good):
    pairs = list(itertools.product(bad, good))
    rightly = sum((a > b) + (a == b) / 2 for a, b in pairs)
    assert ledger.area(bad, good) == pytest.approx(rightly / len(pairs), abs=1e-12)
    u = (
        stats.mannwhitneyu(bad, good, method="asymptotic").statistic
        if len({*bad, *good}) > 1
        else 0
    )
    if u:
        assert ledger.area(bad, good) == pytest.approx(u / len(pairs), abs=1e-12)
    assert ledger.area(good, bad) == pytest.approx(1 - ledger.area(bad, good), abs=1e-12)


# --------------------------------------------------------------------------------- operating rate


def test_operating_rate_is_the_largest_at_which_pre_norm_trains_for_every_seed():
    grid = [row for lr in RATES for row in runs("pre", lr, "trained" if lr < 0.2 else "diverged")]
    assert case(runs=grid).rate == 0.1
    spiked = [*grid, *runs("pre", 0.5, "spiked trained trained")]
    assert case(runs=spiked).rate == 0.5
    assert case(runs=[*grid, *runs("pre", 0.5, "trained undecided trained")]).rate == 0.1
    assert case(runs=runs("pre", words="trained stalled")).rate is None


# ----------------------------------------------------------------------------------- C1 and C3


def test_c1_is_an_identity_of_equations_but_for_the_final_norm():
    assert verdict("C1", checks=made.one_line(final=0)) == SUPPORTED
    found = verdict("C1", checks=made.one_line(final=1))
    assert found.startswith(ONLY_IF) and "final norm" in found


@pytest.mark.parametrize("wrong", [{"wiring": 1}, {"other": 2}, {"lines": 0}])
def test_c1_is_not_supported_where_more_differs_or_nothing_does(wrong):
    assert verdict("C1", checks=made.one_line(final=0, **wrong)) == NOT


def test_c3_is_an_identity_in_float64():
    found, numbers = judged("C3", checks=made.identity(1e-14, 3e-13))
    assert found == SUPPORTED
    assert numbers["norm identity"].value == 3e-13 and numbers["norm identity"].n == 2
    assert verdict("C3", checks=made.identity(1e-14, 1e-6)) == NOT


# ------------------------------------------------------------------------------------------ C2

DEPTHS = (6, 12, 24, 48, 96, 192)


def over_depth(ratio, depths=DEPTHS, top=lambda L: L**-0.5):
    return [
        row
        for L in depths
        for row in probes(f"start: pre, {L} blocks", gradient_ratio=ratio(L), top_gradient=top(L))
    ]


def test_c2_is_supported_where_the_ratio_does_not_grow_with_depth():
    found, numbers = judged("C2", probes=over_depth(lambda L: 3.0))
    slope = numbers["pre ratio slope"]
    assert found == SUPPORTED and slope.low < 0 < slope.high
    # the top's exponent is exact, its jitter is the same at all depths
    assert numbers["pre top slope"].value == pytest.approx(-0.5, abs=1e-9)


def test_c2_has_a_condition_for_a_power_of_depth_and_none_for_an_exponential():
    found, numbers = judged("C2", probes=over_depth(lambda L: L**0.4))
    assert found.startswith(ONLY_IF) and "power" in found
    assert numbers["pre ratio slope"].value == pytest.approx(0.4, abs=1e-9)
    assert verdict("C2", probes=over_depth(lambda L: math.exp(L / 30))) == NOT
    assert verdict("C2", probes=over_depth(lambda L: L**1.5)) == NOT


def test_c2_asks_for_three_depths():
    assert verdict("C2", probes=over_depth(lambda L: 3.0, depths=(6, 48))) == OPEN


# ------------------------------------------------------------------------------------- C4 and C5


def starts(**ratios):
    """Tables of starts whose gradient ratio is given: {law and embedding: ratio}."""
    named = {f"start: post, {what}": ratio for what, ratio in ratios.items()}
    return {
        "runs": [row for name in named for row in runs(name, words="undecided", steps=1)],
        "probes": [
            row for name, ratio in named.items() for row in probes(name, gradient_ratio=ratio)
        ],
    }


@pytest.mark.parametrize("ratio", [30.0, 1 / 30])
def test_c4_is_supported_by_a_bottom_gradient_too_large_or_too_small_at_every_start(ratio):
    found, numbers = judged("C4", **starts(xavier=ratio, kaiming=ratio))
    assert found == SUPPORTED
    assert numbers["ratio xavier"].value == pytest.approx(ratio, rel=1e-3)  # JITTER's own mean
    assert numbers["ratio xavier"].n == 3


def test_c4_names_the_starts_at_which_it_holds():
    found = verdict("C4", **starts(xavier=3, kaiming=100, small=0.001))
    assert found.startswith(ONLY_IF)
    assert "kaiming" in found and "small" in found and "xavier" not in found


def test_c4_is_not_supported_by_ratios_within_a_factor_of_ten():
    assert verdict("C4", **starts(xavier=3, kaiming=0.5)) == NOT
    # 10.05 times JITTER: the interval holds 10
    assert verdict("C4", **starts(xavier=10.05)) == NOT


def test_c4_asks_nothing_of_other_depths():
    tables = starts(**{"6 blocks": 1000})
    assert verdict("C4", **tables) == OPEN


def variances(**shares):
    """Probes of starts: {law: (branch share, norm factor)}."""
    return [
        row
        for law, (share, factor) in shares.items()
        for row in probes(
            f"start: post, {law}, unit embedding", branch_share=share, norm_factor=factor
        )
    ]


def test_c5_is_supported_by_branches_with_a_share_that_norms_take_back():
    assert verdict("C5", probes=variances(xavier=(0.5, 0.8), kaiming=(2, 0.6))) == SUPPORTED


@pytest.mark.parametrize("none", [(0.01, 0.99), (0.5, 1.0), (0.5, 1.5)])
def test_c5_is_not_supported_where_a_norm_has_nothing_to_take_back(none):
    assert verdict("C5", probes=variances(xavier=none, kaiming=none)) == NOT
    assert verdict("C5", probes=variances(xavier=(0.5, 0.8), kaiming=none)).startswith(ONLY_IF)


def test_c5_asks_for_both_laws():
    assert verdict("C5", probes=variances(xavier=(0.5, 0.8))) == OPEN


# ------------------------------------------------------------------------------------------ C6

PRE = [*runs("pre", 0.1), *runs("pre", 0.32, "diverged")]


@pytest.mark.parametrize(
    "words, at_step, expected",
    [
        ("diverged", 100, SUPPORTED),
        ("diverged", 300, SUPPORTED),
        ("diverged", 301, NOT),
        ("trained", 60, NOT),
        ("diverged diverged trained", 100, NOT),
        ("diverged diverged undecided", 100, NOT),
        ("stalled", 301, NOT),
    ],
)
def test_c6_is_supported_by_divergence_of_all_seeds_within_300_updates(words, at_step, expected):
    post = runs("post", 0.1, words, at_step=at_step)
    assert verdict("C6", runs=[*PRE, *post]) == expected


@pytest.mark.parametrize("words", ["stalled", "collapsed", "diverged stalled collapsed"])
def test_c6_says_that_the_word_is_wrong_where_learning_ends_in_another_way(words):
    found, numbers = judged("C6", runs=[*PRE, *runs("post", 0.1, words)])
    assert found.startswith(ONLY_IF) and "unigram" in found
    assert numbers["operating rate"].value == 0.1
    assert (
        numbers["post stalled"].text == f"{words.count('stalled') * 3 // len(words.split())} of 3"
    )
    assert numbers["post latest death"].value == 60


def test_c6_looks_at_the_operating_rate_and_is_open_without_it():
    dead = runs("post", words="diverged")  # at another rate
    assert verdict("C6", runs=[*PRE, *dead]) == OPEN
    assert verdict("C6", runs=[*runs("pre", words="stalled"), *dead]) == OPEN


# ------------------------------------------------------------------------------------------ C7


def first_update(sigma: float, x: float):
    """Probes in which post-norm's first update does so many times what pre-norm's does."""
    plain = {"loss_change": -0.1, "loss_change_predicted": -0.2}
    many = {"sigma_update_mean": 0.02 * sigma, "function_update": 0.02 * x}
    post = [probe("post", seed=i, **plain, **many) for i in range(3)]
    own = {"sigma_update_mean": 0.02, "function_update": 0.02}
    pre = probes("pre", **own)
    return post + [row | plain for row in pre]


def test_c7_compares_the_first_update_of_both_in_the_seeds_that_both_have():
    found, numbers = judged("C7", probes=[*first_update(10, 10), probe("pre", seed=9)])
    assert found == SUPPORTED
    # JITTER's geometric mean differs from 1 by 1.3e-4
    assert numbers["first sigma post over pre"].value == pytest.approx(10, rel=1e-3)
    assert numbers["first sigma post over pre"].n == 3
    # half of the prediction came true: off by half of it
    assert numbers["first miss post"].value == pytest.approx(0.5)


def test_c7_says_where_the_output_moves_and_the_denominators_do_not():
    found = verdict("C7", probes=first_update(0.5, 10))
    assert found.startswith(ONLY_IF) and "output" in found
    assert verdict("C7", probes=first_update(0.5, 0.5)) == NOT
    assert verdict("C7", probes=first_update(1.0, 1.0)) == NOT  # an interval with 1 in it


def test_c7_asks_for_both_placements():
    one = [row for row in first_update(10, 10) if row["recipe"] == "post"]
    assert verdict("C7", probes=one) == OPEN


# ------------------------------------------------------------------------------------------ C8

DAMPED = "pre, skip x 1/sqrt(2)"


def tolerance(damped: str, ramps, pre="trained"):
    rows = [*runs("pre", words=pre), *(runs(DAMPED, words=damped) if damped else [])]
    return {"runs": rows, "ramp": ramps}


FAR = [*ramp("pre", 0.4, 0.3), *ramp("post", None, 0.01)]


def test_c8_is_supported_where_pre_norm_bears_more_and_fails_without_its_identity_path():
    found, numbers = judged("C8", **tolerance("stalled", FAR))
    assert found == SUPPORTED
    assert numbers["ramp pre"].value == pytest.approx(math.sqrt(0.4 * 0.3))
    assert numbers["ramp post never"].text == "1 of 2"
    assert numbers["damped trains"].text == "0 of 3"


def test_c8_leaves_the_cause_out_where_the_damped_path_bears_the_same():
    found = verdict("C8", **tolerance("trained", FAR))
    assert found.startswith(ONLY_IF) and "identity path" in found


def test_c8_is_not_supported_where_post_norm_bears_as_much():
    assert verdict("C8", **tolerance("stalled", [*ramp("pre", 0.4), *ramp("post", 0.4)])) == NOT


def test_c8_is_open_where_seeds_disagree_or_something_was_not_run():
    assert verdict("C8", **tolerance("stalled trained", FAR)) == OPEN
    assert verdict("C8", **tolerance("stalled", FAR, pre="stalled")) == OPEN
    assert verdict("C8", **tolerance("", FAR)) == OPEN
    assert verdict("C8", **tolerance("stalled", [])) == OPEN


def test_c8_without_a_ramp_of_post_norm_has_nothing_to_compare():
    assert verdict("C8", **tolerance("stalled", ramp("pre", 0.4))) == OPEN


def test_c8_is_not_supported_where_pre_norm_trains_at_no_rate_of_the_ramp():
    never = [*ramp("pre", None, None), *ramp("post", 0.01)]
    assert verdict("C8", **tolerance("stalled", never)) == NOT


def test_c8_looks_at_48_blocks_or_else_at_the_deepest():
    deep = [*FAR, *ramp("post", 0.9, layers=96), *ramp("pre", 0.1, layers=96)]
    assert verdict("C8", **tolerance("stalled", deep)) == SUPPORTED
    only = [row for row in deep if row["layers"] != 48]
    assert verdict("C8", **tolerance("stalled", only)) == NOT


# --------------------------------------------------------------------------------- C9, C10, C11


def test_c9_names_the_schedules_at_which_all_seeds_train():
    known = [*runs("post+2017, warmup 200", 0.0125), *runs("post+inverse-sqrt", 0.1, "stalled")]
    found, numbers = judged("C9", runs=known)
    assert found.startswith(ONLY_IF) and "2017" in found and "inverse-sqrt" not in found
    assert {number.text for number in numbers.values()} == {"3 of 3", "0 of 3"}
    assert verdict("C9", runs=known[:3]) == SUPPORTED
    assert verdict("C9", runs=known[3:]) == NOT
    assert verdict("C9", runs=runs("post+2017, warmup 25", 0.03, "trained stalled")) == NOT
    assert verdict("C9", runs=runs("post+warmup")) == OPEN


def test_c10_counts_lengths_of_warmup_where_none_fails():
    bare = [*runs("post", 0.001, "stalled"), *runs("post", 0.0032, "stalled")]
    low, high = runs("post+warmup 50", 0.001), runs("post+warmup", 0.0032, "stalled")
    assert verdict("C10", runs=[*bare, *low]) == SUPPORTED
    found = verdict("C10", runs=[*bare, *low, *high])
    assert found.startswith(ONLY_IF) and "0.001" in found and "0.0032" not in found
    assert verdict("C10", runs=[*bare, *high]) == NOT
    assert verdict("C10", runs=runs("post+2017, warmup 200")) == OPEN


def test_c10_does_not_count_warmup_where_none_is_needed():
    """Half the gain trains at 3.2e-4 without; that it trains with warmup as well tells nothing."""
    idle = [*runs("post, half gain", 3.2e-4), *runs("post, half gain+warmup 50", 3.2e-4)]
    needed = [*runs("post", 0.001, "stalled"), *runs("post+warmup", 0.001, "stalled")]
    assert verdict("C10", runs=[*idle, *needed]) == NOT
    assert verdict("C10", runs=idle) == OPEN


def test_c11_has_the_step_of_the_grid_that_opens_a_window_for_its_condition():
    window = [
        *runs("post", 3.2e-4),
        *runs("post", 0.001, "stalled"),
        *runs("post", 0.0032, "stalled"),
    ]
    found = verdict("C11", runs=window)
    assert found.startswith(ONLY_IF) and "from 0.001 to 0.00032 (post)" in found
    dead = [row | {"outcome": "stalled"} for row in window]
    assert verdict("C11", runs=dead) == NOT
    assert verdict("C11", runs=runs("pre")) == OPEN


def test_c11_tells_how_failure_moves_with_the_rate():
    slow, fast = (
        runs("post", 0.001, "stalled", at_step=90),
        runs("post", 0.1, "stalled", at_step=20),
    )
    _, measured, _ = ledger.c11(case("C11", runs=[*fast, *slow]))
    assert "from step 90 at the lowest" in measured and "from 20 at the highest" in measured


# ------------------------------------------------------------------------------------ C12, C13

FIXES = pytest.mark.parametrize("claim, fix", [("C12", "post+1/sqrt(2L)"), ("C13", "deepnet")])


@FIXES
def test_fix_is_supported_where_it_trains_at_pre_norms_largest_rate_without_warmup(claim, fix):
    assert verdict(claim, runs=[*PRE, *runs(fix, 0.1)]) == SUPPORTED
    assert verdict(claim, runs=[*PRE, *runs(fix, 0.1), *runs(fix, 0.32, "diverged")]) == SUPPORTED


@FIXES
def test_fix_that_bears_less_or_needs_warmup_is_supported_only_so_far(claim, fix):
    dead = runs(fix, 0.1, "stalled stalled trained")
    warm = runs(f"{fix}+warmup", 0.1)
    found, numbers = judged(claim, runs=[*PRE, *dead, *runs(fix, 0.01), *warm])
    assert found.startswith(ONLY_IF)
    assert "0.01 or 0.1 with warmup" in found and "pre-norm's largest: 0.1" in found
    assert numbers[f"{fix} 0.1"].text == "1 of 3"
    assert numbers[f"{fix}+warmup largest"].value == 0.1
    assert verdict(claim, runs=[*PRE, *warm]).startswith(ONLY_IF)


@FIXES
def test_fix_that_trains_at_no_rate_is_not_supported(claim, fix):
    dead = [*runs(fix, 0.1, "stalled"), *runs(f"{fix}+warmup", 0.1, "collapsed trained")]
    assert verdict(claim, runs=[*PRE, *dead]) == NOT


@FIXES
def test_fix_is_open_where_it_or_pre_norm_was_not_run(claim, fix):
    assert verdict(claim, runs=PRE) == OPEN
    assert verdict(claim, runs=runs(fix, 0.1)) == OPEN


# ----------------------------------------------------------------------------------------- C14


def blocks(post=(0.3, 0.9), **fixes):
    """Tables of (least cosine, |J - P| over |P|) at step 0: of post-norm and of both fixes."""
    width, found = 32, {"runs": [], "probes": []}
    named = {"post+1/sqrt(2L)": fixes["scaled"], "deepnet": fixes["deepnet"]} if fixes else {}
    for recipe, (cosine, distance) in {"post": post, **named}.items():
        away = math.sqrt(distance**2 * (1 - 2 / width) + 2 / width)
        found["runs"] += runs(recipe, width=width)
        found["probes"] += [
            probe(recipe, seed=seed, cosine_to_next=cosine, minus_identity=away)
            for seed in range(3)
        ]
    return found


CLOSE, TURNED, FAR_AWAY = (0.99, 0.2), (0.9, 0.2), (0.99, 0.5)


def test_c14_asks_for_a_cosine_and_for_a_jacobian():
    assert verdict("C14", **blocks(scaled=CLOSE, deepnet=CLOSE)) == SUPPORTED
    for off in (TURNED, FAR_AWAY):
        found = verdict("C14", **blocks(scaled=CLOSE, deepnet=off))
        assert found.startswith(ONLY_IF) and "1/sqrt(2L)" in found
        found = verdict("C14", **blocks(scaled=off, deepnet=CLOSE))
        assert found.startswith(ONLY_IF) and "DeepNet" in found
        assert verdict("C14", **blocks(scaled=off, deepnet=off)) == NOT
    assert verdict("C14", **blocks()) == OPEN


def test_c14_is_not_supported_by_a_fix_one_of_whose_seeds_turns_the_stream_round():
    """A negative cosine is the farthest from the identity there is; it must not go unseen."""
    tables = blocks(scaled=CLOSE, deepnet=CLOSE)
    for row in tables["probes"]:
        if row["recipe"] != "post" and row["seed"] == 0:
            row["cosine_to_next"] = -0.5
    assert verdict("C14", **tables) == NOT


def test_c14_is_supported_by_blocks_that_are_the_projector_itself():
    """An estimate may lie below 2/D, and a distance of 0 is the closest there is."""
    tables = blocks(scaled=CLOSE, deepnet=CLOSE)
    for row in tables["probes"]:
        row["minus_identity"] = 0.99 * math.sqrt(2 / 32)
    assert verdict("C14", **tables) == SUPPORTED


def test_c14_measures_the_distance_from_the_norms_projector(x64):
    """|J - 1|^2 = |J - P|^2 + 2/D for J of norm(x + f(x)), P the norm's projector, a share of D."""
    width = 16
    x, A = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(width,), (width, width)])
    )
    block = lambda x: norms.layer_norm(x + 0.1 * A @ x, 0.0)[0]
    J, y = np.asarray(jax.jacrev(block)(x)), np.asarray(block(x))
    P = np.eye(width) - np.full((width, width), 1 / width) - np.outer(y, y) / (y @ y)
    away, distance, projector = (np.linalg.norm(own) ** 2 for own in (J - np.eye(width), J - P, P))
    # float64; a few hundred terms
    assert away == pytest.approx(distance + 2, rel=1e-12)
    tables = blocks(scaled=CLOSE, deepnet=CLOSE)
    for name in ("runs", "probes"):
        for row in tables[name]:
            row |= (
                {"width": width} if name == "runs" else {"minus_identity": math.sqrt(away / width)}
            )
    _, numbers = judged("C14", **tables)
    found = numbers["block distance post"].value
    assert found == pytest.approx(math.sqrt(distance / projector), rel=1e-12)
    assert jnp.asarray(0.0).dtype == jnp.float64  # that it was float64


# ------------------------------------------------------------------------------------ C15, C16


def test_c15_is_a_block_that_passes_x_on_where_its_branches_are_0():
    assert verdict("C15", checks=made.gpt2(0.0)) == SUPPORTED
    assert verdict("C15", checks=made.gpt2(0.1)) == NOT
    assert verdict("C15", checks=made.one_line()) == OPEN


def early(relation, lr=USUAL, seeds=3):
    """Probes of post-norm in which the gradient ratio is a relation of the norm factor."""
    factors = (0.9, 0.7, 0.8, 0.5, 0.6, 0.3, 0.4)
    return [
        probe("post", lr, seed, step, norm_factor=f, gradient_ratio=relation(f, i))
        for seed in range(seeds)
        for i, (f, step) in enumerate(zip(factors, DENSE, strict=False))
    ]


LOOSE = (1, 7, 2, 4, 6, 5, 3)  # ranks with little relation to those of the factors


def related(f, i):
    return f**-3


def unrelated(f, i):
    return float(LOOSE[i])


def test_c16_is_supported_by_a_relation_of_either_sign_in_every_seed():
    found, numbers = judged("C16", probes=early(related))
    assert found == SUPPORTED
    (number,) = numbers.values()
    assert number.value == pytest.approx(-1, abs=2e-3)  # clipped at 0.999
    assert verdict("C16", probes=early(lambda f, i: f**2)) == SUPPORTED


def test_c16_is_not_supported_without_relation_and_says_at_which_rate_there_is_one():
    assert verdict("C16", probes=early(unrelated)) == NOT
    both = [*early(related), *early(unrelated, 0.1)]
    assert verdict("C16", runs=PRE, probes=both).startswith(ONLY_IF)


def test_c16_asks_for_two_seeds_and_looks_at_the_first_300_updates():
    assert verdict("C16", probes=early(related, seeds=1)) == OPEN
    late = [row | {"step": row["step"] + 301} for row in early(related)]
    assert verdict("C16", probes=late) == OPEN


# ------------------------------------------------------------------------------------------ M1

FAIL, FINE = ("post", "post, b1 0", "post, clip 1"), ("pre", "deepnet", "post, half gain")


def apart(steps=DENSE, failure=60, **columns):
    """Six recipes of three seeds, three of them fail. columns: {name: (fails, step, rng) -> value};
    every other scalar is the same in all of them."""
    rng = np.random.default_rng(0)
    rows = {"runs": [], "probes": []}
    for recipe in (*FAIL, *FINE):
        fails = recipe in FAIL
        rows["runs"] += runs(recipe, words="stalled" if fails else "trained", at_step=failure)
        rows["probes"] += [
            probe(
                recipe,
                USUAL,
                seed,
                step,
                **{n: own(fails, step, rng) for n, own in columns.items()},
            )
            for seed, step in itertools.product(range(3), steps)
        ]
    return rows


def at_once(fails, step, rng):
    return rng.uniform(2, 3) if fails else rng.uniform(0, 1)


def from_10(fails, step, rng):
    return at_once(fails and step >= 10, step, rng)


def only_at_10(fails, step, rng):
    return at_once(fails and step == 10, step, rng)


def noise(fails, step, rng):
    return rng.uniform(0, 1)


def led(**columns):
    """{quantity: its row in leads.csv}, and M1's verdict."""
    tables = apart(**columns)
    found = {row["quantity"]: row for row in ledger.leads(case("M1", **tables))}
    return found, verdict("M1", **tables)


def test_m1_the_quantity_that_tells_runs_apart_from_the_first_step_on_leads():
    found, said = led(similarity=at_once, update_ratio=noise, function_update=from_10)
    assert said == "token similarity leads, by 60 updates"
    row = found["similarity"]
    assert (row["leads_from"], row["lead"], row["at_start"]) == (0, 60, 1.0)
    assert (row["runs"], row["failed"], row["failure"]) == (18, 9, 60)
    row = found["function_update"]
    assert (row["leads_from"], row["lead"]) == (10, 50) and row["at_start"] < ledger.TELLS
    assert found["update_ratio"]["leads_from"] is None


def test_m1_what_tells_from_step_10_on_leads_from_10_if_nothing_does_before():
    _, said = led(function_update=from_10, update_ratio=noise)
    assert said == "change of x_L by an update leads, by 50 updates"


def test_m1_what_tells_at_one_step_alone_does_not_lead():
    found, said = led(similarity=only_at_10)
    assert found["similarity"]["leads_from"] is None
    assert "10:1.000" in found["similarity"]["areas"]
    assert said == NOT


def test_m1_a_tie_is_told_as_one():
    found, said = led(similarity=at_once, update_ratio=at_once)
    assert said.startswith("no single one: ") and "token similarity" in said
    assert "update over weights" in said
    assert found["similarity"]["lead"] == found["update_ratio"]["lead"] == 60


def test_m1_a_small_value_is_the_bad_one_of_some_quantities():
    small = lambda fails, step, rng: 1 / at_once(fails, step, rng)
    found, said = led(query_share=small, skip_gain=at_once)
    assert said.startswith("gradient of queries and keys leads")
    assert found["skip_gain"]["at_start"] == 0  # it tells them apart, the wrong way round


def test_m1_a_ratio_is_bad_either_way():
    """By turns far above and far below 1 where the run fails."""
    sides = itertools.cycle((1, -1))
    either = lambda fails, step, rng: 10.0 ** (next(sides) * at_once(fails, step, rng))
    found, _ = led(gradient_ratio=either)
    assert found["gradient_ratio"]["leads_from"] == 0
    gone = lambda fails, step, rng: 0.0 if fails else 0.5
    assert led(gradient_ratio=gone)[0]["gradient_ratio"]["leads_from"] == 0


def test_m1_probes_after_the_failure_count_neither_way():
    lost = lambda fails, step, rng: at_once(fails and step <= 60, step, rng)
    found, _ = led(similarity=lost)
    assert found["similarity"]["leads_from"] == 0
    assert "100:" not in found["similarity"]["areas"]


def test_m1_is_open_without_runs_that_fail_or_without_runs_that_train():
    tables = apart(similarity=at_once)
    for word in ("stalled", "trained", "undecided"):
        alike = [row | {"outcome": word} for row in tables["runs"]]
        assert verdict("M1", runs=alike, probes=tables["probes"]) == OPEN


@pytest.mark.parametrize(
    "other",
    [
        {"warmup": 200},
        {"optimizer": "sgd"},
        {"schedule": "inverse_sqrt"},
        {"lr": 0.1},
        {"steps": 1},
    ],
)
def test_m1_sees_the_whole_adam_runs_at_1e_3_without_warmup_alone(other):
    tables = apart(similarity=at_once)
    tables["runs"] += [run("other", seed=i, word="stalled", at_step=5) | other for i in range(30)]
    tables["probes"] += [probe("other", seed=i, similarity=-1.0) for i in range(30)]
    (row,) = (row for row in ledger.leads(case(**tables)) if row["quantity"] == "similarity")
    assert (row["runs"], row["failure"], row["at_start"]) == (18, 60, 1.0)


def test_m1_interval_holds_the_area_and_is_the_same_each_time(monkeypatch):
    monkeypatch.setattr(ledger, "_bootstrap", BOOTSTRAP)
    half = lambda fails, step, rng: rng.uniform(0.5, 1.5) if fails else rng.uniform(0, 1)
    tables = apart(steps=(0,), similarity=half)
    rows = ledger.leads(case(**tables)), ledger.leads(case(**tables))
    found, again = (next(r for r in own if r["quantity"] == "similarity") for own in rows)
    assert 0 <= found["low"] < found["at_start"] < found["high"] <= 1
    assert (found["low"], found["high"]) == (again["low"], again["high"])


def test_m1_a_quantity_that_is_not_a_number_in_a_failing_run_tells_that_it_fails():
    broken = lambda fails, step, rng: math.nan if fails else rng.uniform(0, 1)
    for column in ("similarity", "jacobian_bottom", "query_share"):
        assert led(**{column: broken})[0][column]["at_start"] == 1


def test_m1_of_a_quantity_few_runs_were_probed_for_says_how_few():
    tables = apart(edge_ratio=at_once)
    for row in tables["probes"]:
        if row["recipe"] not in ("pre", "post"):
            row["edge_ratio"] = None
    (row,) = (row for row in ledger.leads(case(**tables)) if row["quantity"] == "edge_ratio")
    assert (row["runs"], row["failed"]) == (6, 3)


# ---------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("claim", ledger.CLAIMS)
def test_claim_without_data_is_open(claim):
    assert verdict(claim) == OPEN


@pytest.mark.parametrize("claim", ["C4", "C5", "C7"])
def test_one_seed_has_no_interval_and_speaks_against_nothing(claim):
    """However large the effect: a rule that asks for an interval is open without one."""
    tables = {
        "C4": starts(xavier=1e6, kaiming=1e6),
        "C5": {"probes": variances(xavier=(0.5, 0.8), kaiming=(0.5, 0.8))},
        "C7": {"probes": first_update(1e3, 1e3)},
    }[claim]
    one = {name: [row for row in rows if row["seed"] == 0] for name, rows in tables.items()}
    assert verdict(claim, **one) == OPEN


def test_claims_are_those_of_the_statement_in_its_order():
    assert list(ledger.CLAIMS) == [*(f"C{i}" for i in range(1, 17)), "M1"]


def test_every_number_has_a_name_of_its_own_and_a_source(whole):
    verdicts, numbers, _ = ledger.of(whole)
    assert [own.claim for own in verdicts] == list(ledger.CLAIMS)
    names = [number.name for number in numbers]
    assert len(set(names)) == len(names) > 150
    for number in numbers:
        assert number.source and number.text and number.claim in {*ledger.CLAIMS, "all"}, number
        # what \val{NAME} can ask for, see paper.USES
        assert not set(number.name) & set("{}#\n\\%"), number
        if not math.isnan(number.low):
            rounding = 1e-9 * abs(number.value)  # the mean of equal logarithms is off by one
            assert number.low - rounding <= number.value <= number.high + rounding, number


def test_every_verdict_is_one_of_four_kinds_but_m1_s_that_names_a_quantity(whole):
    for own in ledger.of(whole)[0]:
        plain = own.verdict in (SUPPORTED, NOT, OPEN)
        named = own.claim == "M1" and "lead" in own.verdict
        assert plain or own.verdict.startswith(ONLY_IF) or named, own
        assert own.n > 0 and own.measured and own.conditions


@pytest.mark.parametrize("seed", range(3))
def test_order_of_the_runs_changes_no_verdict(whole, seed):
    mixed = {name: random.Random(seed).sample(rows, len(rows)) for name, rows in whole.items()}
    before, after = ledger.of(whole), ledger.of(mixed)
    assert [(own.claim, own.verdict, own.n) for own in before[0]] == [
        (own.claim, own.verdict, own.n) for own in after[0]
    ]
    there, here = ({number.name: number for number in own[1]} for own in (before, after))
    assert there.keys() == here.keys()
    for name, number in there.items():
        # sums in another order: a few roundings
        assert here[name].value == pytest.approx(number.value, rel=1e-9, nan_ok=True), name


def test_no_part_of_the_runs_that_is_missing_raises(whole):
    """As in the folder of a shard, which sums up what it has: any recipe, rate, seed or table."""
    lost = []
    for column in ("recipe", "lr", "seed"):
        for value in {row[column] for row in whole["runs"]}:
            for keep in (False,) if column == "recipe" else (False, True):
                kept = {
                    name: [row for row in whole[name] if (row[column] == value) is keep]
                    for name in ("runs", "probes")
                }
                lost.append((f"{column} {value}, {keep}", whole | kept))
    lost += [(f"no {name}", whole | {name: []}) for name in whole]
    for placement in ("pre", "post"):
        rows = [row for row in whole["ramp"] if row["placement"] != placement]
        lost.append((f"no ramp of {placement}", whole | {"ramp": rows}))
    wrong = []
    for what, tables in lost:
        for claim, (_, rule, _) in ledger.CLAIMS.items():
            try:
                rule(ledger.Case(claim, **tables))
            except Exception as error:
                wrong.append(f"{claim} with {what}: {error!r}")
    assert not wrong


def test_ledger_of_a_folder_is_written_from_its_tables(whole, tmp_path):
    evidence.write(tmp_path, {name: whole[name] for name in ("runs", "probes", "checks")})
    told = ledger.write(tmp_path, made.RAMP)
    assert [row["claim"] for row in told] == list(ledger.CLAIMS)
    back = evidence.read(tmp_path, "claims")
    assert [row["verdict"] for row in back] == [row["verdict"] for row in told]
    assert {row["claim"] for row in evidence.read(tmp_path, "numbers")} <= {*ledger.CLAIMS, "all"}
    assert [row["quantity"] for row in evidence.read(tmp_path, "leads")]
