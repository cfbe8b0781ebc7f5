"""Recipes, as shipped and as pointed at somebody's own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.config import ConfigError, load_config
from reprise.recipes import list_recipes, read_recipe, use_recipe


def names(root: Path) -> list[str]:
    return sorted(path.stem for path in (root / "recipes").glob("*.yaml"))


def test_lists_what_lies_in_the_folder(root: Path) -> None:
    rows = list_recipes()
    assert [row["name"] for row in rows] == names(root)
    assert all(row.keys() == {"name", "about", "score", "time"} for row in rows)


def test_a_recipe_as_it_is(root: Path, tmp_path: Path) -> None:
    for name in names(root):
        use_recipe(name, tmp_path / "params.yaml")
        assert (tmp_path / "params.yaml").read_text(encoding="utf-8") == read_recipe(name)


@pytest.mark.parametrize("name", ["absent", "../params", "", "bag.yaml"])
def test_no_such_recipe(name: str, root: Path) -> None:
    with pytest.raises(ValueError, match=f"there are {', '.join(names(root))}"):
        read_recipe(name)


def test_pointed_at_your_own_file_every_recipe_stays_valid_and_keeps_its_comments(root: Path, tmp_path: Path) -> None:
    for name in names(root):
        target = tmp_path / f"{name}.yaml"
        use_recipe(name, target, path="data/source/tickets.csv", text_column="body", label_column="topic")
        config, shipped = load_config(target), load_config(root / "recipes" / f"{name}.yaml")
        assert config.data.source.model_dump() == {"kind": "path", "path": "data/source/tickets.csv"}
        assert (config.data.columns.text, config.data.columns.label) == ("body", "topic")
        assert config.data.split.method == "hash"
        assert config.registry.model_name == "tickets"
        assert config.registry.gate.minimum == {}
        assert (config.model, config.train, config.tokenizer) == (shipped.model, shipped.train, shipped.tokenizer)
        lost = read_recipe(name).count("#") - target.read_text(encoding="utf-8").count("#")
        assert lost <= 12, "only comments of what was replaced may go"


def test_a_column_that_tells_the_split(tmp_path: Path) -> None:
    use_recipe("bag", tmp_path / "params.yaml", path="data/source/a.csv", split_column="part")
    split = load_config(tmp_path / "params.yaml").data.split
    assert (split.method, split.model_dump()["column"]) == ("given", "part")


@pytest.mark.parametrize("word", ["on", "no", "12:30", "007", "null", "1e3", "1.0", "a: b", "#x", "größe", "'"])
def test_names_that_yaml_reads_as_something_else_stay_text(word: str, tmp_path: Path) -> None:
    target = tmp_path / "params.yaml"
    use_recipe("bag", target, path=f"data/source/{word}.csv", text_column=word, label_column=word, split_column=word)
    config = load_config(target)
    assert config.data.columns.text == config.data.columns.label == config.data.split.model_dump()["column"] == word
    use_recipe("bag", target, path=word)
    assert load_config(target).data.source.model_dump()["path"] == word


def test_what_you_edited_is_kept_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target, kept = tmp_path / "params.yaml", tmp_path / "params.yaml.bak"
    for name in ("bag", "transformer", "transformer"):
        use_recipe(name, target)
    assert not kept.exists(), "a recipe as shipped needs no copy"
    target.write_text("# mine\n")
    use_recipe("bag", target, path="data/source/a.csv")
    use_recipe("bag", target, path="data/source/a.csv")
    assert kept.read_text() == "# mine\n", "writing the same again is no edit"
    assert "params.yaml was edited: what it said is kept in params.yaml.bak" in caplog.text
    use_recipe("bag", target)
    assert "data/source/a.csv" in kept.read_text()


def test_a_model_name_of_your_own(tmp_path: Path) -> None:
    use_recipe("bag", tmp_path / "params.yaml", model_name="mine")
    config = load_config(tmp_path / "params.yaml")
    assert config.registry.model_name == "mine"
    assert config.registry.gate.minimum, "the recipe's own data keeps the recipe's own floor"


def test_what_is_wrong_does_not_replace_a_file_that_was_right(tmp_path: Path) -> None:
    target = tmp_path / "params.yaml"
    use_recipe("bag", target)
    before = target.read_bytes()
    with pytest.raises(ConfigError, match=r"registry\.model_name: found 'a/b'"):
        use_recipe("bag", target, model_name="a/b")
    with pytest.raises(ConfigError, match=r"data\.source\.path"):
        use_recipe("bag", target, path="")
    with pytest.raises(ValueError, match="name it with --path"):
        use_recipe("bag", target, text_column="body")
    assert target.read_bytes() == before
