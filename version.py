"""The version of this package, as text."""

__version__ = "0.1.0"
