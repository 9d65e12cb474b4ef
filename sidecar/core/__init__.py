"""The admission rules, once: who is next, and which engine takes it. No I/O, no clock, no asyncio.

The numbers in docstrings and comments are those of `docs/rules.md`. Amounts are `(tokens, requests, prompt)`, the last
in tokens that were sent and have no first byte yet. Times are in microseconds.
"""
