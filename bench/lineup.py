"""All recipes and the two baselines on one data set: the rows of the table in docs/recipes.md.

    python -m bench.lineup banking77                            # the data that the recipes name
    python -m bench.lineup clinc150 path/to/clinc150 --seeds 3  # the folder that holds the data set's own files
    python -m bench.lineup trec6 path/to/trec6 --seeds 3
    python -m bench.lineup sms_spam path/to/sms_spam --seeds 3

The recipes are used as they are; only data and gate are pointed elsewhere, by what `reprise recipes use --path` calls. Every recipe
runs in a process of its own, so that its peak memory is its own. The test split is read.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from bench.seeds import mean_and_interval
from reprise.evaluation.baselines import LabelledTexts, fit_baselines
from reprise.project import Project, open_project
from reprise.recipes import read_recipe, use_recipe
from reprise.steps.data import encode, fetch, split

RECIPES = ("bag", "cnn", "transformer", "minilm-frozen", "minilm")
SOURCE = "data/source/texts.parquet"

Rows = list[tuple[str, str, str]]  # text, label, split


def clinc150(folder: Path) -> Rows:
    """The 150 intents without the out-of-scope rows (Larson et al. 2019): 15,000 / 3,000 / 4,500 rows."""
    tree = json.loads((folder / "data_full.json").read_text(encoding="utf-8"))
    parts = {"train": "train", "val": "validation", "test": "test"}
    return [(text, label, name) for part, name in parts.items() for text, label in tree[part]]


def trec6(folder: Path) -> Rows:
    """Questions by what they ask for (Li & Roth 2002): 5,452 rows for train and validation, 500 for test."""
    parts = {"TREC.train.all": "train", "TREC.test.all": "test"}
    lines = [
        (line, name) for file, name in parts.items() for line in (folder / file).read_text(encoding="latin-1").split("\n") if line
    ]
    return [(line.partition(" ")[2], line.partition(" ")[0], name) for line, name in lines]


def sms_spam(folder: Path) -> Rows:
    """Short messages, ham or spam (Almeida et al. 2011): 5,574 rows, no official split."""
    lines = (folder / "sms.tsv").read_text(encoding="utf-8").split("\n")
    return [(line.partition("\t")[2], line.partition("\t")[0], "") for line in lines if line]


DATA_SETS: dict[str, Callable[[Path], Rows]] = {"clinc150": clinc150, "trec6": trec6, "sms_spam": sms_spam}


def prepare(recipe: str, data_set: str, folder: Path | None, workdir: Path) -> Project:
    """The project of a recipe on a data set, encoded."""
    params = workdir / "params.yaml"
    workdir.mkdir(parents=True, exist_ok=True)
    if folder is None:
        params.write_text(read_recipe(recipe), encoding="utf-8")
    else:
        rows = DATA_SETS[data_set](folder)
        (workdir / SOURCE).parent.mkdir(parents=True, exist_ok=True)
        columns = zip(*rows, strict=True)
        pq.write_table(pa.table(dict(zip(("text", "label", "part"), map(pa.array, columns), strict=True))), workdir / SOURCE)
        parts = {part for _, _, part in rows}
        use_recipe(recipe, params, path=SOURCE, split_column="part" if "test" in parts else None, model_name=data_set)
        if "test" in parts and "validation" not in parts:
            tree = yaml.safe_load(params.read_text(encoding="utf-8"))
            tree["data"]["split"]["validation_fraction"] = 0.1
            params.write_text(yaml.safe_dump(tree), encoding="utf-8")
    project = open_project(params, workdir)
    for step in (fetch, split, encode):
        step(project)
    return project


def baseline_rows(project: Project) -> list[str]:
    """A row of the table for each baseline."""
    tables = {name: pq.read_table(project.split_dir / f"{name}.parquet", columns=["text", "label"]) for name in ("train", "test")}
    labels = sorted(set(tables["train"]["label"].to_pylist()))
    position = {label: index for index, label in enumerate(labels)}
    texts = {
        name: LabelledTexts(
            table["text"].to_pylist(), pa.array([position[label] for label in table["label"].to_pylist()]).to_numpy()
        )
        for name, table in tables.items()
    }
    baselines = fit_baselines(["majority", "tfidf_logreg"], texts["train"], {"test": texts["test"]}, labels)
    return [
        f"| {name} | {b.metrics['test']['accuracy']:.3f} | {b.metrics['test']['macro_f1']:.3f} | | {b.seconds:.0f} s | |"
        for name, b in baselines.items()
    ]


def recipe_row(recipe: str, project: Project, seeds: int) -> str:
    """A row of the table: trained with so many seeds in a process of its own."""
    command = [sys.executable, "-m", "bench.seeds", str(project.params_path), "--workdir", str(project.workdir)]
    command += ["--seeds", str(seeds), "--test", "--json"]
    runs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    def shown(name: str) -> str:
        mean, half = mean_and_interval([run[name] for run in runs])
        return f"{mean:.3f}" + (f" ± {half:.3f}" if seeds > 1 else "")

    vectors = runs[0]["features seconds"]
    seconds = f"{mean_and_interval([run['seconds'] for run in runs])[0]:.0f} s" + (f" + {vectors:.0f} s" if vectors > 1 else "")
    figures = [
        shown(f"{split} {metric}") for split, metric in (("test", "accuracy"), ("test", "macro_f1"), ("validation", "accuracy"))
    ]
    return f"| {recipe} | {' | '.join(figures)} | {seconds} | {max(run['peak GB'] for run in runs):.1f} GB |"


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_set", choices=["banking77", *DATA_SETS])
    parser.add_argument("folder", type=Path, nargs="?", help="where the files of the data set lie (not for banking77)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--workdir", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    if (arguments.folder is None) != (arguments.data_set == "banking77"):
        parser.error("name the folder of the data set, except for banking77")
    logging.disable(logging.INFO)
    print(f"{arguments.data_set}, {arguments.seeds} seeds, mean and 95 % interval\n")
    print("| | test accuracy | test macro F1 | validation accuracy | training | peak memory |\n|---|---|---|---|---|---|")
    for recipe in arguments.recipes:
        project = prepare(recipe, arguments.data_set, arguments.folder, arguments.workdir / arguments.data_set / recipe)
        if recipe == arguments.recipes[0]:
            print("\n".join(baseline_rows(project)), flush=True)
        print(recipe_row(recipe, project, arguments.seeds), flush=True)


if __name__ == "__main__":
    main()
