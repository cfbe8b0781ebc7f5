"""Where things lie, and the key under which a training is found again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from reprise import project as project_module
from reprise.config import Config, ConfigError
from reprise.project import TRAINING_CODE, code_digest, open_project, run_key

Make = Callable[..., Config]


# ------------------------------------------------------------------------------------------------------------------ key


def test_the_key_changes_with_data_model_and_train(tiny_config: Make) -> None:
    config = tiny_config("bag")
    keys = [
        run_key("a" * 64, config),
        run_key("b" * 64, config),
        run_key("a" * 64, tiny_config("transformer")),
        run_key("a" * 64, tiny_config("bag", {"model.embedding_dim": 16})),
        run_key("a" * 64, tiny_config("bag", {"train.seed": 1})),
        run_key("a" * 64, tiny_config("bag", {"train.optimizer.beta2": 0.99})),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in keys)


def test_the_key_does_not_change_with_anything_else(tiny_config: Make) -> None:
    key = run_key("a" * 64, tiny_config("bag"))
    for changes in (
        {"execution.num_workers": 7, "execution.log_every_steps": 3, "execution.checkpoint_every_steps": 5},
        {"registry.model_name": "another", "registry.gate.minimum": {"accuracy": 0.5}},
        {"evaluate.batch_size": 7},
        {"export.opset": 21},
    ):
        assert run_key("a" * 64, tiny_config("bag", changes)) == key


def test_the_key_changes_with_a_library(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    key = run_key("a" * 64, tiny_config("bag"))
    version = project_module.version
    monkeypatch.setattr(project_module, "version", lambda name: "9.9" if name == "torch" else version(name))
    assert run_key("a" * 64, tiny_config("bag")) != key


@pytest.fixture
def package(root: Path, tmp_path: Path) -> Path:
    shutil.copytree(root / "src" / "reprise", tmp_path / "reprise", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "reprise"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_comments_docstrings_and_layout_do_not_count(package: Path) -> None:
    before = code_digest(package, TRAINING_CODE)
    for place in TRAINING_CODE:
        for path in [package / place] if place.endswith(".py") else sorted((package / place).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            path.write_text("# a comment\n" + text.replace('"""', '"""Other words. ', 1) + "\n\n# the end\n", encoding="utf-8")
    edit(package / "training" / "loop.py", '    """Optimizer steps taken."""\n', "")
    edit(
        package / "training" / "optim.py",
        "decayed, plain, sparse = split_parameters(model)",
        "(decayed,\n     plain, sparse) = split_parameters(model)",
    )
    assert code_digest(package, TRAINING_CODE) == before


@pytest.mark.parametrize("place", TRAINING_CODE)
def test_a_statement_counts_wherever_it_is(package: Path, place: str) -> None:
    before = code_digest(package, TRAINING_CODE)
    path = package / place
    file = path if path.is_file() else next(p for p in sorted(path.rglob("*.py")) if p.name != "__init__.py")
    with file.open("a", encoding="utf-8") as out:
        out.write("\nPLANTED = 1\n")
    assert code_digest(package, TRAINING_CODE) != before


def test_a_new_module_counts_and_a_place_that_is_gone_is_an_error(package: Path) -> None:
    before = code_digest(package, TRAINING_CODE)
    (package / "models" / "new.py").write_text("", encoding="utf-8")
    assert code_digest(package, TRAINING_CODE) != before
    (package / "batches.py").unlink()
    with pytest.raises(FileNotFoundError):
        code_digest(package, TRAINING_CODE)
    (package / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="the run key must cover"):
        code_digest(package, ("empty",))


# -------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def folder(tmp_path: Path, tiny_params: Callable[..., dict[str, object]]) -> Path:
    path = tmp_path / "my project"
    path.mkdir()
    (path / "params.yaml").write_text("# recipe: tiny\n" + yaml.safe_dump(tiny_params("bag")), encoding="utf-8")
    return path


def test_the_nearest_folder_upwards_with_params(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(folder / "a" / "b")
    project = open_project(None, None)
    assert project.workdir == folder
    assert project.params_path == folder / "params.yaml"
    assert project.encoded_dir == folder / "data" / "encoded"
    assert project.run_dir("k") == folder / "runs" / "k"
    assert project.recipe == "tiny"


def test_params_and_work_folder_may_lie_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = open_project(Path("my project/params.yaml"), Path("elsewhere"))
    assert project.workdir == tmp_path / "elsewhere"
    assert project.params_path == folder / "params.yaml"
    assert not project.workdir.exists(), "opening makes nothing"


def test_what_is_missing_or_wrong_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"params\.yaml: 1 problem\n.*no such file"):
        open_project(None, tmp_path)
    with pytest.raises(ValueError, match="this is a file; name a folder"):
        open_project(None, folder / "params.yaml")


def test_the_recipe_is_the_kind_of_model_where_no_header_says_it(folder: Path) -> None:
    edit(folder / "params.yaml", "# recipe: tiny\n", "")
    assert open_project(None, folder).recipe == "bag"


def test_governed_by_dvc(folder: Path) -> None:
    assert not open_project(None, folder).is_governed_by_dvc
    (folder / "dvc.yaml").touch()
    assert open_project(None, folder).is_governed_by_dvc
