"""normstudy diagnose: what is read, found, tried and told. Training here is tiny or made up."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
from tensorboardX import SummaryWriter

from normstudy import checkpoint, cli, config, frames, record, theory, train
from normstudy.diagnose import against, alarms, audits, curves, diagnosis, page, trials, watch
from normstudy.diagnose.checkpoints import from_checkpoint, moved_between
from normstudy.diagnose.subject import (
    Baseline,
    Curve,
    Subject,
    from_losses,
    from_run,
    other_side,
    read_config,
)
from normstudy.diagnose.verdicts import VERDICTS, Finding, exit_code, ranked
from normstudy.errors import UserError

H1 = 3.0
FALLS = 3.0 * np.exp(-np.arange(400) / 40)  # from 3 above a level down to it


def curve(losses, name="run", **more) -> Curve:
    losses = np.asarray(losses, float)
    return Curve(name, losses, np.arange(len(losses)), **more)


def subject(*losses, h1=H1, run=None, **more) -> Subject:
    own = tuple(curve(each, f"seed {i}", **more) for i, each in enumerate(losses))
    return Subject("it", run, frozenset(), own, Baseline(h1))


def verdicts(findings) -> list[str]:
    return [finding.verdict for finding in ranked(findings) if finding.kind != "note"]


# ---------------------------------------------------------------------------------- what happened


@pytest.mark.parametrize(
    "losses, verdict, code",
    [
        (2 + FALLS, "healthy", 0),
        (3 + FALLS, "stalled", 1),
        (np.where(np.arange(400) < 200, 2 + FALLS, 3.02), "collapsed", 1),
        (np.where(np.arange(400) < 200, 2 + FALLS, np.nan), "diverged", 1),
        (np.where(abs(np.arange(400) - 250) < 15, 3.5, 2 + FALLS), "spiked", 1),
        (2 + FALLS[:20], "undecided", 3),
    ],
)
def test_each_fate_has_its_verdict_and_exit_code(losses, verdict, code):
    found = curves.symptoms(subject(losses))
    assert [finding.verdict for finding in found] == [verdict]
    assert exit_code(found) == code


def test_seeds_that_disagree_are_borderline_and_no_mean_is_taken_over_a_dead_one():
    """Case A34: one of five is not finite, and its loss before that was lowest."""
    dead = np.where(np.arange(400) < 390, 1 + FALLS, np.nan)
    (found,) = curves.symptoms(subject(*[2 + FALLS] * 4, dead))
    assert found.verdict == "borderline" and "4 of 5 seeds train" in found.says
    assert any("4 of 5 runs are finite" in each for each in found.evidence)


def test_plateau_just_below_the_unigram_entropy_is_told_as_one_and_its_cause_is_open(tmp_path):
    """Case A29: 12 layers, pre-norm, flat at 3.1 where H1 is 3.3, and nothing else is known."""
    path = tmp_path / "losses.csv"
    path.write_text("step,loss\n" + "".join(f"{i},{3.1 + x}\n" for i, x in enumerate(FALLS)))
    run = config.override(config.Run(), layers=12, placement="pre")
    told = diagnosis.make(
        from_losses(path, Baseline(3.3), run, frozenset({"layers", "placement"})), None
    )
    assert verdicts(told.findings) == ["stalled"]
    assert page.verdict(ranked(told.findings)) == "stalled; cause undetermined"
    assert "pre" not in page.text(told).split("Not checked")[0]  # the placement is not blamed


def test_regression_that_predicts_the_mean_is_stalled_in_any_unit():
    """Case A31: no vocabulary; the baseline is the loss of predicting the mean."""
    for unit in (1e-3, 1.0, 1e4):
        mean = Baseline(17.0 * unit, "the loss of predicting the mean")
        flat, good = (Subject("it", None, frozenset(), (curve(unit * own),), mean)
                      for own in (17 + 20 * FALLS, 3 + 20 * FALLS))  # fmt: skip
        assert verdicts(curves.symptoms(flat)) == ["stalled"]
        assert verdicts(curves.symptoms(good)) == ["healthy"]


def test_without_a_baseline_a_plateau_has_no_name_but_what_is_not_finite_has():
    assert verdicts(curves.symptoms(subject(3 + FALLS, h1=None))) == ["undecided"]
    broken = np.where(np.arange(400) < 300, 3 + FALLS, np.inf)
    assert verdicts(curves.symptoms(subject(broken, h1=None))) == ["diverged"]


def test_outcome_that_normstudy_wrote_is_taken_for_losses_do_not_tell_of_gradients():
    """A run whose last gradient was refused has finite losses."""
    ended = {"word": "diverged", "step": 11, "why": "a gradient is not finite at step 11"}
    logs = frames.Logs("run", config.Run(), H1, 1.0, (), [], [], ended)
    own = dataclasses.replace(curve(5.5 + 0 * FALLS[:11]), logs=logs)
    assert curves.tell(own, Baseline(H1)) == ("diverged", 11, ended["why"])


def test_rows_that_are_ten_updates_apart_date_from_updates():
    sparse = dataclasses.replace(curve(3 + FALLS), steps=np.arange(400) * 10)
    (found,) = curves.symptoms(Subject("it", None, frozenset(), (sparse,), Baseline(H1)))
    step = curves.tell(curve(3 + FALLS), Baseline(H1)).step
    assert f"(step {10 * step})" in found.evidence[0]


# ----------------------------------------------------------------------------- rates, clips, signs


def rated(rates):
    return subject(2 + FALLS[: len(rates)], rates=np.asarray(rates, float))


def test_zero_rate_at_update_1_is_a_note_and_elsewhere_a_bug_in_the_schedule():
    """Case A23."""
    warm = np.minimum(np.arange(400) / 50, 1) * 1e-3
    (found,) = curves.rates(rated(warm))
    assert (found.verdict, "update 1 has learning rate 0" in found.says) == ("note", True)
    assert verdicts(curves.rates(rated(np.where(np.arange(400) < 300, 1e-3, 0)))) == ["schedule"]
    assert verdicts(curves.rates(rated(np.full(400, -1e-3)))) == ["schedule"]
    assert verdicts(curves.rates(rated(np.zeros(400)))) == ["schedule"]
    assert not curves.rates(rated(np.linspace(1e-3, 0, 400)))  # a decay to zero ends so


def test_schedule_that_begins_anew_is_a_resume_mismatch():
    """Case B13: the optimizer's count was not restored."""
    once = np.minimum(np.arange(1, 201) / 50, 1) * 1e-3
    (found,) = curves.rates(rated(np.concatenate([once, once])))
    assert (found.verdict, found.advice != "") == ("resume mismatch", True)
    assert "step 200" in found.says
    assert not curves.rates(rated(np.concatenate([once, once[::-1]])))


