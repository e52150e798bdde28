"""The command line: everything is put together here, nothing is decided here.

Parts that need torch are imported when a command needs them, so that the rest answers at once.
"""

from ragflash.cli.commands import app

__all__ = ["app"]
