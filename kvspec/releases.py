"""Published releases of vLLM: fetched once through pip, kept as Python files, found by name.

A release is a directory ``<cache>/releases/vllm-<version>`` with the Python files of the wheel
(``vllm/**.py``) and its ``.dist-info``. Put first on ``PYTHONPATH`` of a process it is ``import vllm``, and
``importlib.metadata`` knows its version. The wheel's compiled libraries, kernel sources and tuning tables
(95 % of it) are not kept: on a machine without a GPU no part of the scheduler and of the offload connectors
reads them.

Every machine takes the same wheel, the one for Linux on x86-64, whatever it is itself: only Python files
are kept, and so a finding on one machine is a finding about the same bytes on another.

What is checked: that each kept file is the one that the wheel's own RECORD lists (sha256); later, on each
use, that none is missing or has another size; on request, the sha256 of all again. What is not: that the
index which pip asks is the right one. pip compares the download with the hash that the index gives.

A directory under its final name is always complete: it is put together elsewhere and then renamed.
"""

import base64
import csv
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
import platformdirs
from filelock import FileLock, Timeout
from packaging.version import InvalidVersion, Version

from kvspec.errors import KvspecError

KNOWN_GOOD = (
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
"""Releases on which kvspec was seen to run, oldest first. Others may run as well."""

CACHE_VARIABLE = "KVSPEC_CACHE_DIR"
MANIFEST_NAME = "kvspec-release.json"

SPACE_BYTES = 900 * 10**6
"""Free space that an install asks for. A wheel is up to 430 MB and pip holds it twice for a moment (it
copies it from its temporary directory); what stays is about 60 MB."""

POLL_S = 0.2
"""How often a running pip, or a lock that another process holds, is looked at."""

WHEEL_TARGET = (
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=3.12",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(40, 4, -1)),
    "--platform=manylinux2014_x86_64",
    "--platform=manylinux2010_x86_64",
    "--platform=manylinux1_x86_64",
    "--platform=linux_x86_64",
)
"""What pip is told about the machine that the wheel is for (see the module's text). vLLM's wheels are named
``cp38-abi3-manylinux_2_28_x86_64`` or alike and accept Python 3.10 or 3.11 to 3.14; pip takes the name of a
platform to the letter."""

NETWORK_SIGNS = (
    "connection broken",
    "Connection aborted",
    "Connection error",
    "connection failed",
    "Connection refused",
    "ConnectionPool",
    "Could not fetch URL",
    "Failed to establish a new connection",
    "IncompleteRead",
    "name resolution",
    "Network is unreachable",
    "timed out",
)
"""Any of these in a line of pip's output means that the index was not reached (pip 23 to 26)."""

BROKEN_SIGNS = ("DO NOT MATCH THE HASHES", "incomplete-download", "is invalid.")
"""Any of these in pip's output means that it has a file, but not the one that the index promises. Most
often the connection ended too early: pip 23 does not count the bytes."""


class Phase(StrEnum):
    """What an install is doing."""

    WAIT = "waiting for another process that installs it"
    FIND = "asking pip for it"
    DOWNLOAD = "downloading"
    UNPACK = "unpacking"


Progress = Callable[[Phase, int, int | None], None]
"""Called with the phase, the bytes done in it, and the bytes in all, or None while that is unknown."""


class Manifest(msgspec.Struct, frozen=True):
    """What was installed; written into the release's directory as ``kvspec-release.json``."""

    version: str
    wheel: str
    wheel_sha256: str
    record: str
    record_sha256: str
    files_count: int
    files_bytes: int


@dataclass(frozen=True)
class Release:
    """An installed release, sound or damaged (``verify`` tells)."""

    version: str
    path: Path


@dataclass(frozen=True)
class RecordEntry:
    """One line of a wheel's RECORD. The digest is base64 as written there, and None for RECORD itself."""

    name: str
    sha256: str | None
    size_bytes: int


# The public functions ---------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where kvspec keeps what it can fetch again: ``KVSPEC_CACHE_DIR``, or the user's cache directory."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser().absolute()
    return platformdirs.user_cache_path("kvspec", appauthor=False)


@contextmanager
def _cache_errors() -> Iterator[None]:
    """Turn an OSError of the cache into a KvspecError that says what to do. Works as a decorator, too."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full() from error
        raise KvspecError(
            f"The cache {cache_dir()} cannot be used ({error.strerror or error}); "
            f"set {CACHE_VARIABLE} to a directory that you can write to."
        ) from error


@_cache_errors()
def install(version: str, progress: Progress | None = None, *, force: bool = False) -> Path:
    """Install a release if it is missing, and return its directory; with ``force``, fetch it anew.

    Raises KvspecError: malformed or unknown version, no pip, no network, full disk, unusable cache, a wheel
    that does not match its RECORD, an installed release that is damaged (without ``force``). In each case
    it leaves nothing half-done.
    """
    version = canonical(version)
    report = progress or _silent
    if force or not _directory(version).is_dir():
        with _locked(version, report):
            # Another process may have installed it while this one waited.
            if force or not _directory(version).is_dir():
                _install(version, report)
    return path(version)


@_cache_errors()
def path(version: str) -> Path:
    """Return the directory of an installed release, to be put first on ``PYTHONPATH``.

    Raises KvspecError if it is missing or visibly damaged; both say which command helps.
    """
    verify(version)
    return _directory(canonical(version))


@_cache_errors()
def verify(version: str, *, contents: bool = False) -> Manifest:
    """Check an installed release and return its manifest; with ``contents``, hash every file.

    Raises KvspecError if it is missing or damaged.
    """
    version = canonical(version)
    directory = _directory(version)
    if not directory.is_dir():
        raise KvspecError(f"vLLM {version} is not installed; run `kvspec release install {version}`.")
    try:
        manifest = msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
        damage = _damage(directory, manifest, contents)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise _damaged(version, f"{MANIFEST_NAME} cannot be read: {error}") from error
    if damage:
        raise _damaged(version, damage)
    return manifest


@_cache_errors()
def installed() -> list[Release]:
    """Return the releases in the cache, newest first."""
    if not _releases_dir().is_dir():
        return []
    found = []
    for entry in _releases_dir().iterdir():
        name, _, version = entry.name.partition("-")
        with suppress(InvalidVersion):  # whatever else is there is not ours
            if name == "vllm":
                found.append((Version(version), entry))
    return [Release(str(version), entry) for version, entry in sorted(found, reverse=True)]


@_cache_errors()
def remove(version: str) -> None:
    """Remove an installed release, sound or damaged. Raises KvspecError if there is none."""
    version = canonical(version)
    with _locked(version, _silent), _staging(version) as staging:
        try:
            # First out of sight, as one step; then deleted.
            os.replace(_directory(version), staging / "removed")
        except FileNotFoundError:
            raise KvspecError(f"vLLM {version} is not installed; `kvspec release list` shows what is.") from None


def available() -> list[str]:
    """Return the published releases that pip finds, newest first. Raises KvspecError as ``install`` does."""
    result = subprocess.run(
        _pip_command("index", "versions", *WHEEL_TARGET, "vllm"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    found = re.search(r"^Available versions: (.+)$", result.stdout, re.MULTILINE)
    if not found:
        raise _pip_error(None, result.stdout)
    return [version.strip() for version in found[1].split(",")]


def canonical(version: str) -> str:
    """Return the one spelling of a version, which is safe in a path.

    Raises KvspecError if it is not a version in full.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        parsed = None
    if parsed is None or len(parsed.release) < 3:
        raise KvspecError(f"{version!r} is not a version of vLLM; write it in full, such as {KNOWN_GOOD[-1]}.")
    return str(parsed)


# Places, locks, errors --------------------------------------------------------------------------------------


def _releases_dir() -> Path:
    return cache_dir() / "releases"


def _directory(version: str) -> Path:
    return _releases_dir() / f"vllm-{version}"


def _staging_dir() -> Path:
    """Where installs are put together: on the same file system as the cache, so that a rename ends them."""
    return _releases_dir() / ".staging"


@contextmanager
def _staging(version: str) -> Iterator[Path]:
    """A new directory for one install or removal, deleted at the end; its name tells whose lock guards it."""
    _staging_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{version}@", dir=_staging_dir(), ignore_cleanup_errors=True) as name:
        yield Path(name)


def _lock(version: str) -> FileLock:
    locks = _releases_dir() / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"vllm-{version}.lock")


