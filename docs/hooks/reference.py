"""The reference: a Markdown page for each public name, from its signature and its docstring."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

from orthoconv.certificates.display import in_levels

MODULES = ("nn", "certificates", "attacks", "train", "models", "data", "fourier", "linalg", "testing")
FOLDER = "reference"


@dataclass(frozen=True)
class Entry:
    """A public name.

    Attributes:
        module: Name of the package it is documented under, such as "orthoconv.nn".
        name: The name itself.
        value: What it stands for.
    """

    module: str
    name: str
    value: Any

    @property
    def title(self) -> str:
        """The name as a user would write it, from the top of the package if it is there."""
        top = importlib.import_module("orthoconv")
        return f"orthoconv.{self.name}" if self.name in top.__all__ else f"{self.module}.{self.name}"

    @property
    def path(self) -> str:
        """Its page. Names that differ in case alone get different ones."""
        twin = any(
            n != self.name and n.lower() == self.name.lower() for n in importlib.import_module(self.module).__all__
        )
        return f"{FOLDER}/{self.module}/{self.name}{'-type' if twin and not inspect.isroutine(self.value) else ''}.md"

    @property
    def is_class(self) -> bool:
        """Whether it is a class; Python 3.10 takes a type such as dict[str, int] for one, too."""
        return inspect.isclass(self.value) and get_origin(self.value) is None

    @property
    def is_code(self) -> bool:
        """Whether it is a class or a function, and not a constant."""
        return self.is_class or inspect.isroutine(self.value)

    @cached_property
    def text(self) -> str:
        """Its own docstring; that of a constant is the string that follows its assignment."""
        if self.is_class:
            return inspect.cleandoc(self.value.__dict__.get("__doc__") or "")
        if self.is_code:
            return inspect.getdoc(self.value) or ""
        return constant_doc(importlib.import_module(self.module), self.name)

    @property
    def summary(self) -> str:
        """The first sentence."""
        first = " ".join(self.text.split("\n\n")[0].split())
        return re.split(r"(?<=\.)\s", first)[0]


def constant_doc(module: ModuleType, name: str) -> str:
    """Return the string that follows the assignment of `name`, in the file that assigns it."""
    body = ast.parse(Path(module.__file__ or "").read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return constant_doc(importlib.import_module(str(node.module)), name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            literal = after.value if isinstance(after, ast.Expr) else None
            found = literal.value if isinstance(literal, ast.Constant) else ""
            return inspect.cleandoc(found) if isinstance(found, str) else ""
    return ""


def entries() -> list[Entry]:
    """Every public name once: in the subpackage that has it, or else at the top."""
    top = importlib.import_module("orthoconv")
    below = []
    for module in MODULES:
        part = importlib.import_module(f"orthoconv.{module}")
        below += [Entry(part.__name__, name, getattr(part, name)) for name in part.__all__]
    seen: dict[tuple[str, int], Entry] = {}
    for entry in below:
        seen.setdefault((entry.name, id(entry.value)), entry)
    own = [(name, getattr(top, name)) for name in top.__all__]
    return [*seen.values()] + [
        Entry("orthoconv", n, v) for n, v in own if not inspect.ismodule(v) and (n, id(v)) not in seen
    ]


def pages() -> dict[str, str]:
    """Markdown of every page of the reference, by its path in the documentation."""
    every = entries()
    links = {e.name: e.path for e in every}
    result = {e.path: page(e, links) for e in every}
    result |= {f"{FOLDER}/orthoconv/index.md": index("orthoconv", every, links)}
    result |= {f"{FOLDER}/orthoconv.{m}/index.md": index(f"orthoconv.{m}", every, links) for m in MODULES}
    return result


def navigation() -> list[Any]:
    """The reference for the navigation: a section for each module."""
    every = entries()
    sections: list[Any] = []
    for module in ("orthoconv", *(f"orthoconv.{m}" for m in MODULES)):
        own = sorted((e for e in every if e.module == module), key=lambda e: e.name.lower())
        sections.append({module: [f"{FOLDER}/{module}/index.md", *({e.name: e.path} for e in own)]})
    return sections


def index(module: str, every: list[Entry], links: dict[str, str]) -> str:
    """Page of a module: its names and what they are."""
    part = importlib.import_module(module)
    here = f"{FOLDER}/{module}/index.md"
    by_name = {e.name: e for e in every}
    lines = [
        f"# {module}",
        "",
        prose(inspect.getdoc(part) or "", links, here),
        "",
        "| name | what it is |",
        "|---|---|",
    ]
    for name in sorted(part.__all__, key=str.lower):
        value = getattr(part, name)
        if inspect.ismodule(value):
            first = (inspect.getdoc(value) or "").split("\n")[0]
            lines.append(f"| [`{value.__name__}`](../{value.__name__}/index.md) | {cell(first)} |")
        else:
            entry = by_name[name]
            lines.append(f"| [`{name}`](../../{entry.path}) | {cell(prose(entry.summary, {}, here))} |")
    return "\n".join(lines) + "\n"


def page(entry: Entry, links: dict[str, str]) -> str:
    """Page of one name."""
    parts = [f"# {entry.title}", ""]
    if entry.is_code:
        parts += ["```python", signature(entry.name, entry.value), "```", ""]
    parts += [facts(entry), body(entry.text, links, entry.path)]
    if entry.is_class:
        parts += [members(entry.value, links, entry.path)]
    return "\n".join(parts).rstrip() + "\n"


def facts(entry: Entry) -> str:
    """What a layer guarantees, and the names by which `models.build` knows it."""
    layers = importlib.import_module("orthoconv.nn")
    if not (entry.is_class and issubclass(entry.value, layers.Layer)):
        return ""
    words = {
        "orthogonal": "orthogonal: norms never grow, and are kept where the number of values does not shrink",
        "nonexpansive": "nonexpansive: distances never grow",
        None: "none by itself; `lipschitz_bound` counts the norm that the layer has",
    }
    lines = [f"**Guarantee:** {words[entry.value.guarantee]}.", ""]
    methods = importlib.import_module("orthoconv.nn.methods")
    known = {n: methods.conv_method(n) for n in layers.conv_methods()}
    known |= {f"{n}": methods.linear_method(n, n) for n in layers.linear_methods() if n not in known}
    names = [n for n, make in known.items() if entry.value in (make, getattr(make, "func", None))]
    if names:
        lines += [f"**Name in `models.build` and on the command line:** {', '.join(f'`{n!r}`' for n in names)}.", ""]
    return "\n".join(lines)


def signature(name: str, value: Any, *, method: bool = False) -> str:
    """Signature, without `self`, and with one argument a line if it is long."""
    try:
        found = inspect.signature(value)
    except ValueError:
        return name
    kept = [p for p in found.parameters.values() if not (method and p.name == "self")]
    found = found.replace(parameters=kept)
    text = f"{name}{short(str(found))}"
    if len(text) <= 88:
        return text
    lines, star = [], False
    for p in kept:
        if p.kind is p.KEYWORD_ONLY and not star:
            lines.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        lines.append(short(str(p)))
    after = text.rpartition(") -> ")[2] if ") -> " in text else ""
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + (f") -> {after}" if after else ")")


def short(text: str) -> str:
    """Names of types as users know them, and norms as levels of 255."""
    for long, brief in _SHORT:
        text = text.replace(long, brief)
    text = re.sub(r"<factory>|<object object at \w+>", "...", text)
    text = re.sub(r"0\.\d{9,}", lambda number: in_levels(float(number[0])), text)
    return re.sub(r"<function (\w+) at \w+>", r"\1", text)


_SHORT = (
    ("collections.abc.", ""),
    ("torch.nn.modules.module.Module", "nn.Module"),
    ("torch.Tensor", "Tensor"),
    ("pathlib._local.", ""),
    ("pathlib.", ""),
    ("NoneType", "None"),
    ("typing.", ""),
    ("orthoconv.nn.layer.", ""),
)


def body(text: str, links: dict[str, str], here: str, level: int = 2) -> str:
    """Docstring as Markdown: sections become headings, arguments a list, doctests blocks of code."""
    parts: list[str] = []
    inherited: list[str] = []
    at = None
    for kind, block in blocks(text):
        if kind == "code":
            parts.append(f"{heading(level, 'Example')}\n\n```pycon\n{block}\n```")
        elif kind == "formula":
            parts.append(f"$$\n{block}\n$$")
        elif kind == "header":
            title = block.rstrip(":")
            words = title if len(title.split()) > 1 else ""
            title = "Arguments" if title.startswith("Arguments") else title
            parts.append(heading(level, title) + (f"\n\n{prose(words, links, here)}" if words else ""))
            base = re.match(r"Arguments are those of `(\w+)`", words)
            if base and base[1] in links and base[1] not in inherited:
                inherited.append(base[1])
        elif kind == "items":
            parts.append(items(block, links, here))
        else:
            parts.append(prose(block, links, here))
        if inherited and at is None:
            at = len(parts)
        if at is not None and kind == "items" and len(parts) == at + 1:
            at = len(parts)  # the arguments of a base follow those of the class
    if at is not None:
        parts.insert(at, items(base_arguments(inherited[0]), links, here))
    return "\n\n".join(p for p in parts if p)


def base_arguments(name: str) -> str:
    """Arguments that the docstring of a base explains, or that of its own base."""
    base = getattr(importlib.import_module("orthoconv.nn"), name)
    found, of_arguments, own = "", False, ""
    for kind, block in blocks(inspect.cleandoc(base.__dict__.get("__doc__") or "")):
        if kind == "header":
            of_arguments = block.startswith("Arguments")
            further = re.match(r"Arguments are those of `(\w+)`", block)
            found = base_arguments(further[1]) if further else found
        elif kind == "items" and of_arguments:
            own = block
    return "\n".join(p for p in (own.rstrip(), found) if p)


def heading(level: int, title: str) -> str:
    """A heading; at level 0 a line in bold, which the table of contents leaves out."""
    return f"{'#' * level} {title}" if level else f"**{title}**"


_HEADER = re.compile(r"^(Arguments\b.*|Shape:|Attributes:|Returns:|Raises:|References:)$", re.S)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Split a docstring: paragraphs, headers, indented items, formulas, doctests (all of them together, last)."""
    code = []
    for block in re.split(r"\n\s*\n", text):
        if not block.strip():
            continue
        if block.lstrip().startswith(">>>"):
            code.append(textwrap.dedent(block))
            continue
        if block.startswith(".. math::"):
            formula, _, rest = re.match(r"\.\. math::((?:.*\n?)(?:[ ]{4}.*\n?)*)()(.*)", block, re.S).groups()
            yield "formula", " ".join(formula.split())
            if rest.strip():
                yield "text", rest
            continue
        flat, indented = re.match(r"((?:\S[^\n]*\n?)*)(.*)", block, re.S).groups()
        if flat.strip():
            yield ("header" if _HEADER.match(flat.strip()) else "text"), " ".join(flat.split())
        if indented.strip():
            yield "items", textwrap.dedent(indented)
    if code:
        yield "code", "\n\n".join(code)


