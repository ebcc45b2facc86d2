"""What the processes of a run tell each other, and what reports listen to.

A worker is told its job as JSON on stdin and answers with events, one line of JSON each, on a pipe of its
own. The parent hands them on to the handlers in ``kvspec.report``, adds its own and ends with a Verdict.
"""

from collections import Counter
from fnmatch import fnmatchcase

import msgspec

from kvspec.findings import Finding, Key
from kvspec.history import AnyHistory
from kvspec.known import Issue


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What every worker has to know. ``release_path`` must be where its implementation comes from."""

    job: int
    target: str
    release_path: str | None
    events_fd: int = -1
    """Where it writes its events; set when it is started."""


class SearchJob(Job, frozen=True, kw_only=True):
    """Search until the budget, in seconds or in histories, is used up."""

    seed: int
    budget_s: float | None
    histories_max: int | None
    stored: list[Finding]
    """Findings that are looked at first."""
    known: list[Issue]
    """Failures that needn't be minimised."""
    claims: str | None = None
    """Directory in which a worker says, by a file's name, that it minimises a finding."""


class ReplayJob(Job, frozen=True, kw_only=True):
    """Run one history, twice."""

    history: AnyHistory


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of finding that counts as a bug being found. Patterns as in a shell."""

    law: str
    op: str = "*"
    frame: str = "*"

    def matches(self, key: Key) -> bool:
        """Whether a finding is of this kind."""
        pairs = ((key.law, self.law), (key.op, self.op), (key.frame, self.frame))
        return all(fnmatchcase(text, pattern) for text, pattern in pairs)


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bug that a trial looks for."""

    name: str
    counts: tuple[Counts, ...]
    events: tuple[str, ...] = ()
    """Events without which it can't show: a history that hasn't reached them shows something else."""
    without: tuple[str, ...] = ()
    """Events, and laws broken, with which another bug of the release shows in the same way: a history that has one
    doesn't count."""


FAIR, UNEVEN, NO_LIVE_PREFIXES = "fair-device", "uneven-choices", "no-live-prefixes"
ABLATIONS = {
    FAIR: "every stream and rank goes on as soon as it can, instead of at an adversary's mercy",
    UNEVEN: "Hypothesis' own choices: most histories are a change of the one before, and small numbers are preferred",
    NO_LIVE_PREFIXES: "no prompt is repeated or continued on purpose",
}
"""How a trial's machine can be made weaker, and what that means."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One seed of a target's machine, until all that is wanted was found or the budget is used up."""

    seed: int
    budget_cpu_s: float
    wanted: tuple[Wanted, ...]
    ablation: str = ""
    """How the machine is made weaker; see ABLATIONS."""
    defect: str = ""
    """A planted defect, by name."""
    to_the_end: bool = False
    """Use the whole budget, whatever is found."""
    minimises: bool = True
    """Whether what is found is minimised."""


class TrialJob(Job, frozen=True, kw_only=True):
    """Run trials, one after the other."""

    trials: list[Trial]
    known: list[Issue]
    """Failures that count only for the bug of the same name."""
    defects: str
    """Directory of the registry of planted defects."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that a run tells."""


class WorkerReady(Event, frozen=True, kw_only=True):
    """A worker has loaded its target and begins."""

    job: int
    release: str
    """Version of the implementation; empty if unknown."""
    required: dict[str, str]
    """Events that the run must reach, each with a sentence."""
    note: str = ""
    """What a reader of the verdict must know of the target."""


class Progress(Event, frozen=True, kw_only=True):
    """What a worker did since its last one. Stores and loads are blocks, steps are engine steps."""

    job: int
    histories: int = 0
    steps: int = 0
    stores: int = 0
    loads: int = 0
    reruns: int = 0
    """Histories that were run a second time, to compare the traces."""
    engine_wall_s: float = 0.0
    """Inside the engine's step function, the simulated device included."""
    reached: dict[str, int] = {}
    seen: dict[str, int] = {}
    """Histories that showed a finding, by the finding's slug."""


def added(one: Progress, other: Progress) -> Progress:
    """Return the sum of two."""
    values = {name: getattr(one, name) for name in one.__struct_fields__ if name != "job"}
    for name, value in values.items():
        more = getattr(other, name)
        values[name] = dict(Counter(value) + Counter(more)) if isinstance(value, dict) else value + more
    return Progress(job=one.job, **values)


class Rechecked(Event, frozen=True, kw_only=True):
    """A stored finding was run again."""

    job: int
    key: Key
    seen: bool


