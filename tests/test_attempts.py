"""attempts.jsonl: what became of each attempt, and of its time."""

import pytest

from normstudy import attempts, record


def log(folder, rows):
    """Append {step: seconds} to the log of a run."""
    journal = record.Journal(folder / record.METRICS)
    for step, seconds in rows.items():
        journal.write({"step": step, "seconds": seconds})
    journal.close()


def test_goodput_is_the_share_of_time_in_steps_that_count(tmp_path):
    """Neither the first step of an attempt, which holds its compilation, nor one done again."""
    run = tmp_path / "arms" / "00-post" / "seed0"
    run.mkdir(parents=True)
    assert attempts.goodput(run) is None
    attempts.Attempt(run, 0).journal.close()  # and killed after 14 seconds
    log(run, {0: 10, 1: 1, 2: 1, 3: 1, 4: 1})
    assert attempts.goodput(run) == pytest.approx(4 / 14)
    second = attempts.Attempt(run, 3)
    record.truncate(run / record.METRICS, 3)
    log(run, {3: 5, 4: 1, 5: 1})
    second.began -= 8  # seconds
    second.end("done")
    # 1, 2, 4 and 5 count; 1e-3: the clock is written in milliseconds
    assert attempts.goodput(run) == pytest.approx(4 / (14 + 8), rel=1e-3)
    assert attempts.goodput(tmp_path) == attempts.goodput(run)
