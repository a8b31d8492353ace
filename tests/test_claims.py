"""Arms of the claims study: each differs by what its name says; and what is checked by no run."""

import csv
import importlib
import itertools
import json
import math
import re
import shutil

import claims_tables as made
import jax
import pytest
import tiny

from normstudy import cli, config, evidence, frames, ledger, programs, study, theory
from normstudy.errors import UserError
from normstudy.placements import PLACEMENTS

claims = tiny.experiment("claims")

BASE = config.PRESETS["cpu"]
USUAL, L = claims.USUAL, BASE.model.layers
PLACEMENT = {"pre": "pre", "post": "post", "deepnet": "deepnorm"}  # of a recipe's first word


def arms(*parts, base=BASE):
    """{name: run} of these parts, of all where none is named."""
    options = claims.Options(parts=",".join(parts or claims.PARTS))
    found = claims.arms_of(options, base)
    return {name: config.override(base, **arm(base)) for name, arm in found.items()}


def named(part):
    """{recipe: runs} of a part."""
    found = {}
    for name, run in arms(part).items():
        found.setdefault(name.rpartition(" lr ")[0], []).append(run)
    return found


def unlike(a, b):
    """Names of the fields in which two runs differ."""
    return set(config.differences(a, b))


# ------------------------------------------------------------------------------------ all parts


# asked twice, once among the depths and once among the laws of init: a start costs one update
SAME = {"start: post, 48 blocks lr 0.001", "start: post, xavier, unit embedding lr 0.001"}


@pytest.mark.parametrize("preset", config.PRESETS)
def test_every_arm_is_a_run_of_its_own_and_is_called_by_its_rate(preset):
    found = arms(base=config.PRESETS[preset])
    for name, run in found.items():
        recipe, _, rate = name.rpartition(" lr ")
        assert recipe and rate == f"{run.optim.lr:g}"
    assert len({study.slug(name) for name in found}) == len(found)  # each has its folder
    twins = [
        names for names in itertools.combinations(found, 2) if found[names[0]] == found[names[1]]
    ]
    assert [set(names) for names in twins] == [SAME]


def test_arms_of_several_parts_are_those_of_each():
    every = arms()
    each = {}
    for part in claims.PARTS:
        for name, run in arms(part).items():
            assert each.setdefault(name, run) == run, name  # in two parts: the same run
    assert each == every


def test_no_arm_changes_what_is_the_same_for_all():
    fixed = ("width", "heads", "ff", "context", "vocab", "activation", "norm", "dtype", "corpus",
             "batch", "data_seed", "seed", "vectors", "probe_batch", "stop_after")  # fmt: skip
    for name, run in arms().items():
        assert not unlike(run, BASE) & set(fixed), name


@pytest.mark.parametrize("heading", ["\nCommand  ", "\nTime  ", "\nExpect  ", "\nParts\n"])
def test_card_says_command_time_and_expectation(heading):
    assert heading in claims.__doc__


def test_card_tells_what_every_part_is_and_of_no_other():
    told = claims.__doc__.partition("\nParts\n")[2]
    assert tuple(re.findall(r"^  (\w+)  ", told, re.M)) == claims.PARTS


def test_all_parts_but_the_long_one_are_run_by_default():
    assert claims.Options().asked == [part for part in claims.PARTS if part != "long"]
    assert claims.Options(parts=" start , grid").asked == ["start", "grid"]


