"""From a Python call to the hardware: see `docs/architecture.md`."""