def items(block: str, links: dict[str, str], here: str) -> str:
    """Lines `name: text` as a definition list; other text as a paragraph."""
    block = textwrap.dedent(block)
    found = re.findall(r"^((?:\w+(?:, )?)+): (.*(?:\n[ ]+.*)*)", block, re.M)
    if not found or not re.match(r"(?:\w+(?:, )?)+: ", block):
        return prose(block, links, here)
    return "\n\n".join(f"`{name}`\n:   {prose(text, links, here)}" for name, text in found)


def prose(text: str, links: dict[str, str], here: str) -> str:
    """Text with its mathematics between dollars, and links from public names to their pages."""
    text = re.sub(r"\.\. math::\s*(.*)", r"$$\1$$", " ".join(text.split()))
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    up = "../" * here.count("/")

    def link(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2].partition("(")[0]
        target = None if _is_a_word(name) else links.get(name)
        return match[0] if target is None or target == here else f"[`{match[1]}`]({up}{target})"

    return escape(re.sub(r"`((?:orthoconv\.|nn\.|train\.|linalg\.)*\w+)`", link, text))


def _is_a_word(name: str) -> bool:
    """Whether a name is rather an argument or an ordinary word, such as `padding`; those of the top are not."""
    return name.isalpha() and name.islower() and name not in importlib.import_module("orthoconv").__all__


