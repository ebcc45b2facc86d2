"""The registry of known issues: confirmed bugs of a target, which the gate lists instead of failing.

``known_issues.toml`` in this package says how an entry looks. A project can add its own file.
"""

import tomllib
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from kvspec.errors import KvspecError
from kvspec.findings import Key
from kvspec.model.profile import KNOWN_ISSUES
from kvspec.ops import EQUALITIES


class Issue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry. ``law``, ``op`` and ``frame`` are patterns as in a shell."""

    id: str
    title: str
    reference: str
    """An issue number, ``vllm#45704``, or the path of a script; no URL."""
    target: str | list[str]
    """Its name without a release, or several."""
    law: str
    op: str = "*"
    frame: str = "*"
    releases: str | list[str] = ""
    """A range, ``>=0.24,<0.31``, or a list of versions; empty for all."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, for what can't be meant."""
        from kvspec.targets import TARGETS  # needs numpy, which whoever only manages releases does without

        for field in ("id", "title", "reference", "law", "op", "frame"):
            if not getattr(self, field).strip():
                raise ValueError(f"field {field!r} is empty")
        if not all(target.strip() for target in self.targets) or not self.targets:
            raise ValueError("field 'target' is empty")
        if "://" in self.reference:
            raise ValueError("field 'reference' is a URL; write it as vllm#12345, or as the path of a script")
        for target in self.targets:
            if "@" in target:
                raise ValueError("field 'target' has a release; put that into 'releases'")
            if target not in TARGETS and ":" not in target:
                raise ValueError(f"field 'target' has {target!r}; it may be {', '.join(sorted(TARGETS))}, or your own")
        try:
            self.covers("0")
        except (InvalidSpecifier, InvalidVersion) as error:
            raise ValueError(f"field 'releases': {error}") from error

    @property
    def targets(self) -> list[str]:
        """Return the names of the targets that have it."""
        return [self.target] if isinstance(self.target, str) else self.target

    def matches(self, key: Key, release: str) -> bool:
        """Whether a finding is this issue. An unknown release (empty) matches only an entry for all."""
        return (
            key.target.partition("@")[0] in self.targets
            and fnmatchcase(key.law, self.law)
            and fnmatchcase(key.op, self.op)
            and fnmatchcase(key.frame, self.frame)
            and (not self.releases or (bool(release) and self.covers(release)))
        )

    def covers(self, release: str) -> bool:
        """Whether a release is among its releases."""
        version = Version(release)
        if isinstance(self.releases, str):
            return SpecifierSet(self.releases).contains(version, prereleases=True)
        return not self.releases or version in [Version(text) for text in self.releases]


def load_known(added: Path | None = None) -> list[Issue]:
    """Return the issues that come with kvspec and those of a project's own file.

    KvspecError names the file, the entry and the field that is wrong.
    """
    shipped = files("kvspec") / "known_issues.toml"
    issues = _parse("kvspec/known_issues.toml", shipped.read_text()) + _of_the_model()
    if added:
        try:
            issues += _parse(str(added), added.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise KvspecError(f"{added} can't be read: {error}.") from error
    seen: set[str] = set()
    for issue in issues:
        if issue.id in seen:
            raise KvspecError(f"There are two known issues with the id {issue.id!r}; rename yours.")
        seen.add(issue.id)
    return issues


def known_as(issues: list[Issue], key: Key, release: str) -> Issue | None:
    """Return the first issue that a finding is, if any."""
    return next((issue for issue in issues if issue.matches(key, release)), None)


def _parse(name: str, text: str) -> list[Issue]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KvspecError(f"{name} isn't TOML: {error}.") from error
    entries = content.get("issue", [])
    if set(content) - {"issue"} or not isinstance(entries, list):
        raise KvspecError(f"{name}: only a list of [[issue]] tables is expected.")
    return [_entry(name, number, entry) for number, entry in enumerate(entries, 1)]


def _entry(name: str, number: int, entry: Any) -> Issue:
    try:
        return msgspec.convert(entry, Issue)
    except msgspec.ValidationError as error:
        label = f" ({entry['id']!r})" if isinstance(entry, dict) and "id" in entry else ""
        problem = str(error).replace(" - at `$.", ": field `")
        raise KvspecError(f"{name}: issue {number}{label}: {problem}.") from error


def _of_the_model() -> list[Issue]:
    """Return the known issues of the equalities. A difference names in its place the one that causes it."""
    return [
        Issue(
            id=issue.id,
            title=issue.sentence,
            reference=issue.reference,
            target=target,
            law="*",
            frame=issue.id,
            releases=f">={issue.bad}" + (f",<{issue.fixed}" if issue.fixed else ""),
        )
        for issue in KNOWN_ISSUES
        for target, level in EQUALITIES.items()
        if issue.id.startswith(f"{level}-")
    ]
