"""Mutants of Python and C files: small wrong edits, each of which some test should notice.

A generator of our own, since mutmut changes only what is inside functions (no module-level tables) and imports the
package anew for each mutant, and cosmic-ray knows neither dropped arguments, deleted statements nor tables. Positions
come from `ast`, edits are made in the text, so everything else stays as it is written.

Left out, since no test should notice them: docstrings, annotations, `__all__`, imports, `if TYPE_CHECKING`, protocols,
overloads, `__repr__`, log calls, `raise` and `assert` statements (the condition around a `raise` is mutated), strings
with a space in them (prose), f-strings (prose and paths; Python 3.11 gives no positions inside them), casts (`int(x)`),
`strict=` of zip.
"""

import ast
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_COMPARE = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_BINARY = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "zeros": "ones", "ones": "zeros"}
_NAMES |= {"argmax": "argmin", "zeros_like": "ones_like", "new_zeros": "new_ones", "clamp_min": "clamp_max"}
_PLAIN_CALLS = {"detach", "clone", "copy", "abs", "exp", "log", "sqrt", "square", "strip", "lower"}
_WRAPPERS = {"deepcopy", "sorted", "reversed", "abs"}
_LOGGERS = {"debug", "info", "warning", "error", "exception", "warn", "print"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One edit of one file."""

    file: str
    """Relative to the package's parent."""
    where: str
    """The qualified name of the function or class; empty at module level."""
    names: tuple[str, ...]
    """At module level and in class bodies: what the statement defines."""
    line: int
    """Of the edit, from 1."""
    first: int
    """The first line of the innermost function or statement around it."""
    start: int
    """Byte offsets of what is replaced."""
    end: int
    new: bytes
    before: str
    """The line as it stands, and as it becomes."""
    after: str
    number: int = 1
    """Tells apart mutants of one function with the same text."""

    @property
    def key(self) -> str:
        """Names the mutant whatever else changes in the file."""
        count = f" #{self.number}" if self.number > 1 else ""
        return f"{self.file}::{self.where or '(module)'}: {self.before} => {self.after}{count}"

    def apply(self, source: bytes) -> bytes:
        """The file with the edit in it."""
        return source[: self.start] + self.new + source[self.end :]


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in the order of its text."""
    found = list(_c_mutants(file, source) if file.endswith(".c") else _Walk(file, source).run())
    seen: Counter[str] = Counter()
    numbered = []
    for mutant in sorted(found, key=lambda m: (m.start, m.end, m.new)):
        seen[mutant.key] += 1
        numbered.append(replace(mutant, number=seen[mutant.key]))
    return numbered


def sample(mutants: list[Mutant], *, share: float, seed: int) -> list[Mutant]:
    """A share of one file's mutants, rounded up. Each has its own place in the draw, so edits elsewhere move none."""
    drawn = sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).hexdigest())
    return drawn[: math.ceil(share * len(mutants))]


