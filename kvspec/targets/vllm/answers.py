"""What a model runner without memory says: always the same token, and some of the drafts. No expectations here."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

WORD = 7
"""What is said, and drafted, always."""


class Answers:
    """The answers to a scheduler's steps.

    Args:
        requests: the scheduler's, by name.
        drafts: tokens that a drafter proposes for each step; 0 without one.
    """

    def __init__(self, requests: Mapping[str, Any], drafts: int) -> None:
        self._requests = requests
        self._drafts = drafts
        self.random = Random(0)
        """Decides how many drafts are accepted."""
        self._going_on: list[str] = []

    def sampled(self, output: Any) -> list[list[int]]:
        """Return what each request of a step says: a token if its text is computed to its end, and the drafts that are
        accepted.
        """
        begun = {request.req_id for request in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        names, said = list(output.num_scheduled_tokens), []
        for name in names:
            request = self._requests.get(name)
            # A request that begins has no drafts: those in its first step are padding, which is never accepted.
            drafts = 0 if name in begun else len(output.scheduled_spec_decode_tokens.get(name, ()))
            whole = request is not None and request.num_computed_tokens >= request.num_tokens
            said.append([WORD] * (1 + self.random.randint(0, drafts)) if whole else [])
        self._going_on = [name for name, tokens in zip(names, said, strict=True) if tokens]
        return said

    def proposed(self) -> Any:
        """Return the ``DraftTokenIds`` of the requests that have said something with the latest step."""
        from vllm.v1.outputs import DraftTokenIds

        return DraftTokenIds(list(self._going_on), [[WORD] * self._drafts for _ in self._going_on])
