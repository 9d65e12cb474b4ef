"""The door in front of an LLM engine: priority tiers, reserved tokens, lending, aging, proof that nobody starves."""

__version__ = "0.1.0"
