"""The command line: fast help with examples, exit codes that mean something, one message instead of a traceback."""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.main import get_command

from reprise import cli, surroundings
from reprise.config import Config
from reprise.exits import Refused, exit_code, set_up_logging
from reprise.project import Project
from reprise.stopping import Stopped


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """``run("config", "--schema")`` in this process, as ``main`` would end it."""
    # `main` sets variables for the libraries; whatever it does must not outlive the test.
    for name in [*surroundings.DEFAULTS, "REPRISE_DEBUG"]:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    logger = logging.getLogger("reprise")
    before = logger.handlers[:], logger.level

    def call(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["reprise", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return Ended(int(caught.value.code or 0), captured.out, captured.err)

    yield call
    logger.handlers[:], logger.level = before


def commands() -> dict[str, Any]:
    """Every command by the words that call it."""
    found = {}
    for name, command in get_command(cli.app).commands.items():
        children = getattr(command, "commands", None)
        found.update({f"{name} {sub}": c for sub, c in children.items()} if children else {name: command})
    return found


# ----------------------------------------------------------------------------------------------------------------- help


def test_help_costs_less_than_a_third_of_a_second_of_cpu() -> None:
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "reprise", "--help"], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3, times
    assert "130/143 stopped" in done.stdout
    assert all(name.partition(" ")[0] in done.stdout for name in commands())


def test_help_loads_no_heavy_library() -> None:
    code = "import sys; from reprise import cli; print([m for m in HEAVY if m in sys.modules])"
    heavy = ["torch", "mlflow", "prefect", "numpy", "pyarrow", "onnxruntime", "pydantic", "yaml", "dvc"]
    done = subprocess.run([sys.executable, "-c", f"HEAVY = {heavy}; {code}"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_command_has_an_example_and_a_line_that_says_what_it_does(run: Run) -> None:
    found = commands()
    assert {"fetch", "split", "encode", "train", "evaluate", "export", "predict", "runs", "config", "recipes use"} <= found.keys()
    for name, command in found.items():
        ended = run(*name.split(), "--help")
        assert ended.code == 0
        assert "Example" in ended.out, name
        assert f"reprise {name}" in command.epilog, f"the example of {name} calls something else"
        assert command.help, name
        assert all(getattr(p, "help", None) for p in command.params if p.name != "help"), f"an option of {name} has no help"


# ------------------------------------------------------------------------------------------------------------ exit codes


@pytest.fixture
def project_dir(tmp_path: Path, tiny_params: Callable[..., dict[str, Any]]) -> Path:
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tiny_params("bag")), encoding="utf-8")
    return tmp_path


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("reprise.project.open_project", fail)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("found x; allowed y"), 2, "reprise: found x; allowed y\n"),
        (RuntimeError("the disk is gone"), 1, "reprise: the disk is gone\n"),
        (Refused(["a is low", "b is high"]), 3, "reprise: refused: a is low; b is high\n"),
        (Stopped(15), 143, "reprise: stopped by SIGTERM; the same command continues where it stopped\n"),
        (Stopped(2), 130, "reprise: stopped by SIGINT; the same command continues where it stopped\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(error: BaseException, code: int, said: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, error)
    assert run("config") == Ended(code, "", said)


def test_debug_shows_the_traceback_and_keeps_the_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, Refused(["no"]))
    ended = run("--debug", "config")
    assert ended.code == 3
    assert "Traceback" in ended.err
    assert "in fail" in ended.err
    assert "Refused: refused: no" in ended.err


def test_debug_of_one_call_is_not_remembered(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ValueError("x"))
    monkeypatch.setenv("REPRISE_DEBUG", "")
    assert "Traceback" not in run("config").err
    monkeypatch.setenv("REPRISE_DEBUG", "1")
    assert "Traceback" in run("config").err


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "--params", "absent.yaml"],
        ["config", "--wrong"],
        ["nonsense"],
        ["train", "--workdir", "params.yaml"],
        ["train"],
        ["evaluate", "--run", "0123456789abcdef"],
        ["predict"],
        ["predict", "some text", "--model", "absent.onnx"],
        ["predict", "some text"],
        ["predict", "--threads", "0", "x"],
        ["recipes", "show", "absent"],
        ["recipes", "use", "bag", "--text-column", "body"],
    ],
)
def test_what_you_wrote_is_2_and_never_a_traceback(
    arguments: list[str], run: Run, project_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project_dir)
    ended = run(*arguments)
    assert ended.code == 2, ended
    assert ended.err.strip()
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_every_problem_of_the_params_is_printed(run: Run, project_dir: Path) -> None:
    tree = yaml.safe_load((project_dir / "params.yaml").read_text())
    tree["train"]["max_epochs"], tree["model"]["embedding_dim"] = 0, "x"
    (project_dir / "params.yaml").write_text(yaml.safe_dump(tree))
    ended = run("config", "--workdir", project_dir)
    assert ended.code == 2
    assert "2 problems" in ended.err
    assert "train.max_epochs" in ended.err
    assert "model.embedding_dim" in ended.err


