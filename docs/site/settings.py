"""The tables of settings on the page of settings, read from the classes that define them, without importing them."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "agent_r1"

Classes = Mapping[str, ast.ClassDef]


def make_tables(name: str = "TrainConfig") -> str:
    """Return a table of settings for each class that ``name`` inherits from, and for each group of settings."""
    texts = [file.read_text("utf-8") for file in sorted(PACKAGE.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts if "use_attribute_docstrings" in text]  # the files of settings classes
    constants = {
        ast.unparse(node.targets[0]): node.value for tree in trees for node in tree.body if isinstance(node, ast.Assign)
    }
    trees = [_Inline(constants).visit(tree) for tree in trees]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    return "\n".join(_tables(classes, name))


class _Inline(ast.NodeTransformer):
    """Replaces the names of constants by their values, in defaults that name a constant."""

    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self._constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._constants.get(node.id)
        return value if isinstance(node.ctx, ast.Load) and isinstance(value, ast.Constant) else node


def _tables(classes: Classes, name: str) -> Iterator[str]:
    chain = [name]
    while (base := ast.unparse(classes[chain[-1]].bases[0])) in classes:
        chain.append(base)
    for one in reversed(chain):
        yield from _table(classes, classes[one], "", _section(classes[one]))


def _table(classes: Classes, definition: ast.ClassDef, prefix: str, title: str) -> Iterator[str]:
    """Yield the lines of a table of the settings of a class, and of one table for each of its groups of settings."""
    yield f"\n## {title}\n\n| option | default | meaning |\n|---|---|---|"
    groups = []
    for field, description in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        option, kind = prefix + field.target.id, ast.unparse(field.annotation)
        if kind in classes:
            groups.append((classes[kind], option))
        elif not kind.startswith("ClassVar"):
            text = _text(description).replace("|", "\\|")
            yield f"| `--{option}` | {_default(field.value)} | {text} |"
    for group, option in groups:
        yield from _table(classes, group, f"{option}.", f"`{option}`")


def _section(definition: ast.ClassDef) -> str:
    """Return the heading of the settings of a class, which its attribute ``section`` holds."""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "section" and node.value is not None:
            return str(ast.literal_eval(node.value))
    return definition.name


def _text(node: ast.stmt | None) -> str:
    """Return the description of a setting: the text that follows it."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split()) if is_text else ""


def _default(value: ast.expr | None) -> str:
    """Return the default of a setting as on the command line."""
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    if value is None:
        return ""
    try:
        default = ast.literal_eval(value)
    except ValueError:
        return f"`{ast.unparse(value)}`"
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f"`{str(default).lower() if isinstance(default, bool | None) else default}`" if default != "" else ""
