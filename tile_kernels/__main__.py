"""`python -m tile_kernels`: the command line."""

import sys

from tile_kernels.cli import main

sys.exit(main())
