"""Grammars of the arguments of one tool: a JSON object by its schema, or each argument as markup writes it.

Called by :mod:`duckllm.text.formats.reply_grammar`. What the reader of calls makes of a value
(:mod:`duckllm.text.formats.json_text`) decides how a value may be written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duckllm.errors import ConfigError
from duckllm.sampling_params import StructuredOutputsParams
from duckllm.text.chat import Tool
from duckllm.text.formats.json_text import kind_of
from duckllm.text.formats.lark import LarkWriter
from duckllm.text.formats.markup import ParameterMarkup
from duckllm.text.grammar import why_not

# What says nothing of which values there may be.
_REMARKS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "strict", "$id")
) | {"$schema", "$comment"}
_OF_OBJECTS = _REMARKS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}

# What no argument's name has in a call.
_NO_NAME = frozenset('"<>\n')

# A text that is no JSON, and does not begin as any does.
_NO_JSON = r'/[^\s"\[{\-0-9tfn](?s:.*)/'

_MAX_REFERENCES = 16


class ArgumentGrammar:
    """What the arguments of one tool may be.

    A tool that is not strict, with a schema that cannot be kept to, may be called with any JSON object; where
    arguments are written one by one, with values that are so of any kind.

    Args:
        writer: Takes the rules.
        tool: With its schema.
        number: Of the tool, in messages and in names of rules.
    """

    def __init__(self, writer: LarkWriter, tool: Tool, number: int) -> None:
        self._writer, self._tool, self._number = writer, tool, number
        self._label = f"tools[{number}].function.parameters"
        self._schema: Mapping[str, Any] = tool.parameters

    def as_object(self) -> str:
        """What matches the arguments as one JSON object.

        Raises:
            ConfigError: They are none by the tool's schema.
        """
        types = self._schema.get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            raise ConfigError(self._label, dict(self._schema), "a schema of an object")
        return self._json({**self._schema, "type": "object"}, fallback={"type": "object"})

    def one_by_one(self, markup: ParameterMarkup) -> str:
        """What matches the arguments that the schema lists, each as ``markup`` says, in the schema's order.

        Raises:
            ConfigError: A required argument cannot be written so, or a strict tool's schema says more than
                that can keep to.
        """
        properties, required = self._properties()
        # Behind how many of them, and whether one of those was written: as rules, from the last one on.
        rests = {True: "", False: ""}
        for number, (name, schema) in reversed(list(enumerate(properties.items()))):
            if _NO_NAME & set(name) or not name.strip():
                self._cannot(f"an argument's name is {name!r}", always=name in required)
                continue
            argument = self._argument(markup, name, schema, number)
            following = {}
            for has_before, between in ((True, self._writer.exact(markup.between)), (False, "")):
                written = " ".join(filter(None, (between, argument, rests[True])))
                if name not in required:
                    written = f"({written} | {rests[has_before]})" if rests[has_before] else f"({written})?"
                state = "more" if has_before else "first"
                following[has_before] = self._writer.rule(f"rest_{self._number}_{number}_{state}", written)
            rests = following
        return rests[False]

    def _properties(self) -> tuple[dict[str, Any], frozenset[str]]:
        """The arguments' schemas, and which of them are required."""
        schema = self._resolve(self._schema)
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise ConfigError(self._label, dict(self._schema), "a schema of an object")
        if more := sorted(set(schema) - _OF_OBJECTS):
            self._cannot(f"{more[0]} beside properties")
        listed, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(listed, Mapping) or not isinstance(required, list):
            raise ConfigError(self._label, dict(self._schema), "properties and required of JSON Schema")
        others = schema.get("additionalProperties", True)
        for name in required:
            if name not in listed and others is False:
                raise ConfigError(self._label, dict(self._schema), f"{name!r} in properties: it is required")
        return {**listed, **{name: others for name in required if name not in listed}}, frozenset(required)

    def _argument(self, markup: ParameterMarkup, name: str, schema: Any, number: int) -> str:
        """A rule for one argument with its name and its end."""
        write, end = self._writer, markup.end.strip()
        kind, says = kind_of(self._tool.parameters, name), markup.string != markup.json
        shapes = self._texts(schema, end)
        if shapes is None:
            # As JSON it can be kept to, where the markup or the reader of calls lets a string be JSON.
            if kind == "string" and not says:
                self._cannot(f"{name}: more than an enum, a pattern and lengths of a string")
            shapes = [] if self._tool.strict else [()]
        if kind != "string" and not says:
            shapes = [(*shape, _NO_JSON) for shape in shapes]
        ways = []
        if kind == "string" or says or shapes:
            texts = [write.text_up_to(markup.end, without=[end], like=shape) for shape in shapes]
            ways = [f"{write.exact(markup.string)} {text}" for text in texts]
        if kind != "string" or (says and not ways):
            value = self._json(self._with_definitions(schema), fallback={})
            ways.append(f"{write.exact(markup.json)} {value} {write.exact(markup.end)}")
        if not ways:
            self._cannot(f"{name} is no string that can be written", always=True)
        begin = f"{write.exact(markup.begin)} {write.spelled(name)}"
        return write.rule(f"argument_{self._number}_{number}", f"{begin} ({' | '.join(ways)})")

    def _texts(self, schema: Any, end: str) -> list[tuple[str, ...]] | None:
        """For each way to be a string by a schema, what terminals such a text matches; None if unknown.

        A value with the argument's end in it cannot be written.
        """
        schema = self._resolve(schema)
        if not isinstance(schema, Mapping):
            return [()] if schema is True else []
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return []
        says = set(schema) - _REMARKS - {"type", "$defs", "definitions"}
        values = [schema["const"]] if says == {"const"} else schema.get("enum") if says == {"enum"} else None
        if isinstance(values, list):
            texts = [each for each in values if isinstance(each, str) and each and end not in each]
            return [(self._writer.spelled(each),) for each in texts]
        for word in ("anyOf", "oneOf"):
            if says == {word} and isinstance(schema[word], list):
                ways = [self._texts(each, end) for each in schema[word]]
                found = [shape for way in ways for shape in way or []]
                is_clear = word == "anyOf" or (len(set(found)) == len(found) and () not in found)
                return found if None not in ways and is_clear else None
        if not says <= {"pattern", "minLength", "maxLength"} or ("type" not in schema and says):
            return None
        shape = []
        if "pattern" in says:
            shape.append(_search(schema["pattern"]))
        if says & {"minLength", "maxLength"}:
            shape.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        found_out = StructuredOutputsParams(grammar=f"start: T\nT: {' & '.join(['/(?s:.*)/', *shape])}")
        return None if shape and why_not(found_out) else [tuple(shape)]

    def _with_definitions(self, schema: Any) -> dict[str, Any]:
        """An argument's schema on its own, with what it may refer to."""
        if schema is False:
            return {"enum": []}
        own = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        return {**(schema if isinstance(schema, Mapping) else {}), **own}

    def _resolve(self, schema: Any) -> Any:
        """What a schema refers to that says nothing else."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or set(schema) - _REMARKS - {"$defs", "definitions"} != {
                "$ref"
            }:
                break
            found: Any = self._schema
            for key in str(schema["$ref"]).removeprefix("#/").split("/"):
                found = found.get(key) if isinstance(found, Mapping) else None
            schema = found
        return schema

    def _json(self, schema: dict[str, Any], fallback: dict[str, Any]) -> str:
        """What matches JSON by a schema; by the other one where that cannot be and need not be."""
        params = StructuredOutputsParams(json=schema, label=self._label)
        if not self._tool.strict and why_not(params):
            params = StructuredOutputsParams(json=fallback, label=self._label)
        return self._writer.part(params)

    def _cannot(self, reason: str, *, always: bool = False) -> None:
        if always or self._tool.strict:
            expected = "one that calls in this model's markup can keep to"
            raise ConfigError(self._label, dict(self._schema), expected, reason)


def _search(pattern: Any) -> str:
    """A terminal of the texts in which a pattern of JSON Schema is found."""
    from llguidance import regex_to_lark

    pattern = str(pattern)
    head = "" if pattern.startswith("^") else "(?s:.*)"
    tail = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern[0 if head else 1 : None if tail else -1]
    # In a choice an anchor belongs to one side alone.
    return "/$^/" if "|" in inner and not (head and tail) else f"/{head}({regex_to_lark(inner, 'dw')}){tail}/"
