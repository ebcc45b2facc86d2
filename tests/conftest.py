from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Work in an empty directory from which ``toy:suite`` can be run; call it to choose its defects."""
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root.parent}")
    monkeypatch.setenv("KVSPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("TOY", raising=False)

    def defects(names: str) -> None:
        monkeypatch.setenv("TOY", names)

    return defects
