"""JUnit XML, for CI servers: one test case for the run as a whole, one for each finding and known issue."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from kvspec.errors import KvspecError
from kvspec.events import Event, Verdict
from kvspec.report.terminal import VERDICTS, finding_lines, known_issues, verdict_lines


class JUnit:
    """Writes the file when the verdict is there."""

    def __init__(self, file: Path) -> None:
        """Raise KvspecError, before anything runs, if the file can't be written."""
        self._file = file
        with self._errors():
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a"):
                pass

    def __call__(self, event: Event) -> None:
        """Handle one event. KvspecError if the file can't be written any more."""
        if not isinstance(event, Verdict):
            return
        tree = ElementTree(_suite(event))
        indent(tree)
        with self._errors():
            tree.write(self._file, encoding="unicode", xml_declaration=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise KvspecError(f"{self._file} can't be written: {error.strerror or error}.") from error


def _suite(verdict: Verdict) -> Element:
    errors = int(verdict.exit_code not in (0, 1))
    known = [issue for issue, _ in known_issues(verdict).values()]
    suite = Element(
        "testsuite",
        name=f"kvspec {verdict.target}",
        tests=str(1 + len(verdict.findings) + len(known)),
        failures=str(len(verdict.findings)),
        errors=str(errors),
        skipped=str(len(known)),
        time=f"{verdict.wall_s:.3f}",
    )
    run = _case(suite, verdict, "run", verdict.wall_s)
    text = "\n".join(line.plain for line in verdict_lines(verdict))
    if errors:
        _tell(run, "error", VERDICTS[verdict.exit_code][0], text)
    SubElement(run, "system-out").text = _printable(text)
    for reported in verdict.findings:
        told = "\n".join(line.plain for line in finding_lines(reported)).strip()
        _tell(_case(suite, verdict, reported.finding.key.slug), "failure", reported.finding.record.message, told)
    for issue in known:
        _tell(_case(suite, verdict, issue.id), "skipped", f"known issue {issue.reference}: {issue.title}", "")
    return suite


def _case(suite: Element, verdict: Verdict, name: str, time_s: float = 0.0) -> Element:
    return SubElement(suite, "testcase", classname=verdict.target, name=name, time=f"{time_s:.3f}")


def _tell(case: Element, kind: str, message: str, text: str) -> None:
    SubElement(case, kind, message=_printable(message)).text = _printable(text)


def _printable(text: str) -> str:
    """Without the control characters that XML can't hold."""
    return "".join(char for char in text if char >= " " or char in "\n\t")
