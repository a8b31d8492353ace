"""The command line: parse, call, print. Errors become one message and an exit code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from normstudy import attempts, config, frames, measured, remote, tables, topologies
from normstudy.errors import Damaged, Interrupted, NotFinite, Preempted, UserError, choose
from normstudy.progress import say
from normstudy.record import plain


def guarded(main: Callable[[Sequence[str]], None]) -> None:
    """Run a command on sys.argv; bad input prints one message, no traceback, and its exit code."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        fine = isinstance(error, Interrupted | Preempted)  # all is saved
        print(str(error) if fine else f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


@dataclass(frozen=True)
class Study:
    """What to run, and where to."""

    arms: str = "all"  # names from the table above, with commas between them, or semicolons
    seeds: int = 1  # runs of each arm, at seed, seed + 1, ...
    together: int = 1  # runs that train as one program, of those that share their shapes
    shard: str = "1/1"  # i/n: the i-th of n parts of the runs; other machines take the rest
    preset: str | None = None  # smoke, cpu, gpu or tpu; default: the one for the backend found
    out: Path = Path("runs/reproduce")  # folder of the logs, figures and report
    json: bool = False  # print the closing table as JSON
    draw: bool = True  # figures and report at the end
    launch: config.Launch = field(default_factory=config.Launch)

    @property
    def part(self) -> tuple[int, int]:
        """shard as numbers (i, n), i from 0. Raises UserError where it is none."""
        numbers = self.shard.split("/")
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            i, n = map(int, numbers)
            if 1 <= i <= n:
                return i - 1, n
        raise UserError(f"--shard is i/n with i from 1 to n, such as 1/4, not {self.shard}")


Own = TypeVar("Own", bound=Study)


def parse_study(argv: Sequence[str], card: str, out: str) -> tuple[Study, config.Run]:
    """Options of a study and its base run: preset, then any config field by its own name.

    Raises UserError for an unknown option (lists the valid ones) or preset.
    """
    return parse_own(Study(out=Path(out)), argv, card)


def parse_own(
    options: Own, argv: Sequence[str], card: str, **fields: Any
) -> tuple[Own, config.Run]:
    """As parse_study, for a study with options of its own; fields: what it changes in a preset."""
    kind = dataclasses.make_dataclass(
        "StudyCommand", [("study", type(options)), ("run", config.Run)], frozen=True
    )
    command = _parse_run(kind, argv, options, card, **fields)
    study: Own = command.study
    for name in ("seeds", "together"):
        if getattr(study, name) < 1:
            raise UserError(f"{name} must be at least 1, not {getattr(study, name)}")
    _ = study.part  # is it one?
    return dataclasses.replace(study, out=remote.local(study.out)), command.run


def _parse_run(
    kind: Any,
    argv: Sequence[str],
    options: Any,
    card: str,
    base: config.Run | None = None,
    **fields: Any,
) -> Any:
    """kind(options, run), from the options' own names, those of Launch and those of any field.

    base: what the fields start from; default: the preset. fields: what is changed there before the
    command line has its say.
    """
    names = [f.name for part in (options, config.Launch()) for f in dataclasses.fields(part)]
    _check_options(argv, [*names, *config.fields_of(config.Run())])
    helps = "--help" in argv or "-h" in argv
    asked = _value_of("--preset", argv) or options.preset
    preset = asked or ("cpu" if helps or base is not None else _preset_for_backend(argv))
    start = config.PRESETS[choose("preset", preset, config.PRESETS)] if base is None else base
    run = config.override(start, **fields)
    return tyro.cli(
        tyro.conf.OmitArgPrefixes[kind],
        args=list(argv),
        default=kind(dataclasses.replace(options, preset=preset), run),
        description=card,
    )


def command_line(script: str, study: Study, argv: Sequence[str]) -> str:
    """The command that gives this study again, its preset written out."""
    preset = [] if _value_of("--preset", argv) else ["--preset", str(study.preset)]
    return shlex.join(["python", script, *preset, *argv])


def chosen_arms(study: Study, base: config.Run, arms: Mapping[str, Callable]) -> list[str]:
    """The arms asked for.

    Raises UserError for an unknown one (lists the valid ones), or when an option was given that
    every chosen arm sets by itself, so that it would do nothing.
    """
    between = ";" if ";" in study.arms else ","  # some names have a comma in them
    names = [study.arms] if study.arms in arms else study.arms.split(between)
    names = list(arms) if study.arms == "all" else [name.strip() for name in names]
    chosen = [choose("arm", name, arms) for name in names]
    preset = config.PRESETS[study.preset or "cpu"]
    for name in config.differences(preset, base):
        without, given = (
            [(config.fields_of(run) | arms[arm](run))[name] for arm in chosen]
            for run in (preset, base)
        )
        if without == given:
            raise UserError(
                f"--{name.replace('_', '-')} would do nothing: it is what the chosen arms set "
                f"({', '.join(str(v) for v in dict.fromkeys(given))}); choose arms by --arms"
            )
    return chosen


def show(rows: list[dict[str, Any]], study: Study) -> None:
    """Print the closing table, or the summary as JSON, and say where the report is."""
    if study.json:
        print((study.out / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        print(tables.text(frames.closing_table(rows)))
    _say_goodput(study.out)
    if study.draw:
        say(f"report: {study.out / 'report.html'}")


@dataclass(frozen=True)
class Figures:
    """Redraw the figures of a run or study from its logs, or those of the paper from its tables; no
    accelerator needed."""

    # a run or study folder, or several of one study, as its shards write them; or the paper's data
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path | None = None  # default: figures/ in the first of them
    json: bool = False  # print names and sentences as JSON


@dataclass(frozen=True)
class Probe:
    """Measure checkpoints at every layer."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional]  # run folders, or single checkpoints
    what: str = "stream,gradient,jacobian"  # groups with commas between them, or all; see README
    step: str = "newest"  # newest, all, or steps with commas; 0 is made again from config and seed
    layers: str = "all"  # all, or indices with commas: 0,1,mid,-2,-1
    vectors: int = 8  # random vectors for each Jacobian norm
    batches: int = 1  # held-out batches to average over; standard errors are then over them
    sequences: int | None = None  # of each batch; default: as many as the run's own probes
    tolerance: float = 0.01  # relative, of largest singular values and eigenvalues
    corpus: str | None = None  # measure on another text than the run's
    against: Path | None = None  # a second checkpoint, side by side with the first
    format: Literal["table", "json", "csv"] = "table"
    figure: Path | None = None  # draw it: .png, .pdf or .svg, with a .csv beside it


MAX_LR = Path(__file__).parents[1] / "experiments" / "results" / "max_lr.csv"


@dataclass(frozen=True)
class Paper:
    """Tables -> figures, numbers, and the paper as a PDF (by latexmk)."""

    source: Path = Path("paper")  # folder of main.tex and what it takes along
    data: Path | None = None  # folder of the tables; default: SOURCE/data
    out: Path | None = None  # default: SOURCE/build
    draft: bool = False  # where data are missing: a box that says so
    pdf: bool = True  # --no-pdf: all that LaTeX needs, without LaTeX


@dataclass(frozen=True)
class Placements:
    """Print the placements table."""

    layers: int = 48  # L, blocks: the depth of its numbers
    # a max_lr.csv of experiments/max_lr.py; default: the results of this checkout, if it has some
    max_lr: Path | None = MAX_LR if MAX_LR.exists() else None
    json: bool = False


@dataclass(frozen=True)
class Aot:
    """Compile a run for a slice of TPUs, without a TPU: does it fit, and what is its least time?"""

    tpu: str = ""  # name of the slice: v4-32, v5e-16, v5p-64, v6e-16, ...
    slices: int = 1  # so many of them, joined by the network of the data centre
    preset: str = "tpu"  # smoke, cpu, gpu or tpu
    only: str = "all"  # programs of the step, with commas between them
    json: bool = False  # print all of it as JSON


@dataclass(frozen=True)
class _AotCommand:
    options: Aot
    run: config.Run


def figures(argv: Sequence[str]) -> None:
    command = _parse(Figures, argv)
    if not command.paths:
        raise UserError("give a run or study folder: normstudy figures PATH")
    from normstudy import evidence, paper_figures, pictures
    from normstudy import figures as draw

    paths = [_pulled(path) for path in command.paths]
    for folder in (paths[0], paths[0] / evidence.FOLDER):
        if (folder / "runs.csv").exists():
            drawn = paper_figures.draw_all(folder, command.out or paths[0] / "figures")
            print(as_json(list(map(str, drawn))) if command.json else "\n".join(map(str, drawn)))
            return
    runs = frames.load(*paths)
    out = command.out or paths[0] / "figures"
    drawn = draw.draw_all(runs, out, pictures.of(paths, runs))
    rows = [{"figure": str(d.png), "shows": d.sentence} for d in drawn]
    print(as_json(rows) if command.json else "\n".join(row["figure"] for row in rows))


def paper(argv: Sequence[str]) -> None:
    command = _parse(Paper, argv)
    from normstudy import paper as press

    data, out = command.data or command.source / "data", command.out or command.source / "build"
    print(press.build(command.source, data, out, command.draft, command.pdf))


def probe(argv: Sequence[str]) -> None:
    command = _parse(Probe, argv)
    if not command.paths:
        raise UserError("give a run folder or a checkpoint: normstudy probe PATH")
    if command.against and len(command.paths) > 1:
        raise UserError("--against takes two checkpoints: give one PATH beside it")
    from normstudy import runtime

    runtime.start(cpu_devices=1)
    from normstudy import inspection, probe_figure

    options = inspection.Options(
        what=tuple(word.strip() for word in command.what.split(",")),
        steps=command.step,
        **{
            name: getattr(command, name)
            for name in ("layers", "vectors", "batches", "sequences", "tolerance", "corpus")
        },
    )
    if command.figure:
        probe_figure.check(command.figure)
    paths = [*map(_pulled, command.paths), *map(_pulled, [command.against] * bool(command.against))]
    found = list(inspection.inspect(paths, options))
    if command.against and len(found) != 2:
        raise UserError("--against compares one step with one step: name it by --step")
    if command.format == "json":
        print(as_json([measured.as_dict(own) for own in found]))
    elif command.format == "csv":
        numbers = measured.long_table(found)
        if not numbers:
            raise UserError("nothing asked for has numbers, which is all that --format csv holds")
        print(frames.to_csv(numbers), end="")
    elif command.against:
        print(measured.side_by_side(*found))
    else:
        print(measured.text(found))
    if command.figure:
        probe_figure.draw(found, command.figure)
        say(f"figure: {command.figure}")


def placements(argv: Sequence[str]) -> None:
    command = _parse(Placements, argv)
    from normstudy import ramp
    from normstudy.placements import as_rows

    if command.layers < 1:
        raise UserError(f"layers must be at least 1, not {command.layers}")
    rates = ramp.rates(command.max_lr, command.layers) if command.max_lr else {}
    rows = as_rows(command.layers, rates or None)  # no column where nothing was measured
    print(as_json(rows) if command.json else tables.markdown(rows))


def aot(argv: Sequence[str]) -> None:
    """What does not fit ends with exit code 3 and the options by which it fits."""
    command = _parse_run(_AotCommand, argv, Aot(), Aot.__doc__ or "")
    if not command.options.tpu:
        raise UserError("which slice? --tpu NAME, for example --tpu v4-32 or --tpu v5p-64")
    if command.options.slices < 1:
        raise UserError(f"slices must be at least 1, not {command.options.slices}")
    slice = topologies.slice_of(command.options.tpu)
    topologies.prepare()
    from normstudy import aot as ahead

    proof = ahead.prove(command.run, slice, command.options.slices, command.options.only)
    print(as_json(ahead.as_dict(proof)) if command.options.json else ahead.text(proof), flush=True)
    ahead.check(proof)


@dataclass(frozen=True)
class Train:
    """Train one run; the same command goes on where it was stopped."""

    preset: str | None = None  # smoke, cpu, gpu or tpu; default: the one for the backend found
    out: Path = Path("runs/train")  # folder of the run
    launch: config.Launch = field(default_factory=config.Launch)


@dataclass(frozen=True)
class _TrainCommand:
    options: Train
    run: config.Run


def train(argv: Sequence[str]) -> None:
    command = _parse_run(_TrainCommand, argv, Train(), Train.__doc__ or "")
    from normstudy import hosts, runtime
    from normstudy import train as loop

    runtime.start(launch=command.options.launch)
    out = remote.local(command.options.out)
    hosts.first(lambda: remote.pull(out))
    loop.check(command.run)
    name = command.run.model.placement
    launch = command.options.launch
    result = loop.train(command.run, out, name, launch.may_change, launch.keep)
    if hosts.leads():
        print(f"{name}: {result['word']} (step {result['step']}): {result['why']}")
        _say_goodput(out)
    if "not_finite" in result:
        raise NotFinite(f"{out} holds what is known of it, and the last checkpoint")


@dataclass(frozen=True)
class Diagnose:
    """Why does it not train, and what fixes it? Changes that would are tried, one at a time.

    A config by its fields (--placement post --layers 24 --lr 1e-3 ...) or --config; or --run; or
    --checkpoint; or --losses, with what is known beside it.

    Exit codes: 0 healthy, 1 findings, 2 bad input, 3 could not decide.
    """

    config: Path | None = None  # a JSON file of fields, or a config.json that normstudy wrote
    run: Path | None = None  # a run folder, or one arm of a study: all its seeds
    checkpoint: Path | None = None  # a run folder, its ckpt folder or one step in it
    # the other side of a refactor: a config file or run folder; beside --checkpoint, another one
    against: Path | None = None
    losses: Path | None = None  # CSV with a header, JSON lines or TensorBoard events
    h1: float | None = None  # with --losses: unigram entropy of the training text, nats
    mean_loss: float | None = None  # with --losses: loss of predicting the mean (regression)
    runs: bool = True  # --no-runs: nothing is trained, and what literature proposes is listed
    budget: str = "4m"  # for all trials: 90s, 4m or 1h; the audits take 10 s beside
    seeds: int = 1  # of the baseline and of each change
    preset: str | None = None  # what a config's fields start from; default: those of config.py
    out: Path | None = None  # of trials; default: runs/diagnose/HASH of the config
    json: bool = False  # see normstudy/diagnose/page.py for its fields


@dataclass(frozen=True)
class _DiagnoseCommand:
    options: Diagnose
    model: config.Run


def diagnose(argv: Sequence[str]) -> None:
    """Findings end with their exit code."""
    from normstudy import runtime
    from normstudy.diagnose import diagnosis, page, subject, verdicts

    file = _value_of("--config", argv)
    base = subject.read_config(Path(file)) if file else config.Run()
    if (preset := _value_of("--preset", argv)) and not file:
        base = config.PRESETS[choose("preset", preset, config.PRESETS)]
    card = Diagnose.__doc__ or ""
    command = _parse_run(_DiagnoseCommand, argv, Diagnose(), card, base=base)
    options, run = command.options, command.model
    ways = ("config", "run", "checkpoint", "losses")
    if len(asked := [name for name in ways if getattr(options, name)]) > 1:
        raise UserError(f"give one of {', '.join('--' + name for name in asked)}")
    # a checkpoint opens on one device, whatever wrote it
    runtime.start(cpu_devices=1 if options.checkpoint else None, launch=config.Launch())
    about = _subject(options, run, _given(argv))
    trying = None
    if options.runs:
        mark = hashlib.sha256(config.to_json(about.run or run).encode()).hexdigest()[:8]
        out = options.out or Path("runs/diagnose") / mark
        trying = diagnosis.Trying(out, _seconds(options.budget), options.seeds)
    told = diagnosis.make(about, trying)
    if options.against:
        told = _compared(options, about, told)
    print(as_json(page.as_dict(told)) if options.json else page.text(told), flush=True)
    if trying and told.results:
        card = shlex.join(["normstudy", "diagnose", *argv])
        say(f"with pictures: {page.write_report(told, trying.out, card)}")
    if code := verdicts.exit_code(told.findings):
        sys.exit(code)


def _subject(options: Diagnose, run: config.Run, given: frozenset[str]) -> Any:
    """What the command line is about."""
    from normstudy import data
    from normstudy.diagnose import subject

    if options.run:
        return subject.from_run(_pulled(options.run))
    if options.checkpoint:
        from normstudy.diagnose.checkpoints import from_checkpoint

        return from_checkpoint(_pulled(options.checkpoint))
    if not options.losses:
        return subject.from_config(run, data.feed(run).h1)
    if options.mean_loss is not None:
        level = subject.Baseline(options.mean_loss, "the loss of predicting the mean")
    else:
        h1 = data.feed(run).h1 if options.h1 is None and "corpus" in given else options.h1
        level = subject.Baseline(h1)
    return subject.from_losses(options.losses, level, run if given else None, given)


def _compared(options: Diagnose, about: Any, told: Any) -> Any:
    """The diagnosis with what is another in the other side."""
    from normstudy.diagnose import against, subject

    assert options.against
    there = _pulled(options.against)
    findings = list(told.findings)
    if options.checkpoint and there.is_dir():
        from normstudy import checkpoint
        from normstudy.diagnose.checkpoints import moved_between

        findings.append(moved_between(there, _pulled(options.checkpoint)))
        there, _ = checkpoint.locate(there, None)
    differences = against.differences(about, subject.other_side(there))
    return dataclasses.replace(told, findings=findings, differences=differences)


def _given(argv: Sequence[str]) -> frozenset[str]:
    """The config's fields that the command line names."""
    named = {token[2:].split("=")[0].replace("-", "_") for token in argv if token[:2] == "--"}
    names = frozenset(name.removeprefix("no_") for name in named)
    return names & set(config.fields_of(config.Run()))


def _seconds(budget: str) -> float:
    """'90s', '4m' or '1h' in seconds. Raises UserError for anything else."""
    units = {"s": 1, "m": 60, "h": 3600}
    if budget[-1:] in units and budget[:-1].replace(".", "", 1).isdigit() and float(budget[:-1]):
        return float(budget[:-1]) * units[budget[-1]]
    raise UserError(f"--budget is a time such as 90s, 4m or 1h, not {budget!r}")


@dataclass(frozen=True)
class Watch:
    """Follow a run while it goes on, and warn. Exit code 1 where anything was warned of."""

    path: Annotated[Path, tyro.conf.Positional]  # a run folder, or JSON lines with loss and step
    every: float = 5.0  # seconds between two looks
    patience: float = 600.0  # seconds without a new row after which it ends


def watch(argv: Sequence[str]) -> None:
    command = _parse(Watch, argv)
    from normstudy.diagnose import watch as room

    warned = False
    for event in room.follow(command.path, command.every, command.patience):
        warned |= not isinstance(event, str)
        print(event if isinstance(event, str) else f"step {event.step}: {event.says}", flush=True)
    if warned:
        sys.exit(1)


@dataclass(frozen=True)
class Verify:
    """Is every checkpoint what was saved? Reads all bytes again."""

    path: Annotated[Path, tyro.conf.Positional]  # a run or study folder, ckpt folder or one step
    json: bool = False


def verify(argv: Sequence[str]) -> None:
    command = _parse(Verify, argv)
    from normstudy import manifest

    folder = remote.home(remote.local(command.path))
    rows = manifest.look_at_all(folder)
    print(as_json(rows) if command.json else tables.text(rows))
    damaged = [row["checkpoint"] for row in rows if row["problem"]]
    if damaged:
        raise Damaged(f"{len(damaged)} of {len(rows)} are not what was saved")
    _say_goodput(folder)


COMMANDS = {
    "train": train,
    "figures": figures,
    "paper": paper,
    "probe": probe,
    "verify": verify,
    "diagnose": diagnose,
    "watch": watch,
    "placements": placements,
    "aot": aot,
}


def dispatch(argv: Sequence[str]) -> None:
    """normstudy COMMAND ...; without one, what there is."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: normstudy COMMAND ... (normstudy COMMAND --help tells more)\n")
        print(f"  {'train':<22}train one run, or go on with it")
        print(f"  {'figures RUN_DIR':<22}redraw figures from logs")
        print(f"  {'paper':<22}tables to figures, numbers and the paper's PDF")
        print(f"  {'probe CHECKPOINT':<22}measure a checkpoint at every layer")
        print(f"  {'diagnose ...':<22}why does it not train, and what fixes it? tries it")
        print(f"  {'watch RUN_DIR':<22}follow a run and warn")
        print(f"  {'verify RUN_DIR':<22}are the checkpoints what was saved?")
        print(f"  {'placements':<22}the table: where each placement puts the norm")
        print(f"  {'aot --tpu SLICE':<22}does a run fit a slice of TPUs? needs none")
        print("\nThe study itself: python experiments/reproduce.py, or make reproduce")
        return
    COMMANDS[choose("command", argv[0], COMMANDS)](argv[1:])


def main() -> None:
    """Entry point of the `normstudy` script."""
    guarded(dispatch)


def as_json(value: Any) -> str:
    """Indented JSON; numbers that JSON lacks (nan, inf) as strings."""
    return json.dumps(plain(value), indent=2, allow_nan=False)


def _say_goodput(folder: Any) -> None:
    share = attempts.goodput(folder)
    if share is not None:
        say(f"goodput: {share:.0%} of the time of all attempts went into steps that count")


def _parse(kind: Any, argv: Sequence[str]) -> Any:
    _check_options(argv, [f.name for f in dataclasses.fields(kind)])
    return tyro.cli(kind, args=list(argv))


def _pulled(path: Path) -> Path:
    """The folder itself, or a fresh local copy of what lies on an object store."""
    names = path.parts[::-1]
    below = 2 if len(names) > 1 and names[1] == remote.CHECKPOINTS else 0
    below = 1 if names[:1] == (remote.CHECKPOINTS,) else below  # ckpt, or one step in it
    copy = remote.local(path.parents[below - 1] if below else path)
    remote.pull(copy)
    return copy.joinpath(*names[:below][::-1])


def _check_options(argv: Sequence[str], valid: Sequence[str]) -> None:
    for token in argv:
        if token.startswith("--"):
            name = token[2:].split("=")[0].replace("-", "_")
            if name != "help" and name.removeprefix("no_") not in valid:
                choose("option", name, valid)


def _value_of(option: str, argv: Sequence[str]) -> str | None:
    for i, token in enumerate(argv):
        if token == option and i + 1 < len(argv):
            return argv[i + 1]
        if token.startswith(option + "="):
            return token.split("=", 1)[1]
    return None


def _preset_for_backend(argv: Sequence[str]) -> str:
    from normstudy import runtime

    # the backend can be asked only after all processes have met
    launch, _ = tyro.cli(config.Launch, args=list(argv), return_unknown_args=True)
    runtime.start(launch=launch)
    import jax

    return {"gpu": "gpu", "tpu": "tpu"}.get(jax.default_backend(), "cpu")


if __name__ == "__main__":
    main()
