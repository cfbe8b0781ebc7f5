"""The ``reprise`` command. Thin: each command opens a project, calls one step and prints what came back.

Heavy libraries are imported inside the command that needs them, so ``reprise --help`` and ``reprise predict`` stay fast and work
with the base install.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from reprise.exits import DONE, WRONG_INPUT, Refused, exit_codes, set_up_logging
from reprise.surroundings import set_defaults

app = typer.Typer(
    name="reprise",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help costs 0.15 s, Rich's 0.45 s
    help="From a file of labelled texts to a text classifier that can be trusted and rebuilt.",
    epilog="`dvc repro` runs fetch, split, encode and the whole of training; these commands run one step each. "
    "Exit codes: 0 done, 1 failed, 2 what you wrote is wrong, 3 a gate refused, 130/143 stopped.",
)
recipes_app = typer.Typer(no_args_is_help=True, help="Whole params files with measured scores, to start from.")
app.add_typer(recipes_app, name="recipes")

ParamsOption = Annotated[Path | None, typer.Option("--params", help="Params file [default: params.yaml in the work folder].")]
WorkdirOption = Annotated[
    Path | None,
    typer.Option(
        "--workdir", help="Folder of data/, runs/, release/ and mlflow.db [default: the nearest upwards with a params.yaml]."
    ),
]
RunOption = Annotated[str | None, typer.Option("--run", help="Run key [default: the run that the params name].")]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines: one JSON object a line.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from reprise import __version__

        print(f"reprise {__version__}")
        raise typer.Exit


@app.callback()
def settings(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
) -> None:
    """Options of every command."""
    os.environ["REPRISE_DEBUG"] = "1" if debug else os.environ.get("REPRISE_DEBUG", "")
    set_up_logging(logging.WARNING if quiet else logging.INFO)


# ------------------------------------------------------------------------------------------------------------------ data


@app.command(epilog="Example: `reprise fetch --params recipes/bag.yaml --workdir /tmp/try`")
def fetch(params: ParamsOption = None, workdir: WorkdirOption = None) -> None:
    """Take the raw files from where `data.source` says; nothing is downloaded twice."""
    project = _project(params, workdir)
    from reprise.steps import data

    print(data.fetch(project))


@app.command(epilog="Example: `reprise split`")
def split(params: ParamsOption = None, workdir: WorkdirOption = None) -> None:
    """Read every row and assign it to train, validation or test."""
    project = _project(params, workdir)
    from reprise.steps import data

    print(data.split(project))


@app.command(epilog="Example: `reprise encode`")
def encode(params: ParamsOption = None, workdir: WorkdirOption = None) -> None:
    """Train the tokenizer on the train split and write the tokenised dataset."""
    project = _project(params, workdir)
    from reprise.steps import data

    print(data.encode(project))


# ----------------------------------------------------------------------------------------------------------------- model


@app.command(epilog="Example: `reprise train`; run it again after a stop and it continues to the same bits.")
def train(
    params: ParamsOption = None,
    workdir: WorkdirOption = None,
    restart: Annotated[bool, typer.Option("--restart", help="Set an earlier run of these params aside and begin anew.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train the model, or continue where an earlier call stopped; a finished run is not trained again."""
    project = _project(params, workdir)
    from reprise.steps import runs, training

    with _at_work_on(project):
        key = training.train(project, restart=restart)
    _print_result({"key": key, **runs.read_result(project, key)}, as_json)


@app.command(epilog="Example: `reprise evaluate --json`")
def evaluate(
    params: ParamsOption = None, workdir: WorkdirOption = None, run: RunOption = None, as_json: JsonOption = False
) -> None:
    """Measure the best checkpoint on the validation and test splits, baselines beside it."""
    project = _project(params, workdir)
    from reprise.steps import evaluation, runs

    with _at_work_on(project):
        project = project if run is None else runs.project_of_run(project, run)
        _print_result(evaluation.evaluate(project, run or runs.current_run_key(project)), as_json)


@app.command(epilog='Example: `reprise export`; then `reprise predict --model runs/KEY/export/model.onnx "some text"`')
def export(params: ParamsOption = None, workdir: WorkdirOption = None, run: RunOption = None, as_json: JsonOption = False) -> None:
    """Write model.onnx and prove it on the whole test split; exit code 3 if it says anything else than the trained model."""
    project = _project(params, workdir)
    from reprise.steps import release, runs

    with _at_work_on(project):
        project = project if run is None else runs.project_of_run(project, run)
        proof = release.export(project, run or runs.current_run_key(project))
        _print_result(proof, as_json)
        if proof["refusals"]:
            raise Refused(proof["refusals"])


