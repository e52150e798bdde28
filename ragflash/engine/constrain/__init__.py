"""Constraints: request data compiled to states over tokens, one cursor an output."""

from ragflash.engine.constrain.compile import ConstraintCompiler
from ragflash.engine.constrain.cursor import Cursor
from ragflash.engine.constrain.mask import TokenMask

__all__ = ["ConstraintCompiler", "Cursor", "TokenMask"]
