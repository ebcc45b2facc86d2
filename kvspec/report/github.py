"""Annotations on GitHub Actions: a line per finding that the web page shows above the log."""

from collections.abc import Callable

from kvspec.events import Event, FindingReported, Verdict
from kvspec.report.terminal import VERDICTS, finding_lines, verdict_lines


def annotations(write: Callable[[str], None]) -> Callable[[Event], None]:
    """Return a handler that writes workflow commands."""

    def handle(event: Event) -> None:
        if isinstance(event, FindingReported):
            reported = event.reported
            level = "warning" if reported.issue else "error"
            text = "\n".join(line.plain for line in finding_lines(reported)).strip()
            write(_command(level, f"kvspec: {reported.finding.key.law}", text))
        elif isinstance(event, Verdict) and event.exit_code not in (0, 1):
            text = "\n".join(line.plain for line in verdict_lines(event))
            write(_command("error", f"kvspec: {VERDICTS[event.exit_code][0]}", text))

    return handle


def _command(level: str, title: str, text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    title = title.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={title}::{escaped}"
