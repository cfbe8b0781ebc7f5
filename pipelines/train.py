"""The flow ``train``: training, evaluation, export, proof, gate, registration and release of one project.

``python -m pipelines.train`` is what the DVC stage ``release`` runs. Without PREFECT_API_URL, Prefect's temporary server serves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, TypedDict, cast

from prefect import flow
from prefect.states import Completed

from pipelines import tasks
from pipelines.command import run_as_command
from pipelines.server import prefect_server
from reprise.exits import Refused
from reprise.project import Project, open_project
from reprise.steps.runs import exclusive
from reprise.steps.training import check_ready
from reprise.stopping import raise_on_signals


class Outcome(TypedDict):
    """What a flow run ended with; ``model_version`` is None where the gate refused, and ``refusals`` says why."""

    run_key: str
    model_version: int | None
    refusals: list[str]


@flow(name="train", validate_parameters=False)
def train(project: Project) -> Outcome:
    """Train, evaluate, export, and release if the gate lets it pass; a refusal is a finished run that releases nothing."""
    with raise_on_signals():
        key = tasks.train(project)
        tasks.evaluate(project, key)
        tasks.export(project, key)
        if refusals := tasks.gate(project, key):
            return ended({"run_key": key, "model_version": None, "refusals": refusals})
        version = tasks.register(project, key)
        tasks.publish(project, key, version)
        return ended({"run_key": key, "model_version": version, "refusals": []})


def ended(outcome: Outcome) -> Outcome:
    """The outcome for the caller; on Prefect's page a completed run, ``Refused`` with the reasons where the gate said no."""
    if outcome["refusals"]:
        state: Any = Completed(name="Refused", message=str(Refused(outcome["refusals"])), data=outcome)
    else:
        state = Completed(message=f"run {outcome['run_key']} is model version {outcome['model_version']}", data=outcome)
    return cast("Outcome", state)  # Prefect takes a state that a flow returns, and gives its data to whoever called the flow


def main() -> None:
    """Parse the command line, run the flow, and raise ``Refused`` where the gate said no."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--params", type=Path, help="params file (default: params.yaml in the work folder)")
    parser.add_argument(
        "--workdir", type=Path, help="folder of data/, runs/ and release/ (default: the nearest with a params.yaml)"
    )
    arguments = parser.parse_args()
    project = open_project(arguments.params, arguments.workdir)
    check_ready(project)
    with prefect_server(), exclusive(project):
        outcome = train(project)
    if outcome["refusals"]:
        raise Refused(outcome["refusals"])


if __name__ == "__main__":
    run_as_command(main)
