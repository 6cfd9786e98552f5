"""Write the README's operator table from the registry: `python docs/op_table.py [--check]`."""

import inspect
import sys
from pathlib import Path

from tile_kernels.runtime.op import Op, all_ops

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- operators: begin -->", "<!-- operators: end -->"


def row(op: Op) -> str:
    """One operator: its call, and the first sentence of its docstring."""
    parameters = ", ".join(op.signature.parameters)
    summary = (inspect.getdoc(op.function) or "").split("\n\n")[0].replace("\n", " ")
    return f"| `{op.name}({parameters})` | {summary} |"


def table() -> str:
    """The operators, as Markdown."""
    lines = ["| operator | what it does |", "|---|---|", *(row(op) for op in all_ops())]
    return "\n".join([BEGIN, *lines, END])


def updated(text: str) -> str:
    """`text` with the table between its marks made anew."""
    before, rest = text.split(BEGIN)
    return before + table() + rest.split(END)[1]


def main() -> int:
    """Write the table, or with `--check` only compare."""
    text = README.read_text()
    if "--check" in sys.argv:
        if updated(text) != text:
            sys.stderr.write("README.md: the operator table is stale: python docs/op_table.py\n")
            return 1
        return 0
    README.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
