"""Inline PTX in user code, turned into C++ before compilation.

The common instructions are translated: moves, logic, arithmetic, conversions, loads and stores with
any cache hints, cp.async, shuffles and votes, barriers. An `asm` statement with another instruction
stays as it is, and `refusal` names the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

_ASM = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r'(?:\[(\w+)\]\s*)?"([^"]*)"\s*\((.*)\)$', re.S)
_C_TYPES = {
    "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t",
    "s8": "int8_t", "s16": "int16_t", "s32": "int32_t", "s64": "int64_t",
    "b8": "uint8_t", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t",
    "f32": "float", "f64": "double", "f16": "half_t", "bf16": "bfloat16_t", "pred": "bool",
    "f16x2": "__half2", "bf16x2": "__nv_bfloat162",
}  # fmt: skip
_SPECIAL = {
    "laneid": "uint32_t(tl::get_lane_idx())", "warpid": "uint32_t(tl::get_warp_idx())",
    "smid": "0u", "nsmid": "1u", "clock": "uint32_t(clock64())", "clock64": "uint64_t(clock64())",
    "globaltimer": "uint64_t(clock64())", "lanemask_lt": "((1u << tl::get_lane_idx()) - 1)",
    "lanemask_le": "(~0u >> (31 - tl::get_lane_idx()))",
    "lanemask_eq": "(1u << tl::get_lane_idx())",
    "lanemask_ge": "(~0u << tl::get_lane_idx())", "lanemask_gt": "(~0u << tl::get_lane_idx() << 1)",
}  # fmt: skip
for _axis in "xyz":
    _SPECIAL |= {
        f"tid.{_axis}": f"threadIdx.{_axis}",
        f"ctaid.{_axis}": f"blockIdx.{_axis}",
        f"ntid.{_axis}": f"blockDim.{_axis}",
        f"nctaid.{_axis}": f"gridDim.{_axis}",
    }
_BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {
    "ex2": "std::exp2", "lg2": "std::log2", "rcp": "tl::fast_rcp", "rsqrt": "rsqrtf",
    "sqrt": "std::sqrt", "tanh": "std::tanh", "sin": "std::sin", "cos": "std::cos",
}  # fmt: skip
_ROUND = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_NOTHING = {"prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol", "setmaxnreg",
            "createpolicy", "pmevent"}  # fmt: skip


class UnknownError(Exception):
    """An instruction, or a form of one, that is not translated."""


@dataclass
class _Asm:
    """One statement: its template and the C++ expressions of its operands."""

    template: str
    operands: list[str]
    names: dict[str, str] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)  # name -> PTX type


def translate(source: str) -> str:
    """The source with every `asm` statement replaced that consists of known instructions."""
    out, at = [], 0
    for start, end, text in _statements(source):
        try:
            code = _convert(text)
        except UnknownError:
            continue
        out += [source[at:start], code, "\n" * source.count("\n", start, end)]
        at = end
    return "".join([*out, source[at:]])


def refusal(source: str) -> str | None:
    """Why the first `asm` statement that `translate` has left is not supported."""
    for _, _, text in _statements(source):
        try:
            _convert(text)
        except UnknownError as error:
            return str(error)
    return None


# ---- parsing ------------------------------------------------------------------------------------


def _statements(source: str) -> Iterator[tuple[int, int, str]]:
    """Start, end (behind the semicolon) and the text in the parentheses of `asm` statements."""
    for m in _ASM.finditer(source):
        depth, i = 1, m.end()
        while depth and i < len(source):
            string = _STRING.match(source, i)
            if string:
                i = string.end()
                continue
            depth += {"(": 1, ")": -1}.get(source[i], 0)
            i += 1
        end = source.find(";", i) + 1
        if end and not source[i : end - 1].strip():
            yield m.start(), end, source[m.end() : i - 1].replace("\\\n", " \n")


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that are in no string and no bracket."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        string = _STRING.match(text, i)
        if string:
            i = string.end()
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[i], 0)
        if text[i] == separator and not depth:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]


def _convert(text: str) -> str:
    sections = _split(text, ":")
    template = "".join(_STRING.findall(sections[0]))
    for escape, plain in ((r"\n", "\n"), (r"\t", " "), (r"\"", '"')):
        template = template.replace(escape, plain)
    asm = _Asm(template, [])
    for section in sections[1:3]:
        for part in filter(str.strip, _split(section, ",")):
            m = _OPERAND.match(part.strip())
            if m is None:
                raise UnknownError(f"the operand {part.strip()}")
            if m[1]:
                asm.names[m[1]] = str(len(asm.operands))
            asm.operands.append(f"({m[3].strip()})")
    template = re.sub(r"//.*|/\*.*?\*/", "", template)
    # The braces of a block disappear (they follow a statement, or nothing); those of vectors stay.
    flat = re.sub(r";\s*\}", ";", re.sub(r"(^|;)\s*\{", r"\1", template))
    code = [_instruction(asm, s) for s in flat.split(";")]
    return "{ " + " ".join(c for c in code if c) + " }"


# ---- operands -----------------------------------------------------------------------------------


def _value(asm: _Asm, word: str) -> str:
    """C++ for an operand that is read."""
    word = word.strip()
    if word.startswith("%%") or (word.startswith("%") and word[1:] in _SPECIAL):
        name = word.lstrip("%")
        if name not in _SPECIAL:
            raise UnknownError(f"the special register %{name}")
        return _SPECIAL[name]
    if m := re.fullmatch(r"%(\d+)", word):
        return asm.operands[int(m[1])]
    if m := re.fullmatch(r"%\[(\w+)\]", word):
        return asm.operands[int(asm.names[m[1]])]
    if m := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", word):
        return f"__uint_as_float(0x{m[1]}u)"
    if m := re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?", word):
        octal = re.fullmatch(r"0[0-7]+", m[2])
        number = int(m[2], 8 if octal else 0)
        return f"{m[1]}{m[2]}" + ("u" if not m[1] and number < 2**32 else "ll")
    if re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", word):
        return word
    if word.startswith("!"):
        return f"!{_value(asm, word[1:])}"
    if word in asm.registers:
        return f"ptx_{word}"
    raise UnknownError(f"the operand {word}")


def _as(asm: _Asm, word: str, kind: str) -> str:
    if kind not in _C_TYPES:
        raise UnknownError(f"the type .{kind}")
    return f"emu::ptx_as<{_C_TYPES[kind]}>({_value(asm, word)})"


def _store(asm: _Asm, word: str, code: str) -> str:
    """Statement that writes an operand; `_` takes nothing."""
    if word.strip() == "_":
        return f"(void)({code});"
    return f"emu::ptx_set({_value(asm, word)}, {code});"


def _vector(word: str) -> list[str]:
    word = word.strip()
    return _split(word[1:-1], ",") if word.startswith("{") else [word]


def _address(asm: _Asm, word: str, space: str) -> str:
    m = re.fullmatch(r"\[\s*([^\]+]+?)\s*(?:\+\s*(-?\w+))?\s*\]", word.strip())
    if m is None:
        raise UnknownError(f"the address {word.strip()}")
    at = f"emu::ptx_as<uint64_t>({_value(asm, m[1])})" + (f" + {m[2]}" if m[2] else "")
    if space.startswith("shared"):
        return f"emu::smem_ptr(uint32_t({at}))"
    return f"reinterpret_cast<char *>({at})"


# ---- instructions -------------------------------------------------------------------------------


def _instruction(asm: _Asm, text: str) -> str:
    text = " ".join(text.split())
    if not text:
        return ""
    if text.startswith(".reg"):
        return _declare(asm, text)
    guard = re.match(r"@(!?)(\S+)\s+", text)
    if guard:
        rest = _instruction(asm, text[guard.end() :])
        return f"if ({guard[1]}bool({_value(asm, guard[2])})) {{ {rest} }}"
    opcode, _, rest = text.partition(" ")
    parts = opcode.split(".")
    operands = [o.strip() for o in _split(rest, ",")] if rest.strip() else []
    translate_one = _TRANSLATORS.get(parts[0])
    if parts[0] in _NOTHING:
        return ""
    if translate_one is None:
        raise UnknownError(f"the PTX instruction {opcode}")
    try:
        return translate_one(asm, parts, operands)
    except UnknownError as error:
        raise UnknownError(f"the PTX instruction {opcode} with {error}") from None
    except (IndexError, ValueError):
        raise UnknownError(f"the PTX instruction {opcode} in this form") from None


def _declare(asm: _Asm, text: str) -> str:
    kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()  # type: ignore[union-attr]
    if kind not in _C_TYPES or "<" in names:
        raise UnknownError(f"the declaration {text}")
    for name in names.split(","):
        asm.registers[name.strip()] = kind
    return " ".join(f"{_C_TYPES[kind]} ptx_{n.strip()} {{}};" for n in names.split(","))


_Translator = Callable[[_Asm, Sequence[str], Sequence[str]], str]


def _mov(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    target, source = _vector(args[0]), _vector(args[1])
    if len(target) == len(source) == 1:
        return _store(asm, target[0], _value(asm, source[0]))
    wide = _C_TYPES[parts[-1]]
    if len(target) == 1:  # pack
        elements = ", ".join(_value(asm, s) for s in source)
        return _store(asm, target[0], f"emu::ptx_pack<{wide}>({elements})")
    code = f"auto ptx_whole = emu::ptx_as<{wide}>({_value(asm, source[0])}); "
    part = {2: "uint32_t" if wide == "uint64_t" else "uint16_t", 4: "uint16_t"}[len(target)]
    for i, t in enumerate(target):
        code += _store(asm, t, f"{part}(ptx_whole >> {8 * i} * sizeof({part}))")
    return "{ " + code + " }"


def _binary(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    a, b = (_as(asm, x, parts[-1]) for x in args[1:3])
    if parts[-1].endswith("x2"):
        return _store(asm, args[0], f"tl::{parts[0]}2({a}, {b})")
    return _store(asm, args[0], f"{_C_TYPES[parts[-1]]}({a} {_BINARY[parts[0]]} {b})")


def _mul(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    kind, c = parts[-1], None
    a, b = (_as(asm, x, kind) for x in args[1:3])
    if parts[0] in {"mad", "fma"}:
        wide_kind = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in parts else kind
        c = _as(asm, args[3], wide_kind)
    if kind.endswith("x2"):
        return _store(asm, args[0], f"tl::fma2({a}, {b}, {c})" if c else f"tl::mul2({a}, {b})")
    if kind.startswith(("f", "bf")):
        code = f"std::fma(float({a}), float({b}), float({c}))" if c else f"{a} * {b}"
        if kind == "f64":
            code = f"std::fma({a}, {b}, {c})" if c else f"{a} * {b}"
        return _store(asm, args[0], f"{_C_TYPES[kind]}({code})")
    wide = _C_TYPES[f"{kind[0]}{2 * int(kind[1:])}"] if int(kind[1:]) < 64 else "__int128"
    code = f"{wide}({a}) * {wide}({b})"
    if "hi" in parts:
        code = f"({code}) >> {kind[1:]}"
    result = wide if "wide" in parts else _C_TYPES[kind]
    return _store(asm, args[0], f"{result}({result}({code}) + {c})" if c else f"{result}({code})")


def _min_max(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    a, b = (_as(asm, x, parts[-1]) for x in args[1:3])
    if parts[-1].endswith("x2"):
        return _store(asm, args[0], f"tl::{parts[0]}2{'_nan' * ('NaN' in parts)}({a}, {b})")
    name = f"tl::{parts[0]}_nan" if "NaN" in parts else parts[0]
    return _store(asm, args[0], f"{name}({a}, {b})")


def _not(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    sign = {"not": "~", "neg": "-"}[parts[0]]
    return _store(asm, args[0], f"{_C_TYPES[parts[-1]]}({sign}{_as(asm, args[1], parts[-1])})")


def _abs(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    a = _as(asm, args[1], parts[-1])
    return _store(asm, args[0], f"tl::abs2({a})" if parts[-1].endswith("x2") else f"std::abs({a})")


def _shift(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    a, by, kind = _as(asm, args[1], parts[-1]), _as(asm, args[2], "u32"), parts[-1]
    sign = "<<" if parts[0] == "shl" else ">>"
    beyond = f"({a} < 0 ? -1 : 0)" if kind.startswith("s") and sign == ">>" else "0"
    bits = int(kind[1:])
    code = f"({by} >= {bits}u ? {_C_TYPES[kind]}({beyond}) : {_C_TYPES[kind]}({a} {sign} {by}))"
    return _store(asm, args[0], code)


def _lop3(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    a, b, c, table = (_as(asm, x, "b32") for x in args[1:5])
    return _store(asm, args[0], f"emu::ptx_lop3({a}, {b}, {c}, {table})")


def _prmt(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    if parts[-1] != "b32":
        raise UnknownError(f"the mode {parts[-1]}")
    a, b, c = (_as(asm, x, "b32") for x in args[1:4])
    return _store(asm, args[0], f"emu::ptx_prmt({a}, {b}, {c})")


def _cvt(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    target, source = parts[-2], parts[-1]
    how = set(parts[1:-2])
    if target == "tf32":
        return _store(asm, args[0], f"emu::ptx_tf32({_as(asm, args[1], 'f32')})")
    if target in {"f16x2", "bf16x2"} and len(args) == 3 and source == "f32":
        high, low = (_as(asm, x, "f32") for x in args[1:3])
        name = "__float22half2_rn" if target == "f16x2" else "__float22bfloat162_rn"
        if "relu" in how:
            high, low = f"max({high}, 0.f)", f"max({low}, 0.f)"
        return _store(asm, args[0], f"{name}(make_float2({low}, {high}))")
    if target in {"e4m3x2", "e5m2x2"} and source == "f32":
        high, low = (_as(asm, x, "f32") for x in args[1:3])
        kind = "__NV_E4M3" if target == "e4m3x2" else "__NV_E5M2"
        code = f"__nv_cvt_float2_to_fp8x2(make_float2({low}, {high}), __NV_SATFINITE, {kind})"
        return _store(asm, args[0], f"uint16_t({code})")
    if source in {"e4m3x2", "e5m2x2"} and target == "f16x2":
        kind = "__NV_E4M3" if source == "e4m3x2" else "__NV_E5M2"
        return _store(asm, args[0], f"__tl_cvt_fp8x2_to_half2({_as(asm, args[1], 'u16')}, {kind})")
    if target not in _C_TYPES or source not in _C_TYPES or target.endswith("x2"):
        raise UnknownError(f"the types .{target}.{source}")
    a, to_float = _as(asm, args[1], source), target.startswith(("f", "bf"))
    from_float = source.startswith(("f", "bf"))
    if "sat" in how and to_float:
        return _store(asm, args[0], f"{_C_TYPES[target]}(__saturatef(float({a})))")
    rounding = next((r for r in _ROUND if r in how), None)
    if from_float and not to_float:
        wide = "double" if source == "f64" else "float"
        code = f"std::{_ROUND[rounding or 'rzi']}({wide}({a}))"
        return _store(asm, args[0], f"emu::to_int<{_C_TYPES[target]}>({code})")
    if from_float and to_float and rounding:
        return _store(asm, args[0], f"{_C_TYPES[target]}(std::{_ROUND[rounding]}(float({a})))")
    if "sat" in how:
        return _store(asm, args[0], f"emu::ptx_saturate<{_C_TYPES[target]}>({a})")
    if to_float and how & {"rz", "rm", "rp"}:
        raise UnknownError("a directed rounding")
    return _store(asm, args[0], f"{_C_TYPES[target]}({a})")


def _setp(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    if parts[1] not in _COMPARE or len(parts) != 3:
        raise UnknownError(f"the comparison {'.'.join(parts[1:-1])}")
    a, b = (_as(asm, x, parts[-1]) for x in args[1:3])
    return _store(asm, args[0], f"{a} {_COMPARE[parts[1]]} {b}")


def _selp(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    a, b = (_as(asm, x, parts[-1]) for x in args[1:3])
    return _store(asm, args[0], f"({_value(asm, args[3])} ? {a} : {b})")


def _function(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    if parts[-1] not in {"f32", "f64"}:
        raise UnknownError(f"the type .{parts[-1]}")
    kind = _C_TYPES[parts[-1]]
    return _store(asm, args[0], f"{kind}({_UNARY[parts[0]]}({_as(asm, args[1], parts[-1])}))")


def _bits(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    name = {"popc": "__popc", "clz": "__clz", "brev": "__brev"}[parts[0]]
    if parts[-1] == "b64":
        name += "ll"
    return _store(asm, args[0], f"{name}({_as(asm, args[1], parts[-1])})")


def _bfe(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    a = _as(asm, args[1], parts[-1])
    at, count = (_as(asm, x, "u32") for x in args[2:4])
    return _store(asm, args[0], f"emu::ptx_bfe({a}, {at}, {count})")


def _memory(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    """ld and st: spaces, vectors; cache hints and a policy operand have no meaning here."""
    space = next((p for p in parts if p.startswith(("shared", "global", "local", "const"))), "")
    if space.startswith(("local", "const", "shared::cluster")):
        raise UnknownError(f"the state space .{space}")
    kind, count = parts[-1], next((int(p[1:]) for p in parts if p in {"v2", "v4", "v8"}), 1)
    if kind not in _C_TYPES or kind == "pred":
        raise UnknownError(f"the type .{kind}")
    load = parts[0] == "ld"
    where, data = (args[1], args[0]) if load else (args[0], args[1])
    registers, c_type = _vector(data), _C_TYPES[kind]
    order = {"acquire": 2, "release": 3}.get(
        next((p for p in parts if p in {"acquire", "release"}), ""), 0
    )
    atomic = order or "relaxed" in parts or "volatile" in parts
    code = f"auto *ptx_p = reinterpret_cast<{c_type} *>({_address(asm, where, space)}); "
    if count > 1:
        access = "emu::READ" if load else "emu::WRITE"
        code += f"emu::require_aligned(ptx_p, {count} * sizeof({c_type}), {access}); "
    for i, register in enumerate(registers):
        if load:
            code += _store(
                asm, register, f"AtomicLoad(ptx_p + {i}, {order})" if atomic else f"ptx_p[{i}]"
            )
        elif atomic:
            code += f"AtomicStore(ptx_p + {i}, {_as(asm, register, kind)}, {order});"
        else:
            code += f"ptx_p[{i}] = {_as(asm, register, kind)};"
    return "{ " + code + " }"


def _cp(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    if parts[1:2] != ["async"] or "bulk" in parts:
        raise UnknownError("a bulk copy")
    if "commit_group" in parts:
        return "emu::cp_commit();"
    if "wait_all" in parts:
        return "emu::cp_commit(); emu::cp_wait(0);"
    if "wait_group" in parts:
        return f"emu::cp_wait({_value(asm, args[0])});"
    target, source = _address(asm, args[0], "shared"), _address(asm, args[1], "global")
    size = _value(asm, args[2])
    copied = _value(asm, args[3]) if len(args) > 3 else size
    return f"emu::cp_async({target}, {source}, int({size}), int({copied}));"


def _shfl(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    mode = {"bfly": "XOR", "idx": "IDX", "up": "UP", "down": "DOWN"}[parts[2]]
    target = args[0].split("|")[0]
    if "|" in args[0]:
        raise UnknownError("a predicate result")
    value, lane, clamp, mask = (_as(asm, x, "b32") for x in args[1:5])
    width = f"int(32u - ({clamp} >> 8 & 31u))"
    return _store(asm, target, f"emu::shfl<emu::{mode}>({mask}, {value}, int({lane}), {width})")


def _vote(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    name = {"ballot": "__ballot_sync", "any": "__any_sync", "all": "__all_sync"}[parts[2]]
    return _store(asm, args[0], f"{name}({_as(asm, args[2], 'b32')}, {_value(asm, args[1])})")


def _redux(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    name, kind = f"__reduce_{parts[2]}_sync", parts[-1]
    if name not in {f"__reduce_{n}_sync" for n in ("add", "min", "max", "and", "or", "xor")}:
        raise UnknownError(f"the operation {parts[2]}")
    return _store(asm, args[0], f"{name}({_as(asm, args[2], 'b32')}, {_as(asm, args[1], kind)})")


def _elect(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    """elect.sync d|p, mask: always the lowest lane of the mask."""
    mask, (lane, chosen) = _as(asm, args[1], "b32"), args[0].split("|")
    lowest = f"__builtin_ctz({mask})"
    code = f"__syncwarp({mask}); {_store(asm, lane, f'uint32_t({lowest})')} "
    return code + _store(asm, chosen, f"tl::get_lane_idx() == {lowest}")


def _bar(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    if "cluster" in parts:
        raise UnknownError("a cluster")
    if parts[1:2] == ["warp"]:
        return f"__syncwarp({_as(asm, args[0], 'b32')});"
    action = next((p for p in parts if p in {"sync", "arrive"}), None)
    if action is None:
        raise UnknownError("a reduction")
    number, wait = _value(asm, args[0]), "true" if action == "sync" else "false"
    count = _value(asm, args[1]) if len(args) > 1 else "0"
    return f"emu::bar_sync(int({number}), int({count}), {wait});"


def _fence(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    if "proxy" in parts:
        return "tl::fence_proxy_async();"
    return "__threadfence_block();" if "cta" in parts else "__threadfence();"


def _activemask(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    return _store(asm, args[0], "__activemask()")


def _trap(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    return "__trap();"


def _nanosleep(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    return f"__nanosleep({_value(asm, args[0])});"


def _cvta(asm: _Asm, parts: Sequence[str], args: Sequence[str]) -> str:
    if any(p.startswith("shared") for p in parts) and "to" in parts:
        pointer = f"reinterpret_cast<void *>({_as(asm, args[1], 'u64')})"
        return _store(asm, args[0], f"emu::smem_addr({pointer})")
    if any(p.startswith("shared") for p in parts):
        return _store(asm, args[0], f"uint64_t(emu::smem_ptr({_as(asm, args[1], 'u32')}))")
    return _store(asm, args[0], _value(asm, args[1]))


_TRANSLATORS: dict[str, _Translator] = {
    "mov": _mov, "mul": _mul, "mad": _mul, "fma": _mul, "min": _min_max, "max": _min_max,
    "not": _not, "neg": _not, "abs": _abs, "shl": _shift, "shr": _shift, "lop3": _lop3,
    "prmt": _prmt, "cvt": _cvt, "setp": _setp, "selp": _selp, "popc": _bits, "clz": _bits,
    "brev": _bits, "bfe": _bfe, "ld": _memory, "st": _memory, "cp": _cp, "shfl": _shfl,
    "vote": _vote, "redux": _redux, "elect": _elect, "bar": _bar, "barrier": _bar,
    "membar": _fence, "fence": _fence, "activemask": _activemask, "trap": _trap,
    "nanosleep": _nanosleep, "cvta": _cvta,
    **dict.fromkeys(_BINARY, _binary), **dict.fromkeys(_UNARY, _function),
}  # fmt: skip