def test_part_that_does_not_exist_is_refused(no_start, tmp_path):
    with pytest.raises(UserError, match=r"unknown part 'gird'.*grid"):
        claims.arms_of(claims.Options(parts="grid,gird"), BASE)
    argv = ["--preset", "smoke", "--parts", "gird", "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="unknown part 'gird'"):
        claims.main(argv)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- the grid


def test_recipes_are_those_of_the_ledger_in_its_order():
    assert tuple(claims.RECIPES) == ledger.RECIPES
    assert claims.USUAL == ledger.USUAL


def test_rates_are_half_decades_with_the_presets_and_adams_default_among_them():
    steps = [b / a for a, b in itertools.pairwise(claims.RATES)]
    assert steps == pytest.approx([math.sqrt(10)] * 6, rel=0.03)  # two digits
    assert {USUAL, BASE.optim.lr} < set(claims.RATES) and len(claims.RATES) == 7


def test_grid_has_every_recipe_at_every_rate_and_pre_norm_alone_at_the_largest():
    found = named("grid")
    assert list(found) == list(ledger.RECIPES)
    for recipe, runs in found.items():
        rates = claims.RATES if recipe == "pre" else claims.RATES[:-1]
        assert tuple(run.optim.lr for run in runs) == rates


@pytest.mark.parametrize("recipe", claims.RECIPES)
def test_recipe_is_what_its_name_says_and_nothing_else(recipe):
    first, *others = recipe.split("+")
    said = {
        "placement": PLACEMENT[first],
        "depth_scaled": "1/sqrt(2L)" in others,
        "warmup": BASE.optim.warmup if "warmup" in others else 0,
    }
    assert BASE.optim.warmup > 0 and set(others) <= {"1/sqrt(2L)", "warmup"}
    for run in named("grid")[recipe]:
        own = config.override(BASE, lr=run.optim.lr, **said)
        assert unlike(run, own) <= {"probe_once", "curvature"}


def test_pre_norm_and_post_norm_differ_in_the_placement_alone():
    """The refactor, at every rate at which both are run."""
    found = named("grid")
    pairs = list(zip(found["pre"], found["post"], strict=False))
    assert len(pairs) == len(claims.RATES) - 1
    for pre, post in pairs:
        assert unlike(pre, post) == {"placement"}


@pytest.mark.parametrize("warm", ["", "+warmup"])
def test_fix_differs_from_post_norm_in_one_field_with_warmup_and_without(warm):
    found = named("grid")
    for bare, other in zip(found[f"post{warm}"], found[f"post+1/sqrt(2L){warm}"], strict=True):
        assert unlike(bare, other) - {"curvature"} == {"depth_scaled"}
    for bare, other in zip(found[f"post{warm}"], found[f"deepnet{warm}"], strict=True):
        assert unlike(bare, other) - {"curvature"} == {"placement"}


def test_two_rates_are_probed_along_the_run_and_the_others_once():
    closely = {USUAL, BASE.optim.lr}
    for recipe, runs in named("grid").items():
        for run in runs:
            assert run.probe.probe_once is (run.optim.lr not in closely), recipe
            assert run.probe.probe_every == BASE.probe.probe_every


def test_curvature_is_followed_at_adams_default_in_the_story_and_nowhere_else():
    for name, run in arms().items():
        recipe, _, rate = name.rpartition(" lr ")
        followed = recipe in ("pre", "post", "deepnet") and rate == "0.001"
        assert run.probe.curvature is followed, name


# -------------------------------------------------------------------- schedules, warmups, long


def test_schedules_are_the_one_of_2017_at_its_own_rate_and_one_at_the_peak_of_the_others():
    found = named("schedules")
    at_peak = found.pop("post+inverse-sqrt")
    assert [run.optim.lr for run in at_peak] == [USUAL, BASE.optim.lr]
    assert {run.optim.schedule for run in at_peak} == {"inverse_sqrt"}
    assert {run.optim.warmup for run in at_peak} == {BASE.optim.warmup}
    assert len(found) == 2
    for recipe, (run,) in found.items():
        warmup = int(recipe.removeprefix("post+2017, warmup "))
        assert (run.optim.schedule, run.optim.warmup) == ("inverse_sqrt_2017", warmup)
        peak = (run.model.width * warmup) ** -0.5
        assert run.optim.lr == pytest.approx(peak, rel=0.05)  # two digits
        assert run.model.placement == "post"


def test_warmups_are_as_long_as_they_say_and_half_the_gain_is_half():
    for recipe, runs in named("warmups").items():
        plain, _, warmup = recipe.partition("+warmup")
        assert tuple(run.optim.lr for run in runs) == claims.AROUND
        for run in runs:
            assert run.optim.warmup == int(warmup or 0)
            half = plain == "post, half gain"
            assert run.init.gain == BASE.init.gain / (2 if half else 1)
            changed = {"lr", "warmup", "probe_once"} | ({"gain"} if half else set())
            assert unlike(run, BASE) <= changed


def test_long_runs_have_4000_updates_of_warmup_as_the_claim_words_it():
    for recipe, runs in named("long").items():
        assert recipe.endswith("warmup 4000")
        for run in runs:
            assert (run.optim.warmup, run.steps, run.model.placement) == (4000, 5000, "post")


# ------------------------------------------------------------------------------------ the start


def test_starts_are_one_update_of_every_depth_law_and_embedding():
    found = named("start")
    depths = {}
    for recipe, (run,) in found.items():
        assert (run.steps, run.optim.warmup, run.optim.lr) == (1, 0, USUAL)
        placement, _, said = recipe.removeprefix("start: ").partition(", ")
        assert run.model.placement == placement
        if said.endswith(" blocks"):
            depths.setdefault(placement, []).append(run.model.layers)
            assert said == f"{run.model.layers} blocks"
            changed = {"steps", "warmup", "lr", "placement", "layers"}
        else:
            law, _, embedding = said.rpartition(", ")
            assert (run.init.embed_std == 0.02) is (embedding == "embedding 0.02")
            assert (run.init.init == "kaiming") is (law == "kaiming")
            assert (run.init.init == "normal") is (law == "normal 0.02")
            assert run.init.depth_scaled is (law == "xavier, 1/sqrt(2L)")
            changed = {"steps", "warmup", "lr", "init", "depth_scaled", "embed_std"}
            changed |= {"embed_multiplier"}
        assert unlike(run, BASE) <= changed
    assert depths == {name: [6, 12, 24, 48, 96, 192] for name in ("pre", "post")}
    assert len(found) == 2 * 6 + 4 * 2


# ------------------------------------------------------------------------------- the ablations

# beside which recipe an ablation stands, and the fields in which it differs from it
ALONE = {
    "post, embedding 0.02": ("post", {"embed_std", "embed_multiplier"}),  # its size is both
    "post, ds-init": ("post", {"placement"}),
    "post, four matrices (2L)^-1/4": ("post", {"beta"}),
    "post, DeepNet's beta alone": ("post", {"beta"}),
    "deepnet, its alpha alone": ("deepnet", {"beta"}),
    "post, half gain": ("post", {"gain"}),
    "post, frozen norms": ("post", {"frozen"}),
    "post+1/sqrt(2L), frozen norms": ("post+1/sqrt(2L)", {"frozen"}),
    "post, b2 0.95": ("post", {"b2"}),
    "post, b1 0": ("post", {"b1"}),
    "post, clip 1": ("post", {"clip"}),
    "post, eps 1e-3": ("post", {"eps"}),
    "post, SGD 0.1": ("post", {"optimizer", "lr"}),  # Adam's rate is none of SGD's
    "pre, SGD 0.1": ("pre", {"optimizer", "lr"}),
    "post, SGD 1": ("post", {"optimizer", "lr"}),
    "pre, SGD 1": ("pre", {"optimizer", "lr"}),
    "pre, skip x 1/sqrt(2)": ("pre", {"placement"}),
    "pre, skip x 1/sqrt(2), warmup": ("pre", {"placement", "warmup"}),
    "post, o x 1/sqrt(2L)": ("post", {"placement"}),
    "post, down x 1/sqrt(2L)": ("post", {"placement"}),
    "post, o x 1/sqrt(2L), down x 2": ("post", {"placement"}),
    "post, o x 1/sqrt(2L), down x 3": ("post", {"placement"}),
    "pre, o x 10": ("pre", {"placement"}),
}


@pytest.mark.parametrize("recipe", claims.ablations(BASE))
def test_ablation_differs_from_its_recipe_in_what_its_name_says_alone(recipe):
    (run,) = named("ablations")[recipe]
    beside, fields = ALONE[recipe]
    plain = config.override(BASE, lr=USUAL, **claims.RECIPES[beside])
    assert unlike(run, plain) == fields
    number = recipe.rpartition(" ")[2]
    if len(fields - {"placement"}) == 1 and re.fullmatch(r"[\d.]+(e-\d)?", number):
        (field,) = fields
        assert config.fields_of(run)[field] == float(number)


def test_every_ablation_is_told_of_here():
    assert set(ALONE) == set(claims.ablations(BASE))


def test_sizes_of_the_ablations_are_those_of_their_names():
    found = {recipe: run for recipe, (run,) in named("ablations").items()}
    deepnet = theory.deepnorm_decoder(L)
    assert found["post, DeepNet's beta alone"].init.beta == deepnet.beta
    assert found["post, four matrices (2L)^-1/4"].init.beta == (2 * L) ** -0.25
    # the row multiplies by its beta; what is left is 1 but for a rounding
    alone = found["deepnet, its alpha alone"].init.beta * deepnet.beta
    assert alone == pytest.approx(1, rel=1e-12)
    assert found["post, half gain"].init.gain == 0.5
    assert found["post, eps 1e-3"].optim.eps == 1e-3
    for name in ("0.1", "1"):
        for placement in ("pre", "post"):
            assert found[f"{placement}, SGD {name}"].optim.lr == float(name)
    warm = found["pre, skip x 1/sqrt(2), warmup"]
    assert warm.optim.warmup == BASE.optim.warmup


def test_smaller_embedding_is_gpt_2_s_without_the_factor_of_2017():
    run = config.override(BASE, **claims.SMALL)
    assert (run.init.embed_std, run.model.embed_multiplier) == (0.02, 1.0)


# ------------------------------------------------------------------- the row of the table's own


def test_rows_of_the_ablations_are_in_the_table_within_and_only_there():
    before = dict(PLACEMENTS)
    assert claims.DAMPED in claims.ROWS and not claims.ROWS.keys() & before.keys()
    with claims.with_ablations():
        assert list(PLACEMENTS) == [*before, *claims.ROWS]
    assert before == PLACEMENTS


def test_rows_of_the_ablations_are_gone_after_an_error():
    with pytest.raises(ZeroDivisionError), claims.with_ablations():
        _ = 1 / 0
    assert not claims.ROWS.keys() & PLACEMENTS.keys()


def test_every_row_of_the_ablations_is_run():
    assert claims.ROWS.keys() <= {run.model.placement for run in arms("ablations").values()}


def test_damped_row_is_pre_norm_with_less_of_the_skip_path():
    """x / sqrt(2) + f(N(x)), and a final norm as in pre-norm."""
    pre, damped = PLACEMENTS["pre"], claims.ROWS[claims.DAMPED]
    assert damped.norms == pre.norms and damped.final_norm == pre.final_norm
    norm = type("Norms", (), {"pre": staticmethod(lambda x: 10 * x)})
    constants = damped.constants(48)
    assert constants.alpha == pytest.approx(math.sqrt(0.5), rel=1e-12)
    value = damped.equation(2.0, lambda x: x + 1, norm, constants)
    assert value == pytest.approx(2 * math.sqrt(0.5) + 21, rel=1e-12)


@pytest.mark.parametrize("recipe, matrix", [("post, o x 1/sqrt(2L)", "o"),
                                            ("post, down x 1/sqrt(2L)", "down")])  # fmt: skip
def test_one_branch_is_made_as_small_as_1_sqrt_2L_makes_it_and_the_other_is_not(recipe, matrix):
    (run,) = named("ablations")[recipe]
    plain, scaled = (
        programs.standard_deviations(config.override(BASE, **claims.RECIPES[name]))
        for name in ("post", "post+1/sqrt(2L)")
    )
    with claims.with_ablations():
        own = programs.standard_deviations(run)
    assert own == plain | {matrix: scaled[matrix]}
    assert scaled[matrix] != plain[matrix]


@pytest.mark.parametrize("recipe, factors", [
    ("post, o x 1/sqrt(2L), down x 2", {"o": 1 / math.sqrt(2 * L), "down": 2}),
    ("post, o x 1/sqrt(2L), down x 3", {"o": 1 / math.sqrt(2 * L), "down": 3}),
    ("pre, o x 10", {"o": 10}),
])  # fmt: skip
def test_branches_are_as_large_as_the_name_says(recipe, factors):
    (run,) = named("ablations")[recipe]
    plain = programs.standard_deviations(config.override(BASE, **claims.RECIPES["post"]))
    with claims.with_ablations():
        own = programs.standard_deviations(run)
    changed = {name: factor * plain[name] for name, factor in factors.items()}
    assert own == pytest.approx(plain | changed, rel=1e-6)  # float32


# -------------------------------------------------------------------------------------- checks


@pytest.fixture
def no_torch(monkeypatch):
    """Whether it is installed or not: to load it takes longer than all that is tested here."""
    load = importlib.import_module

    def import_module(name, *others):
        if name in ("torch", "transformers"):
            raise ImportError(name)
        return load(name, *others)

    monkeypatch.setattr(claims.importlib, "import_module", import_module)


def test_checks_hold_for_the_models_of_the_package(no_torch, one_device, capsys):
    base = config.override(config.PRESETS["smoke"], layers=2, seed=3)
    rows = claims.checks(base, seeds=(3, 4))
    assert {row["claim"] for row in rows} == {"C1", "C3"}
    assert "transformers is not installed" in capsys.readouterr().err
    found = {row["check"]: row for row in rows if row["claim"] == "C1"}
    for name in ("wiring findings, pre", "wiring findings, post"):
        assert found[name]["value"] == 0, found[name]["says"]
    other = found["parameters that differ, norms aside"]
    assert other["value"] == 0, other["says"]
    assert found["a final norm beside pre-norm alone"]["value"] == 1
    assert found["equations that differ"]["value"] == 1
    assert " | " in found["equations that differ"]["says"]
    assert [row["seed"] for row in rows if row["claim"] == "C3"] == [3, 4]
    for row in rows:
        assert row["claim"] == "C1" or 0 < row["value"] < ledger.EXACT
    tables = {"runs": [], "probes": [], "ramp": [], "checks": rows}
    assert ledger.c1(ledger.Case("C1", **tables))[0].startswith(ledger.ONLY_IF)
    assert ledger.c3(ledger.Case("C3", **tables))[0] == ledger.SUPPORTED
    assert ledger.c15(ledger.Case("C15", **tables))[0] == ledger.OPEN


@pytest.mark.parametrize("seed", [0, 7, 400])
def test_identity_of_the_norm_holds_for_any_seed(seed):
    assert claims._norm_jacobian(seed)["value"] < ledger.EXACT


def test_checks_tell_of_another_parameter_in_one_of_the_placements(one_device, monkeypatch):
    """That they would see one: post-norm is given keel's norms and a wider MLP."""
    base = config.override(config.PRESETS["smoke"], layers=2)
    override = config.override

    def wider(run, **changes):
        more = {"ff": 2 * run.model.ff} if changes.get("placement") == "post" else {}
        return override(run, **changes, **more)

    monkeypatch.setattr(claims.config, "override", wider)
    found = {row["check"]: row for row in claims._one_line(base)}
    other = found["parameters that differ, norms aside"]
    assert other["value"] > 0 and "mlp.up" in other["says"]


# --------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "option, value", [("lr", "0.05"), ("placement", "deepnorm")]
)  # each arm has its own
def test_option_that_every_arm_sets_is_refused(no_start, tmp_path, option, value):
    argv = ["--preset", "smoke", f"--{option}", value, "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=f"--{option} would do nothing"):
        claims.main(argv)


@pytest.mark.parametrize(
    "options",
    [["--width", "16"], ["--steps", "800"], ["--warmup", "100"], ["--seed", "3"],
     ["--batch", "8"], ["--checkpoint-every", "400"], ["--probe-every", "50"]],
)  # fmt: skip
def test_option_that_changes_an_arm_is_taken(options):
    argv = ["--preset", "cpu", *options]
    parsed, base = cli.parse_own(claims.Options(), argv, "card")
    found = claims.arms_of(parsed, base)
    assert cli.chosen_arms(parsed, base, found) == list(found)


@pytest.mark.parametrize("name", ["post lr 0.001", "post, half gain lr 0.001"])
def test_arm_can_be_chosen_by_its_name_whether_it_has_a_comma_or_not(name):
    argv = ["--preset", "cpu", "--arms", f"{name};pre lr 0.01"]
    parsed, base = cli.parse_own(claims.Options(), argv, "card")
    found = cli.chosen_arms(parsed, base, claims.arms_of(parsed, base))
    assert found == [name, "pre lr 0.01"]


CHOSEN = "pre, skip x 1/sqrt(2) lr 0.001"  # of a row that is in no other table


def command(out, *options):
    """The command, on one tiny arm."""
    argv = [
        "--preset", "smoke", "--layers", "2", "--width", "8", "--heads", "2", "--ff", "16",
        "--context", "8", "--steps", "6", "--eval-batches", "1", "--no-draw", "--arms", CHOSEN,
        "--out", str(out), *options,
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims.runtime, "start", lambda **_: None)
        checks = lambda *_: made.one_line() + made.identity(1e-14)  # have a test above
        patch.setattr(claims, "checks", checks)
        patch.setattr(jax, "device_count", lambda: 1)
        claims.main(argv)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("claims") / "out"
    command(out)
    return out


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_command_leaves_the_tables_and_the_ledger(ran):
    folder = ran / evidence.FOLDER
    (run,) = rows(folder / "runs.csv")
    assert (run["recipe"], run["placement"]) == ("pre, skip x 1/sqrt(2)", claims.DAMPED)
    assert (run["outcome"], run["steps"], run["layers"]) == ("undecided", "6", "2")
    assert [row["claim"] for row in rows(folder / "claims.csv")] == list(ledger.CLAIMS)
    assert all(row["source"] for row in rows(folder / "numbers.csv"))
    assert not (folder / "layers.csv").exists()  # of the recipes of the grid alone
    about = {row["what"]: row["value"] for row in rows(folder / "study.csv")}
    assert about["preset"] == "smoke" and about["width"] == "8" and about["seeds"] == "1"
    assert about["command"].startswith("python experiments/claims.py")
    assert {"code", "version of jax", "steps"} <= about.keys()


def test_code_that_runs_were_added_by_is_told(ran, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(ran, out)
    (path,) = out.glob("arms/*/*/config.json")
    identity = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(identity | {"code": "abcdef0123456789"}), encoding="utf-8")
    command(out)
    about = {row["what"]: row["value"] for row in rows(out / evidence.FOLDER / "study.csv")}
    assert about["code"].split("; ")[1] == "abcdef0123456789"
    assert about["commit"].endswith("; abcdef0123")


def test_scalars_ask_for_names_that_real_logs_have(ran):
    """A name that is misspelt in evidence.py gives None, and nobody would miss it."""
    probes = rows(ran / evidence.FOLDER / "probes.csv")
    assert [row["step"] for row in probes] == ["0", "1", "2", "3", "5"]
    for row in probes:
        missing = {name for name, value in row.items() if not value}
        assert missing == {"edge_ratio"}  # for which the curvature must be asked
        assert float(row["update_ratio"]) > 0 and 0 < float(row["query_share"]) < 1
    (logs,) = frames.load(ran)
    assert set(evidence.LAYERS) <= logs.probes[0].keys()


def test_seeds_are_added_to_tables_of_the_same_study_and_of_no_other(ran, tmp_path):
    """A study of several sessions or machines; what it was made by is told of each."""
    folder = tmp_path / "tables"
    shutil.copytree(ran / evidence.FOLDER, folder)
    options = ["--seed", "1", "--tables", str(folder), "--add"]
    command(tmp_path / "out", *options)
    assert [(row["seed"], row["steps"]) for row in rows(folder / "runs.csv")] == [
        ("0", "6"), ("1", "6")
    ]  # fmt: skip
    before, after = (rows(own / "probes.csv") for own in (ran / evidence.FOLDER, folder))
    assert after[: len(before)] == before and {row["seed"] for row in after[5:]} == {"1"}
    about = {row["what"]: row["value"] for row in rows(folder / "study.csv")}
    first, second = about["command"].split("; ")
    assert about["seeds"] == "2" and "--seed 1" in second and "--seed" not in first
    assert ";" not in about["version of jax"]
    # once more: what is there already is not told twice
    command(tmp_path / "out", *options)
    assert len(rows(folder / "runs.csv")) == 2
    for row in (study := rows(folder / "study.csv")):
        row["value"] = "77" if row["what"] == "width" else row["value"]
    evidence.write(folder, {"study": study})
    with pytest.raises(UserError, match=r"another study: width 77 there, 8 here"):
        command(tmp_path / "out", *options)
    assert len(rows(folder / "runs.csv")) == 2


def test_without_add_tables_are_those_of_the_folder_alone(ran, tmp_path):
    folder = tmp_path / "tables"
    shutil.copytree(ran / evidence.FOLDER, folder)
    command(tmp_path / "out", "--seed", "1", "--tables", str(folder))
    assert [row["seed"] for row in rows(folder / "runs.csv")] == ["1"]
