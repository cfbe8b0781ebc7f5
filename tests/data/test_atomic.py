from __future__ import annotations

from pathlib import Path

import pytest

from reprise.data.atomic import whole_folder, write_whole_file


def test_a_finished_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    for number in (1, 2):
        with whole_folder(out) as folder:
            (folder / f"{number}.txt").write_text("x", encoding="utf-8")
    assert [path.name for path in out.iterdir()] == ["2.txt"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_folder_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "out"
    with whole_folder(out) as folder:
        (folder / "old.txt").write_text("old", encoding="utf-8")

    def fail_half_way() -> None:
        with whole_folder(out) as folder:
            (folder / "new.txt").write_text("half", encoding="utf-8")
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old.txt"]


def test_what_a_killed_process_left_does_not_get_into_the_next_folder(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half.txt").write_text("half", encoding="utf-8")
    with whole_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_whole_file(path, "a\né\n")
    assert path.read_bytes() == "a\né\n".encode()
    with pytest.raises(UnicodeEncodeError):
        write_whole_file(path, "half \ud800")
    assert path.read_bytes() == "a\né\n".encode()
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]