@contextmanager
def _locked(version: str, report: Progress) -> Iterator[None]:
    """Hold the lock of a release; the kernel lets go of it however this process ends."""
    lock = _lock(version)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(Phase.WAIT, 0, None)
        lock.acquire(poll_interval=POLL_S)
    try:
        yield
    finally:
        lock.release()


def _silent(phase: Phase, done_bytes: int, total_bytes: int | None) -> None:
    """Progress for nobody."""


def _damaged(version: str, damage: str) -> KvspecError:
    return KvspecError(
        f"The installed vLLM {version} is damaged ({damage}); run `kvspec release install --force {version}`."
    )


def _disk_full() -> KvspecError:
    return KvspecError(
        f"There is too little space for the cache {cache_dir()}: an install needs "
        f"{SPACE_BYTES // 10**6} MB for a moment and keeps about 60 MB; "
        f"free some, or set {CACHE_VARIABLE} to a directory on another disk."
    )


def _refused(wheel: Path, reason: str) -> KvspecError:
    return KvspecError(
        f"The wheel {wheel.name} was refused because {reason}, and nothing was installed; "
        "try again, and if it stays so, see with `pip config list` where pip takes packages from."
    )


# Install ----------------------------------------------------------------------------------------------------


def _install(version: str, report: Progress) -> None:
    """Fetch, unpack and publish a release whose lock is held."""
    _remove_leftovers(version)
    with _staging(version) as staging:
        if shutil.disk_usage(staging).free < SPACE_BYTES:
            raise _disk_full()
        wheel = _download(version, staging, report)
        tree = staging / "tree"
        manifest = _unpack(wheel, version, tree, report)
        (tree / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        with suppress(FileNotFoundError):
            os.replace(_directory(version), staging / "replaced")
        os.replace(tree, _directory(version))


def _remove_leftovers(version: str) -> None:
    """Delete what killed installs left: of this release, whose lock is held, and of all without one."""
    for leftover in list(_staging_dir().glob("*@*")):
        owner = leftover.name.partition("@")[0]
        if owner == version:
            _delete(leftover, owner)
            continue
        with suppress(Timeout), _lock(owner).acquire(timeout=0):
            _delete(leftover, owner)


def _delete(leftover: Path, owner: str) -> None:
    """Delete a leftover, as far as that can be done.

    The pip of an install that was killed may still make files in it. So it is moved first, and then deleted where that
    pip doesn't look.
    """
    try:
        with _staging(owner) as staging:
            os.replace(leftover, staging / "leftover")
    except OSError:  # such as a full disk
        shutil.rmtree(leftover, ignore_errors=True)


def _download(version: str, staging: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into ``staging``; return its path there."""
    temporary, wheels, log = staging / "tmp", staging / "wheel", staging / "pip.log"
    temporary.mkdir()
    command = _pip_command(
        "download", "--no-deps", "--no-cache-dir", f"--dest={wheels}", *WHEEL_TARGET, f"vllm=={version}"
    )
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    report(Phase.FIND, 0, None)
    with log.open("wb") as sink:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
    try:
        _watch(pip, staging, log, report)
    finally:
        pip.kill()  # if this process was interrupted; else it has ended
        pip.wait()
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise _pip_error(version, log.read_text(errors="replace"))
    size_bytes = found[0].stat().st_size
    report(Phase.DOWNLOAD, size_bytes, size_bytes)
    return found[0]


def _watch(pip: subprocess.Popen[bytes], staging: Path, log: Path, report: Progress) -> None:
    """Wait for pip and report how far it is. It writes into its TMPDIR, and copies from there at the end."""
    while True:
        try:
            pip.wait(timeout=POLL_S)
            return
        except subprocess.TimeoutExpired:
            done_bytes = _largest_bytes(staging.glob("tmp/*/*.whl"))
            if done_bytes:
                report(Phase.DOWNLOAD, done_bytes, _announced_bytes(log.read_text(errors="replace")))


def _largest_bytes(files: Iterator[Path]) -> int:
    try:
        return max((file.stat().st_size for file in files), default=0)
    except FileNotFoundError:  # pip has just moved on
        return 0


def _announced_bytes(pip_output: str) -> int | None:
    """The size of the wheel, rounded, once pip has announced it: ``Downloading vllm-….whl (336.4 MB)``."""
    found = re.search(r"Downloading \S+\.whl \((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)", pip_output)
    if not found:
        return None
    return int(float(found[1]) * {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]])


# pip --------------------------------------------------------------------------------------------------------


def _pip_command(command: str, *arguments: str) -> list[str]:
    """The command line of this interpreter's pip; ``-P``: a ``pip.py`` in the working directory is not it."""
    return [
        *(sys.executable, "-P", "-m", "pip", command),
        *("--disable-pip-version-check", "--no-input", "--no-color"),
        *(("--progress-bar=off",) if command == "download" else ()),
        *arguments,
    ]


def _pip_error(version: str | None, output: str) -> KvspecError:
    """What pip's output means. ``version`` is None if pip was only asked for the list of releases."""
    wanted = f"vLLM {version}" if version else "the list of vLLM's releases"
    lines = output.strip().splitlines() or ["nothing"]
    unreached = [line for line in lines if any(sign in line for sign in NETWORK_SIGNS)]
    published = re.search(r"\(from versions: (?!none)(.+?)\)", output)
    if "No module named pip" in output:
        return KvspecError(f"This Python has no pip; run `{sys.executable} -m ensurepip --upgrade`.")
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return _disk_full()
    if any(sign in output for sign in BROKEN_SIGNS):
        return KvspecError(
            f"The download of {wanted} arrived incomplete or changed, and nothing was installed; "
            "try again, and if it stays so, see with `pip config list` where pip takes packages from."
        )
    if unreached or ("No matching distribution" in output and not published):
        return KvspecError(
            f"pip reached no package index that has vLLM, so {wanted} cannot be fetched "
            f"(pip said: {(unreached or lines)[-1]}); check the network and pip's settings "
            "(`pip config list`), and try again. Installed releases go on working offline."
        )
    if version and published:
        return _unknown_release(version, published[1].split(", "))
    requirement = f"vllm=={version}" if version else "vllm"
    return KvspecError(
        f"pip could not fetch {wanted} (it said: {lines[-1]}); "
        f"run `{sys.executable} -m pip download --no-deps {requirement}` to see why."
    )


def _unknown_release(version: str, published: list[str]) -> KvspecError:
    """Names the up to three releases before, and the two after, the one that does not exist."""
    before = sorted((v for v in published if Version(v) < Version(version)), key=Version)
    after = sorted((v for v in published if Version(v) > Version(version)), key=Version)
    near = ", ".join(before[-3:] + after[:2])
    return KvspecError(
        f"There is no release {version} of vLLM; near it are {near} (`kvspec release list --available` shows all)."
    )


# The wheel and its RECORD -----------------------------------------------------------------------------------


def _unpack(wheel: Path, version: str, tree: Path, report: Progress) -> Manifest:
    """Write the files that are kept into ``tree``, each compared with RECORD; return what was installed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return _unpack_archive(archive, wheel, version, tree, report)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _refused(wheel, f"it is not a sound zip file ({error})") from error


def _unpack_archive(archive: zipfile.ZipFile, wheel: Path, version: str, tree: Path, report: Progress) -> Manifest:
    for name in archive.namelist():
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise _refused(wheel, f"its member {name!r} points outside of it")
    record_name, record = _read_record(archive, wheel)
    entries = {entry.name: entry for entry in _parse_record(record)}
    kept = [info for info in archive.infolist() if _is_kept(info.filename)]
    total_bytes = sum(info.file_size for info in kept)
    done_bytes = 0
    for info in kept:
        report(Phase.UNPACK, done_bytes, total_bytes)
        data = archive.read(info)
        if info.filename != record_name and not _matches(entries.get(info.filename), data):
            raise _refused(wheel, f"its file {info.filename} is not the one that its RECORD lists")
        target = tree / info.filename
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        done_bytes += len(data)
    report(Phase.UNPACK, done_bytes, total_bytes)
    return Manifest(
        version=version,
        wheel=wheel.name,
        wheel_sha256=_file_sha256(wheel),
        record=record_name,
        record_sha256=hashlib.sha256(record).hexdigest(),
        files_count=len(kept),
        files_bytes=total_bytes,
    )


def _is_kept(name: str) -> bool:
    """Whether a member of the wheel is kept: vLLM's Python files and its dist-info, and nothing else."""
    top = name.split("/")[0]
    return not name.endswith("/") and (
        (top == "vllm" and name.endswith(".py")) or (top.startswith("vllm-") and top.endswith(".dist-info"))
    )


def _read_record(archive: zipfile.ZipFile, wheel: Path) -> tuple[str, bytes]:
    """Return name and content of the wheel's RECORD."""
    names = [name for name in archive.namelist() if re.fullmatch(r"vllm-[^/]+\.dist-info/RECORD", name)]
    if len(names) != 1:
        raise _refused(wheel, f"it has {len(names)} RECORD files of vLLM instead of one")
    record = archive.read(names[0])
    try:
        _parse_record(record)
    except ValueError as error:
        raise _refused(wheel, f"its RECORD cannot be read ({error})") from error
    return names[0], record


def _parse_record(record: bytes) -> list[RecordEntry]:
    """Parse lines ``name,sha256=digest,size``, the last two empty for RECORD itself. Raises ValueError."""
    entries = []
    for name, digest, size in csv.reader(record.decode().splitlines()):
        algorithm, _, value = digest.partition("=")
        if digest and algorithm != "sha256":
            raise ValueError(f"{name} has a digest of kind {algorithm}")
        entries.append(RecordEntry(name, value or None, int(size or 0)))
    return entries


def _matches(entry: RecordEntry | None, data: bytes) -> bool:
    """Whether these are the bytes that RECORD lists."""
    if entry is None or entry.sha256 is None or entry.size_bytes != len(data):
        return False
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return digest == entry.sha256


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _damage(directory: Path, manifest: Manifest, contents: bool) -> str | None:
    """The first thing that is wrong with an installed release, or None.

    The manifest vouches for RECORD, and RECORD for the other files.
    """
    record_path = directory / manifest.record
    if not record_path.is_file() or _file_sha256(record_path) != manifest.record_sha256:
        return f"{manifest.record} is not the one that was installed"
    entries = [e for e in _parse_record(record_path.read_bytes()) if e.sha256 and _is_kept(e.name)]
    for entry in entries:
        damage = _file_damage(directory, entry, contents)
        if damage:
            return damage
    return _stray_file(directory, {entry.name for entry in entries}) if contents else None


def _file_damage(directory: Path, entry: RecordEntry, contents: bool) -> str | None:
    file = directory / entry.name
    try:
        size_bytes = file.stat().st_size
    except FileNotFoundError:
        return f"{entry.name} is missing"
    if size_bytes != entry.size_bytes:
        return f"{entry.name} has {size_bytes} bytes instead of {entry.size_bytes}"
    if contents and not _matches(entry, file.read_bytes()):
        return f"{entry.name} has been changed"
    return None


def _stray_file(directory: Path, names: set[str]) -> str | None:
    """A Python file that did not come from the wheel, if there is one."""
    strays = (file.relative_to(directory).as_posix() for file in directory.rglob("*.py"))
    return next((f"{name} is not from the wheel" for name in strays if name not in names), None)
