"""The command `python -m codegen` (or, installed, `python -m eqx_attn.codegen`)."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import jinja2

from .files import compare, expected, generated_folder, is_checkout, write
from .matrix import checked_in, matching
from .render import render, RenderError, template_folder
from .spec import KernelSpec, nearest, SpecError


class UserError(Exception):
    """A mistake of the caller, told in one message."""


_EPILOG = """\
Without an option, writes the kernels that changed and deletes those that no longer belong.

NAME is a kernel's name, target/layout_mask_qkDIM_vDIM[_segments], or its path. It need not be checked in:
--show, --explain and --diff render any kernel. GLOB is a shell pattern of names; its * also matches /.

examples:
  %(prog)s --check
  %(prog)s --list 'triton/*causal*'
  %(prog)s --explain triton/bshd_causal_qk96_v96
  %(prog)s --diff triton/bshd_full_qk128_v128 triton/bshd_causal_qk128_v128
  %(prog)s --verify 'pallas_tpu/*qk128*' --platform tpu
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Writes attention kernels from templates, and tells what there is.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="write nothing; exit 1 and name what differs")
    mode.add_argument("--list", nargs="?", const="*", metavar="GLOB", help="table of the checked-in kernels")
    mode.add_argument("--show", metavar="NAME", help="print a kernel")
    mode.add_argument("--explain", metavar="NAME", help="what each choice turned into, or why there is no such kernel")
    mode.add_argument("--diff", nargs=2, metavar=("A", "B"), help="unified diff of two kernels, without their headers")
    mode.add_argument(
        "--verify",
        nargs="?",
        const="*",
        metavar="GLOB",
        help="compile with the device's own compiler, without a device; exit 1 on a failure or a spill",
    )
    parser.add_argument("--platform", choices=("tpu", "cuda"), help="with --verify: whose compiler")
    parser.add_argument(
        "--device", action="append", metavar="KIND", help="with --verify: only this device kind (repeatable)"
    )
    parser.add_argument(
        "--record", action="store_true", help="with --verify: note successes in generated/COMPILED.json"
    )
    parser.add_argument(
        "--unrecorded",
        action="store_true",
        help="with --verify: only kernels that generated/COMPILED.json does not say compile for every device",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 (a check failed), or 2 (a mistake of the caller)."""
    options = parser().parse_args(arguments)
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `... | head` has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, SpecError) as error:
        message = str(error)
    except (RenderError, jinja2.TemplateError) as error:
        message = f"{_template_place(error)}{error}"
    except KeyboardInterrupt:
        return 130
    print(f"python -m {__package__}: {message}", file=sys.stderr)
    return 2


def run(options: argparse.Namespace) -> int:
    """Does what the options ask."""
    verify_only = [f"--{name}" for name in ("platform", "device", "record", "unrecorded") if getattr(options, name)]
    if options.verify is None and verify_only:
        raise UserError(f"{', '.join(verify_only)} belongs to --verify")
    if options.check:
        return check()
    if options.show is not None:
        sys.stdout.write(render(spec_of(options.show)))
        return 0
    if all(option is None for option in (options.list, options.explain, options.diff, options.verify)):
        return update()
    from . import tables  # Rich is slow to import and not needed for the modes above.

    if options.list is not None:
        return tables.print_list(specs_of(options.list))
    if options.explain is not None:
        return tables.print_explanation(spec_of(options.explain))
    if options.diff is not None:
        return tables.print_diff(*map(spec_of, options.diff))
    return verify(options)


def update() -> int:
    """Writes what changed, deletes orphans, and says so."""
    if not is_checkout():
        raise UserError(
            "this is an installed package, whose kernels are not rewritten. Run `python -m codegen` in a checkout; "
            "a kernel that is not checked in is rendered into the user's cache when it is first needed"
        )
    texts = expected()
    difference = write(generated_folder(), texts)
    _print_paths("wrote", difference.missing)
    _print_paths("rewrote", difference.drifted)
    _print_paths("deleted", difference.orphaned)
    changed = len(difference.missing) + len(difference.drifted)
    if difference:
        print(f"{changed} of {len(texts)} kernels written, {len(difference.orphaned)} deleted")
    else:
        print(f"all {len(texts)} kernels are up to date; nothing to write")
    return 0


def check() -> int:
    """Names what differs between `generated/` and the templates."""
    texts = expected()
    difference = compare(generated_folder(), texts)
    _print_paths("missing", difference.missing)
    _print_paths("drifted", difference.drifted)
    _print_paths("orphaned", difference.orphaned)
    if difference:
        print(f"generated/ differs from what the templates write; `python -m {__package__}` puts it right")
        return 1
    print(f"all {len(texts)} kernels are as the templates write them")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Compiles kernels with the real compilers."""
    if options.platform is None:
        raise UserError("--verify needs --platform tpu or --platform cuda")
    from .verify import CannotVerify, unrecorded, verify_specs

    specs = specs_of(options.verify)
    if options.unrecorded:
        specs = unrecorded(specs, options.platform)
        if not specs:
            print("all of them are recorded as compiled for every device")
            return 0
    try:
        return verify_specs(specs, options.platform, tuple(options.device or ()), record=options.record)
    except CannotVerify as error:
        raise UserError(str(error)) from error


def spec_of(name: str) -> KernelSpec:
    """The specification that a user's name means. Raises `UserError` that suggests names where there is none."""
    name = name.removeprefix("./").removeprefix("generated/").removesuffix(".py")
    try:
        spec = KernelSpec.from_name(name)
        reason = spec.refusal()
    except SpecError as error:
        reason = str(error)
    else:
        if reason is None:
            return spec
        reason = f"there is no kernel {name}: {reason}"
    raise UserError(f"{reason}{_suggestion(name)}")


def specs_of(glob: str) -> list[KernelSpec]:
    """The checked-in kernels that match a pattern. Raises `UserError` where none does."""
    glob = glob.removeprefix("./").removeprefix("generated/").removesuffix(".py")
    specs = matching(glob)
    if not specs:
        raise UserError(f"no checked-in kernel matches {glob!r}{_suggestion(glob)}")
    return specs


def _suggestion(name: str) -> str:
    names = nearest(name, (spec.name for spec in checked_in()))
    return f". Nearest: {', '.join(names)}" if names else f". `python -m {__package__} --list` shows all names"


def _print_paths(what: str, paths: Sequence[str]) -> None:
    for path in paths:
        print(f"{what:>8} generated/{path}")


def _template_place(error: BaseException) -> str:
    """`templates/...:LINE: ` of the innermost template frame of an error, so that its author finds the line."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"templates/{error.name}:{error.lineno}: "
    root = template_folder()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(root))]
    return f"templates/{os.path.relpath(frames[-1].filename, root)}:{frames[-1].lineno}: " if frames else ""


if __name__ == "__main__":
    sys.exit(main())
