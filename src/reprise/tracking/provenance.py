"""Where and from what a run came: libraries, machine, threads, state of the code. No environment dump: it holds secrets."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

# The variables that can change a result or its speed; nothing else of the environment is read.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_SPINCOUNT",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "OPENBLAS_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "TOKENIZERS_PARALLELISM",
    "PYTHONHASHSEED",
)
MAX_DIFF_BYTES = 5_000_000
GIT_SECONDS = 30


@dataclass(frozen=True)
class GitState:
    """The code's state; ``note`` says why there is no commit, or no diff. ``diff`` is for `git apply`."""

    commit: str | None
    branch: str | None
    dirty: bool
    diff: str
    untracked: tuple[str, ...]
    note: str | None


def environment(device: str | None = None) -> dict[str, Any]:
    """All that can change a result and is not in params.yaml: ready for JSON, without paths, names of people or secrets."""
    return {
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "os": {"system": platform.system(), "release": platform.release(), "platform": platform.platform(), "libc": _libc()},
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "torch": _torch(),
        "device": _device(device),
        "distributions": _distributions(),
    }


def _libc() -> str:
    return " ".join(platform.libc_ver()).strip()


def _cpu() -> dict[str, Any]:
    model, flags = _cpuinfo()
    return {
        "model": model or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "flags": flags,
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": _usable_cores(),
    }


def _usable_cores() -> int:
    # A container or taskset may leave a process fewer cores than the machine has; torch counts these.
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)


def _cpuinfo() -> tuple[str, list[str]]:
    """Model name and sorted feature flags as Linux tells them; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return "", []
    facts: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts.get("model name", ""), sorted((facts.get("flags") or facts.get("Features") or "").split())


def _torch() -> dict[str, Any] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return {
        "version": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch has no types here
        "build": torch.__config__.show(),
    }


def _device(device: str | None) -> dict[str, Any]:
    if device is None or not device.startswith("cuda"):
        return {"name": device}
    import torch

    index = torch.device(device).index or 0
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": device,
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "gpus_visible": torch.cuda.device_count(),
    }


def _distributions() -> dict[str, str]:
    """Version by name of every installed distribution, in alphabetical order."""
    found = {name: dist.version for dist in metadata.distributions() if (name := dist.metadata["Name"])}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


# ----------------------------------------------------------------------------------------------------------------- git


def git_state(workdir: Path) -> GitState:
    """The checkout that holds ``workdir``. A change of dvc.lock alone is not dirty: the run itself brings it about.

    Never fails: without git, outside a checkout or before the first commit it says so in ``note``.
    """
    top = _git(workdir, "rev-parse", "--show-toplevel")
    if isinstance(top, _GitFailure):
        return GitState(None, None, dirty=False, diff="", untracked=(), note=top.reason)
    root = Path(top.strip())
    entries = list(_status(root))
    untracked = tuple(path for code, path in entries if code == "??")
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    branch = _git(root, "symbolic-ref", "--short", "--quiet", "HEAD")
    branch_name = None if isinstance(branch, _GitFailure) else branch.strip()
    if isinstance(commit, _GitFailure):
        return GitState(None, branch_name, dirty=True, diff="", untracked=untracked, note="no commit yet")
    diff, note = _diff(root) if len(entries) > len(untracked) else ("", None)
    return GitState(commit.strip(), branch_name, bool(entries), diff, untracked, note)


@dataclass(frozen=True)
class _GitFailure:
    reason: str


def _git(folder: Path, *arguments: str) -> str | _GitFailure:
    """What git prints, byte for byte (surrogateescape), or why it does not."""
    # Inside a git hook these variables point to the hook's repository, whatever the folder.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")}
    variables["GIT_OPTIONAL_LOCKS"] = "0"
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, env=variables, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        return _GitFailure("git is not installed")
    except subprocess.TimeoutExpired:
        return _GitFailure(f"git did not answer within {GIT_SECONDS} s")
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "surrogateescape")
    message = done.stderr.decode("utf-8", "replace").strip()
    return _GitFailure("not a git checkout" if "not a git repository" in message else message.splitlines()[0] if message else "?")


_ALL_BUT_DVC_LOCK = ("--", ":(top)", ":(top,exclude,glob)**/dvc.lock")


def _status(root: Path) -> Iterator[tuple[str, str]]:
    """(two-letter code, path) of every change; an ignored file is none."""
    listing = _git(root, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", *_ALL_BUT_DVC_LOCK)
    if isinstance(listing, _GitFailure):
        return
    for entry in listing.split("\0"):
        if entry:
            yield entry[:2], entry[3:]


def _diff(root: Path) -> tuple[str, str | None]:
    """The changes of tracked files against HEAD, and a note where they are too large or could not be had."""
    diff = _git(root, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", *_ALL_BUT_DVC_LOCK)
    if isinstance(diff, _GitFailure):
        return "", f"no diff: {diff.reason}"
    if len(diff) > MAX_DIFF_BYTES:
        return (
            "",
            f"no diff: it has {len(diff):,} bytes, more than {MAX_DIFF_BYTES:,}; commit, or ignore what should not be in it",
        )
    return diff, None
