"""tpu_scripts/ without a TPU: what they would do, what they refuse, what they make of states."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from pod import ROOT, SCRIPTS, Pod, answers, ended, states, wait_for

from normstudy import cli

GOLDEN = Path(__file__).parent / "golden"
STUDY = {"ATTEMPT": "20260101T000000Z-1", "OUT": "gs://bucket/norms", "TYPE": "v4-32"}
SMALL = STUDY | {"TYPE": "v4-8"}

DRY_RUNS = {
    "create": (["create.sh"], {"TYPE": "v5p-64", "PROVISION": "reserved", "PROJECT": "mine"}),
    "create_spot": (["create.sh"], {"TYPE": "v6e-16", "PROVISION": "spot", "VALID_UNTIL": "6h"}),
    "delete": (["delete.sh"], {}),
    "launch": (["launch.sh", "--seeds", "3", "--corpus", "my text"], STUDY),
    "launch_shared": (["launch.sh"], STUDY | {"OUT": "/shared/norms", "TYPE": "v5litepod-8"}),
    "launch_other": (["launch.sh", "--", "sh", "-c", 'echo "it\'s $HOME"'], SMALL),
    "supervise": (["supervise.sh", "--retries", "2", "--arms", "post"], SMALL),
    "stop": (["stop.sh"], {"TYPE": "v4-16"}),
    "status": (["status.sh"], {"OUT": "gs://bucket/norms"}),
    "logs": (["logs.sh", "1", "-n", "20", "-f"], {}),
}  # fmt: skip


@pytest.fixture
def pod(tmp_path):
    pod = Pod(tmp_path)
    yield pod
    pod.close()


@pytest.fixture
def no_pod(tmp_path):
    pod = Pod(tmp_path, ready=False)
    yield pod
    pod.close()


def inside(pod, code, **env):
    """What bash prints for a line of code that has the functions of common.sh."""
    line = f"source {SCRIPTS}/common.sh; {code}"
    ran = subprocess.run(
        ["bash", "-c", line], env=pod.env | env, capture_output=True, text=True, timeout=20
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_prints_what_the_golden_file_says(pod, name):
    # GOLDEN=write python -m pytest tests/test_tpu_scripts.py writes the files anew
    command, env = DRY_RUNS[name]
    ran = pod.run(*command, DRY_RUN="1", **env)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.replace(str(ROOT), "ROOT").replace(str(pod.logs), "LOGS")
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")
    assert not pod.calls() and not pod.logs.exists()


@pytest.mark.parametrize("name", ["launch_shared", "launch", "supervise"])
def test_the_study_knows_the_options_that_it_is_started_with(name):
    said = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    (command,) = re.findall("# norms: attempt .* on . workers: (.*)", said)
    program, script, *options = shlex.split(command)
    assert (program, script) == ("python", "experiments/reproduce.py")
    study, _ = cli.parse_study(options, "", out="elsewhere")
    assert study.preset == "tpu" and study.out.name == "norms"


def test_what_a_dry_run_prints_can_be_pasted(pod):
    command = ["launch.sh", "--", "sh", "-c", 'echo "$0" >>~/ran', 'it\'s a $HOME & "more"\nlines']
    dry = pod.run(*command, DRY_RUN="1", ATTEMPT="one")
    pasted = subprocess.run(["bash", "-e"], input=dry.stdout, env=pod.env, text=True, timeout=30)
    assert pasted.returncode == 0
    assert (pod.homes[0] / "ran").read_text() == f"{command[-1]}\n"
    by_hand = pod.calls("ssh") + pod.calls("scp")
    pod.log.unlink()
    assert pod.run(*command, ATTEMPT="one").returncode == 0
    assert pod.calls("ssh") + pod.calls("scp") == by_hand


@pytest.mark.parametrize("script", ["create", "delete", "launch", "supervise", "stop", "status",
                                    "logs", "cost"])  # fmt: skip
def test_every_script_checks_which_pod_is_meant(pod, script):
    ran = pod.run(f"{script}.sh", NAME="")
    assert (ran.returncode, ran.stderr) == (
        2,
        "error: NAME is not set: the pod's name, as in NAME=norms\n",
    )
    assert not pod.calls()


@pytest.mark.parametrize(
    "bad",
    [
        {"NAME": "Norms"}, {"NAME": "1norms"}, {"NAME": "norms-"}, {"NAME": "a" * 64},
        {"NAME": "a b"}, {"NAME": "--quiet"}, {"NAME": "a;id"},
        {"ZONE": ""}, {"ZONE": "us-central2"}, {"ZONE": "mars"}, {"ZONE": "us-central2-b --x"},
        {"TYPE": ""}, {"TYPE": "v4"}, {"TYPE": "v4-"}, {"TYPE": "v4-12"}, {"TYPE": "v4-0"},
        {"TYPE": "v5e-16"}, {"TYPE": "v6e-12"}, {"TYPE": "a100-8"}, {"TYPE": "tpu7x-16"},
        {"TYPE": "v4-8x"}, {"TYPE": "v4-032"},
        {"PROVISION": "cheap"}, {"OUT": ""}, {"OUT": "runs/here"}, {"OUT": "gs://bucket"},
        {"OUT": "s3://bucket/x"}, {"OUT": "gs://bucket/a b"}, {"OUT": "/a;id"},
    ],
    ids=lambda bad: "=".join(*bad.items()),
)  # fmt: skip
def test_a_bad_setting_is_2_and_one_line(pod, bad):
    ran = pod.run("launch.sh", **bad)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    ((name, value),) = bad.items()
    assert line.startswith(f"error: {name} {repr(value) if value else 'is not set'}")
    assert not pod.calls()


@pytest.mark.parametrize(
    "command",
    ["create.sh --soon", "delete.sh all", "supervise.sh --retries many", "supervise.sh --retries",
     "launch.sh --", "logs.sh all", "logs.sh -n", "status.sh x", "stop.sh x", "cost.sh soon"],
)  # fmt: skip
def test_a_bad_option_is_2_and_one_line(pod, command):
    ran = pod.run(*command.split())
    assert ran.returncode == 2
    assert re.fullmatch("error: .*\n", ran.stderr)
    assert not pod.calls()


@pytest.mark.parametrize(
    ("kind", "image", "chips", "workers"),
    [
        ("v4-8", "tpu-ubuntu2204-base", 4, 1),
        ("v4-32", "tpu-ubuntu2204-base", 16, 4),
        ("v3-32", "tpu-ubuntu2204-base", 16, 4),
        ("v5litepod-1", "v2-alpha-tpuv5-lite", 1, 1),
        ("v5litepod-8", "v2-alpha-tpuv5-lite", 8, 1),
        ("v5litepod-16", "v2-alpha-tpuv5-lite", 16, 4),
        ("v5p-128", "v2-alpha-tpuv5", 64, 16),
        ("v6e-16", "v2-alpha-tpuv6e", 16, 4),
    ],
)
def test_each_type_has_its_image_chips_and_machines(pod, kind, image, chips, workers):
    said = inside(pod, "check_pod; runtime; chips; usual_workers", TYPE=kind)
    assert said.split() == [image, str(chips), str(workers)]


def test_another_image_can_be_asked_for(pod):
    assert inside(pod, "runtime", RUNTIME="v2-alpha-tpuv6e") == "v2-alpha-tpuv6e"


@pytest.mark.parametrize(
    ("codes", "one"),
    [
        ("0 0 0", 0), ("75 75", 75), ("134 75", 75), ("143 134 75", 75), ("0 75", 75),
        ("134 143", 134), ("0 134", 134), ("75 1", 1), ("134 2 134", 2), ("75 3", 3),
        ("255 75", 255),
    ],
)  # fmt: skip
def test_one_code_stands_for_all_workers(pod, codes, one):
    assert inside(pod, f"combined {codes}") == str(one)


def test_cost_is_chips_times_hours(pod):
    assert (
        "16 chips x 2.5 hours = 40.0 chip-hours" in pod.run("cost.sh", "2.5", TYPE="v4-32").stdout
    )
    pod.logs.mkdir()
    lines = [
        {"attempt": n, "waited": 9999, "seconds": 1800 * n, "exit_code": 0, "chips": 16}
        for n in (1, 2, 3)
    ]
    (pod.logs / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "3 attempts so far: 48.0 chip-hours" in pod.run("cost.sh").stdout


# --- create and delete


def made(pod):
    return [argv[3] for argv in pod.calls("queued-resources") if argv[3] != "describe"]


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        (["ACTIVE"], ["READY"], []),
        (["PROVISIONING", "ACTIVE"], ["READY"], []),
        (
            ["NONE", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"],
            ["NONE", "READY"],
            ["create"],
        ),
        (["NONE", "ACCEPTED", "PROVISIONING", "ACTIVE"], ["NONE", "READY"], ["create"]),
        (["NONE", "CREATING", "ACTIVE", "ACTIVE"], ["NONE", "CREATING", "READY"], ["create"]),
        (["SUSPENDED", "SUSPENDED", "ACTIVE"], ["NONE", "READY"], ["delete", "create"]),
        (["FAILED", "FAILED", "ACTIVE"], ["NONE", "READY"], ["delete", "create"]),
        (["SUSPENDING"] * 3 + ["SUSPENDED", "ACTIVE"], ["NONE", "READY"], ["delete", "create"]),
        (["DELETING", "DELETING", "NONE", "ACTIVE"], ["NONE", "READY"], ["create"]),
    ],
)
def test_create_waits_until_the_pod_is_ready(pod, before, after, asked):
    pod.play(states(*before), states(*after, of="tpu-vm"))
    ran = pod.run("create.sh")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert made(pod) == asked
    assert "4 chip-hours for each hour" in ran.stdout


def test_create_twice_makes_one_pod(no_pod):
    assert no_pod.run("create.sh").returncode == 0
    assert no_pod.run("create.sh").returncode == 0
    assert made(no_pod) == ["create"]


def test_a_request_that_failed_is_1_and_says_so(pod):
    pod.play(states("NONE", "WAITING_FOR_RESOURCES", "FAILED"), states("NONE", of="tpu-vm"))
    ran = pod.run("create.sh")
    assert ran.returncode == 1
    assert ran.stderr.endswith("error: the request for norms is FAILED\n")


def test_a_pod_taken_away_before_it_was_ready_is_75(pod):
    pod.play(states("NONE", "PROVISIONING", "SUSPENDING"), states("NONE", of="tpu-vm"))
    assert pod.run("create.sh").returncode == 75


def test_a_stopped_pod_is_named_and_left_alone(pod):
    pod.play(states("STOPPED", of="tpu-vm"))
    ran = pod.run("create.sh")
    assert ran.returncode == 1
    assert "norms is STOPPED" in ran.stderr
    assert not made(pod)


def test_no_network_is_not_taken_for_no_pod(pod):
    pod.play(answers("describe", {"err": "ERROR: network is unreachable\n", "exit": 1}))
    for script in ("create.sh", "delete.sh", "status.sh"):
        ran = pod.run(script)
        assert ran.returncode == 1
        assert "network is unreachable" in ran.stderr
    assert not made(pod)


def test_without_waiting_create_only_asks(pod):
    pod.play(states("NONE", "WAITING_FOR_RESOURCES"), states("NONE", of="tpu-vm"))
    assert pod.run("create.sh", "--no-wait").returncode == 0
    assert made(pod) == ["create"]


def test_delete_twice_deletes_once(pod):
    assert pod.run("delete.sh").returncode == 0
    assert pod.run("delete.sh").returncode == 0
    assert made(pod) == ["delete"]
    assert "--force" in pod.calls("delete")[0]


def test_delete_finds_machines_without_a_request(pod):
    pod.play(states("NONE"), states("READY", of="tpu-vm"))
    assert pod.run("delete.sh").returncode == 0
    assert [argv[2:4] for argv in pod.calls("delete")] == [["tpu-vm", "delete"]]


# --- on a worker


def on_worker(pod, script, **env):
    worker = {name: pod.env[name] for name in ("PATH", "FAKE_PYTHON")}
    worker |= {"HOME": str(pod.homes[0]), "HUGE_PAGES": str(pod.folder.parent / "huge_pages")}
    return subprocess.run(
        ["bash", SCRIPTS / script], env=worker | env, capture_output=True, text=True, timeout=30
    )


def test_setup_in_an_empty_home_installs_and_a_second_time_does_nothing(pod):
    first = on_worker(pod, "setup.sh")
    assert first.returncode == 0, first.stderr
    calls = (pod.homes[0] / "calls").read_text()
    venv = pod.homes[0] / "normstudy/venv"
    assert calls.splitlines()[:2] == [
        f"uv venv --quiet --allow-existing --python 3.12 {venv}",
        f"uv pip install --quiet --python {venv}/bin/python -e {ROOT}[tpu]",
    ]
    assert "sudo sh -c echo always" in calls
    assert re.search(r"python 3\.\d+\.\d+ jax \S+ jaxlib \S+ libtpu \S+", first.stdout)
    second = on_worker(pod, "setup.sh")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert (pod.homes[0] / "calls").read_text() == calls


def test_setup_that_broke_off_starts_again(pod):
    (pod.homes[0] / "uv_fails").touch()
    assert on_worker(pod, "setup.sh").returncode == 1
    (pod.homes[0] / "uv_fails").unlink()
    assert on_worker(pod, "setup.sh").returncode == 0
    assert (pod.homes[0] / "normstudy/venv/bin/python").exists()


@pytest.mark.parametrize(
    "unsafe",
    [
        {"TPU_SKIP_MDS_QUERY": ""},
        {"LIBTPU_INIT_ARGS": "--a --xla_tpu_spmd_rng_bit_generator_unsafe=true"},
        {"XLA_FLAGS": "--xla_tpu_spmd_rng_bit_generator_unsafe=true"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_a_worker_with_unsafe_settings_is_refused(pod, unsafe):
    ran = on_worker(pod, "env.sh", **unsafe)
    assert ran.returncode == 2
    assert re.fullmatch("error: .*\n", ran.stderr)
    assert on_worker(pod, "env.sh", LIBTPU_INIT_ARGS="--a").returncode == 0


# --- other ways to run


@pytest.mark.parametrize(
    ("code", "state", "queued_again"),
    [(0, "RUNNING", False), (75, "RUNNING", True), (1, "RUNNING", False), (75, "CANCELLED", False)],
)
def test_a_slurm_job_is_queued_again_on_75_alone(pod, code, state, queued_again):
    fakes = pod.folder.parent / "bin"
    for name, does in {
        "srun": f'echo "srun $@" >>~/calls; exit {code}',
        "scontrol": f'echo "scontrol $@" >>~/calls; echo "   JobState={state} Reason=None"',
    }.items():
        (fakes / name).write_text(f"#!/bin/sh\n{does}\n")
        (fakes / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "PYTHON": "python"}
    ran = pod.run("slurm.sbatch", "--seeds", "3", **job)
    assert ran.returncode == code, ran.stderr
    calls = (pod.folder.parent / "home/calls").read_text()
    assert f"--preset gpu --out {pod.out} --seeds 3\n" in calls
    assert ("scontrol requeue 7\n" in calls) == queued_again


def test_a_signal_to_the_slurm_script_itself_does_not_hide_the_exit_code(pod):
    fakes, home = pod.folder.parent / "bin", pod.folder.parent / "home"
    for name, does in {
        "srun": "touch ~/up; while [ ! -e ~/saved ]; do sleep 0.1; done; exit 75",
        "scontrol": 'echo "scontrol $@" >>~/calls; echo "JobState=RUNNING"',
    }.items():
        (fakes / name).write_text(f"#!/bin/sh\n{does}\n")
        (fakes / name).chmod(0o755)
    job = pod.start("slurm.sbatch", SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="7")
    wait_for((home / "up").exists)
    os.kill(job.pid, signal.SIGTERM)
    (home / "saved").touch()
    assert ended(job).returncode == 75
    assert "scontrol requeue 7\n" in (home / "calls").read_text()


def test_the_slurm_script_asks_for_a_signal_and_a_place_in_the_queue():
    asked = re.findall(r"^#SBATCH (.*)$", (SCRIPTS / "slurm.sbatch").read_text(), re.M)
    assert {"--requeue", "--signal=TERM@120", "--open-mode=append"} <= set(asked)


def test_on_gke_75_starts_again_and_no_pod_is_retried_alone():
    spec = yaml.safe_load((SCRIPTS / "gke.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] and job["backoffLimit"] == 0
    container = job["template"]["spec"]["containers"][0]
    (on_75,) = [r["onExitCodes"] for r in job["podFailurePolicy"]["rules"] if "onExitCodes" in r]
    assert on_75 == {"containerName": container["name"], "operator": "In", "values": [75]}
    assert spec["failurePolicy"]["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert (ROOT / container["command"][1]).exists()


def test_status_tells_state_price_and_what_is_there(pod):
    pod.logs.mkdir()
    (pod.logs / "attempts.jsonl").write_text('{"attempt": 1}\n')
    listed = {"out": "gs://bucket/norms/arms/02-post/seed0/ckpt/100/\n"}
    pod.play(answers("storage ls .*ckpt", listed))
    ran = pod.run("status.sh", OUT="gs://bucket/norms")
    assert ran.returncode == 0, ran.stderr
    for told in ("norms: READY", "4 chip-hours for each hour", '{"attempt": 1}', listed["out"]):
        assert told in ran.stdout


# --- README


PAGE = (SCRIPTS / "README.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_run_from_top_to_bottom(no_pod):
    commands = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.S)).replace("BUCKET", "bucket")
    ran = subprocess.run(
        ["bash", "-e"], input=commands, cwd=ROOT, env=no_pod.env | {"DRY_RUN": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "--accelerator-type=v4-32" in ran.stdout and "gs://bucket/norms" in ran.stdout
    assert not no_pod.calls()


def test_the_page_names_every_file_and_no_other():
    there = {path.name for path in SCRIPTS.iterdir() if not path.name.startswith(".")}
    named = set(re.findall(r"\b\w+\.(?:sh|sbatch|yaml)\b", PAGE))
    assert named == there - {"README.md"}


def test_the_page_has_the_price_that_is_computed(pod):
    (shown,) = re.findall(r"<!-- cost -->\n```\n(.*?)```\n<!-- /cost -->", PAGE, re.S)
    assert shown == pod.run("cost.sh", "5", TYPE="v4-32").stdout
    assert "on a v4-32, 16 chip-hours an hour" in " ".join(PAGE.split())
