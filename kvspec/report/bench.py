"""A benchmark as a person reads it: figures of each case and defect, a page of HTML, and Markdown for the docs.

Times are CPU seconds of the search alone. A seed that found nothing counts as infinitely long. *95 %* of a share is
Wilson's interval; of a median it is the interval between two order statistics, which needs no assumption about the
times but at least six seeds.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from kvspec import __version__
from kvspec.bench import MINIMISED_SEEDS, NOT_BUILT, Bench, Case, Row, is_built, why_not
from kvspec.defects import Defect
from kvspec.events import ABLATIONS
from kvspec.laws import LAWS
from kvspec.model import CLAUSES

Z_95 = 1.959964
"""Quantile of the normal distribution."""
COLOURS = ("#1b6ca8", "#c1440e", "#2d7d46", "#7b4fa3", "#a67c00", "#c2185b", "#00838f", "#5d4037", "#455a64", "#8bc34a")


class Interval(NamedTuple):
    """From, to."""

    low: float
    high: float


def share_interval(found: int, total: int) -> Interval:
    """Return Wilson's 95 % interval of a share."""
    if not total:
        return Interval(0.0, 1.0)
    share, square = found / total, Z_95**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = Z_95 / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def median_interval(values: Sequence[float]) -> Interval | None:
    """Return a 95 % interval of the median, two order statistics; None with fewer than six values."""
    count, below, rank = len(values), 0.0, 0
    while below + math.comb(count, rank) / 2**count <= 0.025:
        below += math.comb(count, rank) / 2**count
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[count - rank])


@dataclass(frozen=True)
class Figures:
    """What came out for one case or defect, with the whole machine or a weaker one."""

    id: str
    target: str
    kind: str
    law: str
    release: str
    fixed: str
    sentence: str
    events: tuple[str, ...]
    refused: str
    """Why it wasn't run, or nothing."""
    rows: list[Row]
    """On the release that has it."""
    clean: list[Row]
    """On the release that hasn't."""
    seeds: int
    """That were asked for."""

    @property
    def ran(self) -> list[Row]:
        """The seeds of which something can be said."""
        return [row for row in self.rows if not row.failure]

    @property
    def found(self) -> list[Row]:
        """The seeds that found it."""
        return [row for row in self.rows if row.found]

    @property
    def reached(self) -> list[Row]:
        """The seeds that reached all events without which it can't show."""
        return [row for row in self.ran if row.found or all(row.effort.reached.get(event) for event in self.events)]

    @property
    def alarms(self) -> list[Row]:
        """The seeds that weren't silent where it isn't."""
        return [row for row in self.clean if row.found]

    def silence(self) -> str:
        """Say in which release how many seeds were silent, and which known issues they saw."""
        if not self.clean:
            return "–"
        known = sorted({issue for row in self.clean for issue in row.known})
        where = f"{self.fixed}: " if self.fixed else ""
        seen = f" (known: {', '.join(known)})" if known else ""
        return f"{where}{len(self.clean) - len(self.alarms)} of {len(self.clean)}{seen}"

    @property
    def is_proved(self) -> bool:
        """Every seed found it where it is, and was silent where it isn't."""
        silent = [row for row in self.clean if not row.found and not row.failure]
        return len(self.found) == len(silent) == self.seeds

    @property
    def times_s(self) -> list[float]:
        """CPU seconds of each seed until it was found."""
        return [row.effort.cpu_s if row.found else math.inf for row in self.ran]

    @property
    def steps(self) -> list[float]:
        """Engine steps of each seed until it was found."""
        return [row.effort.steps if row.found else math.inf for row in self.ran]

    @property
    def ops(self) -> list[int]:
        """Ops after minimisation, of the seeds whose findings were minimised."""
        return [row.ops for row in self.found if row.ops]

    def note(self) -> str:
        """Say how far it got where it wasn't found, and what was seen where it should be silent."""
        said = [self.refused, *dict.fromkeys(row.failure for row in self.rows if row.failure)]
        lost = [row for row in self.ran if not row.found]
        if lost:
            said.append(self._lost(lost))
        for row in self.alarms:
            assert row.key is not None
            said.append(f"not silent in {row.release}, seed {row.seed}: {row.key.law} ({row.message})")
        return "; ".join(filter(None, said))

    def _lost(self, lost: list[Row]) -> str:
        missing = [event for event in self.events if not any(row.effort.reached.get(event) for row in lost)]
        histories = sum(row.effort.histories for row in lost)
        seeds = f"{len(lost)} seed{'s' * (len(lost) != 1)}"
        if missing:
            return f"never reached {', '.join(missing)} in {histories} histories of {seeds}"
        others = sorted({law for row in lost for law in row.seen})
        broken = f"; broken were {', '.join(others)}" if others else ""
        return f"{histories} histories of {seeds}, what is required reached, and {self.law} unbroken{broken}"


