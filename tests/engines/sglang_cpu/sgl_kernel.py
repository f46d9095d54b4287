# SPDX-License-Identifier: Apache-2.0
"""In the place of SGLang's kernels, of which there is no build for a CPU.

SGLang imports some of them by name when it runs on a CPU. It calls none for the models of these tests; a call raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

if TYPE_CHECKING:
    from collections.abc import Callable

__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., Never]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Never:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no build for a CPU")

    return missing
