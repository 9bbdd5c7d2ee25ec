"""The version, in one place: the package metadata and every cache key read it."""

__version__ = "0.1.0"
