import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.fixture
def launched():
    """Settings that launch the emulator as SGLang would be launched."""
    path = f"{ROOT / 'tests' / 'emulators' / 'site'}:{ROOT}"
    return {"python": Path(sys.executable), "environment": {"PYTHONPATH": path}, "start_s": 60.0, "probe_s": 0.1}
