"""A checkpoint is whole or not there, and what is not whole is refused by name: FAULTS B4."""

from __future__ import annotations

import os
import random
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise import checkpoint
from reprise.checkpoint import (
    CheckpointError,
    load_checkpoint,
    require_same_environment,
    save_checkpoint,
    state_digest,
    tensor_digest,
    training_environment,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def state_of(number: int) -> dict[str, Any]:
    return {
        "model": {"table": torch.full((300, 20), float(number)), "steps": torch.tensor(number)},
        "optimizers": [
            {"state": {0: {"sum": torch.full((300,), float(number))}}, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.999)}]}
        ],
        "fit": {"step": number, "best_value": None, "seconds": 1.5},
    }


def in_child(work: Callable[[], None]) -> int:
    """The wait status of a forked process that does ``work``: a real one, which a real SIGKILL ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001  a fork of pytest must end here, whatever happened
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def number_in(path: Path) -> int:
    """Which state lies in ``path``; fails if it is not exactly one that was saved."""
    state = load_checkpoint(path, CPU)
    number: int = state["fit"]["step"]
    assert state_digest(state) == state_digest(state_of(number))
    return number


# --------------------------------------------------------------------------------------------------------- what comes back


def test_what_was_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    state = state_of(3)
    state["model"]["odd"] = torch.tensor([float("nan"), -0.0, 1e-45])
    save_checkpoint(state, path)
    found = load_checkpoint(path, CPU)
    assert state_digest(found) == state_digest(state)
    assert found["optimizers"][0]["state"][0]["sum"].tolist() == [3.0] * 300
    assert torch.load(path, weights_only=True)["fit"] == state["fit"], "torch alone opens it"
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_best_and_last_are_one_file_until_last_moves_on(tmp_path: Path) -> None:
    best, last = tmp_path / "best.pt", tmp_path / "last.pt"
    save_checkpoint(state_of(1), best, last)
    assert best.stat().st_ino == last.stat().st_ino
    save_checkpoint(state_of(2), last)
    assert (number_in(best), number_in(last)) == (1, 2)
    save_checkpoint(state_of(3), best, last)
    assert (number_in(best), number_in(last)) == (3, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_digests_see_every_bit_every_name_and_every_shape() -> None:
    base = {"a": torch.zeros(4), "b": torch.ones(2, dtype=torch.bfloat16)}
    other = [
        {**base, "a": torch.tensor([0.0, 0, 0, -0.0])},
        {**base, "a": torch.zeros(2, 2)},
        {**base, "a": torch.zeros(4, dtype=torch.int32)},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"]},
    ]
    assert len({tensor_digest(t) for t in [base, *other]}) == 6
    assert tensor_digest(dict(reversed(base.items()))) == tensor_digest(base)
    assert tensor_digest({"a": torch.arange(6).reshape(2, 3).T}) == tensor_digest(
        {"a": torch.arange(6).reshape(2, 3).T.contiguous()}
    )
    leaves = [{"x": 1}, {"x": 1.5}, {"x": True}, {"x": "1"}, {"x": None}, {"x": [1]}, {"x": {"0": 2}}, {"y": 1}]
    assert len({state_digest(leaf) for leaf in leaves}) == len(leaves)


# ------------------------------------------------------------------------------------------------------- killed, disk full

KILL_AT = ["unlink", "torch.save", "os.fsync", "os.link", "replace best", "replace last", "sync directory", "done"]


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(number: int, paths: list[Path], moment: str) -> None:
    """Save in this process, which SIGKILL ends at ``moment``; for torch.save, after half of the bytes."""
    save, fsync, link, replace = torch.save, os.fsync, os.link, Path.replace

    def half_saved(state: Any, file: Any) -> None:
        import io

        whole = io.BytesIO()
        save(state, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        kill_self()

    def replaced(self: Path, target: Path) -> Path:
        if moment == f"replace {Path(target).stem}":
            kill_self()
        return replace(self, target)

    if moment == "torch.save":
        torch.save = half_saved
    if moment == "unlink":
        Path.unlink = lambda *_, **__: kill_self()
    if moment == "os.fsync":
        os.fsync = lambda descriptor: kill_self()
    if moment == "os.link":
        os.link = lambda *_: kill_self()
    if moment == "sync directory":
        checkpoint._sync_directory = lambda _: kill_self()
    Path.replace = replaced
    save_checkpoint(state_of(number), *paths)
    os.fsync, os.link = fsync, link
    kill_self()


@pytest.mark.parametrize("moment", KILL_AT)
def test_a_kill_leaves_the_old_or_the_new_whole(moment: str, tmp_path: Path) -> None:
    best, last = tmp_path / "best.pt", tmp_path / "last.pt"
    save_checkpoint(state_of(1), best, last)
    status = in_child(lambda: save_and_die(2, [best, last], moment))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    found = (number_in(best), number_in(last))
    assert found == {"replace last": (2, 1), "sync directory": (2, 2), "done": (2, 2)}.get(moment, (1, 1))
    # What the dead process left behind must not harm the next one, even if that dies half-way through writing.
    in_child(lambda: save_and_die(3, [best, last], "torch.save"))
    assert (number_in(best), number_in(last)) == found
    save_checkpoint(state_of(4), best, last)
    assert (number_in(best), number_in(last)) == (4, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_kills_at_random_moments(tmp_path: Path) -> None:
    best, last = tmp_path / "best.pt", tmp_path / "last.pt"
    save_checkpoint(state_of(0), best, last)
    moments = random.Random(0)
    reached = 0
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            number = reached
            while True:
                number += 1
                save_checkpoint(state_of(number), *([best, last] if number % 2 else [last]))
        signal.sigtimedwait([signal.SIGCHLD], moments.uniform(0.01, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = number_in(last)
        assert reached <= found
        assert found - 1 <= number_in(best) <= found + 1
        reached = found
    assert reached > 0


def test_a_write_that_fails_keeps_what_was_there(tmp_path: Path) -> None:
    """A real failing write: a limit on the size of files, where a test cannot fill a disk."""
    best, last = tmp_path / "best.pt", tmp_path / "last.pt"
    save_checkpoint(state_of(1), best, last)

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(OSError, match=r"could not be written \(.*File too large\); what was there is kept"):
            save_checkpoint(state_of(2), best, last)

    assert in_child(fill) == 0
    assert (number_in(best), number_in(last)) == (1, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_a_full_disk_at_the_last_flush_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = tmp_path / "last.pt"
    save_checkpoint(state_of(1), last)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(state_of(2), last)
    assert number_in(last) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


# ----------------------------------------------------------------------------------------------------------------- refused


def test_damaged_files_are_refused_by_name_or_give_the_same_state(tmp_path: Path) -> None:
    """Cut anywhere or with a bit turned: never another state, never another error."""
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    save_checkpoint(state_of(7), good)
    whole, rng = good.read_bytes(), random.Random(0)
    refusals: list[str] = []
    for turn in range(300):
        data = bytearray(whole)
        place = rng.randrange(len(data))
        if turn % 3:
            data[place] ^= 1 << rng.randrange(8)
        else:
            data = data[:place]
        bad.write_bytes(data)
        try:
            assert number_in(bad) == 7
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 200
    assert all(str(bad) in said for said in refusals)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02.", b"PK\x03\x04" + bytes(100), b"{}", b"\n"])
def test_files_that_are_something_else(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"last\.pt cannot be read as a checkpoint: ."):
        load_checkpoint(path, CPU)


@pytest.mark.parametrize("foreign", [{"model": {}}, [1, 2], torch.ones(2)])
def test_foreign_checkpoints(foreign: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save(foreign, path)
    with pytest.raises(CheckpointError, match=r"last\.pt is not a checkpoint of Reprise"):
        load_checkpoint(path, CPU)


class Trap:
    """What a pickle can do when it is loaded without care."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("sprung",)


