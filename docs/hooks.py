"""What the site has beside its pages: a reference made of docstrings, and files that pages link to.

MkDocs calls `on_files` and `on_page_markdown`.
"""

import importlib
import inspect
import posixpath
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = "docs/"
# Pages of the reference: a title, and the modules whose public names it has.
REFERENCE = {
    "package": ("The package", ["tile_kernels", "tile_kernels.config", "tile_kernels.rand",
        "tile_kernels.utils"]),
    "moe": (
        "Routing",
        ["tile_kernels.moe", "tile_kernels.modeling.moe", "tile_kernels.modeling.fp8_experts"],
    ),
    "quant": (
        "Quantization",
        [
            "tile_kernels.quant",
            "tile_kernels.quant.per_token_cast_to_e5m6_kernel",
            "tile_kernels.quant.cast_back_e5m6_kernel",
            "tile_kernels.modeling.quant",
        ],
    ),
    "norm": (
        "RMS norm and rotary embedding",
        ["tile_kernels.transform", "tile_kernels.modeling.norm"],
    ),
    "gemm": ("Matrix products", ["tile_kernels.gemm"]),
    "engram": ("Engram", ["tile_kernels.engram", "tile_kernels.modeling.engram"]),
    "mhc": ("Hyper-connections", ["tile_kernels.mhc", "tile_kernels.modeling.mhc"]),
    "attention": ("Attention", ["tile_kernels.attention", "tile_kernels.modeling.attention"]),
    "transpose": ("Transposes", ["tile_kernels.transpose"]),
    "ep": ("Expert parallelism", ["tile_kernels.ep"]),
    "integrations": (
        "Integrations",
        [
            f"tile_kernels.integrations.{name}"
            for name in (
                "deep_gemm",
                "serving",
                "vllm",
                "sglang",
                "plugins",
                "megatron",
                "mx",
                "transformers",
            )
        ],
    ),
    "references": (
        "References",
        [
            "tile_kernels.torch",
            "tile_kernels.torch.engram",
            "tile_kernels.torch.mhc",
            "tile_kernels.moe.scoring",
            "tile_kernels.quant.casting",
            "tile_kernels.quant.formats",
            "tile_kernels.quant.scales",
        ],
    ),
}  # fmt: skip
# Pages of families, and where the reference has their functions.
FAMILIES = {
    f"{name}.md": name
    for name in REFERENCE
    if name not in ("package", "integrations", "references")
}
FAMILIES["integrations/index.md"] = "integrations"
FAMILIES["indexer.md"] = "attention"
FAMILIES["fp8-layer.md"] = "moe"
WIDTH = 88  # of code
SECTIONS = "Args|Attributes|Returns|Yields|Raises|Example"  # of docstrings

_FRAME = re.compile(r"^(`{3,}).*?^\1`*$", flags=re.S | re.M)
_LINK = re.compile(r"\]\((?![a-z]+:|[#/])([^)#\s]+)")
_MARKED = re.compile(r"<!-- reference: begin -->.*?<!-- reference: end -->")


# ---- links --------------------------------------------------------------------------------------


