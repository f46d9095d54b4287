# SPDX-License-Identifier: Apache-2.0
"""Lease words: how a decode worker learns whether a prefill worker still held the blocks that were read.

A read works on addresses: once the prefill worker gave its blocks to another prompt, it returns that prompt's
content. So every offer has a word of host memory that holds its generation while the blocks are leased, and 0 after.
A word that is read after the blocks and still has the generation proves that they were held all the time.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdelta_vllm.metadata import Lease, LeaseWord

WORD_BYTES = 8
"""A word is one aligned u64, so that it is never seen half written."""
LEASE_WORDS = 16_384
"""Words of a prefill worker's table: requests that it computes or leases at the same time."""
LANDING_WORDS = 1_024
"""Words that a decode worker reads at the same time; further reads wait for one of these."""


class WordTable:
    """Words of host memory that a NIXL agent can be asked for."""

    def __init__(self, words: int) -> None:
        self._words: npt.NDArray[np.uint64] = np.zeros(words, dtype=np.uint64)

    @property
    def address(self) -> int:
        """Where the table begins."""
        return int(self._words.ctypes.data)

    def address_of(self, index: int) -> int:
        """Where a word is."""
        return self.address + WORD_BYTES * index

    def register(self, agent: Any, backends: list[str]) -> Any:  # noqa: ANN401
        """Register the table with a NIXL agent; what comes back is to be deregistered."""
        descs = agent.get_reg_descs([(self.address, self._words.nbytes, 0, "")], "DRAM")
        agent.register_memory(descs, backends=backends)
        return descs

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value


class LeaseWords:
    """The words of a prefill worker's requests."""

    def __init__(self, table: WordTable) -> None:
        self.table = table
        self._of: dict[str, LeaseWord] = {}

    def hold(self, request_id: str, word: LeaseWord) -> None:
        """Write the word of a request whose blocks will be offered."""
        self._of[request_id] = word
        self.table[word.slot] = word.generation

    def let_go(self, request_id: str) -> None:
        """Clear the word, before anyone may use the blocks again; a later request in the same slot keeps its own."""
        word = self._of.pop(request_id, None)
        if word is not None and self.table[word.slot] == word.generation:
            self.table[word.slot] = 0

    def let_go_of_all(self) -> None:
        """Clear every word: this worker ends."""
        for request_id in list(self._of):
            self.let_go(request_id)

    def __len__(self) -> int:
        return len(self._of)


class Landing:
    """The words into which a decode worker reads; one belongs to a read until its handle is released."""

    def __init__(self, table: WordTable) -> None:
        self.table = table
        self._free = list(range(len(table)))

    def take(self) -> int | None:
        """Take a word, cleared; None: all are in use."""
        if not self._free:
            return None
        index = self._free.pop()
        self.table[index] = 0
        return index

    def give(self, index: int) -> None:
        """Give a word back; nothing may write it any more."""
        self._free.append(index)

    def __len__(self) -> int:
        return len(self._free)


@dataclass
class WordRead:
    """A read of one rank's word that is under way."""

    handle: Any
    landing: int


@dataclass
class LeaseCheck:
    """The check of one request's offer on all prefill ranks that it reads from."""

    lease: Lease
    engine_id: str
    ranks: tuple[int, ...]
    notice: bytes
    """What tells a rank of the prefill worker that it may free the blocks; travels with the read of its word."""
    deadline: float | None = None
    """None while the blocks are being read."""
    to_post: list[int] = field(default_factory=list)
    reads: dict[int, WordRead] = field(default_factory=dict)
    held: bool = True
    """False once a word was not the generation, or could not be read."""

    @property
    def finished(self) -> bool:
        """Whether every rank has answered."""
        return self.deadline is not None and not self.to_post and not self.reads
