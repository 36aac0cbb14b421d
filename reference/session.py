"""The protocol through which every implementation is driven: steps over requests.

`step` appends tokens to requests and returns the logits of the new rows; `truncate` takes rejected drafts back;
`fork` and `free` manage requests. Prefill, chunked prefill, decode and draft verification are the same call with
other lengths.
"""

from dataclasses import dataclass
from typing import Literal

StepKind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class StepItem:
    """New tokens of one request. They take the next positions of the request, which starts to exist with its first."""

    request: str
    token_ids: tuple[int, ...]
    kind: StepKind
