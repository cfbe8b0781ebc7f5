"""What a person gets wrong in the data: one clear message, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise.cli import main

GOOD = "text,label\n" + "".join(f"row {n} of {label},{label}\n" for n in range(40) for label in ("card", "loan"))


@pytest.fixture
def leave(
    tiny_params: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """``leave(content)``: exit code and stderr of the first of fetch, split and encode that does not end with 0."""
    monkeypatch.delenv("REPRISE_DEBUG", raising=False)

    def run(content: bytes, name: str = "rows.csv", change: Callable[[dict[str, Any]], object] = lambda _: None) -> tuple[int, str]:
        source = tmp_path / "data" / "source" / name
        source.parent.mkdir(parents=True)
        source.write_bytes(content)
        params = tiny_params("bag", {"data.source": {"kind": "path", "path": f"data/source/{name}"}})
        change(params)
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
        for step in ("fetch", "split", "encode"):
            monkeypatch.setattr(sys, "argv", ["reprise", step, "--workdir", str(tmp_path)])
            with pytest.raises(SystemExit) as caught:
                main()
            if caught.value.code:
                return int(str(caught.value.code)), capsys.readouterr().err
        return 0, ""

    return run


def left_behind(folder: Path) -> set[str]:
    """Outputs of a step that are there, and whatever looks like half of one."""
    outputs = {"data/split", "data/encoded", "data/quarantine.jsonl", "runs", "release"}
    return {name for name in outputs if (folder / name).exists()} | {
        path.name for path in folder.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"
    }


def test_good_rows_pass(leave: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert leave(GOOD.encode()) == (0, "")
    assert left_behind(tmp_path) == {"data/split", "data/encoded", "data/quarantine.jsonl"}


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (GOOD.replace("label\n", "topic\n", 1).encode(), "rows.csv", ["rows.csv", "label", "topic", "data.columns"]),
        (b"", "rows.csv", ["rows.csv", "empty"]),
        (b"text,label\n", "rows.csv", ["rows.csv", "no rows"]),
        (b"text,label\n" + b"".join(b"row %d,card\n" % n for n in range(40)), "rows.csv", ["at least 2 classes", "card: 40"]),
        (b"PAR1 this is none PAR1", "rows.parquet", ["rows.parquet", "Parquet"]),
        (GOOD.encode() + "ein Stück,card\n".encode("latin-1"), "rows.csv", ["rows.csv", "UTF-8", "row 81"]),
    ],
    ids=["missing column", "empty file", "header only", "one class", "broken Parquet", "not UTF-8"],
)
def test_a_file_that_cannot_be_used(
    leave: Callable[..., tuple[int, str]], tmp_path: Path, content: bytes, name: str, words: list[str]
) -> None:
    code, said = leave(content, name)
    assert code == 2
    assert said.startswith("reprise: ")
    assert "Traceback" not in said
    assert [word for word in words if word not in said] == [], said
    assert left_behind(tmp_path) == set()


def test_an_unknown_key(leave: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = leave(GOOD.encode(), change=lambda tree: tree["data"].update(spilt=tree["data"].pop("split")))
    assert code == 2
    assert "data.spilt" in said
    assert "data.split" in said
    assert "Traceback" not in said
    assert left_behind(tmp_path) == set()


def test_a_failed_split_leaves_the_old_one_whole(leave: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert leave(GOOD.encode())[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "data" / "split").iterdir()}
    (tmp_path / "data" / "source" / "rows.csv").rename(tmp_path / "kept.csv")
    (tmp_path / "data" / "source").rmdir()
    assert leave(b"text,label\nonly,one\n")[0] == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "data" / "split").iterdir()} == before