def escape(text: str) -> str:
    """Keep stars and underscores of formulas in plain text from becoming emphasis."""
    parts = re.split(r"(`[^`]*`|\$[^$]*\$|\]\([^)]*\))", text)
    return "".join(p if k % 2 else re.sub(r"(?<!\\)([*_<|])", r"\\\1", p) for k, p in enumerate(parts))


def cell(text: str) -> str:
    """Text for a cell of a table, where a bar must not end it."""
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def members(kind: type, links: dict[str, str], here: str) -> str:
    """Public methods and properties: those that the class brings in full, those of its bases in a table."""
    own, others = [], []
    for name, value in inspect.getmembers(kind, lambda v: inspect.isfunction(v) or isinstance(v, property)):
        homes = [c for c in kind.__mro__ if name in c.__dict__ and c.__module__.startswith("orthoconv")]
        if homes and not name.startswith("_") and name not in ("extra_repr", "forward", "set_up"):
            (own if homes == [kind] else others).append((name, value, homes[-1]))
    parts = ["", "## Methods"] if own or others else []
    for name, value, _ in own:
        line = name if isinstance(value, property) else signature(name, value, method=True)
        parts += [
            f"\n### {name}\n",
            f"```python\n{line}\n```\n",
            body(inspect.getdoc(value) or "", links, here, level=0),
        ]
    if others:
        parts += ["", "### Inherited", "", "| name | what it does | from |", "|---|---|---|"]
    for name, value, home in others:
        first = cell(prose((inspect.getdoc(value) or "").split("\n\n")[0], {}, here))
        if not first:
            continue
        base = f"[`{home.__name__}`]({'../' * here.count('/')}{links[home.__name__]})" if home.__name__ in links else ""
        parts.append(f"| `{name}` | {first} | {base} |")
    return "\n".join(parts)
