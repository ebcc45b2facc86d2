"""Releases are installed as a whole or not at all, and every trouble says what to do.

The tests install a small wheel that looks like vLLM's, with the real pip: from a directory
(``PIP_FIND_LINKS``), or from an index on a loopback port that can stop half-way. None needs a network.
"""

import base64
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from filelock import FileLock
from rich.console import Console

from kvspec import releases
from kvspec.cli_release import InstallProgress, release
from kvspec.errors import KvspecError
from kvspec.releases import Phase

VERSION = "0.33.0"
TAG = "cp38-abi3-manylinux_2_28_x86_64"
DEADLINE_S = 60


# A wheel that looks like vLLM's -----------------------------------------------------------------------------


def wheel_files(version: str) -> dict[str, bytes]:
    info = f"vllm-{version}.dist-info"
    return {
        "vllm/__init__.py": f'__version__ = "{version}"\n'.encode(),
        "vllm/v1/__init__.py": b"",
        "vllm/v1/core.py": b"BLOCKS = 7\n",
        "vllm/_C.abi3.so": os.urandom(100_000),
        "vllm/configs/h100.json": b"{}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode(),
    }


def record_of(files: dict[str, bytes], version: str) -> bytes:
    def line(name: str, data: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(data)}\n"

    return "".join([*map(line, files, files.values()), f"vllm-{version}.dist-info/RECORD,,\n"]).encode()


def build_wheel(
    directory: Path,
    version: str = VERSION,
    *,
    listed: dict[str, bytes] | None = None,
    unlisted: dict[str, bytes | None] | None = None,
    record: bytes | None = None,
) -> Path:
    """Write a wheel with more members than usual: ``listed`` in RECORD or ``unlisted`` (None: one less)."""
    files = wheel_files(version) | (listed or {})
    record = record_of(files, version) if record is None else record
    members = files | {f"vllm-{version}.dist-info/RECORD": record} | (unlisted or {})
    directory.mkdir(exist_ok=True)
    wheel = directory / f"vllm-{version}-{TAG}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)
    return wheel


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which pip finds wheels, and nothing else; kvspec's cache is empty."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("KVSPEC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "links").mkdir()
    return tmp_path / "links"


