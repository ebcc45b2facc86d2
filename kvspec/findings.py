"""Findings: failures of a target, each kind once, kept as directories.

A finding is named by its key. A later run on the same target looks at the stored ones first and marks those
that are gone; nothing is ever deleted. A directory ``<law>-<op>-<hash>`` holds

    finding.json    the key, what was said, where and when it was first seen, whether it is gone
    history.json    the shortest history that shows it
    original.json   the history in which it was first seen
    story.txt       the shortest history in words
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvspec.errors import KvspecError
from kvspec.history import AnyHistory, read_history, story
from kvspec.ops import history_to_json

FINDING_FORMAT = 1
NONDETERMINISM = "nondeterminism"
"""Directory, beside the findings, of histories that ran differently the second time."""


class Key(msgspec.Struct, frozen=True):
    """What makes two failures the same finding. ``target`` includes the release, if one was named."""

    target: str
    law: str
    op: str
    frame: str

    @property
    def slug(self) -> str:
        """A short stable name, which is also that of the directory."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]
        return re.sub(r"[^a-z0-9]+", "-", f"{self.law}-{self.op}".lower()).strip("-") + f"-{digest}"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a finding besides its histories; ``finding.json``."""

    key: Key
    message: str
    """What the law said about the shortest history."""
    release: str
    """Version of the implementation that was run; empty if unknown."""
    kvspec: str
    """Version of kvspec that found it."""
    seed: int
    """Seed of the run that found it."""
    first_seen: str
    shortened: bool = True
    """Whether the minimiser came to its end; a later run goes on where it had to stop."""
    gone_since: str | None = None
    """When a re-run no longer showed it."""
    format: int = FINDING_FORMAT


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding with the shortest history that shows it, and the one in which it was seen first."""

    record: Record
    history: AnyHistory
    original: AnyHistory

    @property
    def key(self) -> Key:
        """The key of its record."""
        return self.record.key

    def story(self) -> list[str]:
        """Tell its shortest history in words."""
        return story(self.history)


def now() -> str:
    """The time as findings write it: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class FindingStore:
    """A directory of findings. It is created when the first one is saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check_writable(self) -> None:
        """Raise KvspecError if nothing could be saved here."""
        with self._errors():
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass

    def path(self, key: Key) -> Path:
        """Where the finding with this key is, or would be."""
        return self.directory / key.slug

    def save(self, finding: Finding) -> Path:
        """Save a finding. If it is stored, its date and, unless it was gone, the shorter history stay."""
        directory = self.path(finding.key)
        with self._errors():
            with suppress(KvspecError):  # what is damaged is replaced
                finding = _merged(load_finding(directory), finding)
            directory.mkdir(parents=True, exist_ok=True)
            _write(directory / "original.json", history_to_json(finding.original))
            _write(directory / "history.json", history_to_json(finding.history))
            _write(directory / "story.txt", _story_file(finding).encode())
            self._write_record(finding.record)
        return directory

    def save_nondeterminism(self, history: AnyHistory) -> Path:
        """Save a history that ran differently the second time; return its file."""
        data = history_to_json(history)
        file = self.directory / NONDETERMINISM / f"{hashlib.sha256(data).hexdigest()[:12]}.json"
        with self._errors():
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, data)
        return file

    def of_target(self, target: str) -> tuple[list[Finding], list[str]]:
        """Return the stored findings of a target, gone ones too; and a sentence for each that can't be read."""
        found: list[Finding] = []
        damaged: list[str] = []
        with self._errors():
            for file in sorted(self.directory.glob("*/finding.json")):
                try:
                    found.append(load_finding(file.parent))
                except KvspecError as error:
                    damaged.append(str(error))
        return [finding for finding in found if finding.key.target == target], damaged

    def mark_gone(self, record: Record) -> None:
        """Write down that a re-run no longer shows a finding. It is open again once it is saved again."""
        with self._errors():
            self._write_record(replace(record, gone_since=now()))

    def _write_record(self, record: Record) -> None:
        data = msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
        _write(self.path(record.key) / "finding.json", data)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise KvspecError(
                f"The findings directory {self.directory} can't be used ({error.strerror or error}); "
                "choose another one with --findings DIR."
            ) from error


def load_finding(directory: Path) -> Finding:
    """Read a finding's directory. KvspecError if it isn't one."""
    try:
        record = msgspec.json.decode((directory / "finding.json").read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise KvspecError(
            f"{directory} can't be read as a finding: finding.json: {error}; remove it if it's damaged."
        ) from error
    history, original = (load_history(directory / name) for name in ("history.json", "original.json"))
    return Finding(record=record, history=history, original=original)


def load_history(file: Path) -> AnyHistory:
    """Read a file with a history. KvspecError if there is none."""
    try:
        return read_history(file.read_bytes())
    except OSError as error:
        raise KvspecError(f"{file} can't be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise KvspecError(f"{file} can't be read: {error}.") from error


def _merged(stored: Finding, fresh: Finding) -> Finding:
    """The stored finding with what a new run adds to it."""
    first = stored.record
    record = replace(
        fresh.record, first_seen=first.first_seen, seed=first.seed, kvspec=first.kvspec, release=first.release
    )
    if first.gone_since is None and len(stored.history.ops) <= len(fresh.history.ops):
        return replace(stored, record=replace(record, message=first.message))
    return Finding(record=record, history=fresh.history, original=stored.original)


def _story_file(finding: Finding) -> str:
    key = finding.key
    where = f" in {key.frame}" if key.frame else ""
    head = f"{key.target}: {key.law} during {key.op}{where}\n{finding.record.message}\n"
    return head + "\n" + "\n".join(finding.story()) + "\n"


def _write(file: Path, data: bytes) -> None:
    """Replace a file as one step, so that no reader and no interrupt ever sees half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
