"""`orthoconv completion`: a script that lets a shell complete commands and options."""

__all__ = ["completion", "options", "words"]

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any, Literal

_SCRIPT = """\
_orthoconv() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" path="" each
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $each" in
{paths}
        esac
    done
    local words=""
    case "$path" in
{words}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ "$word" != -* ]]; then COMPREPLY+=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F _orthoconv orthoconv
"""


def completion(shell: Literal["bash", "zsh"]) -> None:
    """Print a script for completion; put `eval "$(orthoconv completion bash)"` into ~/.bashrc.

    Example: orthoconv completion bash

    Args:
        shell: bash or zsh.
    """
    from orthoconv.lab.cli import COMMANDS  # here, because that module lists this one

    known = words(COMMANDS)
    paths = "\n".join(f'            "{path}") path="{path}" ;;' for path in known if path)
    choices = "\n".join(f'        "{path}") words="{" ".join(names)}" ;;' for path, names in known.items())
    start = "autoload -U bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(start + _SCRIPT.format(paths=paths, words=choices), end="")


def words(commands: dict[str, Any], path: str = "") -> dict[str, list[str]]:
    """Return what may follow each path of subcommands: further subcommands, or options.

    >>> words({"a": {"_help": "", "b": words}})
    {'': ['a'], ' a': ['b'], ' a b': ['--help', '--path']}
    """
    names = {name: command for name, command in commands.items() if not name.startswith("_")}
    found = {path: list(names)}
    for name, command in names.items():
        below = f"{path} {name}"
        found |= words(command, below) if isinstance(command, dict) else {below: ["--help", *options(command)]}
    return found


def options(command: Callable[..., Any], prefix: str = "--") -> list[str]:
    """Return the options of a command; those of a dataclass have its name and a dot in front."""
    types = typing.get_type_hints(command)
    found = []
    for name in (n for n, p in inspect.signature(command).parameters.items() if p.default is not p.empty):
        kind = types.get(name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found += [f"{prefix}{name}.{field.name}" for field in dataclasses.fields(kind) if field.init]
        else:
            found.append(f"{prefix}{name}")
    return found
