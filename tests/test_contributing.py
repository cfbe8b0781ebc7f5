"""The page that tells how to add a model is followed word by word, in a copy of the code, up to a proven model.onnx."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

FOLLOW = """
import json, sys
from pathlib import Path
from reprise.project import open_project
from reprise.steps import data, evaluation, release, training

project = open_project(None, Path(sys.argv[1]))
for step in (data.fetch, data.split, data.encode):
    step(project)
key = training.train(project)
evaluation.evaluate(project, key)
proof = release.export(project, key)
from reprise.models import mean
print(json.dumps({"refusals": proof["refusals"], "rows": proof["num_rows"], "model": mean.__file__}))
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_a_model_added_as_the_page_says_is_trained_exported_and_proven(
    root: Path, tiny_params: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    page = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add a model in one file")[2]
    model, section, imports, branch = blocks(page, "python")
    (recipe,) = blocks(page, "yaml")
    package = tmp_path / "src" / "reprise"
    shutil.copytree(root / "src" / "reprise", package, ignore=shutil.ignore_patterns("__pycache__"))

    (package / "models" / "mean.py").write_text(model)

    config = (package / "config.py").read_text()
    (line,) = re.findall(r"^ModelConfig = .*$", config, flags=re.MULTILINE)
    assert section.rstrip().splitlines()[-1] == line.replace(", Field(", " | MeanConfig, Field("), "the page's union is the code's"
    (package / "config.py").write_text(config.replace(line, section))

    init = (package / "models" / "__init__.py").read_text()
    before, build, rest = init.partition("def build_model")
    body, last_return, after = rest.partition("    return Transformer(")
    assert last_return
    future = "from __future__ import annotations\n"
    with_imports = before.replace(future, f"{future}\n{imports}")
    (package / "models" / "__init__.py").write_text(with_imports + build + body + branch + last_return + after)

    work = tmp_path / "work"
    (work / "data" / "source").mkdir(parents=True)
    rows = [f"{word} number {number},{word}" for number in range(40) for word in ("card", "loan", "trip")]
    (work / "data" / "source" / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    params = {**tiny_params("cnn"), **yaml.safe_load(recipe)}
    (work / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "REPRISE_"))}
    ended = subprocess.run(
        [sys.executable, "-c", FOLLOW, str(work)],
        env={**kept, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = yaml.safe_load(ended.stdout.splitlines()[-1])
    assert said["refusals"] == []
    assert said["rows"] > 0
    assert Path(said["model"]) == package / "models" / "mean.py", "the copy was used"
