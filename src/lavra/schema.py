"""Strict configuration: layers of YAML, environment and command line -> one frozen, typed model.

Every value remembers where it came from, and every mistake of a recipe is reported at once, with
file and line, what was seen, what is allowed, and the nearest known key.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from lavra.errors import UsageError
from lavra.units import parse_bytes, parse_count, parse_seconds

ENVIRONMENT_PREFIX = "LAVRA__"


class Config(BaseModel):
    """Base of every configuration section: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a field may be a mapping, which has no hash of its own


def _or_auto(parse: Callable[[object], float]) -> Callable[[object], object]:
    """`auto`, or a value above zero."""

    def convert(value: object) -> object:
        if value == "auto":
            return value
        number = parse(value)
        if number <= 0:
            raise ValueError(f"{value!r} must be above 0, or auto")
        return number

    return convert


def _parse_float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None


_TEXT_OR_NUMBER = int | float | str
Count = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=_TEXT_OR_NUMBER)]
Seconds = Annotated[float, BeforeValidator(parse_seconds, json_schema_input_type=_TEXT_OR_NUMBER)]
Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=_TEXT_OR_NUMBER)]
AutoCount = Annotated[
    int | Literal["auto"], BeforeValidator(_or_auto(parse_count), json_schema_input_type=_TEXT_OR_NUMBER)
]
AutoBytes = Annotated[
    int | Literal["auto"], BeforeValidator(_or_auto(parse_bytes), json_schema_input_type=_TEXT_OR_NUMBER)
]
AutoFloat = Annotated[
    float | Literal["auto"], BeforeValidator(_or_auto(_parse_float), json_schema_input_type=float | str)
]

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """YAML where only true and false are booleans: `compile: off` is the word it looks like (as in YAML 1.2)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")
)


@dataclass(frozen=True)
class Layer:
    """One source of settings, later layers win.

    Attributes:
        origin: what the user calls it: `preset`, `file`, `environment`, `command line`.
        data: nested mapping of plain values.
        marks: key path -> place (`recipe.yaml:12`, `LAVRA__TRAIN__STEPS`, `train.steps=3`).
    """

    origin: str
    data: Mapping[str, Any]
    marks: Mapping[KeyPath, str] = field(default_factory=dict)


def read_yaml(path: Path, *, origin: str) -> Layer:
    """Read a YAML mapping and the line of every key.

    Raises:
        UsageError: missing file, invalid YAML, a key given twice, or no mapping at the top.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path.resolve()}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: {error}", where=str(path)) from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        marks: dict[KeyPath, str] = {}
        data = _construct(node, (), marks, path.name) if node is not None else {}
    except yaml.YAMLError as error:
        raise UsageError(f"invalid YAML: {error}", where=str(path)) from error
    if not isinstance(data, dict):
        raise UsageError("not a mapping of keys to values", where=str(path))
    return Layer(origin, data, marks)


def _construct(node: yaml.Node, at: KeyPath, marks: dict[KeyPath, str], file: str) -> Any:
    marks.setdefault(at, f"{file}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in result:
                raise UsageError(f"the key `{key}` is given twice", where=f"{file}:{line}")
            marks[(*at, key)] = f"{file}:{line}"
            result[key] = _construct(value_node, (*at, key), marks, file)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*at, i), marks, file) for i, item in enumerate(node.value)]
    return _Loader("").construct_object(node, deep=True)


def layer_from_overrides(overrides: Iterable[str]) -> Layer:
    """`["train.steps=100", "model.size=10M"]` -> the `command line` layer.

    Raises:
        UsageError: an item without `=` or with a value that is no YAML.
    """
    data: dict[str, Any] = {}
    marks: dict[KeyPath, str] = {}
    for item in overrides:
        key, equals, raw = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"`{item}` is not an override", hint="write section.key=value")
        _put(data, marks, tuple(key.strip().split(".")), raw, item)
    return Layer("command line", data, marks)


def layer_from_environment(environment: Mapping[str, str]) -> Layer:
    """`LAVRA__TRAIN__STEPS=100` -> the `environment` layer (`__` separates levels)."""
    data: dict[str, Any] = {}
    marks: dict[KeyPath, str] = {}
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(part.lower() for part in name[len(ENVIRONMENT_PREFIX) :].split("__"))
            _put(data, marks, path, environment[name], name)
    return Layer("environment", data, marks)


