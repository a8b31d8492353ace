"""The GPU's benchmark, on what there is: it runs whole, and counts as the papers do."""

import csv

import tiny

from normstudy import config

work = tiny.experiment("work")


def test_attention_s_work_is_two_products_forward_and_four_backward():
    """Per head T x K by K x T and T x T by T x K: 2 x 2 T^2 K, three times, H K = D."""
    run = config.override(config.Run(), layers=3, width=64, heads=4, context=16, batch=2)
    assert work.attention_flops(run) == 3 * (3 * 2 * 2 * 16**2 * 64) * 2


def test_gpu_benchmark_runs_from_the_source_tree(tmp_path):
    done = tiny.python(
        "experiments/gpu_benchmark.py", "--layers", "2", "--width", "64", "--context", "16",
        "--batch", "4", "--members", "4", "--small-width", "16", "--small-context", "16",
        "--steps", "2", "--csv", str(tmp_path / "gpu.csv"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["device"] for row in rows} == {"cpu"}
    assert rows[-1]["what"].endswith("4 together, beside one after another")
    assert all(float(row["value"]) > 0 for row in rows)
    assert not any("utilization" in row["what"] for row in rows)  # of a CPU no data sheet is known
    assert "no data sheet is known of cpu" in done.stderr
