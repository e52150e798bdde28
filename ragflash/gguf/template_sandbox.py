"""Jinja's immutable sandbox with the extras that chat templates expect, and with bounds.

The sandbox keeps a template away from Python. The bounds keep it from running on: every turn of a
loop and every call of a macro is counted and looks at the clock, and `+`, `*`, `**`, `~` and
`range` refuse to build huge values. A single built-in filter is not interrupted.
"""

import json
import threading
import time
from datetime import datetime
from typing import Never, TypeVar

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # turns of loops and calls of macros in one rendering
MAX_VALUE_SIZE = 16 * 2**20  # characters of a text, items of a list, bits of a number
MAX_RANGE = 10_000

_Block = TypeVar("_Block", nodes.For, nodes.Macro)


class TemplateRefusal(TemplateRuntimeError):
    """A template says by itself that it does not take what it was given."""


class _Limits(threading.local):
    """What is left to the rendering that this thread is in."""

    steps = 0
    deadline = 0.0


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and runs templates; the limits are those of one rendering on one thread."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            optimized=False,  # nothing is evaluated while compiling
        )
        self._limits = _Limits()
        self.filters["tojson"] = _to_json
        self.globals["range"] = _short_range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def bounded_template(self, source: str) -> Template:
        """Compile `source` with `tick` in every loop and macro."""
        tree = _Bounding().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def start(self, deadline: float) -> None:
        """Begin a rendering that ends by `deadline`, in seconds of `time.monotonic`."""
        self._limits.steps = 0
        self._limits.deadline = deadline

    def tick(self) -> bool:
        """Count a step of the template; true, so that it can stand in a condition."""
        self._limits.steps += 1
        if self._limits.steps > MAX_STEPS:
            raise TemplateRuntimeError(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._limits.deadline:
            raise TemplateRuntimeError("it runs too long")
        return True

    def join_texts(self, *values: object) -> str:
        """What `~` does."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Refuse an operation on sight of its operands when its result would be huge."""
        _check_size(_result_size(operator, left, right))
        result: object = super().call_binop(context, operator, left, right)
        return result


class _Bounding(NodeTransformer):
    """Puts calls of the sandbox where a template could run on or grow."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 (named after the node)
        node = self._with_tick(node)
        if node.test is not None:
            node.test = nodes.And(_call("tick", node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("join_texts", node.lineno, *node.nodes)

    def _with_tick(self, node: _Block) -> _Block:
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call("tick", node.lineno), lineno=node.lineno)
        node.body.insert(0, tick)
        return node


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call(method: str, lineno: int, *arguments: nodes.Expr) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(function, list(arguments), [], None, None, lineno=lineno)


def _check_size(size: int) -> None:
    if size > MAX_VALUE_SIZE:
        raise SecurityError(f"it builds a value of size {size}, {MAX_VALUE_SIZE} at most")


def _result_size(operator: str, left: object, right: object) -> int:
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(right, 0)
        return left.bit_length() + right.bit_length()
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "*" and isinstance(right, int):
        return _length(left) * right
    if operator == "*" and isinstance(left, int):
        return left * _length(right)
    return 0


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _short_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"range of {len(numbers)} numbers, {MAX_RANGE} at most")
    return numbers


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates pass it by position too)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Plain JSON, with the options that transformers' filter has; Jinja's own escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> Never:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
