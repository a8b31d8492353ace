"""The learning rate of the study: the largest at which the pre-norm baseline trains for every seed.

The refactor's story fixes the rule: same schedule, moved norm. So the rate is the one that pre-norm
bears, not one at which post-norm looks good or bad. The whole grid is reported.

Command   python experiments/tune_lr.py --seeds 3
Time      about 15 minutes on two CPU cores (preset cpu)
Expect    runs/tune_lr/lr_grid.csv; its copy in experiments/results is what preset cpu quotes
"""

from __future__ import annotations

from collections.abc import Sequence

from normstudy import cli, frames, hosts, runtime, study
from normstudy.errors import UserError
from normstudy.progress import say

GRID = tuple(float(f"{10 ** (n / 2):.2g}") for n in range(-6, 0))  # 1e-3 to 0.32, factor sqrt(10)


def arm(lr: float):
    return lambda base: {"placement": "pre", "warmup": 0, "lr": lr, "stop_after": 0}


ARMS: study.Arms = {f"pre at {lr:g}": arm(lr) for lr in GRID}


def choose_lr(rows: list[dict]) -> float:
    """The rule: the largest lr at which every run is `trained`. UserError if there is none."""
    rates = {row["lr"] for row in rows}
    good = [
        lr for lr in rates if all(row["outcome"] == "trained" for row in rows if row["lr"] == lr)
    ]
    if not good:
        raise UserError("pre-norm trains for every seed at no learning rate of the grid")
    return max(good)


def main(argv: Sequence[str]) -> None:
    options, base = cli.parse_study(argv, __doc__ or "", out="runs/tune_lr")
    chosen = cli.chosen_arms(options, base, ARMS)
    runtime.start(launch=options.launch)
    study.run_arms(
        base, ARMS, chosen, options.seeds, options.out, "learning-rate grid",
        options.together, options.launch.may_change, options.part, keep=options.launch.keep,
    )  # fmt: skip
    if not hosts.leads():
        return
    how = cli.command_line("experiments/tune_lr.py", options, argv)
    rows = study.sum_up(options.out, "Pre-norm over learning rates", how, draw=options.draw)
    grid = [
        {
            "lr": logs.run.optim.lr,
            "seed": logs.run.seed,
            **{
                name: row[name]
                for name in ("outcome", "at_step", "best_loss", "last_loss", "val_loss", "h1")
            },
        }
        for logs, row in zip(frames.load(options.out), rows, strict=True)
    ]
    (options.out / "lr_grid.csv").write_text(frames.to_csv(grid), encoding="utf-8")
    cli.show(rows, options)
    say(f"chosen by the rule: lr = {choose_lr(grid):g}")


if __name__ == "__main__":
    cli.guarded(main)
