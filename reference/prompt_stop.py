"""Which tokens end a generation: `eos_token_id` of the checkpoint's `generation_config.json`.

`config.json` has an `eos_token_id` too, of one id; the release stops at two, <|endoftext|> and <|endofassistant|>, and
an engine that reads only the config runs past the end of the turn. So a missing file is an error, not a default.
Source: multimodal prompt specification, sections 1 and 4.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from reference.errors import ConfigError
from reference.json_reader import JsonReader

GENERATION_FILE = "generation_config.json"


def read_stop_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """The stop ids in the order of the file, each once. Raises: ConfigError if the file does not say."""
    path = Path(folder) / GENERATION_FILE
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; without it the stop ids are not known") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object, found {type(values).__name__}")
    ids = JsonReader(values, str(path)).integers("eos_token_id")
    if not ids or min(ids) < 0:
        raise ConfigError(f"{path}: 'eos_token_id' must hold at least one id, none negative, found {list(ids)}")
    return tuple(dict.fromkeys(ids))
