"""Targets of vLLM: its own scheduler, engine step functions and connectors, from an importable vLLM or a published
release."""
