"""Host time of every operator: a repeated call, and one with a token count that was never seen.

    python benchmarks/host_times.py [FILE]      writes JSON; needs a GPU for numbers that matter

Device work is negligible: each operator runs on its smallest ordinary sample. The calls of
`benchmark.run` are measured likewise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tile_kernels.runtime import registry
from tile_kernels.testing import benchmark


def main() -> None:
    """Measures and writes."""
    times = {}
    for op in registry.all_ops():
        repeated, new_size = benchmark.host_times(op)
        times[op.name] = {"repeated_us": repeated, "new_size_us": new_size}
        print(f"{op.name:50} {repeated:8.2f} {new_size:8.2f}", flush=True)
    content = {"machine": benchmark.machine(), "host_us": times}
    name = f"host_times.{benchmark.slug(content['machine']['device'])}.json"
    path = Path(sys.argv[1] if len(sys.argv) > 1 else benchmark.DEFAULT_FOLDER / name)
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