def _put(
    data: dict[str, Any], marks: dict[KeyPath, str], path: tuple[str, ...], raw: str, place: str
) -> None:
    try:
        value = yaml.load(raw, Loader=_Loader) if raw else None
    except yaml.YAMLError as error:
        raise UsageError(f"the value is not valid YAML: {error}", where=place) from error
    target = data
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise UsageError("a section and a value share one name", where=place)
    target[path[-1]] = value
    marks[path] = place


def merge(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Overlay layers (later wins, mappings merge, lists replace) -> (data, key path -> origin text)."""
    data: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for layer in layers:
        _overlay(data, layer.data, (), layer, origins)
    return data, origins


def _overlay(
    base: dict[str, Any],
    over: Mapping[str, Any],
    at: KeyPath,
    layer: Layer,
    origins: dict[KeyPath, str],
) -> None:
    for key, value in over.items():
        path = (*at, key)
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _overlay(base[key], value, path, layer, origins)
            continue
        for stale in [p for p in origins if p[: len(path)] == path]:
            del origins[stale]
        base[key] = copy.deepcopy(value)
        for mark, place in layer.marks.items():
            if mark[: len(path)] == path:
                origins[mark] = f"{layer.origin} ({place})"
        origins.setdefault(path, layer.origin)


ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(
    model: type[ModelT], data: Mapping[str, Any], origins: Mapping[KeyPath, str], *, file: str = "recipe"
) -> ModelT:
    """Build `model`, or raise one error that lists every mistake.

    Args:
        file: what the user calls it.

    Raises:
        UsageError: one line a mistake: place, key path, what was seen, what is allowed.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = sorted({_describe(model, problem, origins, file) for problem in error.errors()})
        count = len(lines)
        recipe_hint = "`lavra config schema` lists every key; `lavra config show` prints the values in use"
        raise UsageError(
            f"{count} mistake{'s' if count > 1 else ''} in the {file}:\n  " + "\n  ".join(lines),
            hint=recipe_hint if file == "recipe" else "",
        ) from None


def _describe(model: type[BaseModel], problem: Any, origins: Mapping[KeyPath, str], file: str) -> str:
    location: KeyPath = tuple(problem["loc"])
    place = _place(location, origins, file)
    name = ".".join(str(part) for part in location) or file
    if problem["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        advice = f"did you mean `{near[0]}`?" if near else "known keys: " + ", ".join(sorted(known))
        return f"{place}: unknown key `{name}`; {advice}"
    if problem["type"] == "missing":
        return f"{place}: `{name}` is required"
    message = problem["msg"].removeprefix("Value error, ")
    seen = problem["input"]
    shown = "" if isinstance(seen, Mapping) and len(str(seen)) > 60 else f" (seen: {seen!r})"
    return f"{place}: `{name}`: {message}{shown}"


def _place(location: KeyPath, origins: Mapping[KeyPath, str], file: str) -> str:
    """Origin of the value, of what lies inside it (a whole section is wrong), or of its nearest parent."""
    inside = [origins[path] for path in origins if path[: len(location)] == location and location]
    parents = [origins[location[:n]] for n in range(len(location), 0, -1) if location[:n] in origins]
    # An origin with a place in brackets says more than the bare name of a layer.
    return next((o for o in parents[:1] + inside + parents if "(" in o), (parents + inside + [file])[0])


def _keys_at(model: type[BaseModel], location: KeyPath) -> list[str]:
    """Field names of the model that the key path leads to (through optionals, lists and unions)."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel) and part in current.model_fields:
            current = _first_model(current.model_fields[str(part)].annotation)
    if isinstance(current, type) and issubclass(current, BaseModel):
        return list(current.model_fields)
    return []


def _first_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        if (found := _first_model(part)) is not None:
            return found
    return None


def flatten(data: Mapping[str, Any], *, whole: Collection[str] = ()) -> dict[str, Any]:
    """Nested mapping -> `{"train.steps": 100, ...}` in its order; lists stay whole, as do the mappings named."""
    flat: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        if isinstance(value, Mapping) and value and prefix not in whole:
            for key, item in value.items():
                walk(item, f"{prefix}.{key}" if prefix else str(key))
        else:
            flat[prefix] = value

    walk(data, "")
    return flat
