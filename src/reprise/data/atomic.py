"""Outputs that are whole or absent: a folder or file is written beside its place and moved there when it is finished."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into; it takes the place of ``folder`` when the block ends, and vanishes if the block raises.

    The name is fixed, so what a killed process left behind is removed by the next one. The caller holds whatever lock keeps
    two writers of one folder apart.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    replaced = folder.with_name(f".{folder.name}.replaced")
    if replaced.exists() and not folder.exists():
        replaced.replace(folder)  # the process before us died between its two renames
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        folder.replace(replaced)
    partial.replace(folder)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write: it takes the place of ``path`` when the block ends, and vanishes if the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole_file(path: Path, text: str) -> None:
    """``path`` holds ``text`` in UTF-8, or is as it was before."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")
