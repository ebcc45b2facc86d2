"""kvspec: property-based verification of KV-cache offload.

An executable model of block allocation, context parallelism and store indexes is held against real
offload implementations; ``kvspec.cli`` is the command line, ``kvspec.world`` couples the two.
"""

__version__ = "0.1.0"