@pytest.fixture
def quick_download(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the wheel without pip, which needs a second to start."""

    def copy(version: str, staging: Path, _: releases.Progress) -> Path:
        name = f"vllm-{version}-{TAG}.whl"
        return Path(shutil.copy(links / name, staging / name))

    monkeypatch.setattr(releases, "_download", copy)


@pytest.fixture(scope="module")
def installed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of one real install, to be copied."""
    root = tmp_path_factory.mktemp("once")
    build_wheel(root / "links")
    environment = {
        "KVSPEC_CACHE_DIR": str(root / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(root / "links"),
        "PIP_NO_INDEX": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        releases.install(VERSION)
    return root / "cache"


@pytest.fixture
def cached(links: Path, installed_once: Path) -> Path:
    """The directory of an installed release; pip would find nothing."""
    shutil.copytree(installed_once, releases.cache_dir())
    return releases.path(VERSION)


def staging() -> Path:
    return releases.cache_dir() / "releases" / ".staging"


def staged() -> list[str]:
    """What lies in the staging directory."""
    return sorted(entry.name for entry in staging().iterdir())


def leave(name: str) -> Path:
    """Make a directory like one that an install which was killed leaves."""
    directory = staging() / name
    directory.mkdir(parents=True)
    return directory


def run_python(code: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process that can import kvspec from where this one does."""
    root = Path(releases.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(root)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# What an install leaves -------------------------------------------------------------------------------------


def test_an_install_keeps_python_files_and_dist_info_and_nothing_else(links: Path) -> None:
    build_wheel(links, listed={"sitecustomize.py": b"raise SystemExit\n"})
    directory = releases.install(VERSION)
    files = {file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()}
    assert directory == releases.cache_dir() / "releases" / f"vllm-{VERSION}"
    assert files == {
        "kvspec-release.json",
        "vllm/__init__.py",
        "vllm/v1/__init__.py",
        "vllm/v1/core.py",
        f"vllm-{VERSION}.dist-info/METADATA",
        f"vllm-{VERSION}.dist-info/RECORD",
        f"vllm-{VERSION}.dist-info/WHEEL",
    }
    assert staged() == []


def test_the_directory_of_a_release_is_what_import_vllm_finds(cached: Path) -> None:
    code = """
        import importlib.metadata, vllm.v1.core
        print(vllm.__version__, importlib.metadata.version("vllm"), vllm.v1.core.BLOCKS)
    """
    process = run_python(code, PYTHONPATH=str(cached))
    assert process.communicate(timeout=DEADLINE_S) == (f"{VERSION} {VERSION} 7\n", "")


def test_the_manifest_names_the_wheel_and_its_hash(links: Path) -> None:
    wheel = build_wheel(links)
    manifest = json.loads((releases.install(VERSION) / "kvspec-release.json").read_text())
    assert manifest["version"] == VERSION
    assert manifest["wheel"] == wheel.name
    assert manifest["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert manifest["files_count"] == 6
    assert releases.verify(VERSION, contents=True).files_count == 6


def test_progress_goes_from_finding_to_all_bytes_unpacked(links: Path) -> None:
    wheel_bytes = build_wheel(links).stat().st_size
    reports: list[tuple[Phase, int, int | None]] = []
    releases.install(VERSION, lambda *report: reports.append(report))
    assert list(dict.fromkeys(phase for phase, _, _ in reports)) == [
        Phase.FIND,
        Phase.DOWNLOAD,
        Phase.UNPACK,
    ]
    assert (Phase.DOWNLOAD, wheel_bytes, wheel_bytes) in reports
    assert reports[-1] == (Phase.UNPACK, *[releases.verify(VERSION).files_bytes] * 2)


def test_an_installed_release_is_returned_without_asking_pip(cached: Path) -> None:
    reports: list[Phase] = []
    assert releases.install(VERSION, lambda phase, *_: reports.append(phase)) == cached
    assert releases.path("v0.33.0") == cached
    assert reports == []


def test_a_download_reports_the_bytes_that_have_come_and_the_size_that_pip_announced(links: Path) -> None:
    wheel_bytes = build_wheel(links, listed={"vllm/big.so": os.urandom(2_000_000)}).stat().st_size
    reports: list[tuple[Phase, int, int | None]] = []
    with index(links) as server:

        def progress(*report: object) -> None:
            reports.append(report)  # type: ignore[arg-type]
            if report[0] is Phase.DOWNLOAD:
                server.resume.set()

        releases.install(VERSION, progress)
    half = next(report for report in reports if report[0] is Phase.DOWNLOAD)
    assert 0 < half[1] <= wheel_bytes // 2
    assert half[2] == pytest.approx(wheel_bytes, rel=0.05)


def test_removing_leaves_nothing_of_a_release(cached: Path) -> None:
    releases.remove(VERSION)
    assert not cached.exists()
    assert releases.installed() == []
    assert staged() == []
    with pytest.raises(KvspecError, match=r"not installed; run `kvspec release install 0\.33\.0`"):
        releases.path(VERSION)
    with pytest.raises(KvspecError, match="not installed"):
        releases.remove(VERSION)


def test_installed_releases_come_newest_first(cached: Path) -> None:
    for other in ("0.9.0", "0.10.0"):
        shutil.copytree(cached, cached.with_name(f"vllm-{other}"))
    (cached.parent / "vllm-notes").mkdir()
    assert [found.version for found in releases.installed()] == [VERSION, "0.10.0", "0.9.0"]
    assert releases.installed()[0].path == cached


def test_available_releases_are_those_that_pip_finds(links: Path) -> None:
    for version in ("0.9.2", "0.32.0", VERSION):
        build_wheel(links, version)
    assert releases.available() == [VERSION, "0.32.0", "0.9.2"]


def test_the_cache_is_the_users_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVSPEC_CACHE_DIR", "relative")
    assert releases.cache_dir() == Path.cwd() / "relative"
    monkeypatch.delenv("KVSPEC_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert releases.cache_dir().is_relative_to(tmp_path)
    assert releases.cache_dir().name == "kvspec"


@pytest.mark.parametrize("version", ["", "latest", "0.33", "../../etc", "0.33.0/../../x", "0.33.0;rm", "/", "--force"])
def test_a_malformed_version_is_refused_by_everything_that_takes_one(links: Path, version: str) -> None:
    for function in (
        releases.install,
        releases.path,
        releases.verify,
        releases.remove,
    ):
        with pytest.raises(KvspecError, match=r"is not a version of vLLM; write it in full, such as 0\."):
            function(version)
    assert not releases.cache_dir().exists()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("v0.33.0", "0.33.0"),
        (" 0.33.0\n", "0.33.0"),
        ("0.8.5post1", "0.8.5.post1"),
        ("0.33.0RC1", "0.33.0rc1"),
    ],
)
def test_each_version_has_one_spelling(given: str, meant: str) -> None:
    assert releases.canonical(given) == meant


# Interruptions ----------------------------------------------------------------------------------------------

INSTALL_UNTIL = """
    import os, sys
    from kvspec import releases

    def progress(phase, done_bytes, total_bytes):
        if phase.name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))

    sys.argv[1:] = {argv}
    releases.install("0.33.0", progress)
"""


class Index(ThreadingHTTPServer):
    """A package index on a loopback port. It sends half of a wheel, and the rest when ``resume`` is set."""

    daemon_threads = True
    half_sent: threading.Event
    resume: threading.Event
    breaks: bool


@contextmanager
def index(wheels: Path, *, breaks: bool = False) -> Iterator[Index]:
    """Serve the wheels of a directory, and tell pip so; ``breaks`` ends each download half-way."""

    def link(wheel: Path) -> str:
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        return f'<a href="/files/{wheel.name}#sha256={sha256}">{wheel.name}</a>'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            if name.endswith(".whl"):
                self.send_wheel((wheels / name).read_bytes())
            else:
                rows = "".join(map(link, wheels.iterdir()))
                self.start(len(rows), "text/html")
                self.wfile.write(rows.encode())

        def start(self, length: int, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def send_wheel(self, data: bytes) -> None:
            self.start(len(data), "application/octet-stream")
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            server.half_sent.set()
            if not server.breaks:
                server.resume.wait(DEADLINE_S)
                self.wfile.write(data[len(data) // 2 :])

        def handle(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # pip was killed
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

    server = Index(("127.0.0.1", 0), Handler)
    server.half_sent, server.resume, server.breaks = threading.Event(), threading.Event(), breaks
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PIP_NO_INDEX")
            patch.delenv("PIP_FIND_LINKS")
            patch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
            patch.setenv("PIP_RETRIES", "0")
            yield server
    finally:
        server.resume.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_install_that_is_killed_while_it_downloads_leaves_nothing_and_the_next_works(
    links: Path, sign: signal.Signals
) -> None:
    build_wheel(links, listed={"vllm/big.so": os.urandom(2_000_000)})
    with index(links) as server:
        process = run_python(INSTALL_UNTIL.format(argv=["never", "0"]))
        assert server.half_sent.wait(DEADLINE_S)
        process.send_signal(sign)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == -sign
        assert releases.installed() == []
        assert len(staged()) == (1 if sign == signal.SIGKILL else 0)
        server.resume.set()
        releases.install(VERSION)
    assert releases.verify(VERSION, contents=True).version == VERSION
    assert staged() == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_install_that_is_killed_while_it_unpacks_leaves_nothing_and_the_next_works(
    links: Path, sign: signal.Signals
) -> None:
    build_wheel(links)
    process = run_python(INSTALL_UNTIL.format(argv=["UNPACK", str(int(sign))]))
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -sign
    assert releases.installed() == []
    assert len(staged()) == (1 if sign == signal.SIGKILL else 0)
    releases.install(VERSION)
    assert releases.verify(VERSION, contents=True).version == VERSION
    assert staged() == []


def test_a_leftover_goes_while_the_pip_of_the_killed_install_still_writes_to_it(
    links: Path, quick_download: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wheel(links)
    leftover = leave(f"{VERSION}@killed")
    rmdir = os.rmdir

    def rmdir_too_late(*args: object, **options: object) -> None:
        with suppress(FileNotFoundError):
            (leftover / "written by pip").touch()
        rmdir(*args, **options)

    monkeypatch.setattr(os, "rmdir", rmdir_too_late)
    releases.install(VERSION)
    assert staged() == []


def test_a_leftover_that_can_not_be_moved_goes_and_stops_no_install(
    links: Path, quick_download: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wheel(links)
    leftover = leave(f"{VERSION}@killed")
    replace = os.replace

    def replace_if_there_is_room(source: Path, target: Path) -> None:
        if source == leftover:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_if_there_is_room)
    releases.install(VERSION)
    assert staged() == []


def test_leftovers_of_other_releases_go_too_unless_their_install_is_still_running(
    links: Path, quick_download: None
) -> None:
    build_wheel(links)
    releases.install(VERSION)
    root = releases.cache_dir() / "releases"
    for name in ("0.31.0@dead", "0.32.0@running"):
        leave(name)
    with FileLock(root / ".locks" / "vllm-0.32.0.lock"):
        releases.install(VERSION, force=True)
    assert staged() == ["0.32.0@running"]


def test_of_two_installs_at_once_the_second_waits_says_so_and_finds_it_installed(links: Path, tmp_path: Path) -> None:
    build_wheel(links)
    code = """
        import os, time
        from kvspec import releases

        def progress(phase, done_bytes, total_bytes):
            print(phase.name, flush=True)
            open(os.environ["REACHED"] + phase.name, "w").close()
            while phase.name == "UNPACK" and not os.path.exists(os.environ["RESUME"]):
                time.sleep(0.02)

        releases.install("0.33.0", progress)
    """
    resume = tmp_path / "resume"
    first = run_python(code, REACHED=str(tmp_path / "first-"), RESUME=str(resume))
    wait_for((tmp_path / "first-UNPACK").exists)
    second = run_python(code, REACHED=str(tmp_path / "second-"), RESUME=str(resume))
    wait_for((tmp_path / "second-WAIT").exists)
    resume.touch()
    first_output, first_errors = first.communicate(timeout=DEADLINE_S)
    second_output, second_errors = second.communicate(timeout=DEADLINE_S)
    assert (first.returncode, first_errors) == (0, "")
    assert (second.returncode, second_errors) == (0, "")
    assert list(dict.fromkeys(first_output.split())) == ["FIND", "DOWNLOAD", "UNPACK"]
    assert second_output.split() == ["WAIT"]
    assert releases.verify(VERSION, contents=True).version == VERSION


# Troubles, and what they say --------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    """The message of the KvspecError that a call must raise, which must have left nothing behind."""
    with pytest.raises(KvspecError) as caught:
        call()
    root = releases.cache_dir() / "releases"
    assert list(root.glob("vllm-*")) == []
    assert list(root.glob(".staging/*")) == []
    return str(caught.value)


def test_an_unknown_release_is_answered_with_those_near_it(links: Path) -> None:
    for version in ("0.9.2", "0.30.0", "0.31.0", "0.32.0", "0.34.0"):
        build_wheel(links, version)
    assert refusal(lambda: releases.install("0.33.1")) == (
        "There is no release 0.33.1 of vLLM; near it are 0.30.0, 0.31.0, 0.32.0, 0.34.0 "
        "(`kvspec release list --available` shows all)."
    )


@pytest.mark.parametrize("retries", ["0", "1"])
def test_without_a_network_the_message_says_to_check_it(
    links: Path, monkeypatch: pytest.MonkeyPatch, retries: str
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", retries)
    for call in (lambda: releases.install(VERSION), releases.available):
        message = refusal(call)
        assert message.startswith("pip reached no package index that has vLLM")
        assert "check the network" in message


def test_a_connection_that_breaks_half_way_is_said_to_have_done_so(links: Path) -> None:
    build_wheel(links, listed={"vllm/big.so": os.urandom(2_000_000)})
    with index(links, breaks=True):
        assert refusal(lambda: releases.install(VERSION)).startswith(
            "The download of vLLM 0.33.0 arrived incomplete or changed, and nothing was installed; try again"
        )


def test_too_little_space_is_noticed_before_the_download(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearly_full = shutil.disk_usage("/")._replace(free=releases.SPACE_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly_full)
    reports: list[Phase] = []
    message = refusal(lambda: releases.install(VERSION, lambda phase, *_: reports.append(phase)))
    assert message.startswith("There is too little space for the cache")
    assert "needs 900 MB" in message
    assert "KVSPEC_CACHE_DIR" in message
    assert reports == []


def test_a_disk_that_fills_up_while_unpacking_is_said_to_be_full(
    links: Path, quick_download: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    build_wheel(links)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert refusal(lambda: releases.install(VERSION)).startswith("There is too little space for the cache")


SAYINGS = {
    "ERROR: Could not install: [Errno 28] No space left on device": "There is too little space for the cache",
    "WARNING: Could not fetch URL https://x: Connection error": "pip reached no package index that has vLLM",
    "ERROR: HTTPSConnectionPool(host='x', port=443): Read timed out.": "pip reached no package index",
    "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES": "The download of vLLM 0.33.0 arrived incomplete",
    "ERROR: Wheel 'vllm' located at x.whl is invalid.": "The download of vLLM 0.33.0 arrived incomplete",
    "ERROR: no such option": "pip could not fetch vLLM 0.33.0 (it said: ERROR: no such option); run `",
    "": "pip could not fetch vLLM 0.33.0 (it said: nothing); run `",
}


@pytest.mark.parametrize(("pip_says", "message_starts"), SAYINGS.items())
def test_what_pip_says_becomes_one_sentence(
    links: Path, monkeypatch: pytest.MonkeyPatch, pip_says: str, message_starts: str
) -> None:
    failing = [sys.executable, "-c", f"print({pip_says!r}); raise SystemExit(1)"]
    monkeypatch.setattr(releases, "_pip_command", lambda *_: failing)
    assert refusal(lambda: releases.install(VERSION)).startswith(message_starts)


def test_a_python_without_pip_is_told_how_to_get_it(
    links: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", bare)
    for call in (lambda: releases.install(VERSION), releases.available):
        assert refusal(call) == f"This Python has no pip; run `{bare} -m ensurepip --upgrade`."


def test_a_cache_that_is_not_a_directory_is_named(links: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSPEC_CACHE_DIR", str(tmp_path / "file"))
    message = refusal(lambda: releases.install(VERSION))
    assert message.startswith(f"The cache {tmp_path / 'file'} cannot be used (")
    assert message.endswith("set KVSPEC_CACHE_DIR to a directory that you can write to.")


@pytest.fixture
def read_only_cache(links: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that this process may not write, even if the tests run as root."""
    root = Path(tempfile.mkdtemp())  # unlike tmp_path, where another user can look
    root.chmod(0o555)
    monkeypatch.setenv("KVSPEC_CACHE_DIR", str(root))
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield root
    finally:
        os.seteuid(user)
        shutil.rmtree(root)


def test_a_read_only_cache_is_named_and_what_to_set_instead(read_only_cache: Path) -> None:
    assert refusal(lambda: releases.install(VERSION)) == (
        f"The cache {read_only_cache} cannot be used (Permission denied); "
        "set KVSPEC_CACHE_DIR to a directory that you can write to."
    )


# Wheels and caches that are not what they should be ---------------------------------------------------------


INFO = f"vllm-{VERSION}.dist-info"
BAD_WHEELS = [
    (
        {"unlisted": {"vllm/v1/core.py": b"BLOCKS = 8\n"}},
        "vllm/v1/core.py is not the one that its RECORD lists",
    ),
    ({"unlisted": {"vllm/extra.py": b""}}, "vllm/extra.py is not the one that its RECORD lists"),
    ({"unlisted": {f"{INFO}/METADATA": b"Name: torch"}}, f"{INFO}/METADATA is not the one"),
    ({"unlisted": {"../evil.py": b""}}, "'../evil.py' points outside"),
    ({"unlisted": {"vllm/../../evil.py": b""}}, "'vllm/../../evil.py' points outside"),
    ({"unlisted": {"/evil.py": b""}}, "'/evil.py' points outside"),
    ({"unlisted": {"vllm\\..\\..\\evil.py": b""}}, "points outside"),
    ({"unlisted": {"vllm-1.dist-info/RECORD": b""}}, "it has 2 RECORD files"),
    ({"unlisted": {f"{INFO}/RECORD": None}}, "it has 0 RECORD files"),
    ({"record": b"vllm/__init__.py,md5=abc,3\n"}, "has a digest of kind md5"),
    ({"record": b"one,two\n"}, "its RECORD cannot be read"),
    ({"record": b"\xff,,\n"}, "its RECORD cannot be read"),
]


@pytest.mark.parametrize(("wheel", "reason"), BAD_WHEELS)
def test_a_wheel_that_is_not_what_its_record_says_is_refused(
    links: Path, quick_download: None, tmp_path: Path, wheel: dict[str, object], reason: str
) -> None:
    build_wheel(links, **wheel)  # type: ignore[arg-type]
    message = refusal(lambda: releases.install(VERSION))
    assert message.startswith(f"The wheel vllm-{VERSION}-{TAG}.whl was refused because ")
    assert reason in message
    assert "nothing was installed" in message
    assert list(tmp_path.rglob("evil.py")) == []


def test_a_tampered_wheel_is_refused_when_it_comes_through_pip(links: Path) -> None:
    build_wheel(links, unlisted={"vllm/v1/core.py": b"BLOCKS = 8\n"})
    assert "was refused because its file vllm/v1/core.py" in refusal(lambda: releases.install(VERSION))


def test_a_wheel_with_flipped_bits_is_refused(links: Path, quick_download: None) -> None:
    wheel = build_wheel(links)
    wheel.write_bytes(wheel.read_bytes().replace(b"BLOCKS = 7", b"BLOCKS = 6"))
    assert "it is not a sound zip file" in refusal(lambda: releases.install(VERSION))


SEEN_ON_USE = {
    "a file is missing": lambda root: (root / "vllm/v1/core.py").unlink(),
    "a file is cut": lambda root: (root / "vllm/v1/core.py").write_bytes(b"BLO"),
    "RECORD has changed": lambda root: (root / f"vllm-{VERSION}.dist-info/RECORD").write_bytes(b""),
    "RECORD is missing": lambda root: (root / f"vllm-{VERSION}.dist-info/RECORD").unlink(),
    "the manifest is missing": lambda root: (root / "kvspec-release.json").unlink(),
    "the manifest is cut": lambda root: (root / "kvspec-release.json").write_bytes(b'{"version": "0.3'),
    "the manifest lacks a field": lambda root: (root / "kvspec-release.json").write_bytes(b"{}"),
}
SEEN_BY_VERIFY = {
    "a file was edited": lambda root: (root / "vllm/v1/core.py").write_bytes(b"BLOCKS = 8\n"),
    "a file was added": lambda root: (root / "vllm/v1/added.py").write_bytes(b""),
}


@pytest.mark.parametrize("damage", SEEN_ON_USE.values(), ids=SEEN_ON_USE)
def test_a_damaged_release_says_how_to_mend_it_and_is_mended_by_that(
    links: Path, quick_download: None, cached: Path, damage: Callable[[Path], object]
) -> None:
    damage(cached)
    for function in (releases.path, releases.install, releases.verify):
        with pytest.raises(KvspecError, match=r"damaged \(.+\); run `kvspec release install --force 0\.33\.0`"):
            function(VERSION)
    build_wheel(links)
    releases.install(VERSION, force=True)
    assert releases.verify(VERSION, contents=True).version == VERSION
    assert staged() == []


@pytest.mark.parametrize("damage", SEEN_BY_VERIFY.values(), ids=SEEN_BY_VERIFY)
def test_a_change_that_keeps_sizes_is_found_when_contents_are_verified(
    cached: Path, damage: Callable[[Path], object]
) -> None:
    damage(cached)
    assert releases.path(VERSION) == cached
    with pytest.raises(KvspecError, match=r"damaged \(vllm/v1/(core.py has been changed|added.py is not from)"):
        releases.verify(VERSION, contents=True)


def test_a_forced_install_that_fails_keeps_what_was_there(links: Path, cached: Path) -> None:
    with pytest.raises(KvspecError):
        releases.install(VERSION, force=True)
    assert releases.verify(VERSION, contents=True).version == VERSION


def test_compiled_files_that_python_adds_are_no_damage(cached: Path) -> None:
    process = run_python("import vllm.v1.core", PYTHONPATH=str(cached), PYTHONDONTWRITEBYTECODE="")
    process.communicate(timeout=DEADLINE_S)
    assert list(cached.rglob("*.pyc"))
    assert releases.verify(VERSION, contents=True).version == VERSION


# The command line -------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(release, arguments)


def test_the_commands_install_list_locate_and_remove(links: Path) -> None:
    for version in ("0.32.0", VERSION):
        build_wheel(links, version)
    root = releases.cache_dir() / "releases"
    empty = invoke("list")
    assert empty.output == "No release is installed; `kvspec release install 0.33.0` installs one.\n"
    done = invoke("install", "v0.33.0", "0.32.0")
    assert done.exception is None
    assert done.stdout == (
        f"vLLM 0.33.0 is installed at {root / 'vllm-0.33.0'}\nvLLM 0.32.0 is installed at {root / 'vllm-0.32.0'}\n"
    )
    assert done.stderr.splitlines()[0] == "vLLM v0.33.0: asking pip for it"
    assert "vLLM 0.32.0: unpacking, 0.0 of 0.0 MB" in done.stderr.splitlines()
    assert invoke("path", VERSION).stdout == f"{root / 'vllm-0.33.0'}\n"
    assert invoke("remove", VERSION).stdout == "vLLM 0.33.0 is removed\n"
    assert invoke("list", "--available").stdout.splitlines() == [
        "0.33.0        not installed  (kvspec is known to run on it)",
        "0.32.0        installed, 6 files, 0.0 MB  (kvspec is known to run on it)",
    ]


def test_list_shows_damage_and_fails(cached: Path) -> None:
    SEEN_BY_VERIFY["a file was edited"](cached)
    assert invoke("list").stdout == "0.33.0        installed, 6 files, 0.0 MB\n"
    result = invoke("list", "--verify")
    assert result.stdout.startswith("0.33.0        damaged: The installed vLLM 0.33.0 is damaged (vllm/v1/core.py")
    assert isinstance(result.exception, KvspecError)
    assert str(result.exception) == "1 of the releases above are damaged; each line says what helps."


@pytest.mark.parametrize("command", [[], ["list"], ["install"], ["path"], ["remove"]])
def test_every_help_text_teaches_by_example(command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "  Example" in result.output
    assert "    kvspec release " in result.output


def test_without_a_terminal_progress_is_a_line_for_each_phase() -> None:
    stream = io.StringIO()
    with InstallProgress(VERSION, Console(file=stream)) as progress:
        progress(Phase.FIND, 0, None)
        progress(Phase.DOWNLOAD, 1_000_000, None)
        progress(Phase.DOWNLOAD, 2_000_000, 336_400_000)
        progress(Phase.UNPACK, 0, 50_000_000)
    assert stream.getvalue() == (
        "vLLM 0.33.0: asking pip for it\n"
        "vLLM 0.33.0: downloading, 1.0 MB so far\n"
        "vLLM 0.33.0: unpacking, 0.0 of 50.0 MB\n"
    )


def test_on_a_terminal_progress_is_a_bar_that_goes_away() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with InstallProgress(VERSION, console) as progress:
        progress(Phase.DOWNLOAD, 100_000_000, 336_400_000)
        progress._bar.refresh()
    assert "vLLM 0.33.0: downloading" in stream.getvalue()
    assert "100.0/336.4 MB" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")
