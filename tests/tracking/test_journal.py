"""The journal: nothing twice, nothing lost, and a resumed training that is not the same is caught."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.tracking.journal import Diverged, Journal, Point, read_points


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_one_json_object_a_line_with_time_in_milliseconds(tmp_path):
    with Journal(tmp_path / "runs" / "k" / "journal.jsonl") as journal:
        journal.log(10, {"train/loss": 0.1 + 0.2, "train/lr": 3})
        journal.log(20, {"train/loss": 1e-300})
    found = lines(journal.path)
    assert [(p["step"], p["name"], p["value"]) for p in found] == [
        (10, "train/loss", 0.30000000000000004),
        (10, "train/lr", 3.0),
        (20, "train/loss", 1e-300),
    ]
    assert all(set(p) == {"step", "name", "value", "time"} and isinstance(p["time"], int) for p in found)
    assert 1_600_000_000_000 < found[0]["time"] < 10_000_000_000_000
    assert journal.last_step == 20


def test_every_call_is_on_disk_before_it_returns(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.log(1, {"train/loss": 2.0})
    assert [p.value for p in read_points(journal.path)[0]] == [2.0]
    journal.close()


def test_a_resumed_run_compares_and_does_not_write_again(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as first:
        for step in (1, 2, 3):
            first.log(step, {"train/loss": 1 / step, "time/step_seconds": 0.1, "system/cpu": 50.0})
    before = path.read_bytes()

    with Journal(path) as resumed:
        assert resumed.last_step == 3
        for step in (2, 3):  # the checkpoint was of step 1; the machine is slower today
            resumed.log(step, {"train/loss": 1 / step, "time/step_seconds": 0.9, "system/cpu": 99.0})
        assert path.read_bytes() == before
        resumed.log(4, {"train/loss": 0.25})

    steps = [p["step"] for p in lines(path) if p["name"] == "train/loss"]
    assert steps == [1, 2, 3, 4]


def test_a_value_that_differs_by_one_bit_is_a_divergence_and_nothing_is_written(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as first:
        first.log(7, {"train/loss": 0.5})
    before = path.read_bytes()
    other = math.nextafter(0.5, 1)
    with Journal(path) as resumed, pytest.raises(Diverged) as caught:
        resumed.log(7, {"train/grad_norm": 1.0, "train/loss": other})
    assert (caught.value.step, caught.value.name, caught.value.recorded, caught.value.now) == (7, "train/loss", 0.5, other)
    for fact in ("step 7", "train/loss", "0.5", repr(other), "journal.jsonl"):
        assert fact in str(caught.value)
    assert path.read_bytes() == before


def test_non_finite_values_are_strict_json_and_equal_themselves(tmp_path):
    path = tmp_path / "journal.jsonl"
    values = {"train/a": math.nan, "train/b": math.inf, "train/c": -math.inf}
    with Journal(path) as journal:
        journal.log(1, values)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)
    with Journal(path) as resumed:
        resumed.log(1, values)
    assert [p.value for p in resumed.points()[1:]] == [math.inf, -math.inf]
    assert math.isnan(resumed.points()[0].value)


def test_half_a_line_left_by_a_kill_is_dropped_when_writing_goes_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.log(1, {"train/loss": 1.0})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "name": "train/lo')
    torn = path.read_bytes()

    resumed = Journal(path)
    assert resumed.last_step == 1
    assert path.read_bytes() == torn  # reading changes nothing: somebody else may be writing that line
    resumed.log(2, {"train/loss": 0.5})
    resumed.close()
    assert [(p.step, p.value) for p in resumed.points()] == [(1, 1.0), (2, 0.5)]


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"step": 1, "name": "a", "value": 1.0, "time": 5}\n{"step": 2, "nam": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: found .*step, name, value and time"):
        Journal(path)


def test_reading_goes_on_from_an_offset_and_leaves_a_line_that_is_being_written(tmp_path):
    path = tmp_path / "journal.jsonl"
    assert read_points(path) == ([], 0)
    with Journal(path) as journal:
        journal.log(1, {"a": 1.0})
        first, offset = read_points(path)
        journal.log(2, {"a": 2.0})
    with path.open("ab") as file:
        file.write(b'{"step": 3')
    rest, end = read_points(path, offset)
    assert [p.step for p in first] == [1]
    assert rest == [Point(2, "a", 2.0, rest[0].time)]
    assert read_points(path, end) == ([], end)


def test_a_name_that_mlflow_would_refuse_is_refused_at_once(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal, pytest.raises(ValueError, match="'f1%'"):
        journal.log(1, {"f1%": 1.0})


@pytest.mark.parametrize("module", ["reprise.tracking.journal", "reprise.tracking.provenance", "reprise.stopping"])
def test_light_modules_do_not_import_the_heavy_libraries(module):
    code = f"import sys, {module}; print([m for m in ('mlflow', 'torch', 'prefect', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
