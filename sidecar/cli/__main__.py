"""`python -m sidecar.cli`, where the command is not on the PATH."""

import sys

from sidecar.cli import main

sys.exit(main())
