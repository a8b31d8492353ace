"""Settings: round trip, refusals, unique names; which rooms start without jax."""

import dataclasses
import json

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from normstudy import config
from normstudy.errors import UserError


@settings(max_examples=50, deadline=None)
@given(
    layers=st.integers(1, 10_000),
    lr=st.floats(1e-30, 1e30),
    warmup=st.integers(0, 400),
    tied=st.booleans(),
    embed_std=st.none() | st.floats(1e-9, 1e9),
    corpus=st.text(min_size=1, max_size=20),
    schedule=st.sampled_from(["constant", "wsd", "inverse_sqrt_2017"]),
    seed=st.integers(0, 2**40),
)
def test_json_round_trip_gives_the_same_run(**changes):
    run = config.override(config.Run(), **changes)
    assert config.from_json(config.to_json(run)) == run


@pytest.mark.parametrize("name", list(config.PRESETS))
def test_every_preset_survives_the_round_trip(name):
    run = config.PRESETS[name]
    assert config.from_json(config.to_json(run)) == run


def test_field_names_are_unique_over_sections():
    names = []
    for field in dataclasses.fields(config.Run):
        section = getattr(config.Run(), field.name)
        if dataclasses.is_dataclass(section):
            names += [f.name for f in dataclasses.fields(section)]
        else:
            names.append(field.name)
    assert sorted(names) == sorted(set(names))
    assert sorted(config.fields_of(config.Run())) == sorted(names)


def test_unknown_field_lists_the_valid_ones_and_the_nearest():
    with pytest.raises(UserError) as error:
        config.override(config.Run(), warmupp=3)
    assert "'warmupp'" in str(error.value) and "Did you mean 'warmup'" in str(error.value)
    for name in config.fields_of(config.Run()):
        assert name in str(error.value)


def test_unknown_section_of_a_file_names_the_file():
    with pytest.raises(UserError, match=r"run/config\.json"):
        config.from_json('{"modell": {"layers": 3}}', where="run/config.json")


def test_unknown_field_of_a_file_is_refused():
    with pytest.raises(UserError, match="n_layers"):
        config.from_json('{"model": {"n_layers": 3}}')


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"x"'])
def test_text_that_is_no_json_object_names_the_file(text):
    with pytest.raises(UserError, match=r"some\.json is not valid JSON"):
        config.from_json(text, where="some.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 2.5},
        {"layers": "2"},
        {"layers": True},
        {"layers": None},
        {"lr": "fast"},
        {"tied": 1},
        {"placement": 3},
        {"embed_std": "wide"},
        {"schedule": 5},
        {"optimizer": None},
    ],
)
def test_value_of_another_type_names_its_field(changes):
    (name,) = changes
    with pytest.raises(UserError, match=name):
        config.override(config.Run(), **changes)


def test_whole_number_passes_as_a_float():
    run = config.override(config.Run(), lr=1, embed_std=2)
    assert (run.optim.lr, run.init.embed_std) == (1.0, 2.0)
    assert type(run.optim.lr) is float


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0}, {"width": -4}, {"lr": 0.0}, {"lr": float("nan")}, {"steps": 0},
        {"warmup": -1}, {"val_fraction": 0.0}, {"val_fraction": 1.0}, {"b1": 1.0}, {"b2": -0.1},
        {"vectors": 1}, {"stop_after": -1}, {"gain": 0.0}, {"batch": 0}, {"clip": -1.0},
        {"checkpoint_every": 0}, {"norm_eps": 0.0}, {"seed": -1},
    ],
)  # fmt: skip
def test_value_out_of_range_names_its_field(changes):
    (name,) = changes
    with pytest.raises(UserError, match=name):
        config.override(config.Run(), **changes)


def test_unknown_choice_lists_the_choices():
    with pytest.raises(UserError, match="constant, linear, cosine, wsd, inverse_sqrt"):
        config.override(config.Run(), schedule="triangle")


def test_heads_must_divide_width_and_the_message_says_which_do():
    with pytest.raises(UserError, match="heads that divide it: 1, 2, 3, 4, 6, 12"):
        config.Model(width=12, heads=5)


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match="warmup 9 is longer than the run of 8 steps"):
        tiny.run(warmup=9)
    assert tiny.run(warmup=8).optim.warmup == 8


def test_override_leaves_the_original_and_the_other_fields():
    base = config.Run()
    changed = config.override(base, lr=0.5, layers=3, steps=7)
    assert base == config.Run()
    assert config.differences(base, changed) == {
        "lr": (base.optim.lr, 0.5), "layers": (48, 3), "steps": (400, 7)
    }  # fmt: skip


def test_configs_are_frozen_and_hashable():
    assert hash(config.Run()) == hash(config.Run())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.Run().model.layers = 3  # type: ignore[misc]


def test_json_holds_every_field():
    tree = json.loads(config.to_json(config.Run()))
    assert set(tree) == {field.name for field in dataclasses.fields(config.Run)}
    assert set(tree["model"]) == {field.name for field in dataclasses.fields(config.Model)}


def test_presets_study_48_layers():
    assert {run.model.layers for run in config.PRESETS.values()} == {48}
    assert set(config.PRESETS) == {"smoke", "cpu", "gpu", "tpu"}


def test_figures_and_records_import_no_jax():
    rooms = (
        "config", "theory", "record", "corpus", "placements", "outcome", "frames", "tables",
        "sentences", "figures", "report", "roles", "errors",
    )  # fmt: skip
    code = (
        f"import sys\nfor room in {rooms}: __import__('normstudy.' + room)\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'jax', 'jaxlib', 'flax', 'optax', 'orbax'}))"
    )
    done = tiny.python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
