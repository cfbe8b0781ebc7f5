"""Where everything of one project lies, and the key under which a training is found again."""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from reprise.config import Config, load_config

# What can change the weights that a training ends with. Their meaning is digested, not their comments.
TRAINING_CODE = (
    "models",
    "training",
    "batches.py",
    "checkpoint.py",
    "evaluation/predict.py",
    "evaluation/metrics.py",
    "data/dataset.py",
    "data/features.py",
)
# What can change the vectors that a frozen encoder makes of the texts.
FEATURE_CODE = ("models/pretrained.py", "models/pooling.py", "batches.py", "evaluation/predict.py", "data/dataset.py")
TRAINING_LIBRARIES = ("torch", "numpy", "transformers", "peft")


@dataclass(frozen=True)
class Project:
    """A params file that was read, and the folder in which its data, runs and release lie."""

    workdir: Path
    params_path: Path
    config: Config

    @property
    def raw_dir(self) -> Path:
        return self.workdir / "data" / "raw"

    @property
    def encoder_dir(self) -> Path:
        """The pretrained encoder's files; an empty folder where the params name none."""
        return self.workdir / "data" / "encoder"

    @property
    def features_dir(self) -> Path:
        """What a frozen encoder made of the texts; kept, because it is the same for every head."""
        return self.workdir / "runs" / "features"

    @property
    def split_dir(self) -> Path:
        return self.workdir / "data" / "split"

    @property
    def quarantine_path(self) -> Path:
        return self.workdir / "data" / "quarantine.jsonl"

    @property
    def encoded_dir(self) -> Path:
        return self.workdir / "data" / "encoded"

    @property
    def runs_dir(self) -> Path:
        return self.workdir / "runs"

    @property
    def release_dir(self) -> Path:
        return self.workdir / "release"

    @property
    def lock_path(self) -> Path:
        """One trainer, release or rebuild at a time in a folder; the kernel frees the lock when its holder dies."""
        return self.workdir / ".reprise.lock"

    @property
    def is_governed_by_dvc(self) -> bool:
        return (self.workdir / "dvc.yaml").exists()

    def run_dir(self, key: str) -> Path:
        return self.runs_dir / key

    @property
    def recipe(self) -> str:
        """The recipe's name from the first line of the params file (``# recipe: bag``), else the model's kind."""
        first = self.params_path.read_text(encoding="utf-8").partition("\n")[0]
        name = first.removeprefix("# recipe:").strip()
        return name if first.startswith("# recipe:") and name else self.config.model.kind


def open_project(params: Path | None, workdir: Path | None) -> Project:
    """The project that these two options of the command line name.

    Args:
        params: the params file; None means ``params.yaml`` in the work folder.
        workdir: the work folder; None means the nearest folder upwards that holds a params.yaml, else the current one.

    Raises:
        ConfigError: the params file is missing or wrong.
        ValueError: the work folder is a file.
    """
    folder = (workdir or _nearest_project(Path.cwd())).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--workdir {folder}: this is a file; name a folder")
    path = (params or folder / "params.yaml").resolve()
    return Project(workdir=folder, params_path=path, config=load_config(path))


def _nearest_project(start: Path) -> Path:
    return next((folder for folder in (start, *start.parents) if (folder / "params.yaml").exists()), start)


def run_key(content_digest: str, config: Config) -> str:
    """16 hex digits that name a training: the same data, settings, code and libraries give the same key.

    A repeated or resumed training therefore finds its own folder, and never a stranger's.
    """
    parts = {
        "data": content_digest,
        "model": config.model.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "code": code_digest(Path(__file__).parent, TRAINING_CODE),
        "libraries": library_versions(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def code_digest(package_dir: Path, places: tuple[str, ...]) -> str:
    """sha256 over the syntax trees of Python files, docstrings stripped: comments and layout do not count."""
    sha = hashlib.sha256()
    for place in places:
        path = package_dir / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"no Python file in {path}, which the run key must cover")
        for file in files:
            tree = _without_docstrings(ast.parse(file.read_bytes()))
            # Not ast.dump: its text gains fields from one Python version to the next.
            sha.update(f"{file.relative_to(package_dir).as_posix()}\n{ast.unparse(tree)}\n".encode())
    return sha.hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree without strings that stand alone as a statement (docstrings, and the texts below dataclass fields)."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [
                s
                for s in body
                if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str))
            ]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]  # every node that has a body list takes one
    return tree


def library_versions() -> dict[str, str | None]:
    """Versions of the libraries that compute; None where one is not installed."""
    return {name: _version(name) for name in TRAINING_LIBRARIES}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
