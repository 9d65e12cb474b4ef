"""The literal reference and its programs are beside the rules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "scheduling"))
