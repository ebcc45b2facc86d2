"""The legal environment: drives the target's own engine, step by step, with a forward that checks what it reads."""
