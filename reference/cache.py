"""What a request keeps between steps: latents, not expanded keys and values.

full layer:     kv_latent [S, C], k_rope [S, R] and index_key [S, J] of every position
sliding layer:  kv_latent and k_rope of the last positions only, in a ring of window + drafts rows
draft layer:    as a sliding layer, its own ring

Tensors are replaced, never written in place, so a fork shares them with its origin and autograd runs through.
Source: text_model specification, section 13.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.config import TextConfig
from reference.errors import CacheError

# S cached tokens  T new tokens  C kv latent  R rope dim  J index head dim


@dataclass(frozen=True)
class LatentRows:
    """Keys in latent form, with the absolute positions they belong to."""

    kv_latent_SC: Tensor
    k_rope_SR: Tensor
    positions_S: Tensor


class LayerCache(ABC):
    """The rows of one layer. `length` counts the tokens seen, not the rows kept."""

    def __init__(self) -> None:
        self.length = 0

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(self.length, self.length + count, device=device)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget every token from position `length` on. Raises: CacheError if rows that are needed then are gone."""

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


class FullCache(LayerCache):
    """Every row of the request."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[str, Tensor] = {}

    def append(self, kv_latent_TC: Tensor, k_rope_TR: Tensor, index_key_TJ: Tensor) -> tuple[LatentRows, Tensor]:
        """Store T rows; return all S rows and index_key_SJ."""
        new = {"kv_latent": kv_latent_TC, "k_rope": k_rope_TR, "index_key": index_key_TJ}
        if self.length:
            new = {name: torch.cat((self._tensors[name], rows)) for name, rows in new.items()}
        self._tensors = new
        self.length = len(new["kv_latent"])
        positions_S = torch.arange(self.length, device=kv_latent_TC.device)
        return LatentRows(new["kv_latent"], new["k_rope"], positions_S), new["index_key"]

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

    def rows(self, positions: Tensor) -> dict[str, Tensor]:
        return {name: tensor[positions] for name, tensor in self._tensors.items()}

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        self._tensors = {name: tensor[: self.length] for name, tensor in self._tensors.items()}


class SlidingCache(LayerCache):
    """A ring: position p lies in row p % size. Rows that were never written hold NaN, so that reading one shows."""

    def __init__(self, window: int, size: int):
        super().__init__()
        self.window, self.size = window, size
        self.oldest = 0  # smallest position still stored
        self._ring: dict[str, Tensor] = {}

    def append(self, kv_latent_TC: Tensor, k_rope_TR: Tensor) -> LatentRows:
        """Store T rows; return them behind the window - 1 older rows that the first of them may see.

        The older rows are read before any is overwritten, so a chunk longer than the ring is exact.
        """
        new = {"kv_latent": kv_latent_TC, "k_rope": k_rope_TR}
        if not self._ring:
            self._ring = {name: rows.new_full((self.size, rows.shape[1]), float("nan")) for name, rows in new.items()}
        device, first = kv_latent_TC.device, self._first_needed(self.length)
        past = self.rows(torch.arange(first, self.length, device=device))
        end = self.length + len(kv_latent_TC)
        kept = torch.arange(max(self.length, end - self.size), end, device=device)
        self._ring = {
            name: ring.index_copy(0, kept % self.size, new[name][kept - self.length])
            for name, ring in self._ring.items()
        }
        self.length, self.oldest = end, max(self.oldest, end - self.size)
        joined = {name: torch.cat((past[name], new[name])) for name in new}
        return LatentRows(joined["kv_latent"], joined["k_rope"], torch.arange(first, end, device=device))

    def tensors(self) -> dict[str, Tensor]:
        return self._ring

    def rows(self, positions: Tensor) -> dict[str, Tensor]:
        """The stored rows of these positions, which must not be older than `oldest`."""
        return {name: ring[positions % self.size] for name, ring in self._ring.items()}

    def truncate(self, length: int) -> None:
        if length >= self.length:
            return
        if self._first_needed(length) < self.oldest:
            raise CacheError(
                f"sliding cache: cannot go back from {self.length} to {length} tokens: the window of the next token "
                f"starts at position {self._first_needed(length)}, but positions below {self.oldest} are overwritten; "
                f"a ring of {self.size} rows takes back at most {self.size - self.window + 1}"
            )
        self.length = length

    def _first_needed(self, length: int) -> int:
        return max(0, length - (self.window - 1))


class RequestCache:
    """All layers of one request, and the draft layer's own ring.

    `max_draft_tokens` is how many tokens may be taken back; `max_length` bounds the request, and with it the rings.
    """

    def __init__(self, config: TextConfig, max_draft_tokens: int, max_length: int | None = None):
        window = config.sliding_window_size
        size = window + max_draft_tokens
        bounded = size if max_length is None else min(size, max_length)
        self.layers: list[FullCache | SlidingCache] = [
            FullCache() if config.is_full(layer) else SlidingCache(window, bounded)
            for layer in range(config.num_hidden_layers)
        ]
        # A draft runs ahead of the committed tokens, and after that tokens may be taken back.
        self.draft = SlidingCache(window, bounded + max_draft_tokens)
        self.max_length = max_length

    @property
    def length(self) -> int:
        return self.layers[0].length

    def check_room(self, count: int) -> None:
        """Raises: CacheError if `count` more tokens exceed `max_length`: the rings are no larger than that."""
        if self.max_length is not None and self.length + count > self.max_length:
            raise CacheError(
                f"cache: {count} tokens behind {self.length} exceed max_length = {self.max_length}; "
                f"make it with a larger max_length"
            )

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in (*self.layers, self.draft))

    def truncate(self, length: int) -> None:
        """Keep `length` tokens; draft row t is made from token t + 1, so the draft layer keeps one fewer.

        Raises: CacheError, before any layer has changed.
        """
        truncated = self.fork()
        for layer in truncated.layers:
            layer.truncate(length)
        truncated.draft.truncate(max(0, length - 1))
        self.layers, self.draft = truncated.layers, truncated.draft

    def fork(self) -> RequestCache:
        forked = copy.copy(self)
        forked.layers = [copy.copy(layer) for layer in self.layers]
        forked.draft = copy.copy(self.draft)
        return forked
