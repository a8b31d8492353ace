"""Arms of one experiment: run them, or what is left of them, and sum them up."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import (
    config,
    corpus,
    figures,
    frames,
    hosts,
    inits,
    mesh,
    pictures,
    programs,
    record,
    remote,
    report,
    schedules,
    tables,
    train,
)
from normstudy.errors import UserError, choose
from normstudy.frames import Logs
from normstudy.progress import say

# an arm: the fields that it changes in the base run
Arms = Mapping[str, Callable[[config.Run], dict[str, Any]]]


def run_arms(
    base: config.Run,
    arms: Arms,
    chosen: list[str],
    seeds: int,
    out: Path,
    kind: str,
    together: int = 1,
    may_change: Collection[str] = (),
    shard: tuple[int, int] = (0, 1),
    numbered: bool = True,
    keep: int = 0,
) -> list[Logs]:
    """Run the chosen arms for seeds base.seed .. base.seed + seeds - 1 under OUT/arms.

    together: so many runs as one program, of those that differ in seed, init and schedule alone.
    may_change: fields that may differ from those the folder was made with.
    shard: (i, n): every n-th run alone, from the i-th (from 0) on; other machines take the others.
    numbered: folders are numbered as the arms; False where other arms may come between them later.
    keep: so many of the newest checkpoints of each run stay; 0: all.
    A finished arm is skipped, an interrupted one goes on from its checkpoint. Everything is
    checked before the first step: raises UserError for an unknown arm or a config that cannot run.
    Returns the logs of the chosen arms in process 0, none in others: they may not see its files.
    """
    if together > 1 and base.probe.curvature:
        raise UserError("--curvature follows one run at a time: leave out --together")
    names = list(arms)
    jobs: list[train.Member] = []
    for name in dict.fromkeys(choose("arm", name, arms) for name in chosen):
        for seed in range(base.seed, base.seed + seeds):
            run = config.override(base, **(arms[name](base) | {"seed": seed}))
            train.check(run)
            number = f"{names.index(name):02d}-" if numbered else ""
            jobs.append(
                train.Member(run, out / "arms" / f"{number}{slug(name)}" / f"seed{seed}", name)
            )
    jobs = part(jobs, shard)
    text = corpus.load(base.data.corpus)
    identity = record.identity(dataclasses.asdict(base), kind, corpus=corpus.as_dict(text))
    hosts.meet_in(out)
    hosts.first(lambda: remote.pull(out))
    hosts.first(lambda: record.open_folder(out, identity, kind, may_change))
    hosts.first(lambda: remote.push(out / record.CONFIG))  # runs keep their own folders alone
    say(corpus.describe(text, base.data.val_fraction, base.model.vocab))
    devices = mesh.make(base.mesh, base.data.batch, base.probe.probe_batch)
    say(f"mesh: {mesh.describe(devices)}")
    for run, _, name in jobs:
        if run.seed == base.seed:
            say(f"{name}: {schedules.audit_line(run.optim, run.model.width, run.steps)}; init "
                f"{inits.describe(run.model, programs.standard_deviations(run))}")  # fmt: skip
    ended = hosts.first(lambda: [(job.folder / record.OUTCOME).exists() for job in jobs])
    finished = [job for job, over in zip(jobs, ended, strict=True) if over]
    for job in finished:
        train.together(
            [job], may_change
        )  # trains nothing, but looks whether it is this run that is finished
    if finished:
        say(f"{len(finished)} of {len(jobs)} runs are finished")
    waiting = [job for job in jobs if job not in finished]
    began, done = time.monotonic(), []
    for group in _groups(waiting, together):
        what = ", ".join(f"{job.name} seed {job.run.seed}" for job in group)
        say(f"[{len(done) + 1}/{len(waiting)}] {what}{_eta(began, done, waiting)}")
        train.together(group, may_change, keep)
        done += group
    return [logs for logs in frames.load(out) if logs.name in chosen] if hosts.leads() else []


def sum_up(
    out: Path, title: str, card: str, draw: bool = True, **more: Any
) -> list[dict[str, Any]]:
    """Write summary.json and summary.md, and figures and report.html, from the logs under OUT.

    more: further entries of summary.json.
    """
    runs = frames.load(out)
    rows = [frames.summary_row(logs) for logs in runs]
    identity = record.read_identity(out / record.CONFIG, None, "code", "versions")
    seeds = len({logs.run.seed for logs in runs})
    summary = {
        "title": title,
        "command": card,
        "code": identity["code"],
        "versions": identity["versions"],
        "config": identity["config"],
        "seeds": f"{seeds} seed{'s' if seeds > 1 else ''}",
        "h1_nats": runs[0].h1,
        "minutes_of_steps": frames.minutes_of_steps(runs),
        "arms": by_arm(rows),
        **more,
    }
    record.write_json(out / "summary.json", summary)
    table = tables.markdown(frames.closing_table(rows))
    (out / "summary.md").write_text(f"# {title}\n\n{table}\n", encoding="utf-8")
    if draw:
        say("drawing the figures")
        drawn = figures.draw_all(runs, out / "figures", pictures.of([out], runs))
        report.write(out / "report.html", title, card, runs, rows, drawn)
    remote.push(out)
    return rows


def by_arm(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{arm: its row}, and with several seeds the count of each outcome and medians.

    Medians are taken only where all seeds came to the same outcome: a dead seed is never averaged.
    """
    arms: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name]
        tally = Counter(row["outcome"] for row in own)
        agreed = len(tally) == 1
        arm: dict[str, Any] = {"outcome": next(iter(tally)) if agreed else "mixed"}
        arm["seeds"] = len(own)
        arm["outcomes"] = dict(tally)
        for column in own[0]:
            if column in ("arm", "seed", "outcome", "why", "stopped_because"):
                continue
            values = [row[column] for row in own]
            usable = agreed and None not in values
            middle = float(np.median(values)) if usable else None
            arm[column] = int(middle) if middle is not None and middle.is_integer() else middle
        arm["runs"] = own
        arms[name] = arm
    return arms


def slug(name: str) -> str:
    """A folder name for an arm, e.g. 'post-1-sqrt-2l'."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def part(jobs: list[train.Member], shard: tuple[int, int]) -> list[train.Member]:
    """Every n-th job from the i-th (from 0) on. Raises UserError where there is none."""
    i, n = shard
    if not (own := jobs[i::n]):
        raise UserError(f"--shard {i + 1}/{n} is empty: there are {len(jobs)} runs in all")
    return own


def _groups(jobs: list[train.Member], size: int) -> list[list[train.Member]]:
    """The runs in their order, up to `size` of those that can train together at a time."""
    alike: dict[config.Run, list[train.Member]] = {}
    for job in jobs:
        alike.setdefault(train.shared(job.run), []).append(job)
    return [own[i : i + size] for own in alike.values() for i in range(0, len(own), size)]


def _eta(began: float, done: list[train.Member], jobs: list[train.Member]) -> str:
    """Time left, were all as fast as those done: an update takes as long as there are layers."""
    if not done:
        return ""
    work, whole = (sum(job.run.steps * job.run.model.layers for job in own) for own in (done, jobs))
    return f" (about {(time.monotonic() - began) / work * (whole - work):.0f} s left for all)"
