"""Which version is installed."""

from importlib.metadata import version

__version__ = version("foretrace")
