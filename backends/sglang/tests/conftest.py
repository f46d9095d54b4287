# SPDX-License-Identifier: Apache-2.0
"""One prefill and one decode engine for all tests: they take half a minute to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair
