"""One way to render: strict names, no blank-line surprises, errors that show the template's line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from mokgen.errors import TemplateError
from mokgen.settings import shipped

CONTEXT_LINES = 3  # shown on each side of a faulty line


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Templates of this mokgen; a name that the context does not hold is an error, never an empty string."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python and Markdown, never HTML
    )


def render(name: str, context: Mapping[str, Any]) -> str:
    """Text of one template: at most two blank lines in a row, one newline at the end."""
    try:
        text = environment().get_template(name).render(context)
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"no template {error.name}", where=name) from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{error.message}\n{_excerpt(error.filename, error.lineno)}", where=name) from error
    except jinja2.TemplateError as error:
        line = _template_line(error)
        where = f"{name}:{line}" if line else name
        raise TemplateError(f"{error}\n{_excerpt(str(_file(name)), line)}", where=where) from error
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def _file(name: str) -> Path:
    return shipped("templates") / name


def _template_line(error: BaseException) -> int:
    """Line of the innermost template frame; Jinja rewrites tracebacks so that frames point into templates."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".jinja")]
    return frames[-1].lineno or 0 if frames else 0


def _excerpt(filename: str | None, line: int) -> str:
    if not filename or not line or not Path(filename).is_file():
        return ""
    lines = Path(filename).read_text(encoding="utf-8").splitlines()
    shown = range(max(1, line - CONTEXT_LINES), min(len(lines), line + CONTEXT_LINES) + 1)
    return "\n".join(f"{'>' if number == line else ' '} {number:4d} {lines[number - 1]}" for number in shown)
