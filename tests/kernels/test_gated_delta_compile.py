"""The kernels of the gated delta rule fit every supported card."""

import pytest

from tests.kernels.test_compile import ARCHITECTURES, check


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_delta_rule_fits_every_card(sm):
    kernels = [
        *("delta_prepare_rows:1", "delta_prepare_rows:7", "delta_advance_rows:32"),
        "delta_commit:32",
        *(f"delta_{name}_chunks:bf16" for name in ("prepare", "solve", "chain")),
        *("gated_norm:fp32", "gated_norm:bf16"),
    ]
    check([f"{kernel}:{sm}" for kernel in kernels], module="tests.kernels.delta_compiling")
