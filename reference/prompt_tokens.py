"""Token ids back to text while they come, so that a parser never sees half of a character.

Byte-level tokens are pieces of UTF-8, cut anywhere: a character of four bytes may come in four tokens. Bytes are held
back until the character is whole. Special tokens stay in the text: the parsers of reasoning and calls look for them.
Source: multimodal prompt specification, section 1; tool-call specification, section 5.3.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable alphabet of bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def token_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for; an added token's are its own UTF-8."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


class TextStream:
    """Text of a sequence of ids. Bytes that are no UTF-8 become U+FFFD, as when decoding all at once."""

    def __init__(self, id_to_token: Callable[[int], str]):
        self._id_to_token = id_to_token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The whole characters that the next ids complete."""
        return self._decoder.decode(b"".join(token_bytes(self._id_to_token(id)) for id in ids))

    def finish(self) -> str:
        """What is left of a character that never became whole: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
