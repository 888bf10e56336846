"""Which branches of which templates write a kernel."""

import dataclasses
import functools
from collections.abc import Iterator

import jinja2
from jinja2 import nodes

from .render import environment, render_body
from .spec import KernelSpec


@dataclasses.dataclass(frozen=True, order=True)
class Branch:
    """The lines of a template between two tags, for instance those of an `{% else %}`; `macro` is the macro around."""

    template: str
    first: int
    last: int
    macro: str

    def __str__(self) -> str:
        lines = f"{self.first}-{self.last}" if self.last > self.first else str(self.first)
        return f"templates/{self.template}:{lines}" + (f" (in {self.macro})" if self.macro else "")

    def inside(self, other: "Branch") -> bool:
        """Whether `other` is another branch around this one."""
        return (
            self != other and self.template == other.template and other.first <= self.first <= self.last <= other.last
        )


def branches_taken(spec: KernelSpec) -> set[Branch]:
    """The branches of `if`, `for` and `macro` that run while `spec` is rendered."""
    tracing, taken = _tracing(environment())
    taken.clear()
    render_body(spec, tracing)
    return set(taken)


@functools.cache
def _tracing(plain: jinja2.Environment) -> tuple[jinja2.Environment, set[Branch]]:
    """`plain` with templates, compiled once, that say where they pass, and what they have said."""
    taken: set[Branch] = set()
    tracing = _TracingEnvironment(**_options(plain))
    tracing.globals["_taken"] = lambda *branch: taken.add(Branch(*branch)) or ""
    return tracing, taken


def outermost(branches: set[Branch]) -> list[Branch]:
    """In order, the branches that lie in no other of `branches`."""
    return sorted(branch for branch in branches if not any(branch.inside(other) for other in branches))


class _TracingEnvironment(jinja2.Environment):
    """Puts a call of `_taken` at the head of each branch of each template."""

    def _generate(self, source: nodes.Template, name: str | None, filename: str | None, *args, **kwargs) -> str:
        branches = [(body, (name, _first(body), _last(body), macro)) for body, macro in _bodies(source, "")]
        for body, branch in branches:
            call = nodes.Call(nodes.Name("_taken", "load"), [nodes.Const(value) for value in branch], [], None, None)
            body.insert(0, nodes.Output([call]).set_lineno(branch[1]))
        source.set_environment(self)
        return super()._generate(source, name, filename, *args, **kwargs)


def _options(environment: jinja2.Environment) -> dict:
    names = ("loader", "undefined", "trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape")
    return {name: getattr(environment, name) for name in names}


def _bodies(node: nodes.Node, macro: str) -> Iterator[tuple[list[nodes.Node], str]]:
    """Every branch below `node`, with the macro around it."""
    if isinstance(node, nodes.Macro):
        macro = node.name
    for field in ("body", "else_"):
        body = getattr(node, field, None)
        if isinstance(node, (nodes.If, nodes.For, nodes.Macro)) and body:
            yield body, macro
    for child in node.iter_child_nodes():
        yield from _bodies(child, macro)


def _first(body: list[nodes.Node]) -> int:
    return min(node.lineno for node in body)


def _last(body: list[nodes.Node]) -> int:
    """The last line of a branch; a stretch of text ends as many lines below its first as it has line ends inside."""
    inner = [inner for node in body for inner in (node, *node.find_all(nodes.Node))]
    texts = [node for node in inner if isinstance(node, nodes.TemplateData)]
    return max(
        [node.lineno or 0 for node in inner] + [text.lineno + text.data.rstrip("\n").count("\n") for text in texts]
    )
