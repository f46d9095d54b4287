# SPDX-License-Identifier: Apache-2.0
"""Plugins of SGLang as it finds them: by the entry points of installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

KVDELTA: Final = ("kvdelta_sglang", "kvdelta = kvdelta_sglang.plugin:register")
"""The package with the hooks."""
LOSES_LOADS: Final = ("loses_loads", "loses_loads = loses_loads:install")
"""The plugin with which loads fail."""


def installed(folder: Path, package: tuple[str, str]) -> None:
    """Write what a package of this name has in ``folder`` when it is installed with this entry point."""
    name, entry = package
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry}\n")
