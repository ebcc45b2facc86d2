"""What a block holds: the tokens before it and in it, and whatever else its keys and values depend on.

An engine identifies this by a chain of cryptographic hashes. The model doesn't hash: a ``BlockHash`` *is*
its content, and two are equal if and only if the content is. So an implementation's hashes must name the
model's one to one.

Not modelled: prompt embeddings, and the bytes of the hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvspec.model.clauses import clause

Extra = tuple[str | int, ...]
"""Something besides tokens that the content of a block depends on; the first item says what it is."""


class Image(NamedTuple):
    """A multi-modal item in a prompt: ``length`` placeholder tokens from position ``offset`` on."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class Content:
    """What a request's keys and values depend on besides its tokens. Images are in order and don't
    overlap.
    """

    adapter: tuple[str, str] | None = None
    """LoRA adapter: name and path."""
    images: tuple[Image, ...] = ()
    salt: str | None = None

    @clause
    def extras(self, start: int, end: int) -> tuple[Extra, ...]:
        """KEY-2. A block's hash covers the LoRA adapter, the images in the block with their place in it, and
        at position 0 the salt.

        An image that begins in an earlier block has a negative place. ``start`` and ``end`` are token
        positions.

        Source: vLLM 0.33.0, v1/core/kv_cache_utils.py, generate_block_hash_extra_keys.
        Releases: all.
        """
        adapter = [("adapter", *self.adapter)] if self.adapter else []
        images = [
            ("image", image.identifier, image.offset - start)
            for image in self.images
            if image.offset < end and start < image.offset + image.length
        ]
        salt = [("salt", self.salt)] if self.salt and start == 0 else []
        return (*adapter, *images, *salt)


PLAIN = Content()
"""Nothing but tokens."""


@dataclass(frozen=True, slots=True)
class BlockHash:
    """The identity of a hash block: everything up to its last token."""

    parent: BlockHash | None
    tokens: tuple[int, ...]
    extras: tuple[Extra, ...] = ()
    lookahead: tuple[int, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.parent, self.tokens, self.extras, self.lookahead)))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        chain: list[str] = []
        block: BlockHash | None = self
        while block is not None:
            chain.append(",".join(map(str, block.tokens)) + "".join(f" {extra}" for extra in block.extras))
            block = block.parent
        return f"<{' | '.join(reversed(chain))}>"


class Key(NamedTuple):
    """Under what a block is found: the identity of its last hash block, and the group that it belongs to."""

    hash: BlockHash
    group: int


@dataclass
class Text:
    """What a request has said so far, and the hashes of it."""

    tokens: list[int]
    hash_tokens: int
    """Tokens per hash block."""
    content: Content = PLAIN
    lookahead: int = 0
    """Tokens after a block that its hash covers too."""
    hashes: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.append([])

    @clause
    def append(self, tokens: Sequence[int]) -> None:
        """KEY-1. Every whole hash block has a hash; it stands for all tokens up to the block's end, and
        exists as soon as they do.

        With lookahead (drafters whose last position depends on the tokens after it) it exists once those
        tokens do.

        Source: vLLM 0.33.0, v1/core/kv_cache_utils.py, get_request_block_hasher.
        Releases: all; lookahead 0.33.0 and later.
        """
        self.tokens.extend(tokens)
        while (end := (len(self.hashes) + 1) * self.hash_tokens) + self.lookahead <= len(self.tokens):
            start = end - self.hash_tokens
            parent = self.hashes[-1] if self.hashes else None
            extras = self.content.extras(start, end + self.lookahead)
            ahead = tuple(self.tokens[end : end + self.lookahead])
            self.hashes.append(BlockHash(parent, tuple(self.tokens[start:end]), extras, ahead))

    @clause
    def view(self, block_tokens: int) -> list[BlockHash]:
        """KEY-3. A block of several hash blocks has the identity of the last of them.

        Source: vLLM 0.33.0, v1/core/kv_cache_utils.py, BlockHashListWithBlockSize.
        Releases: all (0.23.0 and older join the bytes of all its hashes instead, which tells the same blocks
        apart).
        """
        ratio = block_tokens // self.hash_tokens
        return self.hashes[ratio - 1 :: ratio]