def test_step_that_comes_twice_is_told_and_a_loss_that_jumps_there_is_a_mismatch():
    steps = np.concatenate([np.arange(200), np.arange(190, 390)])
    calm = Curve("calm", np.full(400, 2.0), steps)
    jumps = Curve("jumps", np.where(np.arange(400) < 200, 2.0, 4.0), steps)
    own = [curves.resumes(Subject("it", curves=(each,))) for each in (calm, jumps)]
    assert [found.verdict for (found,) in own] == ["note", "resume mismatch"]


def test_clipping_at_every_update_is_suspected_of_gradient_descent():
    """Case A20: SGD with a large rate, clip 0.25."""
    for optimizer, sure in (("sgd", "likely"), ("adam", "possible")):
        run = config.override(config.Run(), clip=0.25, optimizer=optimizer)
        always = subject(2 + FALLS, run=run, gradients=np.full(400, 3.0))
        (found,) = curves.clipping(always)
        assert (found.verdict, found.sure, "100%" in found.says) == ("optimizer", sure, True)
        assert not curves.clipping(subject(2 + FALLS, run=run, gradients=np.full(400, 0.1)))


def probe(step, bottom=1.0, moved=1.0, update=0.01):
    return {
        "step": step, "jacobian_to_end": [bottom, 1.0], "moved/attn.q": [moved] * 2,
        "moved/embed": 0.1, "update/attn.q": [update] * 2, "weight/attn.q": [1.0] * 2,
    }  # fmt: skip


