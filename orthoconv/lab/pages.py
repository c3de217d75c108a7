"""Pages and cards from the templates of the lab."""

__all__ = ["render"]

from importlib.resources import files
from typing import Any

from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """Fill in a file of the folder templates; what is put into HTML is escaped."""
    text = (files("orthoconv.lab") / "templates" / template).read_text()
    is_html = ".html" in template
    options = {"autoescape": is_html, "keep_trailing_newline": not is_html, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(**options).from_string(text).render(**values)  # type: ignore[arg-type]
