"""What kvspec raises when the person in front of it can do something about it."""


class KvspecError(Exception):
    """One clear sentence about what is wrong, and what to do.

    The command line prints the message, without a traceback, and exits with status 2.
    """


class SetupRefused(KvspecError):
    """A target can't run a setup: a combination that its release doesn't support."""


def refuse_outside(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError, with a sentence, for a number that can't be."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be {least if least == most else f'{least} to {most}'}")