class Line(NamedTuple):
    """A curve: how many of the runs have found what they look for, after so many CPU seconds."""

    name: str
    colour: str
    points: str
    found: int
    total: int


class Tick(NamedTuple):
    """A mark on the time axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Curves over a logarithmic time axis; all lengths are pixels."""

    title: str
    lines: list[Line]
    ticks: list[Tick]
    width: int = 640
    height: int = 260


def chart(title: str, series: Sequence[tuple[str, Sequence[float]]], budget_s: float) -> Chart:
    """Return the curves of named times (CPU seconds, infinite if nothing was found)."""
    finite = [max(time_s, 1e-2) for _, times_s in series for time_s in times_s if time_s < math.inf]
    low = 10.0 ** math.floor(math.log10(min([*finite, budget_s / 10])))
    width, height = Chart.width, Chart.height

    def x(time_s: float) -> float:
        span = math.log10(max(budget_s, *finite, low * 10) / low)
        return round(width * math.log10(max(time_s, low) / low) / span, 1)

    lines = []
    for number, (name, times_s) in enumerate(series):
        found = sorted(time_s for time_s in times_s if time_s < math.inf)
        points, share = [(0.0, float(height))], 0.0
        for count, time_s in enumerate(found, 1):
            points.append((x(time_s), height * (1 - share)))
            share = count / len(times_s)
            points.append((x(time_s), height * (1 - share)))
        points.append((float(width), height * (1 - share)))
        told = " ".join(f"{px:g},{round(py, 1):g}" for px, py in points)
        lines.append(Line(name, COLOURS[number % len(COLOURS)], told, len(found), len(times_s)))
    decades = range(round(math.log10(low)), math.floor(math.log10(budget_s)) + 1)
    return Chart(title, lines, [Tick(x(10.0**power), f"{10.0**power:g}") for power in decades])


class Comparison(NamedTuple):
    """CPU seconds to what was found, of all to which an ablation was applied, by the whole machine and without."""

    ablation: str
    bugs_s: list[float]
    weaker_bugs_s: list[float]
    defects_s: list[float]
    weaker_defects_s: list[float]

    def series(self) -> list[tuple[str, list[float]]]:
        """Return a name and times of each."""
        names = ("bugs", "bugs, weaker", "planted defects", "planted defects, weaker")
        return list(zip(names, self[1:], strict=True))


