"""Programs for TPUs, compiled where there is none; what is read from them.

Compiling takes seconds each, so programs are few, tiny and shared; two processes do it at once.
"""

import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny

from normstudy import aot, collectives, config, mesh, programs, topologies
from normstudy.collectives import Collective
from normstudy.errors import OutOfMemory, UserError, Wasteful

SMALL = {
    "layers": 4, "width": 128, "heads": 2, "ff": 128, "context": 32, "batch": 32,
    "probe_batch": 16, "vectors": 2, "dtype": "bfloat16",
}  # fmt: skip
# the plain steps to compile, in a process each: {name: (slice, changes)}
SLICES = {name: (name, {}) for name in ("v4-8", "v5e-16", "v6e-16")}  # v4-32: FLAGSHIP
# wide enough that 48 layers do not lie in the memory of the core, for which the code is another
WIDE = {"width": 256, "ff": 1024, "batch": 64, "context": 64}
DEPTHS = {str(n): ("v5e-4", WIDE | {"layers": n}) for n in (48, 1000)}
FSDP = {"fsdp": ("v4-8", {"fsdp": 4})}
TWO_SLICES = {"2 slices": ("v4-8", {"slices": 2})}
FLAGSHIP = config.override(config.PRESETS["tpu"], context=1024)

# compiles plain steps and prints what the tests ask of them; argv: {name: [slice, fields]}
STEPS = """
import json, sys
from normstudy import topologies
topologies.prepare()
from normstudy import aot, config
answers = {}
for name, (tpu, fields) in json.loads(sys.argv[1]).items():
    slices = fields.pop("slices", 1)
    run, slice = config.override(config.Run(), **fields), topologies.slice_of(tpu)
    proof = aot.prove(run, slice, slices, only=next(iter(aot.TAKES)))
    aot.check(proof)
    (program,) = proof.programs
    answers[name] = aot.as_dict(proof) | {
        "flops": program.flops,
        "in_loops": sum(m.times * m.received for m in program.meetings if m.loops),
        "code": program.memory.code,
    }
print(json.dumps(answers))
"""

# a stack of matrices split by fsdp, used as it should be, and made whole before the scan
WHOLE = """
import json
from normstudy import topologies
topologies.prepare()
import jax, jax.numpy as jnp
from normstudy import aot, config, mesh
slice = topologies.slice_of("v4-8")
devices = mesh.make(config.Mesh(fsdp=4), 8, 8, aot.devices_of(slice))
stack = {"layers": {"q": jax.ShapeDtypeStruct((6, 128, 128), jnp.float32)}}
stack = mesh.placed(stack, mesh.state_shardings(devices, stack))
x = jax.ShapeDtypeStruct((8, 64, 128), jnp.float32, sharding=mesh.by_batch(devices))

def through(stack, x):
    layer = lambda x, w: (mesh.split_by_batch(devices, jnp.tanh(x @ w)), None)
    return jax.lax.scan(layer, x, stack["layers"]["q"])[0]

def whole(stack, x):
    made = jax.lax.with_sharding_constraint(stack["layers"]["q"], mesh.replicated(devices))
    return through({"layers": {"q": made}}, x)

both = [
    aot.compile_one(f.__name__, jax.jit(f), (stack, x), 0, devices, slice.hbm).gathered_whole
    for f in (through, whole)
]
# what each family's compiler says that a program may have, of one that takes far more
said = {}
for family in topologies.FAMILIES:
    slice = topologies.slice_of(next(iter(topologies.names(family))))
    one = mesh.replicated(mesh.make(config.Mesh(), 1, 1, aot.devices_of(slice)[:1]))
    large = jax.ShapeDtypeStruct((2**20, 2**18), jnp.float32, sharding=one)
    try:
        jax.jit(lambda x: x + 1).lower(large).compile()
    except jax.errors.JaxRuntimeError as error:
        said[family] = str(error)
print(json.dumps([both, said]))
"""