@app.command(
    epilog='Examples: `reprise predict "my card has not arrived"`; `reprise predict --file texts.csv --json`; '
    "`cat texts.txt | reprise predict --file -`"
)
def predict(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to classify.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="CSV, TSV, JSONL or plain text, one text a line; - reads lines of text from stdin."),
    ] = None,
    text_column: Annotated[str | None, typer.Option("--text-column", help="Column of --file that holds the text.")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="The ONNX file [default: ./model.onnx, then release/model.onnx].")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of onnxruntime [default: all cores].")] = None,
    as_json: JsonOption = False,
) -> None:
    """Label and probabilities from model.onnx alone: no torch, no params file, no project."""
    from reprise.serving import scoring
    from reprise.serving.classifier import Classifier

    if (file is None) == (not texts):
        raise ValueError('give either texts or --file, as in: reprise predict "some text", or: reprise predict --file texts.csv')
    classifier = Classifier(scoring.find_model(model), num_threads=threads)
    if file is None:
        rows = scoring.score_texts(classifier, texts or [])
    elif str(file) == "-":
        rows = scoring.score_texts(classifier, (line.rstrip("\r\n") for line in sys.stdin))
    else:
        rows = scoring.score_file(classifier, file, text_column)
    scoring.print_scored(rows, sys.stdout, "json" if as_json else "table" if texts else "lines")


# --------------------------------------------------------------------------------------------------------------- looking


@app.command("runs", epilog="Example: `reprise runs --json`")
def show_runs(params: ParamsOption = None, workdir: WorkdirOption = None, as_json: JsonOption = False) -> None:
    """List the runs of this work folder: key, recipe, status, metric."""
    project = _project(params, workdir)
    from reprise.steps.runs import list_runs

    rows = list_runs(project)
    if as_json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        _print_table(rows)


@app.command(epilog="Examples: `reprise config`; `reprise config --schema > params.schema.json`")
def config(
    params: ParamsOption = None,
    workdir: WorkdirOption = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a params file, for editors.")] = False,
) -> None:
    """Check the params file and print it as it was understood."""
    _require_train_extra()
    if schema:
        from reprise.config import Config

        print(json.dumps(Config.model_json_schema(), indent=2))
    else:
        print(json.dumps(_project(params, workdir).config.model_dump(mode="json"), indent=2, ensure_ascii=False))


@recipes_app.command("list", epilog="Example: `reprise recipes list`")
def recipes_list(as_json: JsonOption = False) -> None:
    """The shipped recipes with what they reach."""
    _require_train_extra()
    from reprise import recipes

    rows = recipes.list_recipes()
    if as_json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        _print_table(rows)


@recipes_app.command("show", epilog="Example: `reprise recipes show bag > params.yaml`")
def recipes_show(name: Annotated[str, typer.Argument(help="Name of the recipe.")]) -> None:
    """Print one recipe."""
    _require_train_extra()
    from reprise import recipes

    print(recipes.read_recipe(name), end="")


@recipes_app.command(
    "use",
    epilog="Examples: `reprise recipes use transformer`; "
    "`reprise recipes use bag --path data/source/tickets.csv --text-column body --label-column topic`",
)
def recipes_use(
    name: Annotated[str, typer.Argument(help="Name of the recipe.")],
    path: Annotated[str | None, typer.Option("--path", help="Your own file (or folder), in data/source/.")] = None,
    text_column: Annotated[str | None, typer.Option("--text-column", help="Column that holds the text.")] = None,
    label_column: Annotated[str | None, typer.Option("--label-column", help="Column that holds the label.")] = None,
    split_column: Annotated[
        str | None, typer.Option("--split-column", help="Column that says train, validation or test [default: split by hash].")
    ] = None,
    model_name: Annotated[str | None, typer.Option("--model-name", help="Name in the registry [default: the file's name].")] = None,
    params: ParamsOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Write a recipe to params.yaml, pointed at your own data if you name it."""
    _require_train_extra()
    from reprise import recipes

    target = params or (workdir or Path.cwd()) / "params.yaml"
    recipes.use_recipe(
        name,
        target,
        path=path,
        text_column=text_column,
        label_column=label_column,
        split_column=split_column,
        model_name=model_name,
    )
    print(target)


# ----------------------------------------------------------------------------------------------------------------- frame


def main() -> None:
    """Run the command line and leave with the exit code that its outcome means."""
    set_defaults()
    with exit_codes():
        sys.exit(_run())


def _run() -> int:
    """The exit code of what the command line asks for; typer's own complaints (a wrong option) are shown as it shows them."""
    try:
        outcome = app(standalone_mode=False)
    except TyperException as error:
        if not hasattr(error, "show"):
            raise
        error.show()
        return WRONG_INPUT
    return outcome if isinstance(outcome, int) else DONE


@contextmanager
def _at_work_on(project: Any) -> Iterator[None]:
    """The work folder's lock held, and a signal turned into an orderly stop."""
    from reprise.steps.runs import exclusive
    from reprise.stopping import raise_on_signals

    with raise_on_signals(), exclusive(project):
        yield


def _project(params: Path | None, workdir: Path | None) -> Any:
    _require_train_extra()
    from reprise.project import open_project

    return open_project(params, workdir)


def _require_train_extra() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("yaml", "torch", "mlflow", "pyarrow") if find_spec(name) is None]
    if missing:
        raise ValueError(f"this command needs {', '.join(missing)}: install the training extra, pip install 'reprise[train]'")


def _print_result(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, ensure_ascii=False))
        return
    for name, value in values.items():
        if isinstance(value, str | int | float | bool) or value is None:
            print(f"{name:>24}  {value:.6g}" if isinstance(value, float) else f"{name:>24}  {value}")


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not rows:
        print("none yet")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if v is None else f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
