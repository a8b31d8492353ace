"""Every setting, frozen, with its default and its unit; presets; JSON round trip. No jax here."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from normstudy.errors import UserError, choose


@dataclass(frozen=True)
class Model:
    """The architecture. Only what the forward pass needs: arms that share it share a program."""

    placement: str = "post"  # a row of placements.py
    layers: int = 48  # L, blocks (attention + MLP); 2L sublayers
    width: int = 32  # D
    heads: int = 4  # H; must divide width
    ff: int = 128  # F, units
    context: int = 32  # T, tokens
    vocab: int = 256  # V; bytes
    activation: Literal["gelu", "relu"] = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    # of the stream, the matmuls and their gradients. Parameters, optimizer, statistics of norms,
    # softmax, logits and losses are float32 in any case
    dtype: Literal["float32", "bfloat16"] = "float32"
    tied: bool = False  # readout = embedding transposed
    final_norm: bool | None = None  # between x_L and the readout; None: as the placement's row says
    embed_multiplier: float | None = None  # x_0 = this * E[token] + P[t]; None: sqrt(width), 2017

    def __post_init__(self):
        _positive(self, "layers", "width", "heads", "ff", "vocab", "norm_eps")
        if self.context < 2:
            raise UserError(f"context must be at least 2 tokens, not {self.context}")
        if self.width % self.heads:
            divisors = [h for h in range(1, self.width + 1) if self.width % h == 0]
            raise UserError(
                f"width {self.width} is not divided by heads {self.heads}; "
                f"heads that divide it: {', '.join(map(str, divisors))}"
            )


@dataclass(frozen=True)
class Init:
    """Standard deviations of the parameters at step 0; every law is normal, mean 0."""

    init: Literal["xavier", "kaiming", "normal"] = "xavier"  # for the branch matrices
    init_std: float = 0.02  # used by init=normal alone
    gain: float = 1.0  # multiplies every branch matrix (q, k, v, o, up, down)
    beta: float = 1.0  # multiplies v, o, up and down alone: DeepNet's four, whatever the placement
    depth_scaled: bool = False  # output projections (o, down) also times 1/sqrt(2L)
    embed_std: float | None = None  # token and position tables; None: width^-0.5

    def __post_init__(self):
        _positive(self, "init_std", "gain", "beta")
        if self.embed_std is not None:
            _positive(self, "embed_std")


@dataclass(frozen=True)
class Data:
    """Which text, and in what order."""

    corpus: str = "kjv"  # kjv, synthetic, or a path to a text file, a folder or a .bin
    batch: int = 16  # B, sequences in one update over all devices
    val_fraction: float = 0.05  # of the corpus, taken from its end
    data_seed: int = 0  # order of the windows

    def __post_init__(self):
        _positive(self, "batch")
        _not_negative(self, "data_seed")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"val_fraction must lie between 0 and 1, not {self.val_fraction}")


@dataclass(frozen=True)
class Optim:
    """Optimizer and schedule; the step counts updates from 1."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = 1e-3  # peak learning rate
    schedule: Literal[
        "constant",
        "linear",
        "cosine",
        "wsd",
        "inverse_sqrt",
        "inverse_sqrt_2017",
        "ramp",
        "geometric_ramp",
    ] = "constant"
    warmup: int = 0  # updates of linear warmup; lr / warmup at update 1
    # linear, cosine, wsd: last learning rate over the peak; geometric_ramp: the first over the peak
    end_fraction: float = 0.1
    decay_fraction: float = 0.2  # wsd: share of the updates that decay
    schedule_scale: float = 1.0  # inverse_sqrt_2017: the factor c
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1  # adamw alone; on matrices, by role
    clip: float = 0.0  # global gradient norm; 0: no clipping
    frozen: Literal["", "norms"] = ""  # what no update touches: gains and shifts of all norms

    def __post_init__(self):
        _positive(self, "lr", "schedule_scale", "eps")
        _not_negative(self, "warmup", "end_fraction", "weight_decay", "clip")
        if not 0 < self.decay_fraction <= 1:
            raise UserError(f"decay_fraction must lie in (0, 1], not {self.decay_fraction}")
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise UserError(f"b1 and b2 must lie in [0, 1), not {self.b1}, {self.b2}")


@dataclass(frozen=True)
class Mesh:
    """How the devices are laid out: their product must be the number of devices."""

    data: int = -1  # -1: all devices that the other two leave
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Probe:
    """What is measured, how often, on what."""

    probe_batch: int = 8  # sequences, fixed, from the validation split
    vectors: int = 2  # Rademacher vectors for each Jacobian norm
    # updates; the first 100 are probed at 0,1,2,3,5,10,20,30,50. 0: never, nothing to compile
    probe_every: int = 100
    probe_once: bool = False  # at step 0 and at no other, whatever probe_every
    curvature: bool = False  # sharpness at every probe: 13 or more Hessian-vector products each

    def __post_init__(self):
        _positive(self, "probe_batch")
        _not_negative(self, "probe_every")
        if self.vectors < 2:
            raise UserError(
                f"vectors must be at least 2 (for a standard error), not {self.vectors}"
            )


