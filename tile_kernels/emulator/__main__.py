"""`python -m tile_kernels.emulator script.py`: see `tile_kernels.emulator.runner`."""

from __future__ import annotations

import sys

from .runner import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except FileNotFoundError as error:
        sys.exit(f"emulator: {error}")