class _Walk(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.found = file, source, list[Mutant]()
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.where: list[str] = []
        self.names: tuple[str, ...] = ()
        self.first = 1
        self.in_function = False

    def run(self) -> list[Mutant]:
        self.visit(ast.parse(self.source))
        return self.found

    def at(self, line: int, column: int) -> int:
        return self.offsets[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> bytes:
        start, end = self.span(node)
        return self.source[start:end]

    def emit(self, start: int, end: int, new: bytes) -> None:
        if self.source[start:end] == new:
            return
        changed = self.source[:start] + new + self.source[end:]
        line = self.source.count(b"\n", 0, start)
        before = self.source.splitlines()[line].decode().strip()
        after = changed.splitlines()[line].decode().strip()
        self.found.append(
            Mutant(
                file=self.file, where=".".join(self.where), names=() if self.in_function else self.names, line=line + 1,
                first=self.first, start=start, end=end, new=new, before=before, after=after,
            )
        )  # fmt: skip

    def emit_between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split())).encode()
        spot = re.search(pattern, self.source[start:end])
        if spot:
            self.emit(start + spot.start(), start + spot.end(), new.encode())

    # -- what is left out

    def visit_Import(self, node: ast.AST) -> None: ...
    def visit_ImportFrom(self, node: ast.AST) -> None: ...
    def visit_Raise(self, node: ast.AST) -> None: ...
    def visit_Assert(self, node: ast.AST) -> None: ...
    def visit_JoinedStr(self, node: ast.AST) -> None: ...

    # -- statements

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not self.in_function:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = tuple(t.id for t in targets if isinstance(t, ast.Name))
            self.names, self.first = (*self.where[-1:], *names), node.lineno
        super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any("Protocol" in ast.dump(base) for base in node.bases):
            self.inside(node.name, node.body, function=False, first=node.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "__repr__" or any("overload" in ast.dump(d) for d in node.decorator_list):
            return
        defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
        self.inside(node.name, [*defaults, *node.body], function=True, first=node.lineno)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def inside(self, name: str, parts: list, *, function: bool, first: int) -> None:
        outer = self.in_function, self.names, self.first
        self.where.append(name)
        self.in_function, self.first = self.in_function or function, first if function and not outer[0] else self.first
        for part in parts:
            self.visit(part)
        self.where.pop()
        self.in_function, self.names, self.first = outer

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Constant):
            return
        if isinstance(call, ast.Call):
            function = call.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _LOGGERS:
                return
            self.emit(*self.span(node), b"pass")
        self.visit(call)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if getattr(target, "id", "") in ("__all__", "__slots__") or b"getLogger" in self.text(node.value):
            return
        stores = isinstance(target, ast.Attribute | ast.Subscript)
        if stores and self.in_function and "__init__" not in self.where:
            self.emit(*self.span(node), b"pass")
        self.visit(node.value)
        self.table(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.table(node.value)

    def table(self, value: ast.AST) -> None:
        """Entries of a module's tables."""
        if self.in_function:
            return
        items = (
            [(k, v) for k, v in zip(value.keys, value.values, strict=True) if k] if isinstance(value, ast.Dict) else []
        )
        for (key, held), (_, other) in zip(items, items[1:] + items[:1], strict=True):
            self.drop(self.span(key)[0], self.span(held)[1])
            if not isinstance(held, ast.Constant):
                self.emit(*self.span(held), self.text(other))
        if isinstance(value, ast.Tuple | ast.List | ast.Set) and len(value.elts) > 2:
            for element in value.elts:
                self.drop(*self.span(element))

    def drop(self, start: int, end: int) -> None:
        """Without the entry or argument, and the comma after or before it."""
        after = re.match(rb"\s*,[ ]*", self.source[end:])
        if after:
            self.emit(start, end + after.end(), b"")
        else:
            before = re.search(rb",\s*$", self.source[:start])
            self.emit(before.start() if before else start, end, b"")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        old, new = _BINARY.get(type(node.op), ("", ""))
        if old:
            self.emit_between(node.target, node.value, f"{old}=", f"{new}=")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test) or "__name__" in ast.dump(node.test):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        """Unless another edit of the same expression says the same."""
        if not isinstance(test, ast.Compare | ast.UnaryOp):
            self.emit(*self.span(test), b"not (" + self.text(test) + b")")

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if ast.unparse(item.context_expr) == "torch.no_grad()":
                self.emit(*self.span(item.context_expr), b"torch.enable_grad()")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.emit(*self.span(node), b"continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.emit(*self.span(node), b"break")

    # -- expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.emit_between(left, right, *_COMPARE[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(
            isinstance(side, ast.Constant) and isinstance(side.value, str | None) for side in (node.left, node.right)
        )
        types = isinstance(node.op, ast.BitOr) and (not self.in_function or texts)
        if type(node.op) in _BINARY and not texts and not types:
            self.emit_between(node.left, node.right, *_BINARY[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.emit_between(left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.UAdd):
            self.emit(*self.span(node), b"(" + self.text(node.operand) + b")")
        if not isinstance(node.operand, ast.Constant):
            self.visit(node.operand)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.emit(*self.span(node), str(not value).encode())
        elif isinstance(value, int):
            self.emit(*self.span(node), str(value + 1).encode())
        elif isinstance(value, float):
            self.emit(*self.span(node), repr(2 * value if value and math.isfinite(value) else 1.0).encode())
        elif isinstance(value, str) and " " not in value and value:
            self.emit(*self.span(node), repr(f"XX{value}").encode())

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in _NAMES:
            end = self.span(function)[1]
            self.emit(end - len(name), end, _NAMES[name].encode())
        if isinstance(function, ast.Attribute) and name in _PLAIN_CALLS and not arguments and not node.keywords:
            self.emit(*self.span(node), self.text(function.value))
        if name in _WRAPPERS and len(arguments) == 1 and not node.keywords:
            self.emit(*self.span(node), b"(" + self.text(arguments[0]) + b")")
        first = arguments[:2]
        if len(first) == 2 and all(isinstance(a, ast.Name | ast.Attribute) for a in first) and name != "isinstance":
            texts = [self.text(a) for a in first]
            self.emit(self.span(first[0])[0], self.span(first[1])[1], texts[1] + b", " + texts[0])
        for keyword in node.keywords:
            if keyword.arg and keyword.arg != "strict":
                self.drop(*self.span(keyword))
                self.visit(keyword.value)
        self.visit(function)
        for argument in arguments:
            self.visit(argument)


_C_EDITS = [
    *[(rf"(?<=[\w)\]]) {re.escape(a)} (?=[\w(&*-])", f" {b} ") for a, b in ("+-", "-+", "*/", "/*")],
    *[(rf"(?<= ){re.escape(a)}(?= )", b) for a, b in (("<", "<="), ("<=", "<"), (">", ">="), (">=", ">"), ("+=", "="))],
    *[(rf"(?<= ){re.escape(a)}(?= )", b) for a, b in (("==", "!="), ("!=", "=="), ("&&", "||"), ("||", "&&"))],
    (r"\b0\b(?!\.)", "1"), (r"\b1\b(?!\.)", "2"), (r"\b0\.0?f\b", "1.0f"), (r"\b1\.0?f\b", "2.0f"),
]  # fmt: skip


def _c_mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Textual: operators and small numbers, outside comments and preprocessor lines."""
    text = source.decode()
    bare = re.sub(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"", lambda m: re.sub(r"[^\n]", "@", m[0]), text, flags=re.S)
    bare = re.sub(r"(?m)^\s*#\s*(include|pragma|if|endif|else|undef).*$", lambda m: "@" * len(m[0]), bare)
    for pattern, new in _C_EDITS:
        for spot in re.finditer(pattern, bare):
            start, end = (len(text[:at].encode()) for at in spot.span())
            line = text.count("\n", 0, spot.start())
            changed = (text[: spot.start()] + new + text[spot.end() :]).splitlines()[line].strip()
            yield Mutant(
                file=file, where="", names=(), line=line + 1, first=line + 1, start=start, end=end, new=new.encode(),
                before=text.splitlines()[line].strip(), after=changed,
            )  # fmt: skip


def files_of(rooms: list[str], package: Path, suffix: str) -> list[Path]:
    """The files of these rooms, room by room."""
    return [path for room in rooms for path in sorted((package / room).rglob(f"*{suffix}"))]
