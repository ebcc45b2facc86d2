"""Which machine drives which target."""

from __future__ import annotations

from strategies.machine import OffloadMachine
from strategies.multi import MultiMachine
from strategies.offloading import OffloadingMachine
from strategies.simple import SimpleOffloadMachine

MACHINES: dict[str, type[OffloadMachine]] = {
    "vllm-simple": SimpleOffloadMachine,
    "vllm-offloading": OffloadingMachine,
    "vllm-multi": MultiMachine,
}
