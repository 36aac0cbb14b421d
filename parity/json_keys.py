"""Keys that a JSON object has twice. Readers keep the last one in silence, so such a file means two things."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any


def repeated_keys(content: bytes | str) -> list[str]:
    """Each key that one object has more than once, in a document that is known to be JSON."""
    repeated: dict[str, None] = {}

    def keep(pairs: Sequence[tuple[str, Any]]) -> None:
        if len(pairs) > 1:
            counts = Counter(key for key, _ in pairs)
            repeated.update(dict.fromkeys(key for key, count in counts.items() if count > 1))

    json.loads(content, object_pairs_hook=keep)
    return list(repeated)


def repetition_lines(content: bytes | str) -> list[str]:
    """One line for each such key."""
    return [f"{key[:80]!r}: is a key twice in one object, expected once" for key in repeated_keys(content)]
