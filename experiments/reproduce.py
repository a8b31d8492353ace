"""Does a 48-layer model die when its norm moves from before to after the add, and what saves it?

Claims C4 to C6 and C9 to C13: the same depth, data order, seeds and, unless the arm says otherwise,
the same learning rate: the largest that pre-norm bears (experiments/tune_lr.py).

Command   make reproduce      or   python experiments/reproduce.py --preset cpu
Time      5 minutes on two CPU cores (preset cpu)
Expect    a table of outcomes, and runs/reproduce/report.html

Arms (warmup: `--warmup` updates of linear warmup; only the arms that say so have it):
  pre                      x + f(norm(x)), no warmup: the model before the refactor
  post                     norm(x + f(x)), everything else the same: the refactor
  post+warmup              fix 1: linear warmup, then constant
  post+inverse-sqrt        fix 1: the 2017 schedule, scaled to the same peak
  post+warmup+LR/4         fix 1 with a quarter of the peak learning rate
  post+1/sqrt(2L)          fix 2: output projections scaled at init, no warmup
  post+1/sqrt(2L)+warmup   fixes 1 and 2
  post@half-gain           every branch matrix at half its Xavier std, no warmup
  post@half-gain+warmup    the same with fix 1
  deepnet                  fix 2 as DeepNet does it: alpha and beta, no warmup
"""

from __future__ import annotations

from collections.abc import Sequence

from normstudy import cli, hosts, runtime, study

ARMS: study.Arms = {
    "pre": lambda base: {"placement": "pre", "warmup": 0},
    "post": lambda base: {"placement": "post", "warmup": 0},
    "post+warmup": lambda base: {"placement": "post"},
    "post+inverse-sqrt": lambda base: {"placement": "post", "schedule": "inverse_sqrt"},
    "post+warmup+LR/4": lambda base: {"placement": "post", "lr": base.optim.lr / 4},
    "post+1/sqrt(2L)": lambda base: {"placement": "post", "depth_scaled": True, "warmup": 0},
    "post+1/sqrt(2L)+warmup": lambda base: {"placement": "post", "depth_scaled": True},
    "post@half-gain": lambda base: {"placement": "post", "gain": base.init.gain / 2, "warmup": 0},
    "post@half-gain+warmup": lambda base: {"placement": "post", "gain": base.init.gain / 2},
    "deepnet": lambda base: {"placement": "deepnorm", "warmup": 0},
}


def main(argv: Sequence[str]) -> None:
    options, base = cli.parse_study(argv, __doc__ or "", out="runs/reproduce")
    chosen = cli.chosen_arms(options, base, ARMS)
    runtime.start(launch=options.launch)
    study.run_arms(
        base, ARMS, chosen, options.seeds, options.out, "reproduction",
        options.together, options.launch.may_change, options.part, keep=options.launch.keep,
    )  # fmt: skip
    if not hosts.leads():
        return
    title = f"What moving the norm does to {base.model.layers} layers"
    how = cli.command_line("experiments/reproduce.py", options, argv)
    rows = study.sum_up(options.out, title, how, draw=options.draw)
    cli.show(rows, options)


if __name__ == "__main__":
    cli.guarded(main)
