"""Planted defects: named changes, made in memory, that a law or a clause must notice. See ``kvspec.defects``.

They are what ``kvspec bench`` measures beside real bugs, and what the tests trip each law and clause with. Nothing that
draws histories knows of them.
"""

from __future__ import annotations

from . import core, model, multi, offload_index, offloading, simple, steps

DEFECTS = (
    simple.DEFECTS
    | offloading.DEFECTS
    | multi.DEFECTS
    | core.DEFECTS
    | steps.DEFECTS
    | model.DEFECTS
    | offload_index.DEFECTS
)
