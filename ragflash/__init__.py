"""Document QA that owns both halves of the job: the documents and the model.

The command line is `ragflash`, the HTTP server `ragflash serve`. Inside, packages form layers that
import in one direction only; CONTRIBUTING.md draws them. Importing this package imports nothing.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
