"""The model and vLLM's own objects, side by side: every op is applied to both, and all that can be seen is compared.

A difference is a ``ClauseBroken``.
"""
