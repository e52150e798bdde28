import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["request", "client", "sequence", "scheduler", "constrain", "prompt", "output"]
)
def test_module_does_not_import_torch(module):
    code = f"import sys, ragflash.engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
