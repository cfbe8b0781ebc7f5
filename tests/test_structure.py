"""The shape of the repository: no dead setting, imports in one direction, DVC stages that list what they read."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CODE = ("src", "pipelines")
MADE = {".git", ".venv", ".hypothesis", ".dvc", "data", "runs", "release", "mlartifacts", "dist", "build", "node_modules"}


def python_files(root: Path) -> list[Path]:
    return [path for folder in CODE for path in sorted((root / folder).rglob("*.py"))]


# ---------------------------------------------------------------------------------------------------------- dead settings

# Read by nobody in Python, and why that is right.
NOT_READ: dict[str, str] = {}


def config_fields(source: str) -> set[str]:
    """Names of the fields that the classes of a config module declare."""
    return {
        statement.target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def attribute_reads(source: str) -> set[str]:
    """Names read as an attribute of something that can be a config: neither ``self`` nor an imported module."""
    tree = ast.parse(source)
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and not (isinstance(node.value, ast.Name) and node.value.id in modules | {"self", "cls"})
    }


def dead_fields(config_source: str, code: list[str]) -> set[str]:
    # pydantic reads the field that tells the branches of a union apart.
    read = set(re.findall(r'discriminator="(\w+)"', config_source)).union(*map(attribute_reads, code))
    return config_fields(config_source) - read - NOT_READ.keys()


def test_every_config_field_is_read_by_some_code(root: Path) -> None:
    config = root / "src" / "reprise" / "config.py"
    code = [p.read_text(encoding="utf-8") for p in python_files(root) if p != config]
    source = config.read_text(encoding="utf-8")
    assert len(config_fields(source)) > 60
    assert dead_fields(source, code) == set()
    planted = source.replace("    window_batches: PositiveInt\n", "    window_batches: PositiveInt\n    dead_knob: PositiveInt\n")
    assert dead_fields(planted, code) == {"dead_knob"}
    # A field that only its own validator or only a method's own `self` mentions is dead all the same.
    assert "dead_knob" in dead_fields(planted, [*code, "def f(self):\n    self.dead_knob = 1\n    return self.dead_knob\n"])
    assert dead_fields(planted, [*code, "def f(config):\n    return config.dead_knob\n"]) == set()


def test_the_exceptions_are_fields_that_still_exist(root: Path) -> None:
    assert NOT_READ.keys() <= config_fields((root / "src" / "reprise" / "config.py").read_text(encoding="utf-8"))


def test_no_default_hides_in_code(root: Path) -> None:
    """``getattr(config, name, default)`` would be one, and would make a field look dead."""
    for path in python_files(root):
        assert not re.search(r"getattr\([^(),]*\b(config|execution|train)\b[^(),]*,[^(),]*,", path.read_text(encoding="utf-8")), (
            path
        )


# --------------------------------------------------------------------------------------------------------------- imports


def lint_imports(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    for name in CODE:
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_are_kept(root: Path) -> None:
    code, said = lint_imports(root)
    assert code == 0, said
    assert (kept := re.search(r"Contracts: (\d+) kept, 0 broken", said))
    assert int(kept[1]) >= 6


def test_planted_violations_break_each_contract(copied: Path) -> None:
    """One import per contract, all in one copy, so that the graph is built once."""
    planted = {
        "data/records.py": ["import reprise.models", "import torch", "import mlflow"],
        "serving/classifier.py": ["import reprise.data.split"],
        "tracking/journal.py": ["import reprise.training.loop"],
        "training/optim.py": ["import prefect"],
    }
    for name, lines in planted.items():
        path = copied / "src" / "reprise" / name
        text = path.read_text(encoding="utf-8")
        path.write_text(
            "\n".join(
                [
                    *(f"def _planted_{i}():\n    {line}" for i, line in enumerate(lines)),
                    text.replace("from __future__ import annotations", ""),
                ]
            ),
            encoding="utf-8",
        )
    code, said = lint_imports(copied)
    assert code == 1, said
    names = [c["name"] for c in _pyproject(copied)["tool"]["importlinter"]["contracts"]]
    flat = re.sub(r"\s+", " ", said)
    assert [name for name in names if f"{name} BROKEN" not in flat] == []


def _pyproject(folder: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------------- names


def bad_names(files: list[Path]) -> list[str]:
    forbidden = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc", "core", "lib"}
    parts = {part for path in files for part in [path.stem, *path.parent.parts[-1:]]} - {"__init__", "__main__"}
    return sorted(p for p in parts if p in forbidden or p in sys.stdlib_module_names)


def test_no_module_has_a_name_that_says_nothing_or_hides_the_standard_library(root: Path) -> None:
    files = [p.relative_to(root) for p in python_files(root)]
    assert len(files) > 40
    assert bad_names(files) == []
    planted = [*files, Path("src/reprise/utils.py"), Path("src/reprise/profile.py"), Path("src/reprise/common/x.py")]
    assert bad_names(planted) == ["common", "profile", "utils"]


def text_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in MADE and not f.endswith(("_cache", ".egg-info")) and f != "__pycache__"]
        for name in names:
            path = Path(folder) / name
            if path.suffix not in {".pyc", ".db", ".png", ".onnx", ".pt"} and path.stat().st_size < 2**20:
                yield path


def registry_hosts(text: str) -> list[str]:
    """Addresses of package registries in a text: everybody installs from their own."""
    hosts = [r"py" r"pi\.org", r"python" r"hosted\.org", r"ana" r"conda\.org", r"download\.py" r"torch\.org"]
    options = [r"--(?:extra-)?index-url[= ]\s*https?://", r"index-url\s*=\s*https?://", r"find-links\s*=\s*https?://"]
    return re.findall("|".join([*hosts, *options]), text)


def test_no_file_names_a_package_registry(root: Path) -> None:
    files = list(text_files(root))
    assert len(files) > 60
    assert {root / "requirements.lock", root / "Makefile", root / "dvc.yaml"} <= set(files)
    found = {str(p.relative_to(root)): hosts for p in files if (hosts := registry_hosts(p.read_text("utf-8", errors="ignore")))}
    assert found == {}
    assert registry_hosts("--index-url" + " https://mirror.example/simple") != []
    assert registry_hosts("see https://py" + "pi.org/simple") != []


# ------------------------------------------------------------------------------------------------------------------- DVC


def stages(root: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    return tree


def params_files(root: Path) -> list[Path]:
    return [root / "params.yaml", *sorted((root / "recipes").glob("*.yaml"))]


def has_key(tree: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def test_every_param_that_a_stage_lists_exists_in_every_params_file(root: Path) -> None:
    listed = [key for stage in stages(root).values() for key in stage["params"]]
    assert len(listed) >= 10
    for path in params_files(root):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert [key for key in listed if not has_key(tree, key)] == [], path
    assert not has_key({"data": {}}, "data.source")


def test_the_stages_together_see_every_setting_but_execution(root: Path) -> None:
    from reprise.config import Config

    listed = {key for stage in stages(root).values() for key in stage["params"]}

    def covered(path: str, tree: Any) -> list[str]:
        """Paths below ``path`` that no stage lists, by themselves or through a section that holds them."""
        if path in listed:
            return []
        if not isinstance(tree, dict) or not any(key.startswith(f"{path}.") for key in listed):
            return [path]
        return [missing for key, child in tree.items() for missing in covered(f"{path}.{key}", child)]

    params = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    assert set(params) == set(Config.model_fields)
    assert [missing for section, tree in params.items() for missing in covered(section, tree)] == ["execution"]
    listed.discard("data.cleaning")
    assert covered("data", params["data"]) == ["data.cleaning"]


def test_every_dependency_of_a_stage_exists_or_is_made_by_one_before(root: Path) -> None:
    made: set[str] = set()
    for stage in stages(root).values():
        assert [d for d in stage["deps"] if d not in made and not (root / d).exists()] == []
        made |= {out if isinstance(out, str) else next(iter(out)) for out in stage["outs"]}
    assert "release" in made


def test_the_code_of_the_run_key_exists_and_the_stage_release_depends_on_it(root: Path) -> None:
    """Otherwise an edit gives another run key, and `dvc repro` would still say that there is nothing to do."""
    from reprise.project import TRAINING_CODE

    package = root / "src" / "reprise"
    assert [place for place in TRAINING_CODE if not (package / place).exists()] == []
    deps = [(root / d).resolve() for d in stages(root)["release"]["deps"]]
    unseen = [p for p in TRAINING_CODE if not any((package / p).is_relative_to(d) for d in deps)]
    assert unseen == []


def test_code_that_makes_vectors_is_training_code(root: Path) -> None:
    """Vectors are computed anew when it changes; so must be the training on them."""
    from reprise.project import FEATURE_CODE, TRAINING_CODE

    assert [place for place in FEATURE_CODE if not (root / "src" / "reprise" / place).is_file()] == []
    assert [place for place in FEATURE_CODE if place not in TRAINING_CODE and Path(place).parts[0] not in TRAINING_CODE] == []


def test_training_code_is_all_that_the_training_code_imports(root: Path) -> None:
    """What training imports of ours is in the run key, or is known not to change the weights."""
    from reprise.project import TRAINING_CODE

    harmless = {
        "reprise.config": "its values are in the key themselves",
        "reprise.data.atomic": "decides whether a file is whole, never what is in it",
        "reprise.stopping": "decides when training stops, never what it computes",
    }
    package = root / "src" / "reprise"
    files = [
        f for place in TRAINING_CODE for f in ([package / place] if place.endswith(".py") else (package / place).rglob("*.py"))
    ]
    imported = {
        node.module
        for file in files
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("reprise")
    }
    covered = {f"reprise.{place.removesuffix('.py').replace('/', '.')}" for place in TRAINING_CODE}
    left = {m for m in imported if not any(m == c or m.startswith(f"{c}.") for c in covered)} - harmless.keys()
    assert left == set()


def test_make_targets_call_only_commands_that_exist(root: Path) -> None:
    """`make` is the vocabulary: a recipe that calls a `reprise` command must find it."""
    from typer.main import get_command

    from reprise.cli import app

    text = (root / "Makefile").read_text(encoding="utf-8") + (root / "dvc.yaml").read_text(encoding="utf-8")
    called = set(re.findall(r"^\s*(?:cmd: python -m |[\t@]*(?:\$\(if \$\(RECIPE\),)?)reprise ([a-z]+)", text, re.MULTILINE))
    assert {"fetch", "split", "encode", "recipes"} <= called, "the pattern must find its subjects"
    assert called - set(get_command(app).commands) == set()