@dataclass(frozen=True)
class Launch:
    """How runs are launched; no part of what they compute.

    Several processes: on TPU slices and under SLURM the first three are found, elsewhere
    $NORMSTUDY_COORDINATOR, $NORMSTUDY_NUM_PROCESSES and $NORMSTUDY_PROCESS_ID serve too.
    """

    coordinator: str | None = None  # HOST:PORT of process 0
    num_processes: int | None = None
    process_id: int | None = None  # 0 writes
    join_timeout: int = 300  # seconds in which all must have come, or gone at the end
    heartbeat: int = 100  # seconds without a word after which a process counts as lost
    watchdog: int = 1800  # seconds without a step after which stacks are printed, exit 1; 0: never
    keep: int = 0  # newest checkpoints of a run that stay; 0: all
    allow_config_change: str = ""  # fields that may differ from the folder's, e.g. lr,steps
    allow_unsafe_rng: bool = False  # random numbers that may depend on the mesh

    def __post_init__(self):
        _positive(self, "join_timeout", "heartbeat")
        _not_negative(self, "watchdog", "keep")
        for name in self.may_change:
            choose("field in --allow-config-change:", name, fields_of(Run()))

    @property
    def may_change(self) -> list[str]:
        return [name.strip() for name in self.allow_config_change.split(",") if name.strip()]


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: Model = field(default_factory=Model)
    init: Init = field(default_factory=Init)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    mesh: Mesh = field(default_factory=Mesh)
    probe: Probe = field(default_factory=Probe)
    seed: int = 0  # parameters and probe vectors
    steps: int = 400  # updates
    eval_batches: int = 8  # validation batches at the end
    checkpoint_every: int = 200  # updates
    # end a run that has been dead (outcome.sealed_for) for so many updates after warmup; 0: never.
    # Off by default, since a plateau can end: at lr 0.1 pre-norm sits on H1 until update 164, then
    # trains (experiments/results/lr_grid.csv), where a patience of 100 updates would call it dead
    stop_after: int = 0

    def __post_init__(self):
        _positive(self, "steps", "eval_batches", "checkpoint_every")
        _not_negative(self, "stop_after", "seed")
        if self.optim.warmup > self.steps:
            raise UserError(
                f"warmup {self.optim.warmup} is longer than the run of {self.steps} steps; "
                "raise --steps or lower --warmup"
            )


def fields_of(run: Run) -> dict[str, Any]:
    """Flat view {field name: value}; names are unique over all sections."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(run):
        value = getattr(run, f.name)
        if dataclasses.is_dataclass(value):
            flat |= {g.name: getattr(value, g.name) for g in dataclasses.fields(value)}
        else:
            flat[f.name] = value
    return flat


def override(run: Run, **changes: Any) -> Run:
    """The run with fields of any section replaced by their own names.

    Raises UserError for an unknown name (lists the valid ones) or a value of another type.
    """
    valid = fields_of(run)
    for name in changes:
        choose("field", name, valid)
    top = {}
    for f in dataclasses.fields(run):
        value = getattr(run, f.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            hints = typing.get_type_hints(type(value))
            own = {
                g.name: _typed(g.name, changes[g.name], hints[g.name])
                for g in dataclasses.fields(value)
                if g.name in changes
            }
            if own:
                top[f.name] = dataclasses.replace(value, **own)
        elif f.name in changes:
            top[f.name] = _typed(f.name, changes[f.name], typing.get_type_hints(Run)[f.name])
    return dataclasses.replace(run, **top)


def to_json(run: Run) -> str:
    """The run as indented JSON; `from_json` gives it back."""
    return json.dumps(dataclasses.asdict(run), indent=2)


def from_json(text: str, where: str = "config") -> Run:
    """A Run from its JSON. Raises UserError that names the file and the field."""
    try:
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from None
    changes: dict[str, Any] = {}
    sections = {f.name for f in dataclasses.fields(Run)}
    for name, value in tree.items():
        choose(f"entry in {where}:", name, sections)
        changes |= value if isinstance(value, dict) else {name: value}
    return override(Run(), **changes)


def differences(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Fields that differ: {name: (in a, in b)}."""
    left, right = fields_of(a), fields_of(b)
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value, checked against its annotation; whole numbers pass as floats."""
    if typing.get_origin(hint) is Literal:
        return choose(name, str(value), typing.get_args(hint))
    kinds = typing.get_args(hint) or (hint,)
    if type(value) is int and float in kinds:
        return float(value)
    if type(value) not in kinds:
        wanted = " or ".join(getattr(k, "__name__", str(k)) for k in kinds)
        raise UserError(f"{name} takes {wanted}, not {value!r}")
    return value


def _positive(section: Any, *names: str) -> None:
    for name in names:
        if not getattr(section, name) > 0:
            raise UserError(f"{name} must be positive, not {getattr(section, name)}")


def _not_negative(section: Any, *names: str) -> None:
    for name in names:
        if not getattr(section, name) >= 0:
            raise UserError(f"{name} must not be negative, not {getattr(section, name)}")


# the same study at four sizes; make reproduce takes the one that fits the backend it finds
PRESETS: dict[str, Run] = {
    "smoke": Run(
        model=Model(width=16, heads=2, ff=32, context=16),
        data=Data(batch=8),
        optim=Optim(warmup=6),
        probe=Probe(vectors=2),
        steps=12,
        eval_batches=2,
    ),
    # lr: the largest that pre-norm bears, by experiments/tune_lr.py (see results/lr_grid.csv)
    "cpu": Run(optim=Optim(lr=0.1, warmup=200), steps=400),
    "gpu": Run(
        model=Model(width=512, heads=8, ff=2048, context=256, dtype="bfloat16"),
        data=Data(batch=64),
        optim=Optim(warmup=4000),
        steps=10_000,
        checkpoint_every=1000,
        probe=Probe(probe_every=500, probe_batch=64),
    ),
    "tpu": Run(
        model=Model(width=1024, heads=16, ff=4096, context=512, dtype="bfloat16"),
        data=Data(batch=256),
        optim=Optim(warmup=4000),
        steps=10_000,
        checkpoint_every=1000,
        probe=Probe(probe_every=500, probe_batch=64),
    ),
}
