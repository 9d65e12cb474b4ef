"""The package's version, once."""

__version__ = "0.2.0"
