"""Peers side by side: other gateways and ours before the same engine, with the same load."""
