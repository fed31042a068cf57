"""LLVM IR of a tensor program: exactly its loops, tiles, lanes and unrolled copies, nothing that a compiler chose.

The optimiser may clean up (registers, addresses, fused multiply-add) but gets no loop to vectorise, unroll or
interchange: those passes are off (`compile.py`), so a serial loop stays serial. Every nest is a function
`nest0(buffers..., begin, end)` over iterations of its outermost loop; `repeat(buffers..., n)` runs all of them n times.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

import numpy as np

from foretrace.cost.programs.program import (
    DTYPES,
    Access,
    Expression,
    Loop,
    LoopKind,
    LoopNest,
    Purpose,
    Statement,
    TensorProgram,
    leaves_under,
)

_FLAGS = "contract"  # a product and a sum may become one operation; nothing else may be reordered
_NAMES = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}


def parameters(program: TensorProgram) -> tuple[str, ...]:
    """Return buffers that the functions take as pointers, in order."""
    return tuple(each.name for each in program.having(Purpose.INPUT, Purpose.OUTPUT, Purpose.TEMPORARY))


@dataclass(frozen=True, kw_only=True)
class WrittenModule:
    """LLVM IR, and how often its blocks run: per nest, by the number in a block's name, (loops entered, iterations)."""

    text: str
    trips: tuple[dict[int, tuple[int, int]], ...]


def module(program: TensorProgram) -> WrittenModule:
    """Return the whole module."""
    emitted = [_Nest(program, i, nest) for i, nest in enumerate(program.nests)]
    declared = sorted({each for nest in emitted for each in nest.intrinsics})
    names = [f"%p{i}" for i in range(len(parameters(program)))]
    arguments = ", ".join(f"ptr {name}" for name in names)
    calls = [
        f"  call void @nest{i}({arguments}, i64 0, i64 {nest.extent if isinstance(nest, Loop) else 1})"
        for i, nest in enumerate(program.nests)
    ]
    barrier = '  call void asm sideeffect "", "~{memory}"()'
    repeat = [
        f"define void @repeat({', '.join([arguments, 'i64 %n'])}) {{",
        "start:", "  br label %again", "again:",
        "  %i = phi i64 [ 0, %start ], [ %j, %again ]",
        *calls, barrier,
        "  %j = add i64 %i, 1", "  %more = icmp slt i64 %j, %n", "  br i1 %more, label %again, label %end",
        "end:", "  ret void", "}",
    ]  # fmt: skip
    text = "\n".join([*(each.text() for each in emitted), *repeat, *declared]) + "\n"
    return WrittenModule(text=text, trips=tuple(each.trips for each in emitted))


def _scalar(dtype: str) -> str:
    return "float" if dtype == "float32" else "double"


@dataclass(frozen=True)
class _Scope:
    """Where emission stands: variables as SSA names or, where unrolled, as numbers; the loop that is lanes."""

    variables: dict[str, str | int] = field(default_factory=dict)
    lanes: int = 1
    lane_variable: str = ""

    def with_variable(self, name: str, value: str | int) -> _Scope:
        return _Scope({**self.variables, name: value}, self.lanes, self.lane_variable)


