# SPDX-License-Identifier: Apache-2.0
"""What SGLang reads from its environment, and one prefill and one decode engine: they take half a minute to start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import ON_CPU, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

for name, value in ON_CPU.items():
    os.environ.setdefault(name, value)
# SGLang compiles its hash of a block, for which it needs ninja.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair
