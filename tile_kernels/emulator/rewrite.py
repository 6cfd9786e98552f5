"""Turn TileLang's generated CUDA into C++ for the emulator's headers.

Only declarations change: includes, shared memory, one exported entry per kernel. The arithmetic and
the indexing that g++ compiles are the generated text, on the same lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from . import ptx
from .errors import EmulationError
from .lowering import SharedBuffer

_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b\s*(.*?)\s*$")
_ON_CUDA = {("ifdef", "__CUDACC__"): True, ("if", "defined(__CUDACC__)"): True,
            ("ifndef", "__CUDACC__"): False, ("if", "!defined(__CUDACC__)"): False}  # fmt: skip
_MSVC_GUARD = re.compile(r"^#if defined\(_MSC_VER\).*?^#endif\n", re.S | re.M)
_INCLUDE = re.compile(
    r"^#include <(tl_templates/|cooperative_groups|cuda\.h|math_constants|curand).*\n", re.M
)
_MIN_BLOCKS = re.compile(r"__launch_bounds__\(\w+, (\d+)\)")
_SETMAXNREG = re.compile(r"(\bwarpgroup_reg_(?:de)?alloc<\d+>\()\)")
_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\([^;{]*\{")
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w: ]+?) (\w+)\[\];")
_PART = re.compile(r"void\* (\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)\)\);")
_STATIC = re.compile(r"__shared__ (?:__align__\(\d+\) )?([\w: ]+?) (\w+)\[(\d+)\];")
_LOCAL = re.compile(
    r"^( +)(?!extern|static|return|auto)([\w:]+(?: [\w:]+)*) (\w+)\[(\d+)\];$", re.M
)
_MARGIN = 64  # bytes on both sides of a thread's array, as emu::Local has it
_ARENA = "buf_dyn_shmem"
_UNSUPPORTED = [
    (re.compile(r"\b(?:asm|__asm__)\b"), "inline PTX, which has no meaning on a CPU"),
    (re.compile(r"\btl::tcgen05|\btcgen05"), "tcgen05 (tensor memory of sm_100)"),
    (re.compile(r"\bcurandState(?!Philox4_32_10)\w*"), "a generator of cuRAND other than Philox"),
    (re.compile(r"\bclc_\w+"), "cluster launch control (sm_100)"),
    (re.compile(r"_rs_sat\b"), "stochastic rounding, whose random bits only the hardware defines"),
]


def rewrite(
    source: str,
    shared: Mapping[str, Mapping[str, SharedBuffer]],
    kernels: Sequence[str],
    *,
    split_shared: bool = True,
    follow_locals: bool = False,
) -> str:
    """C++ for the emulator from a generated source.

    | argument | meaning |
    |---|---|
    | `shared` | per kernel, the sizes of its shared buffers |
    | `kernels` | names of the device functions to export |
    | `follow_locals` | tell the runtime of the arrays of a thread, for check mode |
    | `split_shared` | True: every buffer whose size is known gets its own memory, so overruns show; False: TileLang's own placement, so hazards of reused memory show |
    """  # noqa: E501
    source = ptx.translate(source)
    refuse_unsupported(source)
    source = _without_headers(source)
    starts = [(m.start(), m[1]) for m in _KERNEL.finditer(source)]
    if not starts:
        raise EmulationError("the generated source contains no kernel")
    pieces = [source[: starts[0][0]]]
    ends = [s for s, _ in starts[1:]] + [len(source)]
    for (start, name), end in zip(starts, ends, strict=True):
        piece = _place_shared(source[start:end], shared.get(name, {}), split_shared)
        min_blocks = _MIN_BLOCKS.search(piece)
        if min_blocks and min_blocks[1] != "1":
            piece = _SETMAXNREG.sub(rf"\g<1>{min_blocks[1]})", piece)
        pieces.append(_LOCAL.sub(_follow, piece) if follow_locals else piece)
    text = "".join(pieces)
    if "__shared__" in text:
        line = next(ln.strip() for ln in text.splitlines() if "__shared__" in ln)
        raise EmulationError(f"the emulator cannot place this shared-memory declaration: {line}")
    exports = "".join(f"\nEMU_EXPORT({k})" for k in dict.fromkeys(kernels))
    return f'#include "emu.h"\n{text}{exports}\n'


def _without_headers(source: str) -> str:
    """The source without the includes that the emulator's own headers replace."""
    return _INCLUDE.sub("", _MSVC_GUARD.sub("", source))


def _compiled_for_cpu(source: str) -> str:
    """The lines without those that only a CUDA compiler sees, by conditions on `__CUDACC__`."""
    kept = []
    open_conditions: list[tuple[bool, bool]] = []  # whether it hides lines, and its `#else` does
    for line in source.splitlines(keepends=True):
        condition = _CONDITION.match(line)
        if condition is None:
            if not any(hides for hides, _ in open_conditions):
                kept.append(line)
        elif condition[1].startswith("if"):
            on_cuda = _ON_CUDA.get((condition[1], condition[2]))
            open_conditions.append((on_cuda is True, on_cuda is False))
        elif open_conditions:
            _, otherwise = open_conditions.pop()
            if condition[1] != "endif":
                open_conditions.append((otherwise, otherwise))
    return "".join(kept)


def refuse_unsupported(source: str) -> None:
    """Raise a sentence for what is known not to work, before g++ says it in its own words."""
    body = _compiled_for_cpu(_without_headers(source))
    for pattern, what in _UNSUPPORTED:
        m = pattern.search(body)
        if m:
            reason = f"inline PTX: {ptx.refusal(body)}" if "asm" in m[0] else what
            line = body[body.rfind("\n", 0, m.start()) + 1 : body.find("\n", m.start())].strip()
            raise EmulationError(
                f"the kernel uses {reason}; the emulator does not provide it: {line}"
            )


def _follow(m: re.Match[str]) -> str:
    """A declaration of a thread's array with margins, and its registration, on the same line."""
    indent, kind, name, size = m.groups()
    room = f"alignas(16) char before[{_MARGIN}]; {kind} v[{size}]; char after[{_MARGIN}];"
    return (
        f"{indent}struct {{ {room} }} {name}_room; auto& {name} = emu::observed({name}_room.v); "
        f'emu::Local {name}_followed("{name}", {name});'
    )


def _place_shared(text: str, sizes: Mapping[str, SharedBuffer], split: bool) -> str:
    """Replace the shared-memory declarations of one kernel."""
    offsets = sorted(int(m[2]) for m in _PART.finditer(text))

    def dynamic(m: re.Match[str]) -> str:
        kind, name = m[1], m[2]
        label = "dynamic shared memory" if name == _ARENA else name
        known = sizes.get(name) if split else None
        size = known.size if known else 0  # 0: all of the launch's dynamic shared memory
        return f'{kind}* {name} = ({kind}*)emu::dyn_shared("{label}", {size}, 8 * sizeof({kind}));'

    def part(m: re.Match[str]) -> str:
        name, offset = m[1], int(m[2])
        known = sizes.get(name)
        if split and known:
            place = f"{known.size}, {known.elem_bits}, 1024, {offset}"
            return f'void* {name} = emu::shared_buf("{name}", {place});'
        room = next((o for o in offsets if o > offset), 1 << 20) - offset
        size, bits = (known.size, known.elem_bits) if known else (room, 8)
        return f'{m[0]} emu::name_shared("{name}", {name}, {size}, {bits});'

    def static(m: re.Match[str]) -> str:
        return f'{m[1]} (&{m[2]})[{m[3]}] = emu::static_shared<{m[1]}, {m[3]}>("{m[2]}");'

    text = _PART.sub(part, text)
    text = _DYNAMIC.sub(dynamic, text)
    text = _STATIC.sub(static, text)
    # An arena that no buffer lives in any more must not be reserved: it would hide overruns.
    uses = re.findall(rf"\b{_ARENA}\b", text)
    if len(uses) == 1:
        text = re.sub(rf"^ *uchar\* {_ARENA} = .*;$", "", text, flags=re.M)
    return text
