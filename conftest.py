"""Fixtures of the suite's own tests that need a real target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvspec.targets import Target


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> Target:
    """Return the target that this run checks; the plugin has made its release importable."""
    from kvspec.targets import load_target

    name = pytestconfig.getoption("kvspec_target") or pytestconfig.getini("kvspec_target")
    return load_target(name)
