"""In Mamba's cache mode "align", a decode step without drafts after rejected ones can end in an AssertionError.

Seen in vLLM 0.20.2 to 0.22.1. Drafts that reach into the next block make ``MambaManager.allocate_new_blocks`` extend
the row. If they are rejected, and the next step has no drafts (an n-gram drafter finds none, say), it needs fewer
blocks than the row has, which is asserted not to happen.
"""

from plain_core import Cache, states

cache = Cache((states(4, drafts=2), False))
request = cache.request("r", range(14))
cache.compute(request, 12)
cache.compute(request, 2)
request.append_output_token_ids([50])
cache.compute(request, 3)  # one token and two drafts, the last of them in the next block
request.num_computed_tokens -= 2  # both are rejected
request.append_output_token_ids([51])
try:
    cache.compute(request, 1)
except AssertionError as error:
    raise SystemExit(f"BUG: {error}") from error
print("a step that needs fewer blocks than the row has is fine")
