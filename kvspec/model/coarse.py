"""What all coarse ops have in common: see ``ops``."""

from __future__ import annotations

import msgspec


class CoarseOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    """A step of a history."""
