# SPDX-License-Identifier: Apache-2.0
"""What classes and modules of a vLLM that is not installed have, read from its sources."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvdelta_vllm.compat import Touched

Names = dict[str, list[str] | None]
"""A name to its parameters without ``self``; None: it is no function."""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _names(body: list[ast.stmt]) -> Names:
    found: Names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if node.name == "__init__":
                found |= {
                    target.attr: None
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Assign | ast.AnnAssign)
                    for target in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
                    if isinstance(target, ast.Attribute)
                }
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: None for target in targets if isinstance(target, ast.Name)}
    return found


def _owned(root: Path, module: str, owner: str) -> Names | None:
    """What a class has, with what its bases in vLLM have."""
    tree = _tree(root / (module.replace(".", "/") + ".py"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            found: Names = {}
            for base in node.bases:
                if isinstance(base, ast.Name):
                    found |= _owned(root, module, base.id) or {}
            return found | _names(node.body)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm."):
            for alias in node.names:
                if (alias.asname or alias.name) == owner and (root / (node.module.replace(".", "/") + ".py")).exists():
                    return _owned(root, node.module, alias.name)
    return None


def lacks(root: Path, touched: Touched) -> Iterator[str]:
    """Names that the sources in ``root`` do not have as they are touched."""
    if not (root / (touched.module.replace(".", "/") + ".py")).exists():
        yield touched.module
        return
    found = (
        _owned(root, touched.module, touched.owner)
        if touched.owner
        else _names(_tree(root / (touched.module.replace(".", "/") + ".py")).body)
    )
    where = f"{touched.module}.{touched.owner}" if touched.owner else touched.module
    if found is None:
        yield where
        return
    for entry in touched.names:
        name, _, parameters = entry.rstrip(")").partition("(")
        wanted = [parameter for parameter in parameters.split(", ") if parameter]
        if name not in found:
            yield f"{where}.{name}"
        elif "(" in entry and (found[name] or [])[: len(wanted)] != wanted:
            yield f"{where}.{name}({', '.join(found[name] or [])}) instead of {entry}"