class _Nest:
    """One function."""

    def __init__(self, program: TensorProgram, number: int, nest: LoopNest) -> None:
        self.program, self.number = program, number
        self.scalar = _scalar(program.dtype)
        self.align = DTYPES[program.dtype]
        self.lines: list[str] = []
        self.intrinsics: set[str] = set()
        self.count, self.trips, self.runs = 0, dict[int, tuple[int, int]](), 1
        self.block = "start"
        self.pointers = {name: f"%p{i}" for i, name in enumerate(parameters(program))}
        self.allocas = self.local_buffers(nest)
        if isinstance(nest, Loop) and nest.kind is not LoopKind.UNROLLED and nest.kind is not LoopKind.VECTORISED:
            self.loop(nest, _Scope(), "%begin", "%end")
        else:
            self.node(nest, _Scope())

    def text(self) -> str:
        given = [f"ptr noalias %p{i}" for i in range(len(parameters(self.program)))]
        head = f"define void @nest{self.number}({', '.join([*given, 'i64 %begin', 'i64 %end'])}) noinline nounwind {{"
        return "\n".join([head, "start:", *self.allocas, *self.lines, "  ret void", "}"])

    def local_buffers(self, nest: LoopNest) -> list[str]:
        used = {a.buffer for _, leaf in leaves_under(nest) for a in (leaf.target, *leaf.reads)}
        found: list[str] = []
        for buffer in self.program.having(Purpose.LOCAL):
            if buffer.name in used:
                name = f"%l{len(found)}"
                found.append(f"  {name} = alloca {self.scalar}, i64 {buffer.elements}, align 64")
                self.pointers[buffer.name] = name
        return found

    def add(self, instruction: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {instruction}")
        return f"%v{self.count}"

    # --- loops -------------------------------------------------------------------------------------------------

    def node(self, node: LoopNest, scope: _Scope) -> None:
        if isinstance(node, Statement):
            self.statement(node, scope)
        elif node.kind is LoopKind.VECTORISED:
            for each in node.body:
                self.node(each, _Scope(scope.variables, node.extent, node.variable))
        elif node.kind is LoopKind.UNROLLED:
            for i in range(node.extent):
                for each in node.body:
                    self.node(each, scope.with_variable(node.variable, i))
        else:
            self.loop(node, scope, "0", str(node.extent))

    def loop(self, loop: Loop, scope: _Scope, begin: str, end: str) -> None:
        self.count += 1
        mark = self.count
        head, after, before = f"h{mark}", f"x{mark}", self.block
        self.lines += [f"  br label %{head}", f"{head}:", ""]
        phi = len(self.lines) - 1
        self.block, entered = head, self.runs
        self.runs *= loop.extent
        self.trips[mark] = (entered, self.runs)
        for each in loop.body:
            self.node(each, scope.with_variable(loop.variable, f"%i{mark}"))
        self.runs = entered
        self.lines[phi] = f"  %i{mark} = phi i64 [ {begin}, %{before} ], [ %n{mark}, %{self.block} ]"
        self.lines += [
            f"  %n{mark} = add nuw nsw i64 %i{mark}, 1",
            f"  %c{mark} = icmp slt i64 %n{mark}, {end}",
            f"  br i1 %c{mark}, label %{head}, label %{after}",
            f"{after}:",
        ]
        self.block = after

    # --- statements ----------------------------------------------------------------------------------------------

    def statement(self, leaf: Statement, scope: _Scope) -> None:
        lanes = scope.lanes
        reads = [self.load(each, scope) for each in leaf.reads]
        value = self.value(leaf.value, reads, lanes)
        if leaf.combine:
            value = self.operation(leaf.combine, [self.load(leaf.target, scope), value], lanes)
        self.store(value, leaf.target, scope)

    def type(self, lanes: int) -> str:
        return f"<{lanes} x {self.scalar}>" if lanes > 1 else self.scalar

    def address(self, access: Access, scope: _Scope, shift: int = 0) -> str:
        fixed, moving = access.offset + shift, ""
        for variable, stride in access.strides:
            if variable == scope.lane_variable:
                continue
            value = scope.variables[variable]
            if isinstance(value, int):
                fixed += value * stride
            elif stride:
                term = value if stride == 1 else self.add(f"mul nsw i64 {value}, {stride}")
                moving = self.add(f"add nsw i64 {moving}, {term}") if moving else term
        if fixed or not moving:
            moving = self.add(f"add nsw i64 {moving}, {fixed}") if moving else str(fixed)
        return self.add(f"getelementptr inbounds {self.scalar}, ptr {self.pointers[access.buffer]}, i64 {moving}")

    def load(self, access: Access, scope: _Scope) -> str:
        lanes, stride = scope.lanes, access.stride(scope.lane_variable)
        if lanes == 1 or stride == 0:
            one = self.load_one(self.address(access, scope))
            return one if lanes == 1 else self.splat(one, lanes)
        if stride == 1:
            return self.add(f"load {self.type(lanes)}, ptr {self.address(access, scope)}, align {self.align}")
        found = "poison"
        for lane in range(lanes):  # lanes that do not lie side by side are gathered one by one
            one = self.load_one(self.address(access, scope, lane * stride))
            found = self.add(f"insertelement {self.type(lanes)} {found}, {self.scalar} {one}, i32 {lane}")
        return found

    def load_one(self, address: str) -> str:
        return self.add(f"load {self.scalar}, ptr {address}, align {self.align}")

    def splat(self, one: str, lanes: int) -> str:
        kind = self.type(lanes)
        first = self.add(f"insertelement {kind} poison, {self.scalar} {one}, i32 0")
        return self.add(f"shufflevector {kind} {first}, {kind} poison, <{lanes} x i32> zeroinitializer")

    def store(self, value: str, access: Access, scope: _Scope) -> None:
        lanes, stride = scope.lanes, access.stride(scope.lane_variable)
        if lanes == 1:
            self.store_one(value, self.address(access, scope))
        elif stride == 1:
            where = self.address(access, scope)
            self.lines.append(f"  store {self.type(lanes)} {value}, ptr {where}, align {self.align}")
        else:
            for lane in range(lanes):
                one = self.add(f"extractelement {self.type(lanes)} {value}, i32 {lane}")
                self.store_one(one, self.address(access, scope, lane * stride))

    def store_one(self, value: str, address: str) -> None:
        self.lines.append(f"  store {self.scalar} {value}, ptr {address}, align {self.align}")

    # --- values ------------------------------------------------------------------------------------------------

    def value(self, value: Expression, reads: list[str], lanes: int) -> str:
        if value[0] == "read":
            return reads[value[1]]
        if value[0] == "const":
            return self.constant(value[1], lanes)
        return self.operation(value[0], [self.value(each, reads, lanes) for each in value[1:]], lanes)

    def constant(self, value: float, lanes: int) -> str:
        exact = float(np.float32(value)) if self.program.dtype == "float32" else float(value)
        one = f"0x{struct.pack('>d', exact).hex().upper()}"
        return one if lanes == 1 else f"<{', '.join([f'{self.scalar} {one}'] * lanes)}>"

    def operation(self, name: str, arguments: list[str], lanes: int) -> str:
        kind = self.type(lanes)
        if name in _NAMES:
            return self.add(f"{_NAMES[name]} {_FLAGS} {kind} {arguments[0]}, {arguments[1]}")
        if name == "max":  # a chain of comparisons and selections would keep some passes busy for minutes
            return self.intrinsic("maxnum", arguments, lanes, "nnan nsz ")
        if name == "sqrt":
            return self.intrinsic("sqrt", arguments, lanes)
        return self.exponential(arguments[0], lanes)

    def intrinsic(self, name: str, arguments: list[str], lanes: int, flags: str = "") -> str:
        kind = self.type(lanes)
        suffix = f"v{lanes}" * (lanes > 1) + ("f32" if self.scalar == "float" else "f64")
        self.intrinsics.add(f"declare {kind} @llvm.{name}.{suffix}({', '.join([kind] * len(arguments))})")
        given = ", ".join(f"{kind} {each}" for each in arguments)
        return self.add(f"call {flags}{kind} @llvm.{name}.{suffix}({given})")

    def exponential(self, x: str, lanes: int) -> str:
        """Return exp(x) = 2^n 2^f with |f| <= 1/2: n into the exponent's bits, 2^f by its series. x is kept
        in range.
        """
        kind, single = self.type(lanes), self.scalar == "float"
        bits, whole = (23, "i32") if single else (52, "i64")
        bias, bound, terms = (127, 87.0, 8) if single else (1023, 708.0, 14)
        integer = whole if lanes == 1 else f"<{lanes} x {whole}>"

        def shifted(value: int) -> str:
            return str(value) if lanes == 1 else f"<{', '.join([f'{whole} {value}'] * lanes)}>"

        x = self.operation("max", [x, self.constant(-bound, lanes)], lanes)
        below = self.add(f"fcmp olt {kind} {x}, {self.constant(bound, lanes)}")
        condition = "i1" if lanes == 1 else f"<{lanes} x i1>"
        x = self.add(f"select {condition} {below}, {kind} {x}, {kind} {self.constant(bound, lanes)}")
        scaled = self.operation("mul", [x, self.constant(math.log2(math.e), lanes)], lanes)
        # adding the bias first makes the number positive, so that cutting off its fraction rounds to nearest
        moved = self.add(f"fadd {kind} {scaled}, {self.constant(bias + 0.5, lanes)}")
        n = self.add(f"fptosi {kind} {moved} to {integer}")
        power = self.add(f"bitcast {integer} {self.add(f'shl {integer} {n}, {shifted(bits)}')} to {kind}")
        centre = self.add(f"sitofp {integer} {self.add(f'sub {integer} {n}, {shifted(bias)}')} to {kind}")
        high = 0.693359375 if single else 0.693145751953125  # ln 2 in two parts, so that the remainder is exact
        part = self.operation("mul", [centre, self.constant(-high, lanes)], lanes)
        rest = self.operation("add", [x, part], lanes)
        part = self.operation("mul", [centre, self.constant(-(math.log(2) - high), lanes)], lanes)
        rest = self.operation("add", [rest, part], lanes)
        series = self.constant(1 / math.factorial(terms - 1), lanes)
        for i in range(terms - 2, -1, -1):
            series = self.operation("mul", [series, rest], lanes)
            series = self.operation("add", [series, self.constant(1 / math.factorial(i), lanes)], lanes)
        return self.operation("mul", [power, series], lanes)
