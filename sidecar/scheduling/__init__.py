"""The admission rules, once: who is next, and which engine takes it.

They are those of `tests/scheduling/reference.py`, whose numbers stand in docstrings and comments. Amounts are
`(tokens, requests, prompt)`, the last in tokens that were sent and have no first byte yet. Times are in microseconds.
No I/O, no clock, no asyncio.
"""
