"""Two requests that differ in an image get the same block hash, if the block was completed while decoding.

Seen in vLLM 0.20.2 to 0.30.0. ``get_request_block_hasher`` starts with the *last* image of the request when it goes
on after the first call, so of two images in the block in which the prompt ends only the last one is in the hash. A
request that comes back after a preemption then takes over the other request's keys and values; and a follow-up turn,
whose prompt contains that block, doesn't find it (it hashes both images).
"""

from plain_core import Cache, full
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange


def images(*identifiers):
    return [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=4 + i, length=1)
        )
        for i, name in enumerate(identifiers)
    ]


cache = Cache((full(4), False))
prompt = range(7)  # tokens 4 and 5 stand for images
cat = cache.request("cat", prompt, mm_features=images("cat", "tree"))
dog = cache.request("dog", prompt, mm_features=images("dog", "tree"))
for request in (cat, dog):
    request.append_output_token_ids([50])  # completes the second block
again = cache.request("follow-up", [*prompt, 50], mm_features=images("cat", "tree"))
print("cat and dog share the hash:", cat.block_hashes[1] == dog.block_hashes[1])
print("the follow-up finds the block:", cat.block_hashes[1] == again.block_hashes[1])
if cat.block_hashes[1] == dog.block_hashes[1]:
    raise SystemExit("BUG: different images, equal hashes")
