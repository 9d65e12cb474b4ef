"""The admission rules, once: who is next, and which engine takes it. And what replicas share: the ledger, its calls.

It will replace `sidecar.scheduling` and the stores of `sidecar.pools`; until then the product does not use it. The
rules are those of `tests/scheduling/reference.py`, whose numbers stand in docstrings and comments. Amounts are
`(tokens, requests, prompt)`, the last in tokens that were sent and have no first byte yet. Times are in microseconds.
No I/O, no clock, no asyncio.
"""
