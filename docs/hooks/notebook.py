"""Notebooks: run the cells of one and store what they show; turn one into Markdown."""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def to_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook and its pictures."""
    parts, pictures = [], {}
    for k, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{k}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell above draws]({name})")
            elif "text/html" in data:
                parts.append(f"<div>{''.join(data['text/html'])}</div>")
            else:
                text = "".join(data.get("text/plain", output.get("text", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def execute(cells: list[Cell]) -> list[Cell]:
    """Run the code cells in order, in one namespace, and return all cells with what they show."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [_run(cell, namespace) if cell["cell_type"] == "code" else cell for cell in cells]


def _run(cell: Cell, namespace: dict[str, Any]) -> Cell:
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    outputs += [{"output_type": "display_data", "data": {"image/png": p}, "metadata": {}} for p in _pictures()]
    return {**cell, "outputs": outputs}


def _pictures() -> list[str]:
    """Figures that a cell left open, as PNG in base64; they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    found = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=110, bbox_inches="tight")
        found.append(base64.b64encode(file.getvalue()).decode())
    pyplot.close("all")
    return found


def main(paths: list[str]) -> None:
    """Run notebooks and store what their cells show."""
    for name in paths:
        path = Path(name)
        whole = json.loads(path.read_text())
        whole["cells"] = execute(whole["cells"])
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
        print(f"{name}: {len(whole['cells'])} cells")


if __name__ == "__main__":
    main(sys.argv[1:])
