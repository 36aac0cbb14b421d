"""Reads values out of a JSON object and refuses, by name, what is absent or of the wrong type.

The released config's traps are all silent (an absent key that a relative's code would default differently), so
nothing here has a default unless the caller states one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from reference.errors import ConfigError

_MISSING: Any = object()


class JsonReader:
    """Typed access to one JSON object; `where` names it in error messages."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values = values
        self._where = where
        self.read_keys: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._values

    def unread(self) -> dict[str, Any]:
        """The entries that no call has asked for."""
        return {key: value for key, value in self._values.items() if key not in self.read_keys}

    def integer(self, key: str, default: int = _MISSING, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        if value < minimum:
            raise self._wrong(key, f"an integer of at least {minimum}", value)
        return value

    def number(self, key: str, default: float = _MISSING) -> float:
        """A finite positive number; integers are accepted and returned as float."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def boolean(self, key: str, default: bool = _MISSING) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def choice(self, key: str, allowed: Sequence[Any], default: Any = _MISSING) -> Any:
        """One of the values that exist. `1`, `1.0` and `true` are three different values."""
        value = self._get(key, default)
        if not any(value == option and type(value) is type(option) for option in allowed):
            raise self._wrong(key, " or ".join(repr(option) for option in allowed), value)
        return value

    def integers(self, key: str, default: Sequence[int] = _MISSING) -> tuple[int, ...]:
        """A list of integers; a single integer is a list of one."""
        value = self._get(key, default)
        items = [value] if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(items, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in items):
            raise self._wrong(key, "an integer or a list of integers", value)
        return tuple(items)

    def strings(self, key: str) -> tuple[str, ...]:
        value = self._get(key, _MISSING)
        if not isinstance(value, list | tuple) or any(not isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def section(self, key: str) -> "JsonReader | None":
        """A nested object, or None where the key is absent."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return JsonReader(value, f"{self._where}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        self.read_keys.add(key)
        if key in self._values:
            return self._values[key]
        if default is _MISSING:
            raise ConfigError(
                f"{self._where}: required key {key!r} is absent; a relative's default would be silently wrong"
            )
        return default

    def _wrong(self, key: str, expected: str, found: Any) -> ConfigError:
        return ConfigError(f"{self._where}: {key!r} must be {expected}, found {found!r}")
