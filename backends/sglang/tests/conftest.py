# SPDX-License-Identifier: Apache-2.0
"""What SGLang reads from its environment, in this process and in those of its engines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engines import ON_CPU

for name, value in ON_CPU.items():
    os.environ.setdefault(name, value)
# SGLang compiles its hash of a block, for which it needs ninja.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