def started(code: str, *args: str) -> subprocess.Popen:
    """A process of its own; jax is imported here with another environment."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=tiny.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process: subprocess.Popen):
    """What it printed as JSON; ended at the limit."""
    try:
        out, err = process.communicate(timeout=900)  # compiles for minutes on a busy machine
    finally:
        process.kill()
    assert process.returncode == 0, err
    return json.loads(out)


def wanted(cases: dict) -> str:
    return json.dumps({name: [tpu, SMALL | own] for name, (tpu, own) in cases.items()})


@pytest.fixture(scope="module")
def compiled():
    """(answers about plain steps, what WHOLE prints), by two processes at once."""
    flagship = {"flagship": ["v4-32", config.fields_of(FLAGSHIP)]}
    first = started(STEPS, json.dumps(json.loads(wanted(SLICES)) | flagship))
    second = started(STEPS, wanted(DEPTHS | FSDP | TWO_SLICES))
    try:
        steps = answer(second)
        whole = answer(started(WHOLE))
        return steps | answer(first), whole
    finally:
        first.kill()


def command(*args: str) -> subprocess.CompletedProcess:
    return tiny.python("-m", "normstudy.cli", "aot", *args)


@pytest.mark.fault  # F20
def test_each_family_of_tpus_can_be_compiled_for_by_two_processes_at_once(compiled):
    steps, _ = compiled
    for name in SLICES:
        assert steps[name]["fits"], name
        assert steps[name]["devices"] == topologies.slice_of(name).chips
        (program,) = steps[name]["programs"]
        assert 0 < program["needed_bytes"] < 2**28


@pytest.mark.fault  # F20
def test_48_layers_of_width_1024_and_context_1024_fit_v4_32_without_any_flag(compiled):
    own = compiled[0]["flagship"]
    assert (FLAGSHIP.model.layers, FLAGSHIP.model.width, FLAGSHIP.model.context) == (48, 1024, 1024)
    assert own["fits"] and own["mesh"] == {"data": 16, "fsdp": 1, "tensor": 1}
    needed = own["programs"][0]["needed_bytes"]
    # parameters and Adam's two moments alone are 12 bytes for each of 604 million entries
    assert 12 * 604e6 < needed < own["hbm_bytes"] == 30.75 * 2**30


@pytest.mark.fault  # F20
def test_program_of_1000_layers_is_hardly_larger_than_that_of_48(compiled):
    code = {depth: compiled[0][depth]["code"] for depth in DEPTHS}
    assert code["48"] > 100_000
    assert code["1000"] < 1.05 * code["48"]


@pytest.mark.fault  # F20
def test_matrix_products_of_a_step_are_four_thirds_of_its_textbook_count(compiled):
    """Forward, once more for the backward pass, and twice in it, less what is kept of a layer."""
    textbook = tiny.experiment("work")
    for depth in DEPTHS:
        run = config.override(config.Run(), **SMALL | WIDE | {"layers": int(depth)})
        work = textbook.matmul_flops(run) + textbook.attention_flops(run)
        assert 1.1 < 4 * compiled[0][depth]["flops"] / work < 4 / 3


@pytest.mark.fault  # F20
def test_two_slices_meet_once_a_step_and_what_they_gather_is_no_parameter(compiled):
    """They add up gradients by a reduce-scatter in each slice, and gather the sums."""
    own = compiled[0]["2 slices"]
    assert own["fits"] and own["devices"] == 8 and own["mesh"]["data"] == 8
    where = {kind["kind"]: kind["in_loops"] for kind in own["collectives"]}
    assert where["between slices"] is False and not any(where.values())


@pytest.mark.fault  # F20
def test_data_parallel_devices_meet_outside_of_loops_alone(compiled):
    for name in SLICES:
        kinds = {(own["kind"], own["in_loops"]) for own in compiled[0][name]["collectives"]}
        assert kinds == {("all-reduce", False)}


@pytest.mark.fault  # F20
def test_fsdp_brings_parameters_and_never_the_activations(compiled):
    """The compiler would rather split the stream by width, and add up activations in each layer."""
    own, entries = compiled[0]["fsdp"], SMALL["layers"] * (4 * 128**2 + 2 * 128 * 128)
    # of 4 bytes: half for each of two gathers in bfloat16, 1 for gradients; all of it at most
    # twice, for pieces that go both ways around a ring
    assert 0 < own["in_loops"] < 2 * 2 * 4 * entries
    assert own["programs"][0]["gathered_whole"] == []


@pytest.mark.fault  # F20
def test_stack_that_is_made_whole_before_its_scan_is_found(compiled):
    through, whole = compiled[1][0]
    assert through == [] and whole == ["layers/q"]


@pytest.mark.fault  # F20
def test_memory_of_each_family_is_what_its_compiler_says(compiled):
    said = compiled[1][1]
    assert said.keys() == topologies.FAMILIES.keys()
    for name, family in topologies.FAMILIES.items():
        assert f"exceeds available HBM ({family.hbm}G)" in said[name]


def test_what_the_optimizer_keeps_stays_beside_a_probe():
    run = tiny.run()
    devices = mesh.make(run.mesh, 8, 8)
    beside = {name: own[-1] for name, own in aot.step_programs(run, devices).items()}
    model = programs.of(run)[0].abstract.model
    # Adam's two moments and its counter, all replicated on a mesh of data alone
    moments = 2 * sum(leaf.size * 4 for leaf in jax.tree.leaves(model)) + 4
    assert beside == {"step": 0, "measure": moments, "effect": moments}


@pytest.mark.fault  # F20
def test_misfit_ends_with_code_3_and_names_a_flag_that_then_fits():
    fields = {"layers": 6000, "width": 128, "heads": 2, "ff": 512, "batch": 8, "context": 32}
    fields |= {"probe-batch": 8}
    options = [f"--{name}={value}" for name, value in fields.items()]
    asked = ["--tpu", "v5e-4", "--only", next(iter(aot.TAKES)), *options]
    misfit = command(*asked)
    assert misfit.returncode == 3, misfit.stderr
    assert "a program can have 15.75 GiB; it fits with --fsdp 2 (" in misfit.stderr
    assert "Traceback" not in misfit.stderr
    fit = command(*asked, "--fsdp", "2")
    assert fit.returncode == 0, fit.stderr
    for word in (
        "headroom (per cent)",
        "floor (ms)",
        "all-gather",
        "mesh data 2, fsdp 2, tensor 1",
    ):
        assert word in fit.stdout


@pytest.mark.fault
def test_bad_input_is_told_before_anything_is_compiled():
    unknown = command("--tpu", "v5p-65")
    assert unknown.returncode == 2 and "Valid: v5p-8, v5p-16, v5p-32, v5p-64" in unknown.stderr
    missing = command()
    assert missing.returncode == 2 and "--tpu NAME" in missing.stderr
    odd = command("--tpu", "v4-8", "--batch", "6")
    assert odd.returncode == 2 and "make it a multiple of 4" in odd.stderr


def test_missing_libtpu_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'normstudy\[aot\]'"):
        aot.devices_of(topologies.slice_of("v4-8"))


def test_smaller_runs_come_mildest_first():
    run = tiny.run(heads=2, batch=8, probe_batch=8)
    found = [aot.flags(run, other) for other in aot.smaller(run, 4)]
    assert found == [
        "--fsdp 2", "--fsdp 4", "--fsdp 2 --tensor 2", "--batch 4 --fsdp 4 --probe-batch 4",
        "--batch 2 --fsdp 4 --probe-batch 2", "--batch 1 --fsdp 4 --probe-batch 1",
    ]  # fmt: skip


def proof(**changes) -> aot.Proof:
    memory = aot.Memory(arguments=10, outputs=0, temporary=20, beside=0, code=0)
    program = aot.Program("step", 30, 40, 1.0, memory, 5.0)._replace(**changes)
    slice = topologies.slice_of("v4-8")
    return aot.Proof(tiny.run(), slice, 1, {"data": 4}, (program,))


def test_parameters_gathered_for_all_layers_at_once_end_with_code_1():
    aot.check(proof())
    with pytest.raises(Wasteful, match=r"layers/q.*a bug in the program") as error:
        aot.check(proof(gathered_whole=("layers/q",)))
    assert error.value.exit_code == 1


def test_plan_above_the_memory_does_not_fit_even_where_it_compiles(monkeypatch):
    monkeypatch.setattr(aot, "first_that_fits", lambda proof: None)
    with pytest.raises(OutOfMemory, match="take a larger slice") as error:
        aot.check(proof(needed=41))
    assert error.value.exit_code == 3


def test_floor_is_the_longest_of_three_parts():
    meeting = Collective("all-reduce", ((8,),), 32, 4, (6,))
    least = aot.floor(proof(meetings=(meeting,)).programs[0], topologies.slice_of("v4-8"))
    assert least.compute == 5 / 275e12
    assert least.hbm == (10 + 2 * 20) / 1200e9
    assert least.links == 6 * 2 * 32 * 3 / 4 / 300e9
    assert least.bound == "links" and max(least) == least.links


def test_matrix_products_are_counted_for_every_turn_of_a_scan():
    def f(x, w):
        y, _ = jax.lax.scan(lambda x, w: (jax.jit(jnp.matmul)(x, w), None), x, w)
        return y

    x, w = jnp.ones((3, 5)), jnp.ones((7, 5, 5))
    assert aot.matmul_flops(jax.make_jaxpr(f)(x, w)) == 7 * 2 * 3 * 5 * 5


TEXT = """HloModule jit_f
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
%condition (p: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={1}
  %s = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%y), channel_id=3
}
%all-reduce-scatter (p: f32[64]) -> f32[16] {
  %r = f32[64]{0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
}
ENTRY %main (x: f32[4]) -> f32[] {
  %w = (s32[], f32[4]) while(%t), condition=%condition, body=%body
  %f = f32[16]{0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter
  ROOT %a = (f32[], f32[10]{0}) all-reduce(%b, %c), replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
}
"""  # noqa: E501


def test_collectives_are_read_with_bytes_groups_and_turns_of_their_loops():
    found = {own.kind: own for own in collectives.read(TEXT)}
    assert len(collectives.read(TEXT)) == len(found) == 4
    assert found["all-gather"] == Collective("all-gather", ((1, 8, 128),), 2048, 4, (6,))
    assert found["collective-permute"] == Collective("collective-permute", ((8,),), 32, 2, (6,))
    assert found["all-reduce"] == Collective("all-reduce", ((), (10,)), 44, 4, ())
    assert found["reduce-scatter"].bytes == 64 and found["reduce-scatter"].received == 192
    assert found["all-gather"].times == 6 and found["all-gather"].received == 2048 * 3 / 4
    assert math.isclose(found["all-reduce"].received, 2 * 44 * 3 / 4)
