"""Identities that are not API keys: signed tokens of an issuer, and the issuer's public keys."""
