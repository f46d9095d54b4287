# SPDX-License-Identifier: Apache-2.0
"""In the place of SGLang's kernels, of which there is no build for a CPU.

SGLang imports some of them by name when it runs on a CPU. It calls none for the test model; a call
raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__path__: list[str] = []

# SGLang looks these up when it imports some of its models, as dynamo.sglang has it do.
_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_input_proj_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
):
    _OPERATORS.define(f"{_name}(Tensor tensor) -> Tensor")


def __getattr__(name: str) -> Callable[..., Never]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Never:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no build for a CPU")

    return missing
