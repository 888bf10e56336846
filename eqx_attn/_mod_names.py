"""The names that values have in the code of a user's function: arguments, closure variables, assignments."""

import ast
import functools
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.extend.source_info_util as source_info_util

_PLACE = re.compile(r"(?P<file>.*):(?P<line>\d+):(?P<column>\d+) \(.*\)")


def place_of(equation: Any) -> str:
    """Where in the user's code an equation was traced, as "file:line:column (function)"."""
    return source_info_util.summarize(equation.source_info)


def assigned_name(equation: Any) -> str:
    """The variable that the user's code assigns what begins where the equation does, or ""."""
    match = _PLACE.fullmatch(place_of(equation))
    if match is None:
        return ""
    return _assignments(match["file"]).get((int(match["line"]), int(match["column"])), "")


@functools.lru_cache(maxsize=64)
def _assignments(file: str) -> dict[tuple[int, int], str]:
    """Of each plain assignment of a file, where its right side begins."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        (target, *others) = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not others and isinstance(target, ast.Name):
            found[node.value.lineno, node.value.col_offset] = target.id
    return found


def argument_names(function: Callable, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the function's positional parameters; the usual ones where it has others."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return kinds
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(names[: len(kinds)]) if len(names) >= len(kinds) else kinds


def captured_name(function: Any, array: Any) -> str:
    """What the function's code calls an array that it closes over, or ""."""
    return next((name for name, value in _reachable(function, 3) if value is array), "")


def _reachable(function: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Names and values that a function's code may use: closures, globals, bound arguments, attributes, and functions' own."""
    if depth == 0:
        return
    found: dict[str, Any] = {}
    if (code := getattr(function, "__code__", None)) is not None:
        cells = getattr(function, "__closure__", None) or ()
        for name, cell in zip(code.co_freevars, cells, strict=False):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # an empty cell
                continue
        names = function.__globals__
        found |= {name: names[name] for name in code.co_names if name in names}
        found |= getattr(function, "__kwdefaults__", None) or {}
        defaults = function.__defaults__ or ()
        found |= dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    found |= getattr(function, "keywords", None) or {}
    if (owner := getattr(function, "__self__", None)) is not None:
        found |= getattr(owner, "__dict__", {})
    if not inspect.isfunction(function):
        found |= getattr(function, "__dict__", {})
    yield from found.items()
    for value in list(found.values()):  # dictionaries of parameters, and modules
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", {}) if _is_module(value) else {}
        yield from ((str(name), x) for name, x in inside.items())
    inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
    for value in (*found.values(), inner, type(function).__dict__.get("__call__")):
        if callable(value) and not inspect.isclass(value) and not _is_jax(value):
            yield from _reachable(value, depth - 1)


def _is_module(value: Any) -> bool:
    return isinstance(value, eqx.Module) and not inspect.isfunction(value)


def _is_jax(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in ("jax", "jaxlib", "numpy", "equinox")