def test_no_code_of_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"digest": "x", "model": Trap()}, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "last.pt", CPU)
    assert not (tmp_path / "sprung").exists()


def test_an_altered_file_with_intact_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    state = state_of(1)
    torch.save({**state_of(2), "digest": state_digest(state)}, path)
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged"):
        load_checkpoint(path, CPU)


def test_no_file_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "last.pt", CPU)


# ------------------------------------------------------------------------------------------------------------- environment


def test_another_environment_is_refused_and_each_difference_named() -> None:
    now = training_environment(CPU)
    assert now.keys() == {"torch", "device", "hardware", "threads"}
    assert now["threads"] == "1"
    require_same_environment(now, now, Path("last.pt"))
    saved = {**now, "threads": "64", "hardware": "AVX2000"}
    with pytest.raises(CheckpointError) as caught:
        require_same_environment(saved, now, Path("last.pt"))
    said = str(caught.value)
    assert "last.pt" in said
    assert "threads was 64 and is 1" in said
    assert f"hardware was AVX2000 and is {now['hardware']}" in said
    assert "device was" not in said
    assert "--restart" in said
    with pytest.raises(CheckpointError, match="torch was None"):
        require_same_environment({}, now, Path("last.pt"))


def test_threads_are_part_of_it() -> None:
    before = training_environment(CPU)
    torch.set_num_threads(2)
    assert training_environment(CPU)["threads"] == "2" != before["threads"]


# ------------------------------------------------------------------------------------------------- what training goes on from


def put(path: Path, number: int) -> None:
    save_checkpoint({**state_of(number), "environment": training_environment(CPU)}, path)


def test_training_falls_back_one_slot_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from reprise.steps.training import _last_checkpoint

    assert _last_checkpoint(tmp_path, CPU) is None
    put(tmp_path / "best.pt", 1)
    put(tmp_path / "last.pt", 2)
    assert _last_checkpoint(tmp_path, CPU)["fit"]["step"] == 2
    assert caplog.records == []

    (tmp_path / "last.pt").write_bytes((tmp_path / "last.pt").read_bytes()[:5000])
    assert _last_checkpoint(tmp_path, CPU)["fit"]["step"] == 1
    assert "last.pt cannot be read" in caplog.text
    assert "falling back one slot" in caplog.text

    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read; `reprise train --restart`"):
        _last_checkpoint(tmp_path, CPU)

    (tmp_path / "last.pt").unlink()
    put(tmp_path / "best.pt", 1)
    assert _last_checkpoint(tmp_path, CPU)["fit"]["step"] == 1, "killed between best and last of the first epoch"


def test_training_does_not_go_on_in_another_environment(tmp_path: Path) -> None:
    from reprise.steps.training import _last_checkpoint

    put(tmp_path / "last.pt", 2)
    torch.set_num_threads(2)
    with pytest.raises(CheckpointError, match="threads was 1 and is 2"):
        _last_checkpoint(tmp_path, CPU)
