"""Arms: folders, skipping, what is summed up and what is never averaged."""

import json

import pytest
import tiny

from normstudy import frames, quantities, record, study, train
from normstudy.errors import UserError


def row(arm="a", seed=0, outcome="trained", **values):
    plain = {"arm": arm, "seed": seed, "outcome": outcome, "at_step": 10, "best_loss": 2.0,
             "why": "", "stopped_because": ""}  # fmt: skip
    return plain | values


def test_medians_are_taken_over_seeds_that_agree():
    rows = [row(seed=s, best_loss=loss) for s, loss in enumerate([2.0, 2.2, 2.1])]
    found = study.by_arm(rows)["a"]
    assert (found["outcome"], found["seeds"], found["best_loss"]) == ("trained", 3, 2.1)
    assert found["runs"] == rows


def test_dead_seed_is_never_averaged():
    rows = [row(), row(seed=1, outcome="collapsed", best_loss=9.0), row(seed=2)]
    found = study.by_arm(rows)["a"]
    assert (found["outcome"], found["seeds"]) == ("mixed", 3)
    assert sorted(found["outcomes"].values()) == [1, 2]
    assert found["best_loss"] is None and found["at_step"] is None


def test_missing_number_makes_no_median():
    assert study.by_arm([row(), row(seed=1, best_loss=None)])["a"]["best_loss"] is None


def test_arms_keep_their_order():
    assert list(study.by_arm([row("b"), row("a"), row("b", seed=1)])) == ["b", "a"]


@pytest.mark.parametrize(
    "name, folder",
    [
        ("post+1/sqrt(2L)", "post-1-sqrt-2l"),
        ("pre at 0.001", "pre-at-0.001"),
        ("deepnet", "deepnet"),
    ],
)
def test_slug_is_a_folder_name(name, folder):
    assert study.slug(name) == folder


def test_study_folder_holds_one_folder_an_arm_and_seed(drawn_study):
    out, rows = drawn_study
    assert sorted(str(p.relative_to(out)) for p in out.glob("arms/*/*")) == [
        "arms/00-post/seed0", "arms/01-post-blows-up/seed0", "arms/02-pre/seed0"
    ]  # fmt: skip
    assert [found["arm"] for found in rows] == ["post", "post/blows-up", "pre"]
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["arms"]) == ["post", "post/blows-up", "pre"]
    assert summary["arms"]["post/blows-up"]["outcome"] == "diverged"


def test_finished_arms_are_skipped(drawn_study, monkeypatch):
    out, _ = drawn_study
    logs = {path: path.read_bytes() for path in out.glob("arms/*/*/*.jsonl")}
    monkeypatch.setattr(train, "_loop", lambda *args: pytest.fail("trained again"))
    runs = study.run_arms(tiny.run(), tiny.ARMS, ["pre", "post"], 1, out, "test")
    assert [run.name for run in runs] == ["post", "pre"]
    assert {path: path.read_bytes() for path in logs} == logs


@pytest.fixture
def trained(monkeypatch):
    """Which jobs run_arms trains, without training them: [(arm, seed, folder)]."""
    jobs = []

    def together(group, may_change=(), keep=0):
        jobs.extend((job.name, job.run.seed, job.folder) for job in group)

    monkeypatch.setattr(train, "together", together)
    monkeypatch.setattr(frames, "load", lambda out: [])
    return jobs


def test_shards_are_disjoint_and_complete(trained, tmp_path):
    parts = []
    for shard in ((0, 3), (1, 3), (2, 3), (0, 1)):
        study.run_arms(
            tiny.run(), tiny.ARMS, list(tiny.ARMS), 3, tmp_path / "out", "test", shard=shard
        )
        parts.append(list(trained))
        trained.clear()
    whole = parts.pop()
    assert len(whole) == 9
    assert sorted(job for part in parts for job in part) == sorted(whole)
    assert [len(part) for part in parts] == [3, 3, 3]


def test_folders_without_numbers_do_not_move_when_arms_are_added(trained, tmp_path):
    for arms in (tiny.ARMS, {"new": lambda base: {}} | tiny.ARMS):
        study.run_arms(tiny.run(), arms, ["pre"], 1, tmp_path / "out", "test", numbered=False)
    assert [folder for _, _, folder in trained] == [tmp_path / "out" / "arms" / "pre" / "seed0"] * 2


def test_everything_is_checked_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train", lambda *args: pytest.fail("trained"))
    arms = {"good": lambda base: {}, "bad": lambda base: {"placement": "nowhere"}}
    with pytest.raises(UserError, match="unknown placement 'nowhere'"):
        study.run_arms(tiny.run(), arms, ["good", "bad"], 1, tmp_path / "out", "test")
    assert not (tmp_path / "out").exists()


def test_unknown_arm_lists_the_arms(tmp_path):
    with pytest.raises(UserError, match="Valid: one, two"):
        arms = {"one": lambda base: {}, "two": lambda base: {}}
        study.run_arms(tiny.run(), arms, ["three"], 1, tmp_path / "out", "test")


def test_study_of_another_base_is_refused(drawn_study):
    with pytest.raises(UserError, match=r"optim\.lr: 0\.01 there, 0\.5 now"):
        study.run_arms(tiny.run(lr=0.5), tiny.ARMS, ["pre"], 1, drawn_study[0], "test")


def test_run_and_study_load_alike(drawn_study):
    out, _ = drawn_study
    whole, alone = frames.load(out), frames.load(out / "arms" / "02-pre" / "seed0")
    assert [logs.name for logs in whole] == ["post", "post/blows-up", "pre"]
    assert [logs.name for logs in alone] == ["pre"]
    assert alone[0].metrics == whole[2].metrics and alone[0].run == whole[2].run


def test_runs_see_the_same_batches_and_probe_sequences(drawn_study):
    """Arms differ by what they say: at step 0 two post-norm arms have one loss and one probe."""
    post, big, _ = frames.load(drawn_study[0])
    assert post.metrics[0]["loss"] == big.metrics[0]["loss"]
    names = [name for name in post.probes[0] if name != "step"]
    same = [name for name in names if quantities.of(name).group != "update"]
    assert len(names) > len(same) > 20
    assert all(post.probes[0][name] == big.probes[0][name] for name in same)


def test_identity_of_a_study_is_its_base(drawn_study):
    identity = record.read_json(drawn_study[0] / record.CONFIG)
    assert identity["kind"] == "test"
    assert identity["config"]["optim"]["lr"] == 0.01


def test_closing_table_has_a_seed_column_where_there_are_several(drawn_study):
    rows = drawn_study[1]
    assert "seed" not in frames.closing_table(rows)[0]
    several = frames.closing_table([*rows, rows[0] | {"seed": 1}])
    assert [found["seed"] for found in several] == [0, 0, 0, 1]
