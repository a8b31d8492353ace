"""README.md says what the code does: its tables are generated, its example runs."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_parts_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import write_readme

    assert write_readme.fill(README) == README, "run: python experiments/write_readme.py"


def test_every_generated_part_has_its_place():
    for name in ("placements", "outcomes", "results"):
        assert README.count(f"<!-- {name} -->") == README.count(f"<!-- /{name} -->") == 1


def test_example_of_the_library_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    small = example.replace("layers=12", "layers=2").replace("steps=60", "steps=3")
    assert small != example
    done = subprocess.run(
        [sys.executable, "-c", small], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("undecided")  # three updates decide nothing
    assert (tmp_path / "runs/mine/outcome.json").exists()


def test_every_path_that_it_names_exists():
    names = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert names
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing
