"""What a training measured, on disk first: one JSON object a line, appended and never changed.

The tracking server gets its points from this file, so an outage loses nothing, and a resumed training is checked against it:
the same step must give the same value.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

# Measurements of the machine, not of the model: they differ from run to run, so a resumed run does not compare them.
EXEMPT_PREFIXES = ("time/", "system/")
# What MLflow allows; a name that it refuses would block every later point. Source: mlflow/utils/validation.py.
_NAME = re.compile(r"^[\w.\- :/]{1,250}$")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Diverged(RuntimeError):  # noqa: N818  named after the verdict, like `Stopped`
    """A resumed training measured something else than the journal holds for the same step and name."""

    def __init__(self, path: Path, step: int, name: str, recorded: float, now: float) -> None:
        self.path, self.step, self.name, self.recorded, self.now = path, step, name, recorded, now
        super().__init__(
            f"{path}: step {step} recorded {name} = {recorded!r}, and the resumed training gives {now!r}. They must be equal "
            "to the last bit: compare machine, thread counts and library versions with those of the first part"
        )

    def __reduce__(self) -> tuple[type[Diverged], tuple[Path, int, str, float, float]]:
        return type(self), (self.path, self.step, self.name, self.recorded, self.now)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric; ``step`` counts optimizer steps, ``time`` is in milliseconds since 1970 (UTC)."""

    step: int
    name: str
    value: float
    time: int


class Journal:
    """The points of one run, in the order in which they were first measured. One writer at a time: the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        points, self._end = read_points(path)
        self._values = {(point.step, point.name): point.value for point in points}
        self._names = {point.name for point in points}
        self.last_step = max((point.step for point in points), default=-1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the points that are new; what the journal already holds is compared instead of written a second time.

        Raises:
            Diverged: a value differs from the recorded one; nothing of this call is written then.
            ValueError: MLflow does not allow such a name.
        """
        now = int(time.time() * 1000)
        new = [Point(step, name, float(value), now) for name, value in values.items() if self._is_new(step, name, float(value))]
        if not new:
            return
        lines = "".join(map(_to_line, new)).encode()
        file = self._open()
        file.write(lines)
        file.flush()
        self._end += len(lines)
        self._values.update({(point.step, point.name): point.value for point in new})
        self.last_step = max(self.last_step, step)

    def points(self) -> list[Point]:
        """All points on disk."""
        return read_points(self.path)[0]

    def sync(self) -> None:
        """Make what was logged so far survive a power cut."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _is_new(self, step: int, name: str, value: float) -> bool:
        if name not in self._names:
            if not _NAME.match(name):
                raise ValueError(f"metric name {name!r}: use 1 to 250 of letters, digits, _ - . / : and spaces, as MLflow does")
            self._names.add(name)
        recorded = self._values.get((step, name))
        if recorded is None:
            return True
        if not name.startswith(EXEMPT_PREFIXES) and not _same(recorded, value):
            raise Diverged(self.path, step, name, recorded, value)
        return False

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            # Half a line is all that a kill in the middle of a write leaves; the next line must not be glued to it.
            self._file.truncate(self._end)
        return self._file


def read_points(path: Path, offset: int = 0) -> tuple[list[Point], int]:
    """The whole lines from byte ``offset`` on, and the offset behind them: a line that is being written is left for later.

    Raises:
        ValueError: a line is not what a journal holds; file and line are named.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read()
    whole = block[: block.rfind(b"\n") + 1]
    return list(_parse(path, whole, offset)), offset + len(whole)


def _parse(path: Path, block: bytes, offset: int) -> Iterator[Point]:
    for number, line in enumerate(block.splitlines(), start=1):
        try:
            fields = json.loads(line)
            yield Point(int(fields["step"]), str(fields["name"]), _to_float(fields["value"]), int(fields["time"]))
        except (ValueError, KeyError, TypeError):
            place = f"line {number}" if offset == 0 else f"line {number} after byte {offset}"
            raise ValueError(
                f"{path}, {place}: found {line[:80]!r}; a journal line is a JSON object with step, name, value and time. "
                "Move the file away to send and compare nothing of it"
            ) from None


def _to_line(point: Point) -> str:
    # JSON has no word for NaN and infinity; as text they survive every reader, and float() understands them.
    value: float | str = point.value
    if not math.isfinite(point.value):
        value = "NaN" if math.isnan(point.value) else ("Infinity" if point.value > 0 else "-Infinity")
    return json.dumps({"step": point.step, "name": point.name, "value": value, "time": point.time}) + "\n"


def _to_float(value: Any) -> float:
    return _NON_FINITE[value] if isinstance(value, str) else float(value)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
