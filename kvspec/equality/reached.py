"""What the histories of an equality machine can reach, and what a run of one must."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvspec.model.profile import CheckpointEnd, DraftTail, Profile, known_issues

CORE_EVENTS = {
    "evicted": "a block that could be found was reused",
    "equal-blocks": "two blocks were registered under the same key",
    "held-again": "a free block was touched",
    "shared": "a block had two holders",
    "refused": "a call was refused",
    "found": "a look-up found something",
    "left-out": "a null or masked block was left out of a registration",
    "tail-registered": "a block was registered for a prefix that ends inside it",
    "promoted": "a block that was registered for a prefix inside it was filled",
    "hashes-moved": "the hashes of a block were moved",
    "reused-while-read": "a reader was told that its block is reused",
    "reset": "the prefix cache was reset",
    "reset-several-hashes": "a reset dropped a block's several hashes",
    "reset-refused": "a reset was refused",
    "hit": "a request was looked up, and had a hit",
    "content": "a request arrived with an adapter, images or a salt",
    "hit-inside": "a hit ended inside a block",
    "copied": "a block was copied because its request goes on inside it",
    "checkpoint": "a step kept a state in the middle of its chunk",
    "parted": "full attention's hit was longer than the other groups'",
    "external": "a request took over tokens that came from elsewhere",
    "left-window": "a request gave up blocks that it didn't read any more",
    "refused-by-reserve": "a step was refused although there were enough free blocks",
    "preempted": "a request was preempted",
    "steps-overlap": "two steps were in flight between steps",
    "reset-in-flight": "running requests were preempted by a reset while a step was in flight",
    "rejected": "a draft was rejected",
    "stale": "a step in flight said something of a request that was preempted since",
    "deferred": "the release of blocks waited for a step in flight",
}
"""What a run can reach -> what it is, counted before the sides are compared: a difference is often where it is reached
first. A known issue that shortens or skips a step is counted as ``known:ID``."""

OFFLOAD_EVENTS = {
    "evicted": "a chunk was evicted",
    "refused": "a store was refused",
    "passed": "a key was there already when it was offered",
    "pending": "a key was looked up while it was being stored",
    "pinned": "a load pinned chunks",
    "failed": "a store failed",
    "reused": "a request ended that had reused a chunk",
    "reset": "a tier was reset",
    "reset-in-flight": "a tier was reset with transfers in flight",
    "reset-refused": "a reset was refused because blocks were in use",
    "stale": "a transfer from before a reset was reported",
    "hit": "a request had a hit in the tier",
    "hit-after-local": "a request had a hit in the tier, after one on the GPU",
    "hit-proven": "a request had a hit in the tier, with a chunk behind it for layers of a draft model",
    "unmarked-drafts": "a draft model's layers were in no marked group",
    "held-back": "a last chunk wasn't stored yet, as a draft that is rejected could change it",
    "asked-again": "a request was told to ask again",
    "loaded": "a request began to load",
    "loaded-for-remote": "a request began to load that a remote engine will decode",
    "reads-nothing": "a request came that may not read the prefix cache",
    "stored": "a store was planned",
    "stored-at-end": "a store was planned of a request that had ended",
    "flushed": "a transfer had to end before a step",
    "preempted": "a request was preempted",
    "aborted": "a request was aborted",
    "given-away": "a block that had left a window was given to somebody before it was stored",
}
"""The same of a run with OffloadingConnector."""

EVENTS: Mapping[str, Mapping[str, str]] = {"vllm-core": CORE_EVENTS, "vllm-offload-index": OFFLOAD_EVENTS}
"""By target."""


def _always(*events: str) -> dict[str, Callable[[Profile], bool]]:
    return dict.fromkeys(events, lambda profile: True)


REQUIRED: Mapping[str, Mapping[str, Callable[[Profile], bool]]] = {
    "pool": {
        **_always("evicted", "held-again", "refused", "reset", "equal-blocks", "shared", "found", "left-out"),
        **dict.fromkeys({"tail-registered", "promoted"}, lambda profile: profile.secondary_hashes),
        "hashes-moved": lambda profile: profile.moves_hashes,
        "reused-while-read": lambda profile: profile.pins,
    },
    "cache": {
        **_always(
            "evicted",
            "held-again",
            "refused",
            "reset",
            "hit",
            "external",
            "left-window",
            "preempted",
            "reset-refused",
            "content",
        ),
        "parted": lambda profile: profile.retains_shared_prefix,
        **dict.fromkeys({"hit-inside", "copied"}, lambda profile: profile.hits_inside),
        "checkpoint": lambda profile: profile.checkpoint_end is not CheckpointEnd.NOWHERE,
        "refused-by-reserve": lambda profile: profile.reserve,
        "deferred": lambda profile: profile.deferred_frees,
    },
    "scheduler": {
        **_always("preempted", "reset", "reset-refused", "steps-overlap", "rejected"),
        **dict.fromkeys(
            {"reset-in-flight", "stale"},
            lambda profile: "core-reset-in-flight-underflow" not in known_issues(profile.release),
        ),
        "deferred": lambda profile: profile.deferred_frees,
    },
    "tier": {
        **_always("evicted", "refused", "passed", "pending", "pinned", "failed"),
        "reused": lambda profile: profile.tier_counts_requests,
        "reset-in-flight": lambda profile: profile.offload_reset,
    },
    "index": {
        **_always(
            "evicted",
            "refused",
            "passed",
            "stored",
            "loaded",
            "preempted",
            "aborted",
            "hit-after-local",
            "loaded-for-remote",
            "reads-nothing",
        ),
        "asked-again": lambda profile: "offload-in-flight-is-a-miss" not in known_issues(profile.release),
        "flushed": lambda profile: profile.jobs_by_number,
        "reset": lambda profile: profile.offload_reset,
        "stored-at-end": lambda profile: profile.stores_at_end,
        "given-away": lambda profile: profile.offload_policies,
        **dict.fromkeys(
            {"held-back", "hit-proven", "unmarked-drafts"}, lambda profile: profile.draft_tail is not DraftTail.NOWHERE
        ),
    },
}
"""Level -> events that a run of it must reach -> whether a release can."""


def required(level: str, profile: Profile) -> frozenset[str]:
    """Return the events that a run of a level must reach in a release."""
    return frozenset(event for event, when in REQUIRED[level].items() if when(profile))
