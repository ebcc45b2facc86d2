"""The executable specification of block allocation, prefix caching, context parallelism, and the CPU tier behind it.

To be read in this order: ``keys`` (what a block holds), ``pool`` (who holds which block, and which is reused first),
``groups`` (what a token reads), ``scaling`` (how many tokens a block spans), ``lookup`` (what a request finds),
``checkpoints`` (which states are kept in the middle of a chunk), ``states`` (which states it holds, and what is
copied), ``registration`` (what it lets others find), ``cache`` (what it takes and gives back), ``deferred`` (when),
``steps`` (how far it is while steps are in flight), ``tiers`` (what the CPU holds), ``offload`` (what is stored there,
and loaded), ``profile`` (what differs between releases). Each rule is a *clause* with an id; ``clauses.CLAUSES`` has
them all.

It is pure Python and can be used as a fake of vLLM's ``KVCacheManager`` in unit tests of a scheduler or a connector:

>>> from kvspec.model import CacheManager, Group, Kind, Request, profile_for
>>> cache = CacheManager([Group(Kind.FULL, block_tokens=4)], num_blocks=10, profile=profile_for("0.33.0"))
>>> first = Request("first", cache.text(range(10)), prompt_tokens=10)
>>> cache.allocate(first, new_tokens=10)
([1, 2, 3],)

Two of its blocks are full, and can be found at once; a request with the same prompt needs only the third:

>>> second = Request("second", cache.text(range(10)), prompt_tokens=10)
>>> hit = cache.lookup(second)
>>> hit.tokens, hit.blocks
(8, ([1, 2],))
>>> cache.allocate(second, new_tokens=2, hit=hit)
([4],)
>>> [block.references for block in cache.pool.blocks[:5]]
[0, 2, 2, 1, 1]

What is given back can still be found until it is reused, the end of a text first:

>>> cache.free(first)
>>> cache.free(second)
>>> cache.pool.queue
[4, 3, 5, 6, 7, 8, 9, 2, 1]
"""

from kvspec.model.cache import CacheManager
from kvspec.model.clauses import CLAUSES, Clause, ClauseBroken, agree
from kvspec.model.deferred import DeferredFrees
from kvspec.model.groups import Group, Kind
from kvspec.model.keys import BlockHash, Content, Image, Key, Text
from kvspec.model.offload import Offloader, OffloadRequest
from kvspec.model.pool import NULL, BlockPool, Cleared, Removed, Stored
from kvspec.model.profile import KNOWN_ISSUES, RELEASES, SWITCHES, Profile, profile_for
from kvspec.model.requests import Hit, Request
from kvspec.model.scaling import ContextParallel, Slot, Unsupported
from kvspec.model.steps import Steps
from kvspec.model.tiers import Tier

__all__ = [
    "CLAUSES",
    "KNOWN_ISSUES",
    "NULL",
    "RELEASES",
    "SWITCHES",
    "BlockHash",
    "BlockPool",
    "CacheManager",
    "Clause",
    "ClauseBroken",
    "Cleared",
    "Content",
    "ContextParallel",
    "DeferredFrees",
    "Group",
    "Hit",
    "Image",
    "Key",
    "Kind",
    "OffloadRequest",
    "Offloader",
    "Profile",
    "Removed",
    "Request",
    "Slot",
    "Steps",
    "Stored",
    "Text",
    "Tier",
    "Unsupported",
    "agree",
    "profile_for",
]
