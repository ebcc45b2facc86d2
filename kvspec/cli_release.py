"""``kvspec release``: the releases of vLLM on this machine."""

import time
from contextlib import ExitStack
from types import TracebackType

import click
from packaging.version import Version
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvspec import releases
from kvspec.errors import KvspecError
from kvspec.gate import Prepared, prepare
from kvspec.releases import KNOWN_GOOD, Phase
from kvspec.report.terminal import PipeConsole

PLAIN_INTERVAL_S = 5.0
"""Without a terminal, a download says how far it is as often as this."""


class InstallProgress:
    """Shows on stderr how an install goes: a bar on a terminal, else plain lines. A ``releases.Progress``."""

    def __init__(self, version: str, console: Console) -> None:
        self._version = version
        self._console = console
        self._phase: Phase | None = None
        self._said_at = 0.0
        self._bar = Progress(
            TextColumn("vLLM {task.fields[version]}: {task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, version=version)

    def __enter__(self) -> "InstallProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, phase: Phase, done_bytes: int, total_bytes: int | None) -> None:
        """Show one report (bytes)."""
        phase_is_new, self._phase = phase != self._phase, phase
        if not self._console.is_terminal:
            self._say(phase_is_new, f"{phase}{_amount(done_bytes, total_bytes)}")
            return
        if phase_is_new:
            self._bar.reset(self._task, description=str(phase))
        self._bar.update(self._task, completed=done_bytes, total=total_bytes)

    def _say(self, phase_is_new: bool, text: str) -> None:
        now_s = time.monotonic()
        if phase_is_new or now_s - self._said_at >= PLAIN_INTERVAL_S:
            self._console.print(f"vLLM {self._version}: {text}", soft_wrap=True)
            self._said_at = now_s


def _amount(done_bytes: int, total_bytes: int | None) -> str:
    if total_bytes is None:
        return f", {done_bytes / 1e6:.1f} MB so far" if done_bytes else ""
    return f", {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"


def prepared_target(target: str) -> Prepared:
    """Install the release of a target if need be, and show how that goes."""
    with ExitStack() as stack:

        def progress(version: str) -> releases.Progress:
            return stack.enter_context(InstallProgress(version, PipeConsole(stderr=True)))

        return prepare(target, progress)


@click.group()
def release() -> None:
    """Install, list and remove releases of vLLM.

    kvspec checks the code of any published release on a machine without a GPU. It fetches the release's
    wheel once, through pip and pip's settings (index, proxy, certificates), keeps its Python files (about
    60 MB) in a cache, and runs them with the dependencies of `pip install 'kvspec[vllm]'`. Targets such as
    `vllm-simple@0.33.0` install what they need by themselves; these commands are for doing it ahead, and for
    looking after the cache.

    \b
    Examples:
      kvspec release install 0.33.0          fetch one release (250 to 430 MB)
      kvspec release list --available        what could be installed
      PYTHONPATH=$(kvspec release path 0.33.0) python -c 'import vllm; print(vllm.__version__)'

    The cache is the user's cache directory, or KVSPEC_CACHE_DIR.
    """


@release.command("list")
@click.option("--available", is_flag=True, help="Also show published releases, newest first (asks pip).")
@click.option("--verify", is_flag=True, help="Compare every file with the hash that it was installed with.")
def list_(available: bool, verify: bool) -> None:
    """Show the releases that are installed.

    A release that has lost files, or parts of them, is shown as damaged, and the command fails with status 2.
    With `--verify` the contents are compared too.

    \b
    Examples:
      kvspec release list
      kvspec release list --verify
      kvspec release list --available
    """
    states = {found.version: _state(found.version, verify) for found in releases.installed()}
    if available:
        for version in releases.available():
            states.setdefault(version, "not installed")
    if not states:
        click.echo(f"No release is installed; `kvspec release install {KNOWN_GOOD[-1]}` installs one.")
    for version, state in sorted(states.items(), key=lambda item: Version(item[0]), reverse=True):
        known = "  (kvspec is known to run on it)" if version in KNOWN_GOOD and available else ""
        click.echo(f"{version:<12}  {state}{known}")
    damaged = [version for version, state in states.items() if state.startswith("damaged")]
    if damaged:
        raise KvspecError(f"{len(damaged)} of the releases above are damaged; each line says what helps.")


def _state(version: str, contents: bool) -> str:
    """One line about an installed release."""
    try:
        manifest = releases.verify(version, contents=contents)
    except KvspecError as error:
        return f"damaged: {error}"
    return f"installed, {manifest.files_count} files, {manifest.files_bytes / 1e6:.1f} MB"


@release.command()
@click.argument("versions", nargs=-1, required=True, metavar="VERSION...")
@click.option("--force", is_flag=True, help="Fetch it anew even if it is there (for a damaged cache).")
def install(versions: tuple[str, ...], force: bool) -> None:
    """Fetch releases of vLLM and keep their Python files.

    Needs 900 MB of free space for a moment; about 60 MB stay. It can be interrupted at any time: a release is
    there as a whole or not at all. If another process is installing the same one, this one waits for it.

    \b
    Examples:
      kvspec release install 0.33.0
      kvspec release install 0.23.0 0.28.0 0.33.0
      kvspec release install --force 0.33.0
    """
    console = PipeConsole(stderr=True)
    for version in versions:
        with InstallProgress(version, console) as progress:
            directory = releases.install(version, progress, force=force)
        click.echo(f"vLLM {releases.canonical(version)} is installed at {directory}")


@release.command()
@click.argument("version")
def path(version: str) -> None:
    """Print the directory of an installed release.

    Put first on PYTHONPATH, it is what `import vllm` finds.

    \b
    Examples:
      kvspec release path 0.33.0
      grep -rn reset_prefix_cache "$(kvspec release path 0.33.0)/vllm/v1/core"
    """
    click.echo(releases.path(version))


@release.command()
@click.argument("versions", nargs=-1, required=True, metavar="VERSION...")
def remove(versions: tuple[str, ...]) -> None:
    """Remove releases from the cache.

    \b
    Examples:
      kvspec release remove 0.23.0 0.28.0
    """
    for version in versions:
        releases.remove(version)
        click.echo(f"vLLM {releases.canonical(version)} is removed")
