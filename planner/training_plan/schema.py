"""Validator for the subset of JSON Schema used here, without dependencies.

GPU nodes have numpy and torch only. A test compares its verdicts with the ``jsonschema`` package.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
    *("minimum", "maximum", "exclusiveMinimum", "minItems", "maxItems", "uniqueItems", "pattern"),
    *("anyOf", "$ref", "$defs", "$schema", "$id", "title", "description"),
}

BOUNDS = {"type", "minimum", "maximum", "exclusiveMinimum", "description"}


@dataclass(frozen=True)
class SchemaError:
    """A broken rule.

    Attributes
    ----------
    field
        Path, such as ``network.ids[3]``.
    rule
        The rule.
    found
        The value found, shortened.
    remedy
        What to write instead.
    """

    field: str
    rule: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}, found {self.found}; {self.remedy}"


@cache
def load_schema(name: str) -> dict[str, Any]:
    """A schema of the package, such as ``plan``."""
    path = Path(__file__).parent / f"{name}.schema.json"
    schema: dict[str, Any] = json.loads(path.read_text())
    return schema


def show(value: Any) -> str:
    """A value in at most 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def errors(value: Any, schema: dict[str, Any]) -> Iterator[SchemaError]:
    """All rules that ``value`` breaks, in document order."""
    yield from _errors(value, schema, schema, "")


def _errors(
    value: Any, schema: dict[str, Any] | bool, root: dict[str, Any], path: str
) -> Iterator[SchemaError]:
    if schema is True:
        return
    where = path or "plan"
    if schema is False:
        yield SchemaError(where, "is not a known field", show(value), "remove it")
        return
    unknown = set(schema) - KEYWORDS
    if unknown:
        raise NotImplementedError(f"schema keyword {unknown} is not supported")
    remedy = f"expected {schema['description']}" if "description" in schema else "correct it"

    def broken(rule: str) -> SchemaError:
        return SchemaError(where, rule, show(value), remedy)

    if "$ref" in schema:
        yield from _errors(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root, path)
    if "anyOf" in schema:
        branches = [list(_errors(value, branch, root, path)) for branch in schema["anyOf"]]
        if all(branches):
            # report the last alternative: the others are null
            yield from branches[-1]
        return
    if "type" in schema and not _is_type(value, schema["type"]):
        yield broken(f"must be of type {schema['type']}")
        return
    if "const" in schema and not _same(value, schema["const"]):
        yield broken(f"must be {show(schema['const'])}")
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        yield broken(f"must be one of {show(schema['enum'])}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from (broken(rule) for rule in _number_rules(value, schema))
    elif isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield broken(f"must match {schema['pattern']}")
    elif isinstance(value, list):
        yield from (broken(rule) for rule in _array_rules(value, schema))
        if "items" in schema and not _plain_numbers(value, schema["items"]):
            for k, item in enumerate(value):
                yield from _errors(item, schema["items"], root, f"{path}[{k}]")
    elif isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                inner = schema.get("properties", {}).get(name, {})
                description = inner.get("description", f"field {name!r}")
                yield SchemaError(_join(path, name), "is missing", "nothing", f"give {description}")
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
            yield from _errors(item, inner, root, _join(path, name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if not isinstance(value, TYPES[name]):
        return False
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return True


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _number_rules(value: float, schema: dict[str, Any]) -> Iterator[str]:
    if not math.isfinite(value):
        yield "must be a finite number"
        return
    if "minimum" in schema and value < schema["minimum"]:
        yield f"must be >= {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"must be <= {schema['maximum']}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"must be > {schema['exclusiveMinimum']}"


def _plain_numbers(values: list[Any], schema: dict[str, Any]) -> bool:
    """Whether all are numbers, or null, that satisfy the schema of the items.

    A fast path for tables with millions of them.
    """
    branches = schema.get("anyOf", [schema])
    numbers, null = branches[-1], branches[:-1] == [{"type": "null"}]
    numeric = numbers.get("type") == "number" and set(numbers) <= BOUNDS
    if not numeric or not (null or numbers is schema):
        return False
    smallest, exclusive_least = (
        numbers.get("minimum", -math.inf),
        numbers.get("exclusiveMinimum", -math.inf),
    )
    largest = numbers.get("maximum", sys.float_info.max)
    return all(
        (type(x) is float and smallest <= x <= largest and x > exclusive_least)
        or (null and x is None)
        for x in values
    )


def _array_rules(value: list[Any], schema: dict[str, Any]) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"must have at least {schema['minItems']} entries"
    if len(value) > schema.get("maxItems", math.inf):
        yield f"must have at most {schema['maxItems']} entries"
    if schema.get("uniqueItems"):
        distinct = {json.dumps(item, sort_keys=True) for item in value}
        if len(distinct) < len(value):
            yield "must not list an entry twice"
