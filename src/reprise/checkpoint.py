"""Checkpoints that are either whole or not there: written beside, flushed to disk, renamed; checked against their own digest.

A checkpoint is a nested dict of tensors and plain values in torch's own format, so ``torch.load(path, weights_only=True)`` opens
it anywhere. It carries a sha256 over its contents: a torn or altered file is refused by name. (File bytes would not do: torch
writes the file's name into the file.)
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint file is torn, altered or foreign."""


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes in order of name: equal exactly when every bit of every tensor is."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        _feed(sha, name, tensors[name])
    return sha.hexdigest()


def state_digest(state: Mapping[str, Any]) -> str:
    """sha256 over every leaf of a nested state: tensors by their bytes, other values by their JSON."""
    sha = hashlib.sha256()
    for path, leaf in _leaves(state, ""):
        if isinstance(leaf, Tensor):
            _feed(sha, path, leaf)
        else:
            sha.update(f"{path}={json.dumps(leaf)}\n".encode())
    return sha.hexdigest()


def _feed(sha: Any, name: str, tensor: Tensor) -> None:
    array = tensor.detach().cpu().contiguous()
    sha.update(f"{name}|{array.dtype}|{tuple(array.shape)}\n".encode())
    sha.update(array.reshape(-1).view(torch.uint8).numpy().data if array.numel() else b"")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


def save_checkpoint(state: State, *paths: Path) -> None:
    """Write ``state`` once and put it in place under each of ``paths`` in turn (hard links of one file).

    A kill at any moment leaves under each path either the file that was there or the new one, whole.

    Raises:
        OSError: the disk is full or not writable; what was there is untouched.
    """
    draft = paths[0].with_name(f".{paths[0].name}.tmp")
    link = paths[0].with_name(f".{paths[0].name}.link.tmp")
    try:
        # What a killed process left here may be a second name of paths[0]'s own file: never write into it.
        draft.unlink(missing_ok=True)
        _write_durably({**state, "digest": state_digest(state)}, draft)
        for path in paths[:-1]:
            link.unlink(missing_ok=True)
            os.link(draft, link)
            link.replace(path)
        draft.replace(paths[-1])
        _sync_directory(paths[-1].parent)
    finally:
        draft.unlink(missing_ok=True)
        link.unlink(missing_ok=True)


def require_space(directory: Path, num_bytes: int, num_files: int) -> None:
    """Return if ``num_files`` checkpoints of ``num_bytes`` each will fit; those that lie in ``directory`` already are counted in.

    Raises:
        CheckpointError: they will not; the figures are named. Better before the first step than after the first epoch.
    """
    present = sum(path.stat().st_size for path in directory.glob("*.pt"))
    free, needed = shutil.disk_usage(directory).free, num_files * num_bytes - present
    if free < needed:
        raise CheckpointError(
            f"{directory}: {free / 1e9:.2f} GB are free, and {num_files} checkpoints of {num_bytes / 1e9:.2f} GB each need "
            f"{needed / 1e9:.2f} GB more. Make room (old runs lie in runs/), lower execution.keep_last, or name a folder on "
            "another disk with --workdir"
        )


def _write_durably(state: State, path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's writer hides a failed write behind an internal check of its own.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(
                f"{path.parent}: the checkpoint could not be written ({_first_line(cause)}); what was there is kept"
            ) from error
        file.flush()
        os.fsync(file.fileno())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable (a file's fsync does not cover its directory entry)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: Path, device: torch.device) -> State:
    """The state saved in ``path``, its tensors on ``device``; read without executing pickled code.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: the file is torn, was altered, or is not one of ours.
    """
    try:
        state: State = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Damaged bytes meet torch's reader anywhere, and it raises whatever they lead it to (a torn file: OSError on a seek).
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_first_line(error)}") from error
    recorded = state.pop("digest", None) if isinstance(state, dict) else None
    if recorded is None:
        raise CheckpointError(f"{path} is not a checkpoint of Reprise: it carries no digest")
    if state_digest(state) != recorded:
        raise CheckpointError(f"{path} is damaged: its contents do not match the digest it carries")
    return state


def training_environment(device: torch.device) -> dict[str, str]:
    """What decides the bits of a training beside data, settings and code: saved with every checkpoint."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"torch": str(torch.__version__), "device": device.type, "hardware": hardware, "threads": str(torch.get_num_threads())}


def require_same_environment(saved: dict[str, str], now: dict[str, str], path: Path) -> None:
    """Refuse to go on where the same steps would give other bits.

    Raises:
        CheckpointError: something differs; each difference is named.
    """
    differences = [f"{name} was {saved.get(name)} and is {now[name]}" for name in now if saved.get(name) != now[name]]
    if differences:
        raise CheckpointError(
            f"{path} was made under another environment: {'; '.join(differences)}. Going on would not give the bits of an "
            "uninterrupted run. Restore it (REPRISE_DEVICE sets the device), or begin anew with "
            "`reprise train --restart`"
        )
