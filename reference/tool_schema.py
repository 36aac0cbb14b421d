"""The tools of a request, and the type that a tool's schema gives to each parameter.

    T(schema, depth) = nothing                              if schema is no object, or depth > 10
                     = schema.type                          if that key is there
                     = T($defs[last part], depth + 1)       if $ref begins "#/$defs/"
                     = first T(alternative, depth + 1)      over anyOf, oneOf, allOf, those of type "null" left out

T is a function of the schema and the depth alone, so it is computed once for each pair: a schema of cycles and many
alternatives costs 11 visits a node, where plain recursion takes (alternatives)^10.
Source: tool-call specification, sections 2 and 3.1, and its clarifications.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reference.errors import NoteError

ParameterType = Literal["string", "integer", "number", "boolean", "json"]

MAX_DEPTH = 10
LOCAL_REFERENCE = "#/$defs/"
UNIONS = ("anyOf", "oneOf", "allOf")
TYPE_NAMES: dict[str, ParameterType] = {
    "string": "string",
    "str": "string",
    "text": "string",
    "integer": "integer",
    "int": "integer",
    "number": "number",
    "float": "number",
    "boolean": "boolean",
    "bool": "boolean",
}


class ToolError(NoteError):
    """A list of tools is not what a request carries, or the parser was used in the wrong order."""


class NoToolCallError(NoteError):
    """A tool call was required, and the output has no valid one."""


@dataclass(frozen=True)
class _Schema:
    properties: Mapping[str, Any]
    definitions: Mapping[str, Any]


class Tools:
    """The known tools. Of two with one name, the first has the schema."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()):
        """Each is `{"type": "function", "function": {"name", "parameters", ...}}`, or flat, without `function`.

        Raises: ToolError for what is no list of objects with names.
        """
        if isinstance(tools, Mapping | str | bytes) or not isinstance(tools, Iterable):
            raise ToolError(f"tools must be a list of objects, found {type(tools).__name__}")
        self._schemas: dict[str, _Schema] = {}
        self._types: dict[tuple[str, str], ParameterType] = {}
        for number, tool in enumerate(tools):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                raise ToolError(
                    f'tools[{number}] must be {{"type": "function", "function": {{"name": …, "parameters": …}}}}, '
                    f"found no name in {_shortened(tool)}"
                )
            parameters = _object(function.get("parameters"))
            schema = _Schema(_object(parameters.get("properties")), _object(parameters.get("$defs")))
            self._schemas.setdefault(name, schema)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Tools:
        """Read a file that holds the list, or a request with the list under `tools`."""
        try:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
        except OSError as error:
            raise ToolError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ToolError(f"{path}: is not valid JSON: {error}") from error
        tools = values.get("tools") if isinstance(values, dict) else values
        if not isinstance(tools, list):
            raise ToolError(f'{path}: must hold a list of tools, or an object with one under "tools"')
        try:
            return cls(tools)
        except ToolError as error:
            raise ToolError(f"{path}: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def __len__(self) -> int:
        return len(self._schemas)

    def names(self) -> tuple[str, ...]:
        return tuple(self._schemas)

    def parameter_type(self, tool: str, parameter: str) -> ParameterType:
        """How the text of this parameter is read; `string` where nothing is declared."""
        key = (tool, parameter)
        if key not in self._types:
            schema = self._schemas[tool]
            if parameter not in schema.properties:
                # Not kept: the names a model makes up are without end.
                return "string"
            self._types[key] = _type_of(schema.properties[parameter], schema.definitions)
        return self._types[key]


def tools_of_request(
    request: Iterable[Mapping[str, Any]] | None,
    constructed: Iterable[Mapping[str, Any]] = (),
    fall_back: bool = False,
) -> Tools:
    """The tools that count: those of the request.

    Revisions of vLLM disagree on a request without any: with `fall_back`, the tools that the parser was constructed
    with count then; without, as vLLM 0.33 computes, every call is dropped.
    """
    return Tools(request or (constructed if fall_back else ()))


def _type_of(schema: Any, definitions: Mapping[str, Any]) -> ParameterType:
    declared = _declared(schema, 0, definitions, {})
    if isinstance(declared, list):
        declared = next((name for name in declared if name != "null"), "string")
    if not isinstance(declared, str) or not declared:
        return "string"
    return TYPE_NAMES.get(declared.lower(), "json")


def _declared(schema: Any, depth: int, definitions: Mapping[str, Any], known: dict[tuple[int, int], Any]) -> Any:
    """T of the module's docstring: a type's name, a list of names, or None."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    key = (id(schema), depth)
    if key not in known:
        known[key] = _searched(schema, depth, definitions, known)
    return known[key]


def _searched(schema: Mapping[str, Any], depth: int, definitions: Mapping[str, Any], known: dict[Any, Any]) -> Any:
    if "type" in schema:
        return schema["type"]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith(LOCAL_REFERENCE):
        return _declared(definitions.get(reference.rsplit("/", 1)[-1]), depth + 1, definitions, known)
    for union in UNIONS:
        alternatives = schema.get(union)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            if isinstance(alternative, Mapping) and alternative.get("type") == "null":
                continue
            found = _declared(alternative, depth + 1, definitions, known)
            # An empty name is a type that is present, and ends the search.
            if found is not None:
                return found
    return None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
