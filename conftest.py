"""Fixtures of the suite's own tests that need a real target."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvspec.targets import Target

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> Target:
    """Return the target that this run checks; the plugin has made its release importable."""
    from kvspec.targets import load_target

    name = pytestconfig.getoption("kvspec_target") or pytestconfig.getini("kvspec_target")
    return load_target(name)