class Report:
    """The figures of a benchmark, for templates."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.plan = bench.plan
        self.header = bench.header
        self.version = __version__
        self.ablations = {name: ABLATIONS[name] for name in bench.plan.ablations}
        self.cases = [self._case(case, "") for case in bench.plan.cases]
        self.defects = [self._defect(name, defect, "") for name, defect in bench.plan.defects.items()]
        self.releases = sorted({row.release for row in bench.rows if row.release})

    def _rows(self, subject: str, side: str, ablation: str) -> list[Row]:
        asked = (subject, side, ablation)
        rows = [row for row in self.bench.rows if (row.subject, row.side, row.ablation) == asked]
        return sorted(rows, key=lambda row: row.seed)

    def _case(self, case: Case, ablation: str) -> Figures:
        return Figures(
            id=case.id,
            target=case.target,
            kind=case.kind,
            law=" or ".join(dict.fromkeys(counts.law for counts in case.counts)),
            release=case.bad,
            fixed=case.fixed,
            sentence=case.cause,
            events=case.events,
            refused=why_not(case),
            rows=self._rows(case.id, "bad", ablation),
            clean=self._rows(case.id, "fixed", ""),
            seeds=self.plan.seeds,
        )

    def _defect(self, name: str, defect: Defect, ablation: str) -> Figures:
        rows, clean = self._rows(name, "bad", ablation), self._rows(name, "fixed", "")
        return Figures(
            id=name,
            target=defect.target,
            kind=defect.kind,
            law=defect.law,
            release=rows[0].release if rows else "",
            fixed=clean[0].release if clean else "",
            sentence=defect.sentence,
            events=(),
            refused="" if is_built(defect.target) else NOT_BUILT,
            rows=rows,
            clean=clean,
            seeds=self.plan.seeds,
        )

    # Head figures -----------------------------------------------------------------------------------------------------

    def runnable(self, figures: Iterable[Figures]) -> list[Figures]:
        """Those of which at least one seed says something."""
        return [one for one in figures if one.ran]

    def noted(self, figures: Iterable[Figures]) -> list[tuple[str, str]]:
        """Return id and note of those that have one, and weren't left out on purpose."""
        return [(one.id, one.note()) for one in figures if one.note() and not one.refused]

    def left_out(self, figures: Iterable[Figures]) -> list[tuple[str, str, list[str]]]:
        """Return why, of which target, and ids of those that can't be run."""
        groups: dict[tuple[str, str], list[str]] = {}
        for one in figures:
            if one.refused:
                groups.setdefault((one.refused, one.target), []).append(one.id)
        return [(why, target, ids) for (why, target), ids in sorted(groups.items())]

    def compared(self) -> list[Comparison]:
        """Return what each ablation changes."""
        return [self._comparison(name) for name in self.ablations]

    def _comparison(self, ablation: str) -> Comparison:
        weaker_cases = self.runnable(self._case(case, ablation) for case in self.plan.cases)
        weaker_defects = self.runnable(self._defect(*defect, ablation) for defect in self.plan.defects.items())
        columns = []
        for whole, weaker in ((self.cases, weaker_cases), (self.defects, weaker_defects)):
            both = {one.id for one in self.runnable(whole)} & {one.id for one in weaker}
            columns += [[one for one in figures if one.id in both] for figures in (whole, weaker)]
        return Comparison(ablation, *map(all_times_s, columns))

    def charts(self) -> list[Chart]:
        """Curves of all together, of what each ablation changes, and of each case."""
        groups = {
            "Share of runs that have found what they look for": [
                ("bugs", all_times_s(self.runnable(self.cases))),
                ("planted defects", all_times_s(self.runnable(self.defects))),
            ],
            **{f"Whole and weaker: {one.ablation}": one.series() for one in self.compared()},
            "Each bug": [(one.id, one.times_s) for one in self.runnable(self.cases)],
        }
        series = {title: [(name, times_s) for name, times_s in lines if times_s] for title, lines in groups.items()}
        return [chart(title, lines, self.header.budget_cpu_s) for title, lines in series.items() if lines]

    def laws(self) -> list[str]:
        """Laws, then clauses of the model if a target that checks them is built."""
        return [*LAWS, *(CLAUSES if is_built("vllm-core") else ())]

    def sentence(self, law: str) -> str:
        """Return what a law or a clause says."""
        return LAWS[law].sentence if law in LAWS else CLAUSES[law].sentence

    def tripped_by(self, law: str) -> list[str]:
        """Return the defects that broke a law, those that were meant to first."""
        broke = [one for one in self.defects if any(law in row.seen for row in one.rows)]
        return [one.id for one in sorted(broke, key=lambda one: one.law != law)]

    def cell(self, law: str, defect: Figures) -> str:
        """Return the matrix' mark: ● broken as meant, ○ broken too, ✗ meant and not broken."""
        broken = any(law in row.seen for row in defect.rows)
        if defect.law == law:
            return "●" if broken else "✗"
        return "○" if broken else ""


def all_times_s(figures: Iterable[Figures]) -> list[float]:
    """Return the times of all runs of several cases or defects."""
    return [time_s for one in figures for time_s in one.times_s]


def in_seconds(value: float) -> str:
    """Write a time with two digits that matter, or that there is none."""
    if value == math.inf:
        return "∞"
    return f"{value:.2g}" if value < 99.5 else f"{value:.0f}"


def in_steps(value: float) -> str:
    """Write a number of engine steps."""
    return "∞" if value == math.inf else f"{value:,.0f}"


def median(values: Sequence[float]) -> float:
    """Return the upper median: with an even number of runs no average of a time and none."""
    return statistics.median_high(values)


def told_interval(interval: Interval | None) -> str:
    """Write an interval of times, or that there are too few seeds for one."""
    return f"{in_seconds(interval.low)} – {in_seconds(interval.high)}" if interval else "–"


def told_share(found: int, total: int) -> str:
    """Write a share's interval in per cent."""
    low, high = share_interval(found, total)
    return f"{100 * low:.0f} – {100 * high:.0f} %"


def render(bench: Bench, template: str, command: str) -> str:
    """Return the report: template ``bench.md.j2`` or ``bench.html.j2``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvspec.report"),
        autoescape=template.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    helpers: dict[str, Any] = {
        "s": in_seconds,
        "steps": in_steps,
        "median": median,
        "median_interval": median_interval,
        "told_interval": told_interval,
        "told_share": told_share,
        "all_times_s": all_times_s,
        "float_inf": math.inf,
        "minimised_seeds": MINIMISED_SEEDS,
    }
    return environment.get_template(template).render(report=Report(bench), command=command, **helpers)


def write_reports(bench: Bench, command: str) -> list[Path]:
    """Write ``bench.md`` and ``bench.html`` beside the results, and return their paths."""
    files = []
    for suffix in ("md", "html"):
        file = bench.plan.output / f"bench.{suffix}"
        file.write_text(render(bench, f"bench.{suffix}.j2", command), encoding="utf-8")
        files.append(file)
    return files