def test_alarms_go_once_at_the_first_step_and_look_at_nothing_later():
    norms = np.ones(100)
    norms[60], norms[80] = 20.0, 50.0
    losses = np.where(np.arange(100) < 70, 2.0, 4.0)
    metrics = [
        {"step": i, "loss": loss, "gradient_norm": norm}
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    probes = [probe(0), probe(10, bottom=1e-5), probe(20, bottom=1e-9), probe(30, update=3.0)]
    told = alarms.alarms(metrics, probes)
    assert [(own.name, own.step) for own in told] == [
        ("Jacobian", 10), ("update", 30), ("gradient norm", 60), ("loss", 75),
    ]  # fmt: skip
    for n in range(len(metrics) + 1):
        early = alarms.alarms(metrics[:n], [p for p in probes if p["step"] < n])
        assert early == [own for own in told if own.step < n]


def test_matrices_that_start_at_zero_have_no_relative_update():
    zero = probe(0, update=1.0) | {"weight/attn.q": [0.0, 0.0]}
    assert alarms.alarms([], [zero]) == []


def test_mean_that_dwarfs_the_deviation_is_precision_in_bfloat16_and_not_in_float32():
    probes = [{"step": 0, "offset": [0.1, 2.0]}, {"step": 9, "offset": [0.1, 40.0]}]
    (found,) = alarms.far(probes, "it", "bfloat16")
    assert found.verdict == "precision" and "x_1" in found.says
    assert "step 9" in found.evidence[0] and "16%" in found.evidence[0]  # 40 / 2^8
    assert alarms.far(probes, "it", "float32") == []
    assert alarms.far([{"step": 0}], "logs of an older version", "bfloat16") == []


def test_updates_that_move_nothing_are_underflow_but_not_where_no_gradient_arrives():
    """Case A22: parameters in bfloat16 without a master copy; and what only looks like it."""
    logs = frames.Logs("run", config.Run(), H1, 1.0, (), [], [probe(0), probe(9, moved=0.0)], {})
    own = dataclasses.replace(curve(3 + FALLS), logs=logs)
    (found,) = alarms.rounding(Subject("it", curves=(own,)))
    assert (found.verdict, found.evidence) == (
        "update underflow",
        ("attn.q: 0.0% moved at step 9",),
    )
    logs.probes[1]["jacobian_to_end"][0] = 1e-12
    assert alarms.rounding(Subject("it", curves=(own,))) == []


# ---------------------------------------------------------------------------------- what is read


def test_csv_json_lines_and_tensorboard_hold_the_same_curve(tmp_path):
    rows = [{"iteration": 10 * i, "train_loss": 3 + x, "learning_rate": 1e-3} for i, x in
            enumerate(np.float32(FALLS[:60]).tolist())]  # fmt: skip
    as_csv, as_json = tmp_path / "run.csv", tmp_path / "run.jsonl"
    as_csv.write_text(frames.to_csv(rows))
    as_json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for row in rows:
            for name in ("train_loss", "learning_rate"):
                writer.add_scalar(name, row[name], row["iteration"])
    (events,) = (tmp_path / "tb").glob("*tfevents*")
    read = [from_losses(p, Baseline(H1), None, frozenset()) for p in (as_csv, as_json, events)]
    for one in read:
        np.testing.assert_array_equal(one.curves[0].steps, np.arange(60) * 10)
        # a float32 in TensorBoard, nine digits in CSV
        np.testing.assert_allclose(one.curves[0].losses, 3 + np.float32(FALLS[:60]), rtol=1e-6)
        np.testing.assert_allclose(one.curves[0].rates, 1e-3, rtol=1e-6)


def test_torn_event_at_the_end_is_left_out(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for i in range(5):
            writer.add_scalar("loss", 2.0, i)
    (events,) = tmp_path.glob("*tfevents*")
    events.write_bytes(events.read_bytes()[:-7])
    assert len(from_losses(events, Baseline(H1), None, frozenset()).curves[0].losses) == 4


@pytest.mark.parametrize(
    "content, message",
    [
        ("step,accuracy\n0,0.1\n", "no column of losses"),
        ("step,loss\n", "holds no row"),
        ('{"loss": 2.0}\nnot json\n', "line 2 is no JSON object"),
        ('{"loss": 2.0}\n[1]\n', "line 2 is no JSON object"),
    ],
)
def test_files_that_are_no_curve_say_where(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        from_losses(path, Baseline(H1), None, frozenset())
    with pytest.raises(UserError, match="cannot be read"):
        from_losses(tmp_path / "none", Baseline(H1), None, frozenset())


def test_gaps_in_a_csv_are_no_numbers(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n0,5.5\n1,\n2,nan\n3,4\n")
    losses = from_losses(path, Baseline(H1), None, frozenset()).curves[0].losses
    assert losses[0] == 5.5 and np.isnan(losses[1:3]).all()


def test_config_of_a_run_folder_and_fields_alone_are_the_same_config(tmp_path):
    run = tiny.run()
    whole, alone = tmp_path / "config.json", tmp_path / "fields.json"
    whole.write_text(json.dumps({"kind": "run", "config": dataclasses.asdict(run)}))
    alone.write_text(config.to_json(run))
    assert read_config(whole) == read_config(alone) == run
    alone.write_text('{"placement": "prae"}')
    with pytest.raises(UserError, match="fields"):
        read_config(tmp_path / "fields.json")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_config(tmp_path / "none.json")


# ------------------------------------------------------------------------------- before training


def test_config_of_one_that_works_has_notes_alone():
    run = tiny.run(placement="pre")
    found, left = audits.findings(run, frozenset(config.fields_of(run)))
    assert {finding.verdict for finding in found} == {"note"} and not left


def test_model_that_is_too_large_to_make_is_audited_by_its_config_alone():
    run = config.override(config.Run(), width=4096, heads=32, ff=16384, layers=51, placement="pre")
    found, left = audits.findings(run, frozenset(config.fields_of(run)))
    assert [entry.split(":")[0] for entry in left] == ["loss at step 0", "wiring"]
    assert "1e+10 parameters" in left[0]
    assert {finding.verdict for finding in found} == {"note"}


def test_suspicion_against_a_run_that_trains_is_a_note():
    run = tiny.run(layers=24, placement="post")
    known = frozenset(config.fields_of(run))
    own = Subject("it", run, known, (curve(2 + FALLS),), Baseline(H1))
    for trying in (None, diagnosis.Trying(Path("unused"))):
        told = diagnosis.make(own, trying)
        assert verdicts(told.findings) == ["healthy"]
        assert any("it trains all the same" in finding.says for finding in told.findings)


def test_audits_that_lack_a_field_say_which():
    found, left = audits.findings(tiny.run(), frozenset({"lr", "schedule", "warmup", "steps"}))
    assert len(found) == 1 and found[0].says.startswith("learning rate by update")
    assert any(entry.startswith("placement: layers, placement not known") for entry in left)


def test_logits_of_unit_tables_are_found_at_step_0():
    """Case A19: a tied readout with std 1."""
    run = tiny.run(layers=1, width=128, heads=8, placement="pre", tied=True, embed_std=1.0)
    (found,) = audits.first_loss(run)
    assert found.verdict == "logit scale"
    loss = float(found.says.split(" is ")[1].split(" nats")[0])
    assert loss > math.log(256) + 3


def test_init_that_ignores_the_width_is_suspected():
    """Case A16: 16 layers of width 256 at std 0.14, where sqrt(2 / (5 D)) is 0.0395."""
    sizes = {"layers": 16, "width": 256, "heads": 4, "ff": 1024, "placement": "pre"}
    large, good = (
        config.override(config.Run(), init="normal", init_std=std, **sizes)
        for std in (0.14, 0.0395)
    )
    (found,) = audits.init(large)
    assert (found.verdict, found.sure) == ("init scale", "likely")
    assert not [f for f in audits.init(good) if f.kind == "cause"]
    assert not audits.init(config.override(config.Run(), placement="t-fixup"))  # its own rule


def test_pre_norm_without_a_final_norm_is_a_structure_before_any_training():
    """Case A08."""
    bare = tiny.run(placement="pre", final_norm=False)
    found = audits.structure(bare)
    assert verdicts(found) == ["structure"]
    assert "nothing norms the stream" in next(f.says for f in found if f.kind == "cause")
    assert verdicts(audits.structure(tiny.run(placement="post"))) == []
    (tried,) = [own for own in trials.chosen(bare, ["structure"]) if own[0].cause == "structure"]
    assert tried[1] == {"final_norm": True}
    without = trials.chosen(tiny.run(placement="t-fixup"), [])  # it has no norm by design
    assert not any(trial.cause == "structure" for trial, _ in without)


def test_deep_post_norm_at_full_rate_is_suspected_and_shallow_or_warm_is_not():
    """Case A01, before training: the skip path of 24 blocks carries nothing, that of 2 does."""

    def found(**changes):
        (own,) = audits.placement(tiny.run(placement="post", **changes))
        return own.verdict

    assert found(layers=24) == "placement without warmup"
    assert found(layers=24, warmup=8) == "note"
    assert found(layers=2) == "note"
    assert audits.placement(tiny.run(placement="pre", layers=24)) == []


def test_root_decay_from_the_first_update_is_named_with_its_rates():
    """Case A04: the same peak and warmup 1, but another schedule than the recipe's."""
    run = tiny.run(schedule="inverse_sqrt", warmup=1, steps=400, lr=3e-4)
    found = next(f for f in audits.schedule(run) if f.kind == "cause")
    assert found.verdict == "schedule"
    assert "1: 0.0003" in found.evidence[0] and "100: 3e-05" in found.evidence[0]
    linear = tiny.run(schedule="linear", warmup=1, steps=400, lr=3e-4)
    assert not [f for f in audits.schedule(linear) if f.kind == "cause"]


def test_rate_that_the_2017_schedule_does_not_use_is_told():
    found = audits.schedule(tiny.run(schedule="inverse_sqrt_2017", lr=1e-6, warmup=2))
    assert verdicts(found) == ["schedule"]


def test_decay_that_does_nothing_is_told():
    """Decay is adamw's alone; adam with another decay than the default was meant to have it."""
    assert verdicts(audits.optimizer(tiny.run(weight_decay=0.3))) == ["optimizer"]
    assert audits.optimizer(tiny.run(weight_decay=0.3, optimizer="adamw")) == []


def test_text_that_repeats_itself_is_found(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"the same line, again and again. " * 4000)
    run = tiny.run(corpus=str(tmp_path / "text.txt"))
    assert verdicts(audits.text(run)) == ["duplicate data"]
    assert verdicts(audits.text(tiny.run())) == []


def test_share_of_copies_is_what_was_copied_at_any_offset():
    """A quarter of the text is a copy of another quarter; the sample of hashes gives it to 3%."""
    random = np.random.default_rng(0).integers(0, 256, 200_000).astype(np.uint8)
    assert audits.copies(random) == 0
    copied = np.concatenate([random[:150_000], random[1013 : 1013 + 50_000]])
    assert audits.copies(copied) == pytest.approx(0.25, abs=0.03)
    assert audits.copies(random[:10]) == 0


# --------------------------------------------------------------------------------------- against


def test_other_side_lists_what_was_set_and_what_follows(tmp_path):
    """Pre -> post with a rate that changed, too."""
    path = tmp_path / "before.json"
    path.write_text(config.to_json(tiny.run(placement="pre", lr=0.02)))
    here = Subject("here", tiny.run(placement="post"))
    rows = {row["what"]: row for row in against.differences(here, other_side(path))}
    assert (rows["placement"]["there"], rows["placement"]["here"]) == ("pre", "post")
    assert rows["lr"]["how"] == "set" and rows["rate at update 1"]["how"] == "follows"
    assert rows["final norm"]["how"] == "follows" and "init of o, x Xavier" not in rows
    with pytest.raises(UserError, match="loss curve alone"):
        against.differences(subject(2 + FALLS), here)


def test_losses_are_compared_at_the_last_common_update_and_none_is_left_out():
    """Case A34: unequal lengths, and one seed that is not finite."""
    run = tiny.run()
    here = subject(2 + FALLS, np.full(400, np.nan), run=run)
    there = subject(2.5 + FALLS[:100], run=run)
    (row,) = [r for r in against.differences(here, there) if r["how"] == "measured"]
    assert row["what"] == "loss at update 100, by seed"
    assert row["here"].endswith("1 of 2 finite") and row["there"].endswith("1 of 1 finite")


# ---------------------------------------------------------------------------------------- trials


def result(name, words, steps, best=2.0, cause="", **changes):
    n = len(words)
    return trials.Result(name, changes, cause, "", tuple(words), tuple(steps), (best,) * n)


BASE = result("baseline", ["collapsed"] * 2, [40, 44], 3.0)


@pytest.mark.parametrize(
    "words, steps, effect",
    [
        (["trained", "spiked"], [30, 30], "cures"),
        (["trained", "collapsed"], [30, 60], "cures some seeds"),
        (["collapsed", "diverged"], [90, 100], "delays"),
        (["collapsed", "collapsed"], [41, 44], "no effect"),
        (["stalled", "stalled"], [200, 200], "no effect"),  # it never failed: it never trained
        (["undecided", "collapsed"], [90, 90], "undecided"),
    ],
)
def test_effects_are_told_by_outcomes_and_a_later_failure_is_a_delay(words, steps, effect):
    assert trials.effect(BASE, result("lr / 2", words, steps)) == effect


def test_cure_is_a_tested_cause_and_a_delay_is_called_one():
    """Case A07: a lower rate only moves the failure."""
    lower = result("lr / 2", ["collapsed"] * 2, [80, 90], cause="learning rate too high", lr=5e-4)
    warm = result("warmup", ["trained"] * 2, [9, 9], cause="placement without warmup", warmup=200)
    tried = [dataclasses.replace(own, effect=trials.effect(BASE, own)) for own in (lower, warm)]
    found = trials.causes(BASE, tried)
    assert verdicts(found) == ["placement without warmup"]
    assert (found[0].sure, found[0].advice) == ("tested", "--warmup 200")
    assert any("a delay and no cure" in finding.says for finding in found)


def test_causes_that_are_cured_each_alone_stand_in_the_order_of_the_loss_that_was_reached():
    tried = [
        result("lr / 2", ["trained"], [30], 2.5, "learning rate too high", lr=0.5),
        result("batch x 8", ["trained"], [30], 2.2, "batch too small", batch=16),
    ]
    cures = [dataclasses.replace(own, effect="cures") for own in tried]
    found = trials.causes(BASE, cures)
    told = [f.verdict for f in found if f.kind == "cause"]
    assert told == ["batch too small", "learning rate too high"]
    assert any("no one of them is the only cause" in f.says for f in found)
    assert not any("only cause" in f.says for f in trials.causes(BASE, cures[:1]))


def test_placement_that_fails_too_is_acquitted_and_where_nothing_cures_that_is_said():
    pre = result("pre-norm", ["collapsed"] * 2, [40, 40], placement="pre")
    tried = [dataclasses.replace(pre, effect="no effect")]
    found = trials.causes(BASE, tried)
    assert verdicts(found) == ["not attributable"]
    assert any(finding.says.startswith("not the placement") for finding in found)
    assert verdicts(trials.causes(BASE, tried, ["lr / 4"])) == []  # that one may cure it


def test_nothing_is_recommended_to_a_run_that_trains():
    """Case A32: eps and beta2 may only be recommended by a run that they changed the outcome of."""
    base = result("baseline", ["trained"], [30])
    eps = dataclasses.replace(result("eps", ["trained"], [20], eps=1e-6), effect="no effect")
    assert trials.causes(base, [eps]) == []


def test_trials_change_something_and_are_ordered_by_suspicion():
    run = tiny.run(placement="post", clip=0.25, optimizer="sgd", steps=100)
    names = [trial.name for trial, _ in trials.chosen(run, ["optimizer"])]
    assert names[0] == "no clipping" and "eps 1e-6 and b2 0.95" not in names
    for trial, changes in trials.chosen(run, []):
        assert config.override(run, **changes) != run, trial.name
    pre = [trial.name for trial, _ in trials.chosen(tiny.run(placement="pre"), [])]
    assert not {"pre-norm", "DeepNorm"} & set(pre)
    scaled = dict(trials.chosen(tiny.run(placement="post", depth_scaled=True), []))
    deep = next(changes for trial, changes in scaled.items() if trial.name == "DeepNorm")
    assert deep == {"placement": "deepnorm", "depth_scaled": False}
    assert {trial.cause for trial in trials.TABLE} <= set(VERDICTS)


def test_beta_alone_is_tried_where_nothing_counts_the_depth_yet():
    def tried(**changes):
        run = tiny.run(layers=24, **changes)
        return {trial.name: own for trial, own in trials.chosen(run, [])}

    name = "DeepNet's beta on v, o, up, down"
    assert tried(placement="post")[name] == {"beta": theory.deepnorm_decoder(24).beta}
    for changes in (
        {"placement": "deepnorm"}, {"placement": "pre"},
        {"placement": "post", "depth_scaled": True}, {"placement": "post", "beta": 0.5},
    ):  # fmt: skip
        assert name not in tried(**changes)
    decayed = tried(placement="pre", optimizer="adamw")["no weight decay"]
    assert decayed == {"weight_decay": 0.0} and "no weight decay" not in tried(placement="pre")


def test_cure_is_told_as_options_that_the_command_takes():
    changes = {"final_norm": True, "tied": False, "depth_scaled": True, "lr": 0.01, "warmup": 3}
    options = trials._options(changes)
    assert options == "--final-norm True --no-tied --depth-scaled --lr 0.01 --warmup 3"


def test_config_that_does_not_fit_the_budget_is_tried_at_a_stated_proxy():
    large = config.override(
        config.Run(), width=4096, heads=32, ff=16384, layers=51, context=2048, batch=512,
        steps=100_000, warmup=2000, lr=6e-4, placement="mix-ln", init="normal", init_std=0.02,
    )  # fmt: skip
    small, told = trials.proxy(large, 300.0)
    assert (small.model.width, small.model.layers, small.model.placement) == (32, 48, "mix-ln")
    assert small.optim.lr == pytest.approx(6e-4 * 128) and small.optim.warmup == 8
    assert "width 32 for 4096" in told and "lr 0.0768 for 0.0006" in told
    fits = tiny.run()
    assert trials.proxy(fits, 300.0) == (fits, "")


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """A post-norm run of 60 updates whose rate is absurd, with a budget for a change or two."""
    out = tmp_path_factory.mktemp("trials") / "out"
    run = tiny.run(placement="post", lr=3.0, steps=60)
    told = diagnosis.make(
        Subject("it", run, frozenset(config.fields_of(run)), (), Baseline(H1)),
        diagnosis.Trying(out, budget=8.0),
    )
    return out, told


def test_baseline_is_run_first_and_what_the_budget_did_not_hold_is_named(tried):
    out, told = tried
    assert told.results[0].name == "baseline" and told.results[0].effect is None
    assert any(finding.verdict in ("diverged", "stalled", "collapsed") for finding in told.findings)
    ran = {own.name for own in told.results[1:]}
    left = {entry.split(":")[0] for entry in told.unchecked if entry.endswith("no budget left")}
    run = tiny.run(placement="post", lr=3.0, steps=60)
    assert ran | left == {trial.name for trial, _ in trials.chosen(run, [])}
    assert (out / "arms" / "baseline" / "seed0" / record.OUTCOME).exists()


def test_page_has_the_verdict_first_and_says_what_was_not_checked(tried):
    _, told = tried
    lines = page.text(told).splitlines()
    assert lines[0].startswith("it: ")
    assert any(line.startswith("What was tried") for line in lines)
    assert max(map(len, lines)) < 120


def test_json_has_its_schema_and_every_finding_its_kind(tried):
    told = json.loads(cli.as_json(page.as_dict(tried[1])))
    assert set(told) == {
        "schema", "subject", "verdict", "exit_code", "findings", "trials", "scale", "literature",
        "unchecked", "differences",
    }  # fmt: skip
    assert told["verdict"] == told["findings"][0]["verdict"]
    for finding in told["findings"]:
        assert finding["kind"] == VERDICTS[finding["verdict"]][0]


def test_report_has_the_text_and_the_pictures(tried):
    out, told = tried
    path = page.write_report(told, out, "normstudy diagnose ...")
    content = path.read_text(encoding="utf-8")
    assert "<pre>it: " in content and content.count("<img") == 2


def test_folder_of_another_config_s_trials_is_refused(tried):
    out, _ = tried
    with pytest.raises(UserError, match="another config"):
        trials.Bench(tiny.run(placement="post", lr=2.0), out, 1.0, 1)


# -------------------------------------------------------------------------------- command and watch


def test_command_on_a_run_folder_agrees_with_its_outcome(finished, capsys, no_start):
    run, folder, _ = finished
    with pytest.raises(SystemExit) as ended:
        cli.dispatch(["diagnose", "--run", str(folder), "--no-runs", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (ended.value.code, told["exit_code"], told["verdict"]) == (3, 3, "undecided")
    assert from_run(folder).run == run


def test_checkpoint_is_told_by_its_loss_and_its_checks(finished):
    _, folder, _ = finished
    own = from_checkpoint(folder)
    assert (own.run, own.curves) == (finished[0], ())
    assert verdicts(own.seen) == ["undecided"]  # eight updates
    assert any("wired as declared" in finding.says for finding in own.seen)
    told = diagnosis.make(own, diagnosis.Trying(Path("unused")))
    assert exit_code(told.findings) == 3 and not told.results


def test_two_checkpoints_say_what_moved_between_them(finished, capsys, no_start):
    _, folder, _ = finished
    steps = checkpoint.steps(folder)
    there, here = (str(folder / "ckpt" / str(step)) for step in (steps[0], steps[-1]))
    with contextlib.suppress(SystemExit):
        cli.dispatch(["diagnose", "--checkpoint", here, "--against", there, "--no-runs"])
    assert "entries that differ between the two checkpoints: some in every matrix" in (
        capsys.readouterr().out
    )
    with pytest.raises(UserError, match="same checkpoint"):
        moved_between(Path(here), folder)


def test_checkpoints_with_the_same_weights_had_no_update_between_them(tmp_path):
    """Case A23."""
    run = tiny.run(steps=2, lr=1e-50, checkpoint_every=1)  # is 0 in float32
    train.train(run, tmp_path / "run", "tiny")
    first, last = (tmp_path / "run" / "ckpt" / str(step) for step in (1, 2))
    found = moved_between(first, last)
    assert found.verdict == "update underflow"
    assert found.says.startswith("no update happened between step 1 and step 2")


def test_command_without_runs_cites_and_says_that_nothing_was_tried(capsys, no_start):
    argv = ["--placement", "post", "--layers", "24", "--width", "8", "--heads", "2", "--ff", "16"]
    with pytest.raises(SystemExit) as ended:
        cli.dispatch(["diagnose", *argv, "--no-runs"])
    page_text = capsys.readouterr().out
    assert ended.value.code == 1
    assert "From literature, not tested here" in page_text and "2002.04745" in page_text


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--run", "nowhere"], "nowhere"),
        (["--losses", "a", "--run", "b"], "give one of"),
        (["--budget", "soon", "--layers", "2"], "--budget is a time"),
        (["--placement", "res-post"], "unknown placement 'res-post'"),  # case A37: no guess
    ],
)
def test_bad_input_is_one_sentence(argv, message, no_start):
    with pytest.raises(UserError, match=message):
        cli.dispatch(["diagnose", *argv])


def test_watch_follows_a_file_that_grows_and_warns_once(tmp_path):
    path, looks = tmp_path / "live.jsonl", []

    def write(n):
        rows = [{"step": i, "loss": 2.0, "grad_norm": 50.0 if i == 30 else 1.0} for i in range(n)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')  # torn

    def sleep(_):
        looks.append(len(looks))
        write(min(20 * (len(looks) + 1), 60))

    write(20)
    told = list(watch.follow(path, 1.0, 2.0, sleep))
    assert [event.step for event in told[:-1]] == [30]
    assert told[-1].startswith("nothing new for 2 s, after 60 updates")


def test_watch_ends_with_the_run(finished, capsys):
    _, folder, ended = finished
    told = list(watch.follow(folder, 1.0, 2.0))
    assert told[-1].startswith(f"ended after 8 updates: {ended['word']}")
    with pytest.raises(UserError, match="does not exist"):
        next(watch.follow(folder / "none", 1.0, 2.0))


def test_verdicts_outside_the_table_are_refused():
    with pytest.raises(ValueError, match="no verdict"):
        Finding("magic", "no")
