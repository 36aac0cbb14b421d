"""The token ids of each request while a workload runs."""

from __future__ import annotations

from parity.workload import Workload


class Tokens:
    """Follows the actions of a workload: how long each request is, and which tokens come next."""

    def __init__(self, workload: Workload, vocab_size: int):
        self._workload, self._vocab_size = workload, vocab_size
        self._lengths: dict[str, int] = {}
        self._epochs: dict[str, int] = {}

    def length(self, request: str) -> int:
        return self._lengths.get(request, 0)

    def place(self, request: str) -> tuple[int, int]:
        """Position of the next token, and how many truncations there were."""
        return self.length(request), self._epochs.get(request, 0)

    def take(self, request: str, count: int) -> tuple[int, ...]:
        """The next tokens; the request is longer then."""
        ids = self.peek(request, count)
        self._lengths[request] = self.length(request) + count
        return ids

    def peek(self, request: str, count: int) -> tuple[int, ...]:
        start, epoch = self.place(request)
        return tuple(
            self._workload.token_id(request, position, epoch, self._vocab_size)
            for position in range(start, start + count)
        )

    def truncate(self, request: str, count: int) -> int:
        """Take back `count` tokens; returns the new length. Other tokens come in their place."""
        self._lengths[request] -= count
        self._epochs[request] = self._epochs.get(request, 0) + 1
        return self._lengths[request]

    def fork(self, request: str, new: str) -> None:
        self._lengths[new] = self._lengths[request]
        self._epochs[new] = 0

    def live(self) -> list[str]:
        return list(self._lengths)

    def free(self, request: str) -> None:
        del self._lengths[request]
        self._epochs[request] = self._epochs.get(request, 0) + 1
