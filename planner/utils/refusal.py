"""The exception for input that cannot be used."""


class Refusal(ValueError):
    """Input that cannot be used; one line with rule, value and remedy.

    Raise it for what the user can correct before the next try: options, files, plans, settings that
    differ between ranks. A rank that refuses its input exits with 2. What fails while all input was
    usable is a `RuntimeError` (a lost peer, divergence, a missing rank); the rank exits with 3. In
    the planner, `ValueError` subclasses with the same kind of message serve.
    """
