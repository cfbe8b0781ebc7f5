"""The flow ``rebuild``: what ``dvc repro`` does, from a deployment: the data stages, the train flow, and DVC told of the result."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from rich.console import Console

from pipelines.command import run_as_command
from pipelines.server import prefect_server
from pipelines.train import Outcome, ended, train
from reprise.children import ChildFailed, run_child
from reprise.exits import Refused
from reprise.project import Project, open_project
from reprise.recipes import use_recipe
from reprise.steps.runs import exclusive
from reprise.stopping import raise_on_signals, watch_worker

CHANGED = 1  # Source: dvc/commands/data_sync.py and status.py: with --quiet, whether anything changed; an error gives 255
logger = logging.getLogger("reprise.pipelines.rebuild")


@task(name="data", cache_policy=NO_CACHE)
def make_data(workdir: Path) -> None:
    """Bring the stages before ``release`` up to date; DVC skips what is."""
    _dvc(workdir, "repro", "encode")


@task(name="compare", cache_policy=NO_CACHE)
def is_current(workdir: Path) -> bool:
    """Whether ``release/`` is what the stage would make again, as far as DVC sees: then ``dvc repro``, too, would do nothing."""
    try:
        _dvc(workdir, "status", "--quiet", "release")
    except ChildFailed as failed:
        if failed.code != CHANGED:
            raise
        return False
    return True


@task(name="commit", cache_policy=NO_CACHE)
def commit_release(workdir: Path) -> None:
    """Tell DVC that ``release/`` is what its stage would have made, so that the next ``dvc repro`` has nothing to do."""
    _dvc(workdir, "commit", "--force", "release")


def _dvc(workdir: Path, *arguments: str) -> None:
    # The stages call `python`: it must be this one.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "dvc", *arguments]
    run_child(command, cwd=workdir, env={**os.environ, "PATH": path}, show=logger.info)


@flow(name="rebuild")
def rebuild(recipe: str | None = None, workdir: str | None = None) -> Outcome:
    """Rebuild everything that changed, from the raw data to the release; a refusal by the gate leaves the old release to DVC.

    Args:
        recipe: a recipe that is copied over params.yaml first; None takes params.yaml as it is.
        workdir: the project's folder; None is the current one.
    """
    folder = Path(workdir or ".").resolve()
    with raise_on_signals():
        if watch_worker() is not None:
            _outlive_the_reader_of_our_output()
        if recipe is not None:
            use_recipe(recipe, folder / "params.yaml")
        project = open_project(None, folder)
        with exclusive(project):
            make_data(folder)
            if is_current(folder):
                logger.info("nothing changed since the release was made")
                return ended(last_outcome(project))
            outcome = train(project)
            if not outcome["refusals"]:
                commit_release(folder)
        return ended(outcome)


def _outlive_the_reader_of_our_output() -> None:
    """Where nobody reads what it prints any more, rich ends the process; a flow run whose worker died must save its state first.

    Source: rich/console.py, on_broken_pipe, which is meant to be replaced.
    """

    def go_on(self: Console) -> None:
        self.quiet = True

    Console.on_broken_pipe = go_on  # type: ignore[method-assign]


def last_outcome(project: Project) -> Outcome:
    """What the flow run that made ``release/`` ended with."""
    run = json.loads((project.release_dir / "run.json").read_text(encoding="utf-8"))
    return {"run_key": run["run_key"], "model_version": run["model_version"], "refusals": []}


def main() -> None:
    """Parse the command line, run the flow, and raise ``Refused`` where the gate said no."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.rebuild", description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", help="recipe to copy over params.yaml first")
    arguments = parser.parse_args()
    with prefect_server():
        outcome = rebuild(recipe=arguments.recipe)
    if outcome["refusals"]:
        raise Refused(outcome["refusals"])


if __name__ == "__main__":
    run_as_command(main)
