"""Which implementation of an operation runs."""

from enum import StrEnum

import torch


class Backend(StrEnum):
    """The implementations that an operation may have."""

    REFERENCE = "reference"  # plain torch, any device
    TRITON = "triton"  # any card that Triton knows, and its interpreter
    GLUON = "gluon"  # NVIDIA cards from compute capability 8.0


def pick_backend(device: torch.device) -> Backend:
    """Return the fastest implementation for tensors on a device."""
    if device.type != "cuda":
        return Backend.REFERENCE
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        return Backend.GLUON
    return Backend.TRITON
