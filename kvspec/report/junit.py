"""JUnit XML, for CI servers: one test case for the run as a whole, one for each finding and known issue."""

from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from kvspec.errors import KvspecError
from kvspec.events import Event, Verdict
from kvspec.report.terminal import VERDICTS, finding_lines, verdict_lines


class JUnit:
    """Writes the file when the verdict is there."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, event: Event) -> None:
        """Handle one event. KvspecError if the file can't be written."""
        if not isinstance(event, Verdict):
            return
        tree = ElementTree(_suite(event))
        indent(tree)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            tree.write(self._file, encoding="unicode", xml_declaration=True)
        except OSError as error:
            raise KvspecError(f"{self._file} can't be written: {error.strerror or error}.") from error


def _suite(verdict: Verdict) -> Element:
    errors = int(verdict.exit_code not in (0, 1))
    suite = Element(
        "testsuite",
        name=f"kvspec {verdict.target}",
        tests=str(1 + len(verdict.findings) + len(verdict.known)),
        failures=str(len(verdict.findings)),
        errors=str(errors),
        skipped=str(len(verdict.known)),
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
    for reported in verdict.known:
        assert reported.issue is not None
        message = f"known issue {reported.issue.reference}: {reported.issue.title}"
        _tell(_case(suite, verdict, reported.issue.id), "skipped", message, "")
    return suite


def _case(suite: Element, verdict: Verdict, name: str, time_s: float = 0.0) -> Element:
    return SubElement(suite, "testcase", classname=verdict.target, name=name, time=f"{time_s:.3f}")


def _tell(case: Element, kind: str, message: str, text: str) -> None:
    SubElement(case, kind, message=_printable(message)).text = _printable(text)


def _printable(text: str) -> str:
    """Without the control characters that XML can't hold."""
    return "".join(char for char in text if char >= " " or char in "\n\t")