class Minimising(Event, frozen=True, kw_only=True):
    """A worker has a new finding and makes it short."""

    job: int
    key: Key


class FindingFound(Event, frozen=True, kw_only=True):
    """A worker has a finding, minimised unless it is a known issue."""

    job: int
    finding: Finding


class Nondeterminism(Event, frozen=True, kw_only=True):
    """A history ran differently the second time."""

    job: int
    message: str
    history: AnyHistory


class Replayed(Event, frozen=True, kw_only=True):
    """What a replay saw. There is one schedule per op and one for the drain, of the first run."""

    release: str
    violations: list[tuple[Key, str, int]]
    """Key, message and index of the op."""
    schedules: list[str]
    traces: tuple[str, str]

    @property
    def repeats(self) -> bool:
        """Whether the second run was like the first."""
        return self.traces[0] == self.traces[1]


class TrialStarted(Event, frozen=True, kw_only=True):
    """A worker begins a trial of its job."""

    job: int
    trial: int


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial has done. CPU seconds are without imports, reruns and minimisation."""

    cpu_s: float = 0.0
    histories: int = 0
    steps: int = 0
    """Engine steps."""
    reached: dict[str, int] = {}


class Unreachable(Event, frozen=True, kw_only=True):
    """A trial doesn't look for something, since the machine never makes the events that it needs."""

    job: int
    trial: int
    wanted: str
    events: list[str]


class Seen(msgspec.Struct, frozen=True):
    """A kind of finding that a trial has seen."""

    key: Key
    histories: int
    issue: str
    """The known issue that it is, or nothing."""


class Sighted(Event, frozen=True, kw_only=True):
    """A trial has found what was wanted, and made it short."""

    job: int
    trial: int
    wanted: str
    effort: Effort
    """Until it was found."""
    key: Key
    message: str
    ops_first: int
    """Ops of the history in which it was seen first."""
    history: AnyHistory
    """The short one."""
    seen: list[Seen]
    """All that was broken until then."""


class TrialDone(Event, frozen=True, kw_only=True):
    """A trial has ended."""

    job: int
    trial: int
    effort: Effort
    seen: list[Seen]


class WorkerFailed(Event, frozen=True, kw_only=True):
    """A worker can't go on. ``details`` is a traceback or the end of its log."""

    job: int
    message: str
    details: str = ""


class WorkerDone(Event, frozen=True, kw_only=True):
    """A worker has finished its job, or was asked to stop."""

    job: int


WorkerEvent = (
    WorkerReady
    | Progress
    | Rechecked
    | Minimising
    | FindingFound
    | Nondeterminism
    | Replayed
    | TrialStarted
    | Unreachable
    | Sighted
    | TrialDone
    | WorkerFailed
    | WorkerDone
)


class GateStarted(Event, frozen=True, kw_only=True):
    """The parent starts the workers."""

    target: str
    seed: int
    jobs: int
    budget_s: float | None
    histories_max: int | None


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """A finding as a run reports it."""

    finding: Finding
    path: str | None
    """Its directory; a known issue has none."""
    issue: Issue | None
    """The known issue that it is."""
    stored: bool
    """It was in the findings directory already, and is still there."""
    histories: int = 0
    """How many histories of the search showed it."""


class FindingReported(Event, frozen=True, kw_only=True):
    """A finding that this run hadn't reported yet."""

    reported: Reported


class Interrupted(Event, frozen=True, kw_only=True):
    """The run was asked to stop, and waits for the workers to end their histories."""


class Verdict(Event, frozen=True, kw_only=True):
    """The end of a run, with everything that it counted."""

    target: str
    release: str
    seed: int
    wall_s: float
    total: Progress
    findings: list[Reported]
    known: list[Reported]
    gone: list[Finding]
    missing: dict[str, str]
    """Required events that weren't reached, each with a sentence."""
    nondeterminism: list[str]
    """One sentence each."""
    failures: list[WorkerFailed]
    interrupted: bool
    ignored: list[str] = []
    """Stored findings that can't be read, one sentence each."""

    @property
    def exit_code(self) -> int:
        """The strongest fact: a finding stands whatever else went wrong; hollow comes last."""
        facts = (
            (1, self.findings),
            (2, self.failures),
            (4, self.nondeterminism),
            (130, self.interrupted),
            (3, self.missing or not self.total.histories),
        )
        return next((code for code, fact in facts if fact), 0)
