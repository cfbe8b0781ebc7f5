"""What is recorded of machine and code, on real checkouts."""

import json
import subprocess
from pathlib import Path

import pytest

from reprise.tracking import provenance
from reprise.tracking.provenance import environment, git_state


def git(folder: Path, *arguments: str) -> str:
    who = (
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "core.hooksPath=/dev/null",
    )
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "code.py").write_text("a = 1\n")
    (folder / "latin1.txt").write_bytes(b"caf\xe9\n")
    (folder / "dvc.lock").write_text("one\n")
    (folder / ".gitignore").write_text("runs/\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_checkout(checkout):
    state = git_state(checkout / "sub")
    assert state.commit == git(checkout, "rev-parse", "HEAD")
    assert (state.branch, state.dirty, state.diff, state.untracked, state.note) == ("main", False, "", (), None)


def test_only_dvc_lock_and_ignored_files_changed_is_not_dirty(checkout):
    (checkout / "dvc.lock").write_text("two\n")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "x").write_text("x")
    assert not git_state(checkout).dirty
    (checkout / "code.py").write_text("a = 2\n")
    state = git_state(checkout)
    assert state.dirty
    assert "dvc.lock" not in state.diff


@pytest.mark.parametrize("from_folder", [".", "sub"])
def test_the_diff_brings_the_changes_back_byte_for_byte(checkout, from_folder):
    (checkout / "code.py").write_text("a = 2\n")
    (checkout / "latin1.txt").write_bytes(b"th\xe9\n")
    (checkout / "new.bin").write_bytes(bytes(range(256)))
    git(checkout, "add", "new.bin")  # staged counts as well
    (checkout / "loose.py").write_text("b = 1\n")
    state = git_state(checkout / from_folder)
    assert state.dirty
    assert state.untracked == ("loose.py",)

    patch = checkout.parent / "diff.patch"
    patch.write_text(state.diff, encoding="utf-8", errors="surrogateescape", newline="")
    git(checkout.parent, "clone", "-q", str(checkout), "copy")
    copy = checkout.parent / "copy"
    git(copy, "apply", str(patch))
    for name in ("code.py", "latin1.txt", "new.bin"):
        assert (copy / name).read_bytes() == (checkout / name).read_bytes()


def test_an_untracked_file_is_dirty(checkout):
    (checkout / "loose.py").write_text("b = 1\n")
    state = git_state(checkout)
    assert (state.dirty, state.diff, state.untracked) == (True, "", ("loose.py",))


def test_a_huge_diff_is_left_out_and_says_so(checkout, monkeypatch):
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 10)
    (checkout / "code.py").write_text("a = 2\n")
    state = git_state(checkout)
    assert state.dirty
    assert state.diff == ""
    assert "more than 10" in (state.note or "")


def test_without_a_commit_a_checkout_or_git_it_says_so(tmp_path, monkeypatch):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    state = git_state(tmp_path)
    assert (state.commit, state.dirty, state.note) == (None, False, "not a git checkout")
    git(folder, "init", "-q", "-b", "main")
    state = git_state(folder)
    assert (state.commit, state.branch, state.dirty, state.note) == (None, "main", True, "no commit yet")
    monkeypatch.setenv("PATH", str(tmp_path))
    state = git_state(folder)
    assert (state.commit, state.note) == (None, "git is not installed")


def test_a_hooks_environment_does_not_mislead(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert git_state(checkout).branch == "main"


def test_environment_holds_what_can_change_a_result(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = environment("cpu")
    assert found["python"]["version"].startswith("3.")
    assert found["distributions"]["numpy"]
    assert list(found["distributions"]) == sorted(found["distributions"], key=str.lower)
    assert found["cpu"]["model"]
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["logical_cores"]
    assert found["threads"]["OMP_NUM_THREADS"] == "2"
    assert found["torch"]["threads"] >= 1
    assert isinstance(found["torch"]["deterministic"], bool)
    assert found["device"] == {"name": "cpu"}


def test_environment_holds_no_secret_and_no_path(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-value")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cr3t-value")
    text = json.dumps(environment("cpu"))
    assert "s3cr3t" not in text
    assert str(Path.cwd()) not in text
