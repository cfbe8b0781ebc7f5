"""The flow ``rebuild``: what ``dvc repro`` does, from a deployment: the data stages, the train flow, and DVC told of the result."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from pipelines.command import run_as_command
from pipelines.train import Outcome, train
from reprise.children import run_child
from reprise.exits import Refused
from reprise.project import open_project
from reprise.recipes import use_recipe
from reprise.steps.runs import exclusive


@task(name="data", cache_policy=NO_CACHE)
def make_data(workdir: Path) -> None:
    """Bring the stages before ``release`` up to date; DVC skips what is."""
    _dvc(workdir, "repro", "encode")


@task(name="commit", cache_policy=NO_CACHE)
def commit_release(workdir: Path) -> None:
    """Tell DVC that ``release/`` is what its stage would have made, so that the next ``dvc repro`` has nothing to do."""
    _dvc(workdir, "commit", "--force", "release")


def _dvc(workdir: Path, *arguments: str) -> None:
    # The stages call `python`: it must be this one.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    run_child([sys.executable, "-m", "dvc", *arguments], cwd=workdir, env={**os.environ, "PATH": path})


@flow(name="rebuild")
def rebuild(recipe: str | None = None, workdir: str | None = None) -> Outcome:
    """Rebuild everything that changed, from the raw data to the release.

    Args:
        recipe: a recipe that is copied over params.yaml first; None takes params.yaml as it is.
        workdir: the project's folder; None is the current one.
    """
    folder = Path(workdir or ".").resolve()
    if recipe is not None:
        use_recipe(recipe, folder / "params.yaml")
    project = open_project(None, folder)
    with exclusive(project):
        make_data(folder)
        outcome = train(project)
        if outcome["refusals"]:
            raise Refused(outcome["refusals"])
        commit_release(folder)
    return outcome


def main() -> None:
    """Parse the command line and run the flow."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.rebuild", description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", help="recipe to copy over params.yaml first")
    arguments = parser.parse_args()
    rebuild(recipe=arguments.recipe)


if __name__ == "__main__":
    run_as_command(main)
