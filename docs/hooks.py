"""What the site has beside its pages: a reference made of docstrings, and files that pages link to.

MkDocs calls `on_files` and `on_page_markdown`.
"""

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Pages of the reference: a title, and the modules whose public names it has.
REFERENCE = {
    "package": ("The package", ["tile_kernels", "tile_kernels.config", "tile_kernels.utils"]),
    "moe": ("Routing", ["tile_kernels.moe", "tile_kernels.modeling.moe"]),
    "quant": ("Quantisation", ["tile_kernels.quant", "tile_kernels.modeling.quant"]),
    "engram": ("Engram", ["tile_kernels.engram", "tile_kernels.modeling.engram"]),
    "mhc": ("Hyper-connections", ["tile_kernels.mhc", "tile_kernels.modeling.mhc"]),
    "attention": ("Attention", ["tile_kernels.attention", "tile_kernels.modeling.attention"]),
    "transpose": ("Transposes", ["tile_kernels.transpose"]),
    "ep": ("Expert parallelism", ["tile_kernels.ep"]),
}
WIDTH = 88  # of code
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


# ---- files --------------------------------------------------------------------------------------


def page_of(path: str) -> str:
    """Where the site has a file of the repository that is not among the documents."""
    return f"source/{re.sub('[^a-z0-9]+', '-', path.lower())}.md"


def file_page(path: str) -> str:
    """A file as a page: documents as they are, other text in a frame."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return re.sub(r"\]\((?:docs/)?([\w-]+\.md)", r"](../\1", text)
    return f"# {path}\n\n```{Path(path).suffix[1:]}\n{text}```\n"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the reference, and what pages link to outside of their folder."""
    texts = [file.content_string for file in files.documentation_pages()]
    outside = sorted({path for text in texts for path in _OUTSIDE.findall(text)})
    pages = {page_of(path): file_page(path) for path in outside}
    pages |= {f"reference/{name}.md": reference(*REFERENCE[name]) for name in REFERENCE}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside lead to their pages."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    return _OUTSIDE.sub(lambda match: f"]({page_of(match[1])}", markdown)


# ---- the reference ------------------------------------------------------------------------------


def reference(title: str, modules: list[str]) -> str:
    """A page: every public name with its call and its docstring."""
    parts = [f"# {title}: reference"]
    for name in modules:
        module = importlib.import_module(name)
        parts.append(f"## `{name}`")
        for public in public_names(module):
            parts += entry(public, getattr(module, public), "###")
    return "\n\n".join(parts) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """Functions and classes that a module offers, with docstrings."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    return [name for name in names if has_page(getattr(module, name))]


def has_page(value: Any) -> bool:
    """Whether it is a function or a class that says what it does."""
    return callable(value) and bool(inspect.getdoc(value))


def entry(name: str, value: Any, mark: str) -> list[str]:
    """A function or a class, and the methods of a class."""
    parts = [f"{mark} `{name}`", *called(name, value), as_markdown(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        for method, attribute in vars(value).items():
            function = getattr(attribute, "__func__", attribute)  # of class and static methods
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                parts += entry(f"{name}.{method}", function, mark + "#")
    return parts


def called(name: str, value: Any) -> list[str]:
    """How it is called, where Python can tell."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return []
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    short = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    call = f"{name}{short}"
    if len(call) > WIDTH:
        lines = textwrap.wrap(str(short)[1:-1], WIDTH - 4)
        call = "\n".join([f"{name}(", *(f"    {line}" for line in lines), ")"])
    return [f"```python\n{call}\n```"]


def as_markdown(docstring: str) -> str:
    """A docstring, its sessions (`>>>`) in frames."""
    parts = []
    for paragraph in docstring.split("\n\n"):
        session = paragraph.lstrip().startswith(">>>")
        parts.append(f"```pycon\n{paragraph}\n```" if session else paragraph)
    return "\n\n".join(parts)