def test_an_error_may_bring_its_own_code() -> None:
    assert exit_code(OSError("x")) == 1
    assert exit_code(UnicodeDecodeError("utf-8", b"", 0, 1, "x")) == 2
    assert exit_code(Stopped(15)) == 143


def test_a_missing_training_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    ended = run("train")
    assert ended.code == 2
    assert "this command needs torch: install the training extra, pip install 'reprise[train]'" in ended.err


# ---------------------------------------------------------------------------------------------------------------- output


def test_config_prints_what_was_understood(run: Run, project_dir: Path) -> None:
    ended = run("config", "--workdir", project_dir)
    assert ended.code == 0
    assert Config.model_validate(json.loads(ended.out)).train.seed == 17


def test_schema_needs_no_project(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("config", "--schema")
    assert ended.code == 0
    assert set(json.loads(ended.out)["properties"]) == set(Config.model_fields)


def test_runs_of_an_empty_folder_and_of_one_with_runs(run: Run, project_dir: Path) -> None:
    assert run("runs", "--workdir", project_dir) == Ended(0, "none yet\n", "")
    assert run("runs", "--workdir", project_dir, "--json").out.strip() == ""
    for key in ("aaaa", "bbbb"):
        (project_dir / "runs" / key).mkdir(parents=True)
        (project_dir / "runs" / key / "result.json").write_text(json.dumps({"status": "stopped", "recipe": "bag"}))
    rows = [json.loads(line) for line in run("runs", "--workdir", project_dir, "--json").out.splitlines()]
    assert {row["key"] for row in rows} == {"aaaa", "bbbb"}
    assert rows[0]["status"] == "stopped"
    assert "aaaa" in run("runs", "--workdir", project_dir).out


def test_recipes_list_show_and_use(run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = sorted(p.stem for p in (root / "recipes").glob("*.yaml"))
    listed = [json.loads(line)["name"] for line in run("recipes", "list", "--json").out.splitlines()]
    assert listed == names
    assert all(name in run("recipes", "list").out for name in names)
    assert run("recipes", "show", "bag").out == (root / "recipes" / "bag.yaml").read_text(encoding="utf-8")
    assert run("recipes", "use", "bag").code == 0
    assert (tmp_path / "params.yaml").read_text() == (root / "recipes" / "bag.yaml").read_text(encoding="utf-8")


def test_data_steps_print_the_path_of_what_they_made(run: Run, tiny_project: Callable[[str], Project], tmp_path: Path) -> None:
    """The doors of DVC: fetch, split, encode, one after the other, into the same bytes as the library made."""
    import shutil

    project = tiny_project("bag")
    shutil.copytree(project.workdir / "data" / "source", tmp_path / "data" / "source")
    shutil.copy(project.params_path, tmp_path)
    for step, made in {"fetch": "raw/files.json", "split": "split/split.json", "encode": "encoded/manifest.json"}.items():
        ended = run(step, "--workdir", tmp_path)
        assert (ended.code, ended.out.strip()) == (0, str(tmp_path / "data" / made)), ended.err
    again = (tmp_path / "data" / "encoded" / "manifest.json").read_bytes()
    assert again == (project.encoded_dir / "manifest.json").read_bytes()


def test_quiet_leaves_only_warnings(run: Run) -> None:
    run("--quiet", "config", "--schema")
    assert logging.getLogger("reprise").level == logging.WARNING
    run("config", "--schema")
    assert logging.getLogger("reprise").level == logging.INFO


def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"DO_NOT_TRACK": "0", "OMP_WAIT_POLICY": "ACTIVE"})
    surroundings.set_defaults()
    assert os.environ["DO_NOT_TRACK"] == "0"
    assert os.environ["DVC_NO_ANALYTICS"] == "1"
    assert "GOMP_SPINCOUNT" not in os.environ, "libgomp would heed it before OMP_WAIT_POLICY"
    monkeypatch.setattr(os, "environ", {})
    surroundings.set_defaults()
    assert os.environ == surroundings.DEFAULTS


def test_log_lines_go_to_stderr_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar replaces sys.stderr while it is drawn: a line written past it would end on the bar's own."""
    ours = logging.getLogger("reprise")
    before, level = list(ours.handlers), ours.level
    try:
        set_up_logging(logging.INFO)
        later = io.StringIO()
        monkeypatch.setattr(sys, "stderr", later)
        logging.getLogger("reprise.anything").info("epoch %d", 3)
        assert later.getvalue() == "epoch 3\n"
    finally:
        ours.handlers[:] = before
        ours.setLevel(level)
