"""What requests say, and what a model would leave in the KV cache for it.

The model is greedy and its answer is a function of the whole prefix, so equal prompts give equal continuations. The
KV bytes of a position are a function of the prefix that ends there: a *tag*, one 64-bit number. Tags are unique (up
to hash collisions of 64 bits), so a wrong byte names the write that it came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

STOP_TOKEN = 2
_AGREES, _REJECTED = 1001, 1002  # no tokens: they tell other hashes of a prefix from the tag of a longer one
FIRST_WORD = 10
VOCABULARY = 1000


def mix(value: int, word: int) -> int:
    """Return a 64-bit hash of both (splitmix64's finalizer)."""
    x = (value ^ (word + 1) * _GOLDEN) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def words(stem: int, start: int, stop: int) -> list[int]:
    """Return tokens ``start`` to ``stop`` of an endless text; texts of stems less than 990 apart differ everywhere."""
    return [FIRST_WORD + (stem * 97 + position * 31) % (VOCABULARY - FIRST_WORD) for position in range(start, stop)]


class Origin(NamedTuple):
    """Where a tag was first promised: token ``position`` of ``request``, or a draft of it that the model rejects."""

    request: str
    position: int
    rejected: bool = False


class Origins:
    """The tags of a history and who was first to have them."""

    def __init__(self) -> None:
        self._by_tag: dict[int, Origin] = {}

    def claim(self, tag: int, request: str, position: int, rejected: bool = False) -> None:
        if tag not in self._by_tag:
            self._by_tag[tag] = Origin(request, position, rejected)

    def describe(self, tag: int) -> str:
        """Say in words what a tag read from memory is."""
        if tag == 0:
            return "bytes that nothing has written"
        origin = self._by_tag.get(tag)
        if origin is None:
            return f"unknown bytes {tag:#018x}"
        what = "a rejected draft of token" if origin.rejected else "token"
        return f"{what} {origin.position} of {origin.request}"


@dataclass
class Text:
    """The tokens of one request, as far as the model has determined them, and the tag of each position."""

    request: str
    origins: Origins
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    stop_next: bool = False
    _seed: int = 0
    _tags: np.ndarray = field(default_factory=lambda: np.zeros(64, dtype=np.uint64))

    @classmethod
    def of_prompt(cls, request: str, prompt: list[int], context: int, origins: Origins) -> Text:
        """Return the text of a new request. ``context`` stands for what isn't tokens but changes them: the salt."""
        text = cls(request, origins, prompt_tokens=len(prompt), _seed=mix(1, context))
        for token in prompt:
            text._append(token)
        return text

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        if position == len(self._tags):
            self._tags = np.concatenate([self._tags, np.zeros_like(self._tags)])
        self._seed = mix(self._seed, token)
        self._tags[position] = self._seed
        self.tokens.append(token)
        self.origins.claim(self._seed, self.request, position)

    def tags(self, start: int, stop: int) -> np.ndarray:
        """Return the tags of positions ``start`` to ``stop``; shape (stop - start,), uint64."""
        if stop > len(self.tokens):
            raise IndexError(f"{self.request} has {len(self.tokens)} tokens, not {stop}")
        return self._tags[start:stop]

    def sample(self, position: int) -> int:
        """Return the token at ``position``, letting the model choose it if it is the next one."""
        if position < len(self.tokens):
            return self.tokens[position]
        if position > len(self.tokens):
            raise IndexError(f"token {position} of {self.request} is sampled before token {len(self.tokens)}")
        token = STOP_TOKEN if self.stop_next else FIRST_WORD + self._seed % (VOCABULARY - FIRST_WORD)
        self.stop_next = False
        self._append(token)
        return token

    def accepted(self, position: int, drafts: int) -> int:
        """Return how many of ``drafts`` drafts for ``position`` and what follows the model says too: 0 to all of them.

        It depends on the prefix alone, as all that a text says, and any number is as frequent as another.
        """
        return mix(int(self._tags[position - 1]), _AGREES) % (drafts + 1)

    def tags_with_drafts(self, stop: int, rejected: int) -> np.ndarray:
        """Return the tags of positions 0 to ``stop``, and those that ``rejected`` wrong drafts behind it leave.

        Shape (stop + rejected,), uint64. Nothing else has the tags of wrong drafts, which depend on the prefix.
        """
        if not rejected:
            return self.tags(0, stop)
        seed = mix(int(self._tags[stop - 1]), _REJECTED)
        wrong = [mix(seed, position) for position in range(stop, stop + rejected)]
        for position, tag in enumerate(wrong, stop):
            self.origins.claim(tag, self.request, position, rejected=True)
        return np.concatenate([self.tags(0, stop), np.array(wrong, dtype=np.uint64)])
