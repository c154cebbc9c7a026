"""The JSON Schema of a config, for editors: every key with its description, default and verdict, "auto" included."""

from __future__ import annotations

from typing import Any

from .draft import dotted
from .fields import Section
from .legacy import renamed_keys, replaced_switches
from .optim import OptimizerParams
from .root import Config
from .scanner import Path
from .schedule import KNOWN_SCHEDULES
from .tree import keys_of

_AUTO = {"const": "auto"}


def json_schema() -> dict[str, Any]:
    """Return the schema as a plain dict (JSON Schema 2020-12)."""
    schema = Config.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    for section in (schema, *definitions.values()):
        _finish(section)
    definitions["Optimizer"]["properties"]["params"] = _parameters([OptimizerParams], definitions["Optimizer"]["properties"]["params"])
    definitions["Scheduler"]["properties"]["params"] = _parameters(
        list(KNOWN_SCHEDULES.values()), definitions["Scheduler"]["properties"]["params"]
    )
    for old, present in renamed_keys():
        properties = _properties(schema, old)
        properties[str(old[-1])] = {**properties[str(present[-1])], **_deprecated(present)}
    for old, present in replaced_switches():
        _properties(schema, old)[str(old[-1])] = {"type": "boolean", **_deprecated(present)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Stateroom config"}


def _finish(section: dict[str, Any]) -> None:
    """Let every value that is not a section be "auto", which loading resolves."""
    for name, value in section.get("properties", {}).items():
        value.pop("title", None)
        if "$ref" in value or value.get("type") == "object":
            continue
        about = {word: value.pop(word) for word in ("description", "default", "effect", "alters") if word in value}
        choices = value.get("anyOf", [value] if value else None)
        section["properties"][name] = about if choices is None else {**about, "anyOf": [*choices, _AUTO]}


def _parameters(models: list[type[Section]], around: dict[str, Any]) -> dict[str, Any]:
    """Describe free parameters: the known ones of all `models`, and room for others."""
    properties: dict[str, Any] = {}
    for model in models:
        own = model.model_json_schema()
        _finish(own)
        for name in keys_of(model):
            # schedules give the same name different defaults, so only what is common is said
            properties.setdefault(name, {word: text for word, text in own["properties"][name].items() if word != "default"})
    return {**around, "properties": properties}


def _properties(schema: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the properties of the section around a key of the first or second level."""
    section = schema
    if len(path) > 1:
        section = schema["$defs"][str(schema["properties"][str(path[0])]["$ref"]).rsplit("/", 1)[-1]]
    properties: dict[str, Any] = section["properties"]
    return properties


def _deprecated(present: Path) -> dict[str, Any]:
    return {"deprecated": True, "description": f"Deprecated spelling of {dotted(present)}."}
