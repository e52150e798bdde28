"""DFlash drafters: models that predict a block of a target's next tokens in one pass."""

from ragflash.models.dflash.config import Causality, DFlashConfig, Given, Target
from ragflash.models.dflash.context import Candidates, DraftContext
from ragflash.models.dflash.load import drafter_hash, load_drafter
from ragflash.models.dflash.model import DFlashModel, DraftSequence
from ragflash.models.dflash.ring import RING_TOKENS

__all__ = [
    "RING_TOKENS",
    "Candidates",
    "Causality",
    "DFlashConfig",
    "DFlashModel",
    "DraftContext",
    "DraftSequence",
    "Given",
    "Target",
    "drafter_hash",
    "load_drafter",
]
