"""README.md says what the code does: its tables are generated, its example runs."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import tiny

from normstudy import placements, programs, train, wiring

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_parts_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import placement_pages
    import write_readme

    assert write_readme.fill(README) == README, "run: python experiments/write_readme.py"
    pages = placement_pages.PATH.read_text(encoding="utf-8")
    assert placement_pages.text() == pages, "run: python experiments/write_readme.py"
    headings = [line[3:] for line in pages.splitlines() if line.startswith("## ")]
    assert headings == list(placements.PLACEMENTS)


def test_every_generated_part_has_its_place():
    for name in ("placements", "outcomes", "results"):
        assert README.count(f"<!-- {name} -->") == README.count(f"<!-- /{name} -->") == 1


def test_example_of_the_library_runs(tmp_path):
    (example,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", README, flags=re.S)
        if "layers=12" in code
    )
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


def test_example_of_a_new_placement_trains_and_is_wired_as_it_says(tmp_path, monkeypatch):
    code = README.split("<!-- example -->\n```python\n")[1].split("```")[0]
    (tmp_path / "my_placements.py").write_text(code, encoding="utf-8")  # a row reads its own source
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(placements.PLACEMENTS, "post-damped", raising=False)  # gone when this ends
    importlib.import_module("my_placements")
    place = placements.row("post-damped")
    assert (place.text, place.skip_norms) == ("n.post(x + c.branch * f(x))", ("post",))
    run = tiny.run(placement="post-damped", probe_every=0)
    result = train.train(run, tmp_path / "run")
    assert result["steps_done"] == run.steps
    state = programs.initial_state(run, programs.of(run)[0])
    report = wiring.check_model(state.model, run.model, programs.standard_deviations(run))
    assert report.agrees and report.sentences()[0].endswith("norm(1.414 x + f(x))")
