"""What a scheduler counts: how far each request is, with steps in flight, drafts, preemptions and resets.

A *step* computes some tokens of some requests. Several can be in flight: scheduled, and not processed yet. A step whose
tokens reach the end of a request's text says the next token, and with drafts among them one more for each draft that is
accepted. The scheduler decides who is scheduled; the model says what follows from it.

Not modelled: who is scheduled, with how many tokens, and who is preempted; stop conditions; structured output;
connectors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvspec.model.clauses import clause
from kvspec.model.profile import Profile


@dataclass
class Work:
    """What a step in flight computes of one request."""

    tokens: int
    """Drafts included."""
    drafts: int
    end: int
    """Tokens of the request that have been computed when it has run, its drafts included."""
    stale: bool = False
    """The request was preempted since."""
    dropped: bool = False
    """For a reset."""


@dataclass
class Progress:
    """How far a request is. Tokens."""

    length: int
    """Of its text, as far as it is known."""
    computed: int = 0
    """Those that have been computed, or will have been when what is in flight has run; drafts included."""
    waiting: bool = True
    granted: int = 0
    """Those that it has got slots for last."""
    works: deque[Work] = field(default_factory=deque)
    """What is in flight, oldest first."""

    @property
    def in_flight(self) -> int:
        """Tokens that are scheduled and not processed."""
        return sum(work.tokens for work in self.works)


class Steps:
    """The requests of a scheduler, by name.

    Args:
        profile: what differs between releases.
        drafts: draft tokens of a step.
        draft_model: whether a draft model with a forward of its own makes them.
    """

    def __init__(self, profile: Profile, *, drafts: int, draft_model: bool) -> None:
        self.profile = profile
        self.drafts = drafts
        self.draft_model = draft_model
        self.requests: dict[str, Progress] = {}

    def arrive(self, name: str, tokens: int) -> None:
        """A request with a prompt of so many tokens arrives."""
        self.requests[name] = Progress(tokens)

    def keep(self, names: set[str]) -> None:
        """Forget all other requests: they have ended."""
        self.requests = {name: progress for name, progress in self.requests.items() if name in names}

    def grant(self, name: str, tokens: int) -> None:
        """A request has got slots for so many tokens in the step that is being scheduled."""
        self.requests[name].granted = tokens

    @clause
    def schedule(self, name: str, drafts: int) -> None:
        """STEP-1. A step computes the tokens that it has got slots for. They count as computed at once, drafts
        included; the next step goes on behind them.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler._update_after_schedule.
        Releases: all.
        """
        progress = self.requests[name]
        progress.computed += progress.granted
        progress.works.append(Work(progress.granted, drafts, progress.computed))

    @clause
    def _take_back(self, progress: Progress, work: Work, said: int) -> None:
        """STEP-2. When a step is processed, the drafts that were rejected are taken back: they don't count as computed
        any more, and what is in flight behind them stands so much earlier.

        A step says one token more than it has accepted drafts, or nothing. What it says of a request that was
        preempted since takes nothing back.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler.update_from_output.
        Releases: all.
        """
        if work.stale or not said:
            return
        rejected = work.drafts + 1 - said
        progress.computed -= rejected
        for one in (work, *progress.works):
            one.end -= rejected

    @clause
    def admit(self, name: str, hit: int) -> None:
        """STEP-3. A request that is preempted has computed nothing. Like a new one it begins behind what it hits when
        it is scheduled again.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler._preempt_request and schedule.
        Releases: all.
        """
        progress = self.requests[name]
        progress.waiting = False
        progress.computed = hit

    def preempt(self, name: str, drop: bool) -> None:
        """Preempt a request; ``drop`` for a reset."""
        progress = self.requests[name]
        progress.waiting = True
        progress.computed = 0
        drop = drop or any(work.dropped for work in progress.works)
        for work in progress.works:
            work.stale, work.dropped = True, drop

    @clause
    def process(self, name: str, said: int) -> None:
        """STEP-4. Each token of a text is said once, by the step that computes the token before it.

        What a step says of a request that was preempted since is text all the same, unless that was for a reset: then
        it is dropped, and said again. While a dropped step is in flight, all that a later preemption finds in flight is
        dropped too.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler.update_from_output and _preempt_request.
        Releases: all.
        """
        progress = self.requests[name]
        work = progress.works.popleft()
        self._take_back(progress, work, said)
        if said and not work.dropped:
            progress.length = progress.length + said if work.stale else work.end + 1

    @clause
    def lookahead(self, name: str) -> int:
        """STEP-5. A draft model with a forward of its own writes behind the step's tokens: each step asks for slots for
        its drafts besides. Tokens.

        Source: vLLM 0.33.0, v1/core/sched/scheduler.py, Scheduler.schedule; config/vllm.py, num_lookahead_tokens.
        Releases: all; from 0.23.0 on the step that admits a request, too.
        """
        admits = self.requests[name].waiting
        none = not self.draft_model or (admits and not self.profile.lookahead_on_admission)
        return 0 if none else self.drafts
