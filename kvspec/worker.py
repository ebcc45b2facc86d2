"""The child process in which a target runs: ``python -P -m kvspec.worker``.

It reads its job from stdin and writes events to a pipe of its own: stdout and stderr belong to the target.
SIGTERM asks it to stop after the history at hand.
"""

import faulthandler
import gc
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from kvspec.errors import KvspecError
from kvspec.events import Event, Replayed, ReplayJob, SearchJob, TrialJob, WorkerDone, WorkerFailed
from kvspec.releases import KNOWN_GOOD

if TYPE_CHECKING:
    from kvspec.search import Suite

HISTORY_WALL_S = 120.0
"""A worker from which nothing is heard for so long is stuck inside the target; it writes where, and dies."""


def main() -> None:
    """Do the job on stdin."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchJob | ReplayJob | TrialJob)
    os.set_inheritable(job.events_fd, False)
    with os.fdopen(job.events_fd, "wb") as pipe:
        emit = _writer(pipe)
        try:
            _work(job, emit)
        except KvspecError as error:
            emit(WorkerFailed(job=job.job, message=str(error)))
        except BrokenPipeError:  # the parent has gone
            return
        except Exception:
            emit(
                WorkerFailed(
                    job=job.job,
                    message="A worker failed outside of the target: in kvspec or in the target's adapter.",
                    details=traceback.format_exc(),
                )
            )
        emit(WorkerDone(job=job.job))
    os._exit(0)  # all is said; threads of the target could hold an orderly exit up


def _writer(pipe: BinaryIO) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        faulthandler.dump_traceback_later(HISTORY_WALL_S, exit=True)
        pipe.write(msgspec.json.encode(event) + b"\n")
        pipe.flush()

    return emit


def _work(job: SearchJob | ReplayJob | TrialJob, emit: Callable[[Event], None]) -> None:
    check_import(job.target, job.release_path)
    from kvspec.search import Search, load_suite
    from kvspec.trial import run_trials

    suite = load_suite(job.target)
    freeze_imports()
    stop_asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop_asked.append(number))
    if isinstance(job, SearchJob):
        Search(suite, job, emit, lambda: bool(stop_asked)).run()
    elif isinstance(job, TrialJob):
        run_trials(suite, job, emit, lambda: bool(stop_asked))
    else:
        emit(_replayed(suite, job))


def freeze_imports() -> None:
    """Take what was imported out of garbage collection, as vLLM's engine does at its start: a look at it takes 0.5 s.

    Only for a process that ends by ``os._exit``: at an orderly end some extensions complain of leaks then.
    """
    gc.collect()
    gc.freeze()


def check_import(target: str, release_path: str | None) -> None:
    """Raise KvspecError unless ``import vllm`` would import what the target names. Imports nothing itself."""
    spec = importlib.util.find_spec("vllm")
    found = Path(spec.origin) if spec and spec.origin else None
    if release_path and not (found and found.is_relative_to(release_path)):
        raise KvspecError(
            f"{target} should be imported from {release_path}, but `import vllm` finds {found or 'nothing'}; "
            "remove what puts another vLLM first (a sitecustomize, a .pth file)."
        )
    if found is None and ":" not in target:  # a target that plugs in may do without
        raise KvspecError(
            f"No vLLM can be imported from here; name a release, such as {target}@{KNOWN_GOOD[-1]}, "
            "or run kvspec where `python -c 'import vllm'` works."
        )


def _replayed(suite: "Suite", job: ReplayJob) -> Replayed:
    from kvspec.search import implementation_version, violation_key

    first, second = suite.run(job.history), suite.run(job.history)
    return Replayed(
        release=implementation_version(job.target),
        violations=[(violation_key(job.target, v), v.message, v.op_index) for v in first.violations],
        schedules=list(first.schedules),
        traces=(first.trace, second.trace),
    )


if __name__ == "__main__":
    main()