def with_links(text: str, document: str, change: Callable[[str, str], str]) -> str:
    """A document with `change(link, path in the repository)` for its links to files.

    What stands in frames is no link.
    """
    folder = posixpath.dirname(document)

    def changed(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        return f"]({change(match[1], path)}"

    parts, end = [], 0
    for frame in _FRAME.finditer(text):
        parts += [_LINK.sub(changed, text[end : frame.start()]), frame[0]]
        end = frame.end()
    return "".join([*parts, _LINK.sub(changed, text[end:])])


def in_site(path: str) -> bool:
    """Whether MkDocs itself has that file of the repository."""
    return path.startswith(DOCS) and not path.endswith(".py")


def links_of(text: str, document: str) -> list[str]:
    """What a document links to outside of the site; raises if the target does not exist."""
    found = []

    def note(link: str, path: str) -> str:
        if not in_site(path):
            if path.startswith("..") or not (ROOT / path).exists():
                raise PluginError(f"{document} links to {link}, but there is no {path}")
            found.append(path)
        return link

    with_links(text, document, note)
    return found


def for_site(text: str, document: str, here: str) -> str:
    """A document whose links lead to pages of the site; it is the page `here` of it."""

    def change(link: str, path: str) -> str:
        if in_site(path) and document.startswith(DOCS):
            return link  # from page to page: as it is
        page = path.removeprefix(DOCS) if in_site(path) else page_of(path)
        return posixpath.relpath(page, posixpath.dirname(here) or ".")

    return with_links(text, document, change)


# ---- files --------------------------------------------------------------------------------------


def page_of(path: str) -> str:
    """Where the site has a file or a folder of the repository that is not among the documents."""
    return f"source/{re.sub('[^a-z0-9]+', '-', path.lower())}.md"


def document_of(path: str) -> tuple[str, str]:
    """What a page shows of a file or a folder, and which document that is.

    Documents are shown as they are and other text in a frame; of a folder its README, or else a
    list of its files.
    """
    file = ROOT / path
    if file.is_dir():
        if (file / "README.md").exists():
            return document_of(f"{path}/README.md")
        names = sorted(part.name for part in file.glob("[!.]*") if part.is_file())
        listed = "\n".join(f"- [{name}]({name})" for name in names)
        return f"# {path}\n\n{listed}\n", f"{path}/README.md"
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PluginError(f"{path} is linked to, but is no text that a page can show") from error
    if path.endswith(".md"):
        return text, path
    return f"# {path}\n\n{framed(text, file.suffix[1:])}\n", path


def framed(text: str, language: str = "") -> str:
    """Text in a frame whose marks are longer than those that stand in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    end = "" if text.endswith("\n") else "\n"
    return f"{marks}{language}\n{text}{end}{marks}"


def file_pages(documents: dict[str, str]) -> dict[str, str]:
    """Pages of what documents (by their path) link to, and of what these link to in turn."""
    wanted = [path for name, text in documents.items() for path in links_of(text, name)]
    pages: dict[str, str] = {}
    while wanted:
        path = wanted.pop()
        if page_of(path) not in pages:
            text, document = document_of(path)
            pages[page_of(path)] = for_site(text, document, page_of(path))
            wanted += links_of(text, document)
    return pages


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the reference, and what pages link to outside of their folder."""
    documents = {DOCS + file.src_uri: file.content_string for file in files.documentation_pages()}
    pages = file_pages(documents)
    pages |= {f"reference/{name}.md": reference(*REFERENCE[name]) for name in REFERENCE}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside lead to their pages, and families to their reference.

    The reference is in the site only, so its links cannot stand in the documents themselves.
    """
    name = page.file.src_uri
    if name.startswith(("source/", "reference/")):
        return markdown
    markdown = for_site(markdown, DOCS + name, name)
    links = [f"[{title}](reference/{key}.md)" for key, (title, _) in REFERENCE.items()]
    markdown = _MARKED.sub(", ".join(links), markdown)
    if name == "operators.md":
        markdown = linked_operators(markdown)
    if name in FAMILIES:
        root = posixpath.relpath(".", posixpath.dirname(name) or ".")
        markdown += (
            f"\n\n## Reference\n\n[All functions]({root}/reference/{FAMILIES[name]}.md) with their "
            f"docstrings, and [the references]({root}/reference/references.md) that define them.\n"
        )
    return markdown


def linked_operators(markdown: str) -> str:
    """The list of operators with a link from each name to its docstring."""
    lines, family = [], ""
    for line in markdown.splitlines():
        if line.startswith("## "):
            family = line.removeprefix("## ")
        page = "norm" if family == "transform" else family
        lines.append(re.sub(r"^\| `(\w+)` \|", rf"| [`\1`](reference/{page}.md#\1) |", line))
    return "\n".join(lines)


# ---- the reference ------------------------------------------------------------------------------


def reference(title: str, modules: list[str]) -> str:
    """A page: every public name with its call and its docstring."""
    parts = [f"# {title}: reference"]
    for name in modules:
        module = importlib.import_module(name)
        parts.append(f"## `{name}`")
        for public in public_names(module):
            parts += entry(public, getattr(module, public), "###")
    return linked_names("\n\n".join(parts) + "\n")


def linked_names(page: str) -> str:
    """A page of the reference with links where its text names another function of the page.

    Docstrings often describe an argument as that of another function.
    """
    known = set(re.findall(r"^### `(\w+)`$", page, flags=re.M))

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name}`](#{name.lower()})" if name in known else match[0]

    lines, here, in_frame = [], "", False
    for line in page.splitlines():
        if line.startswith("```"):
            in_frame = not in_frame
        heading = re.match(r"#+ `(\w+)", line)
        if heading:
            here = heading[1]
        elif not in_frame:
            first, bar, rest = line.partition(" | ") if line.startswith("| ") else ("", "", line)
            text = re.sub(r"(?<![\[`\w])`(\w+)`(?![\]`])", link, rest)
            lines.append(first + bar + text.replace(f"[`{here}`](#{here.lower()})", f"`{here}`"))
            continue
        lines.append(line)
    return "\n".join(lines) + "\n"


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
    """A function or a class, and the methods of a class, those of its bases in the package too."""
    method = name.partition(".")[2]
    label = f' {{ data-toc-label=".{method}" }}' if method else ""  # narrow, in the page's contents
    title = f"{mark} `{name}`{label}"
    parts = [title, *called(name, value), as_markdown(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        for method, attribute in members(value).items():
            function = getattr(attribute, "__func__", attribute)  # of class and static methods
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                parts += entry(f"{name}.{method}", function, mark + "#")
    return parts


def members(value: type) -> dict[str, Any]:
    """What a class and its bases in this package define, its own first."""
    found: dict[str, Any] = {}
    for each in value.__mro__:
        if each.__module__.startswith("tile_kernels"):
            found = {**found, **{k: v for k, v in vars(each).items() if k not in found}}
    return found


def called(name: str, value: Any) -> list[str]:
    """How it is called, where Python can tell."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return []
    if "iterable" in signature.parameters:
        return []  # a tuple, which its class methods make
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    short = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    call = f"{name}{short}"
    if len(call) > WIDTH:
        lines = textwrap.wrap(str(short)[1:-1], WIDTH - 4)
        call = "\n".join([f"{name}(", *(f"    {line}" for line in lines), ")"])
    return [framed(call, "python")]


def as_markdown(docstring: str) -> str:
    """A docstring: sections as lists, sessions (`>>>`) in frames."""
    prose, *sections = re.split(rf"^({SECTIONS}):\n", docstring, flags=re.M)
    parts = [framed_sessions(prose)]
    for title, body in zip(sections[::2], sections[1::2]):
        text = textwrap.dedent(body).strip("\n")
        if title in ("Args", "Attributes", "Raises"):
            entries = re.findall(r"^(\S.*?): (.*(?:\n .*)*)", text, flags=re.M)
            cells = [(names(head), " ".join(rest.split())) for head, rest in entries]
            rows = [f"| {head} | {rest.replace('|', chr(92) + '|')} |" for head, rest in cells]
            parts.append("\n".join([f"| {title} | |", "|---|---|", *rows]))
        else:
            parts += [f"**{title}**", framed_sessions(text)]
    return "\n\n".join(part for part in parts if part.strip())


def names(head: str) -> str:
    """The names at the head of an entry, each as code."""
    return ", ".join(f"`{name}`" for name in re.split(r",\s*", head))


def framed_sessions(text: str) -> str:
    """Paragraphs, those that are sessions (`>>>`) in frames."""
    parts = []
    for paragraph in text.strip("\n").split("\n\n"):
        session = paragraph.lstrip().startswith(">>>")
        parts.append(framed(textwrap.dedent(paragraph), "pycon") if session else paragraph)
    return "\n\n".join(parts)
