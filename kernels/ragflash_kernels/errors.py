"""The one error of this package."""


class KernelInputError(ValueError):
    """An operation was called with a shape, type, device or option that it cannot take."""
