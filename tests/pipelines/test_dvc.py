"""What DVC runs again when something changed: dvc.yaml as it is, but for the training, which a few lines stand for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = ["fetch", "split", "encode"]
STAND_IN = "import json, os, pathlib; f = pathlib.Path('release'); f.mkdir(exist_ok=True); (f / 'metrics.json').write_text('{}')"


@pytest.fixture(scope="module")
def graph(make_checkout: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A project that was reproduced once; each test leaves it reproduced."""
    checkout = make_checkout(tmp_path_factory.mktemp("graph"))
    (checkout.folder / ".git" / "release.py").write_text(STAND_IN)
    path = checkout.folder / "dvc.yaml"
    text = path.read_text()
    assert text.count("cmd: python -m pipelines.train") == 1
    path.write_text(text.replace("cmd: python -m pipelines.train", "cmd: python .git/release.py"))
    assert ran(checkout) == [*DATA, "release"]
    return checkout


def ran(checkout: Any) -> list[str]:
    """The stages that `dvc repro` ran."""
    return re.findall(r"Running stage '(\w+)'", checkout.run("dvc", "repro").said)


def test_nothing_runs_twice(graph: Any) -> None:
    start = time.monotonic()
    assert ran(graph) == []
    assert time.monotonic() - start < 20, "the promise is 3 s on a quiet machine"


@pytest.mark.parametrize(
    ("key", "value", "stages"),
    [
        ("train.seed", 99, ["release"]),
        ("execution.log_every_steps", 7, []),
        ("tokenizer.max_length", 32, ["encode", "release"]),
        ("data.split.seed", 14, ["split", "encode", "release"]),
    ],
)
def test_a_changed_param_runs_the_stages_that_read_it(graph: Any, key: str, value: Any, stages: list[str]) -> None:
    graph.set_params({key: value})
    assert ran(graph) == stages


def test_an_edit_in_place_of_the_users_file_is_seen(graph: Any) -> None:
    with (graph.folder / "data" / "source" / "rows.csv").open("a") as file:
        file.write("one row more about a card,card\n")
    assert ran(graph) == [*DATA, "release"]


def test_an_edit_in_a_helper_of_the_data_room_is_seen(graph: Any) -> None:
    """Not in a stage's own script: in what that script imports."""
    helper = graph.folder / "src" / "reprise" / "data" / "records.py"
    text = helper.read_text()
    helper.write_text(text + "\n# edited\n")
    # The data come out the same, so encode's own result is the same and the release stands.
    assert ran(graph) == ["split", "encode"]
    helper.write_text(text)
    assert ran(graph) == [], "back to what was, DVC remembers the results"


def test_another_version_of_a_library_is_seen(graph: Any) -> None:
    lock = graph.folder / "requirements.lock"
    text = lock.read_text()
    lock.write_text(text.replace("tokenizers==", "tokenizers==0.0."))
    assert ran(graph) == ["split", "encode", "release"]


def test_what_python_leaves_behind_is_no_change(graph: Any) -> None:
    made = Path(graph.folder / "src" / "reprise" / "data" / "__pycache__")
    made.mkdir(exist_ok=True)
    (made / "records.cpython-399.pyc").write_bytes(b"\0")
    assert ran(graph) == []
