"""Makes the modules that these tests share importable: `from tiny_setup import TinySetup`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
