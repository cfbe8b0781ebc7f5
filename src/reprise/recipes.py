"""The shipped recipes: whole params files, each with a header that states the score and time it was measured at."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted  # a column called `on` must stay text
from yaml import safe_load

from reprise.config import parse_config
from reprise.data.atomic import write_whole_file

logger = logging.getLogger(__name__)

HEADER = re.compile(r"^# (recipe|score|time|about): *(.+)$")


def recipes_dir() -> Path:
    """The folder of the recipes: inside an installed package, or at the top of a checkout.

    Raises:
        ValueError: neither is there.
    """
    package = Path(__file__).parent
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return folder
    raise ValueError("no recipes beside this installation; work from a checkout of Reprise")


def list_recipes() -> list[dict[str, str | None]]:
    """Name, what it is, expected score and time of each recipe, from its header."""
    paths = sorted(recipes_dir().glob("*.yaml"), key=lambda path: path.stem)
    return [{"name": path.stem, **_header(path.read_text(encoding="utf-8"))} for path in paths]


def read_recipe(name: str) -> str:
    """The text of a recipe.

    Raises:
        ValueError: there is none of this name; those that exist are listed.
    """
    path = recipes_dir() / f"{name}.yaml"
    if not re.fullmatch(r"[\w-]+", name) or not path.is_file():
        names = ", ".join(sorted(p.stem for p in recipes_dir().glob("*.yaml")))
        raise ValueError(f"no recipe is called {name!r}; there are {names}")
    return path.read_text(encoding="utf-8")


def use_recipe(
    name: str,
    target: Path,
    *,
    path: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    model_name: str | None = None,
) -> None:
    """Write a recipe to ``target``; with ``path``, pointed at the user's own file. Comments are kept.

    A ``target`` that somebody edited is kept beside it as ``.bak``.

    Raises:
        ValueError: no such recipe, or columns were named without a file.
    """
    text = read_recipe(name)
    columns = {"text": text_column, "label": label_column}
    if path is None and any((text_column, label_column, split_column)):
        raise ValueError("--text-column, --label-column and --split-column describe your own file: name it with --path")
    if path is None and model_name is None:
        _replace(target, text)
        return
    yaml = YAML()  # the round-trip one: comments and order stay
    yaml.preserve_quotes = True
    yaml.width = 4096
    tree = yaml.load(text)
    if path is not None:
        _point_at(tree, path, {k: v for k, v in columns.items() if v is not None}, split_column)
    tree["registry"]["model_name"] = Quoted(model_name or re.sub(r"[/:]", "-", Path(path or name).stem))
    text = _dump(yaml, tree)
    parse_config(safe_load(text), target)  # before writing: what is wrong must not replace a params file that was right
    _replace(target, text)


def _replace(target: Path, text: str) -> None:
    """Write ``text``; what was there before, unless it is a recipe as shipped, is kept beside it."""
    before = target.read_text(encoding="utf-8") if target.is_file() else text
    shipped = [path.read_text(encoding="utf-8") for path in recipes_dir().glob("*.yaml")]
    if before not in (text, *shipped):
        kept = target.with_name(target.name + ".bak")
        write_whole_file(kept, before)
        logger.warning("%s was edited: what it said is kept in %s", target.name, kept.name)
    write_whole_file(target, text)


def _point_at(tree: CommentedMap, path: str, columns: dict[str, str], split_column: str | None) -> None:
    """Replace source and split by the user's file, split by hash unless one of its columns tells the split."""
    data = tree["data"]
    data["source"] = CommentedMap(kind="path", path=Quoted(path))
    data["columns"].update({name: Quoted(column) for name, column in columns.items()})
    if split_column is not None:
        data["split"] = CommentedMap(method="given", seed=13, files=None, column=Quoted(split_column), validation_fraction=None)
    else:
        fractions = CommentedMap(train=0.8, validation=0.1, test=0.1)
        data["split"] = CommentedMap(method="hash", seed=13, fractions=fractions, rare_class="keep_in_train")
    tree["registry"]["gate"]["minimum"] = CommentedMap()  # the recipe's own floor says nothing about other data


def _dump(yaml: YAML, tree: Any) -> str:
    from io import StringIO

    out = StringIO()
    yaml.dump(tree, out)
    return out.getvalue()


def _header(text: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {"about": None, "score": None, "time": None}
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if (match := HEADER.match(line)) and match[1] in found:
            found[match[1]] = match[2]
    return found
