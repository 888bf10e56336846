"""What `--list`, `--explain` and `--diff` print."""

import difflib
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import explain
from .files import generated_folder
from .matrix import checked_in
from .records import COMPILED, VERIFIED
from .render import body_digest, body_of, render, template_name
from .spec import KernelSpec


def console() -> Console:
    """The terminal or, where the output goes to a file or pipe, one wide enough that no name is broken."""
    return Console(width=None if sys.stdout.isatty() else 240, soft_wrap=False, highlight=False)


def print_list(specs: list[KernelSpec]) -> int:
    """The table of checked-in kernels."""
    needed_by = checked_in()
    compiled, verified = COMPILED.read(generated_folder()), VERIFIED.read(generated_folder())
    table = Table(
        "spec", "needed by", "lines", "compiled for", "verified on", box=None, header_style="bold", pad_edge=False
    )
    table.columns[0].no_wrap = True
    table.columns[2].justify = "right"
    for spec in specs:
        text = render(spec)
        digest = body_digest(text)
        table.add_row(
            spec.name,
            needed_by[spec],
            str(text.count("\n")),
            " ".join(COMPILED.lookup(compiled, spec.name, digest)) or "-",
            ", ".join(VERIFIED.lookup(verified, spec.name, digest)) or "-",
        )
    console().print(table)
    return 0


def print_explanation(spec: KernelSpec) -> int:
    """What each choice of `spec` turned into."""
    text = render(spec)
    needed_by = checked_in().get(spec)
    out = console()
    out.print(Text(spec.name, style="bold"))
    out.print(f"  template   templates/{template_name(spec)}")
    out.print(f"  needed by  {needed_by or 'nobody by name: not checked in, rendered on demand'}")
    out.print(f"  text       {text.count(chr(10))} lines, digest {body_digest(text)}")
    for choice in explain.explain(spec):
        out.print(Text.assemble("\n", (f"{choice.field} = {choice.value}", "bold"), f"  {choice.words}"))
        if choice.other is None:
            continue
        change = f"+{choice.added} -{choice.removed} lines" if choice.added or choice.removed else "the same text"
        out.print(f"  against {choice.other.name}: {change}")
        for branch in choice.branches:
            out.print(f"    {branch}")
    return 0


def print_diff(first: KernelSpec, second: KernelSpec) -> int:
    """The unified diff of two kernels' bodies, coloured on a terminal."""
    before, after = (body_of(render(spec)).splitlines() for spec in (first, second))
    styles = {"+": "green", "-": "red", "@": "cyan"}
    out = console()
    for line in difflib.unified_diff(before, after, first.name, second.name, lineterm=""):
        out.print(Text(line, style=styles.get(line[0], "")), soft_wrap=True)
    return 0
