"""Layers, origins, and the words in which a recipe's mistakes are told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from lavra.errors import UsageError
from lavra.schema import (
    Config,
    Count,
    Layer,
    Seconds,
    flatten,
    layer_from_environment,
    layer_from_overrides,
    merge,
    read_yaml,
    validate,
)


class Door(Config):
    width: Count = 1
    colour: str = "red"


class House(Config):
    name: str = "house"
    budget: Seconds = 60.0
    height: Annotated[int, Field(ge=1)] = 3
    lights: str = "off"
    warm: bool = True
    front: Door = Door()
    doors: tuple[Door, ...] = ()


def write(folder: Path, text: str, name: str = "house.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(*layers: Layer) -> House:
    return validate(House, *merge(layers))


def mistake(*layers: Layer) -> str:
    with pytest.raises(UsageError) as caught:
        load(*layers)
    return str(caught.value)


values = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


def overlaid(base: Any, over: Any) -> Any:
    """Oracle: what `merge` means, as a pure recursion."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {k: overlaid(base[k], v) if k in base else v for k, v in over.items()}


@example([{"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}])
@given(st.lists(mappings, max_size=4))
def test_later_layers_win_mappings_merge_and_layers_stay_as_they_were(data: list[dict]) -> None:
    before = copy.deepcopy(data)
    merged, _ = merge([Layer(str(i), d) for i, d in enumerate(data)])
    expected: dict = {}
    for item in before:
        expected = overlaid(expected, item)
    assert merged == expected
    assert data == before


def test_each_value_knows_the_file_line_variable_or_argument_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\n\nfront:\n  width: 2\n  colour: blue\n")
    layers = [
        read_yaml(path, origin="file"),
        layer_from_environment({"LAVRA__FRONT__COLOUR": "green", "HOME": "/"}),
        layer_from_overrides(["budget=5m"]),
    ]
    house = load(*layers)
    assert (house.name, house.front.width, house.front.colour, house.budget) == ("a", 2, "green", 300)
    origins = merge(layers)[1]
    assert origins[("name",)] == "file (house.yaml:1)"
    assert origins[("front", "width")] == "file (house.yaml:4)"
    assert origins[("front", "colour")] == "environment (LAVRA__FRONT__COLOUR)"
    assert origins[("budget",)] == "command line (budget=5m)"


def test_a_list_replaces_the_earlier_list_and_its_lines(tmp_path: Path) -> None:
    old = read_yaml(write(tmp_path, "doors:\n  - width: 1\n  - width: 2\n", "old.yaml"), origin="preset")
    new = read_yaml(write(tmp_path, "# new\ndoors:\n  - width: 3\n", "new.yaml"), origin="file")
    data, origins = merge([old, new])
    assert data == {"doors": [{"width": 3}]}
    assert origins[("doors", 0, "width")] == "file (new.yaml:3)"
    assert not any("old.yaml" in origin for origin in origins.values())


def test_five_mistakes_are_told_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = (
        "nmae: a\n"  # line 1: misspelt
        "budget: soon\n"  # line 2: no duration
        "height: 0\n"  # line 3: out of range
        "front:\n"
        "  collour: blue\n"  # line 5: misspelt, nested
        "doors:\n"
        "  - width: 2\n"
        "  - width: two\n"  # line 8: no count, in a list
    )
    message = mistake(read_yaml(write(tmp_path, text), origin="file"))
    assert message.startswith("5 mistakes in the recipe:")
    lines = message.splitlines()[1:6]
    for number, words in (
        (1, ["unknown key `nmae`", "did you mean `name`?"]),
        (2, ["`budget`", "'soon' is not a duration", "5m"]),
        (3, ["`height`", "greater than or equal to 1", "(seen: 0)"]),
        (5, ["unknown key `front.collour`", "did you mean `colour`?"]),
        (8, ["`doors.1.width`", "'two' is not a count", "10M"]),
    ):
        (line,) = [line for line in lines if f"(house.yaml:{number})" in line]
        assert all(word in line for word in words), line


def test_an_unknown_key_with_no_near_name_lists_the_known_ones() -> None:
    message = mistake(layer_from_overrides(["front.xyzzy=1"]))
    assert "command line (front.xyzzy=1): unknown key `front.xyzzy`; known keys: colour, width" in message


def test_an_unknown_key_inside_a_list_is_compared_with_the_keys_of_its_items(tmp_path: Path) -> None:
    message = mistake(read_yaml(write(tmp_path, "doors:\n  - wdth: 2\n"), origin="file"))
    assert "file (house.yaml:2): unknown key `doors.0.wdth`; did you mean `width`?" in message


@pytest.mark.parametrize(
    ("text", "place"),
    [("name: a\nname: b\n", "house.yaml:2"), ("front:\n  width: 1\n  width: 1\n", "house.yaml:3")],
)
def test_a_key_given_twice_is_refused_even_with_equal_values(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(UsageError, match="given twice") as caught:
        read_yaml(write(tmp_path, text), origin="file")
    assert caught.value.where == place


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n"])
def test_a_recipe_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="mapping"):
        read_yaml(write(tmp_path, text), origin="file")


def test_broken_yaml_and_broken_text_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid YAML"):
        read_yaml(write(tmp_path, "a: [1,\n"), origin="file")
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_yaml(path, origin="file")
    with pytest.raises(UsageError, match=str(tmp_path / "none.yaml")):
        read_yaml(tmp_path / "none.yaml", origin="file")


def test_an_empty_file_is_an_empty_layer_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, "# nothing\n"), origin="file").data == {}
    assert read_yaml(write(tmp_path, "\ufeffname: a\n"), origin="file").data == {"name": "a"}


def test_off_is_a_word_and_true_a_boolean_in_files_and_overrides(tmp_path: Path) -> None:
    for layer in (
        read_yaml(write(tmp_path, "lights: off\nwarm: false\nname: no\n"), origin="file"),
        layer_from_overrides(["lights=off", "warm=false", "name=no"]),
    ):
        house = load(layer)
        assert (house.lights, house.warm, house.name) == ("off", False, "no")


@pytest.mark.parametrize("item", ["height", "=3", " =3"])
def test_an_argument_without_key_and_value_is_no_override(item: str) -> None:
    with pytest.raises(UsageError, match="not an override"):
        layer_from_overrides([item])


def test_a_section_and_a_value_cannot_share_a_name() -> None:
    with pytest.raises(UsageError, match="share one name"):
        layer_from_overrides(["front=1", "front.width=2"])


def test_an_override_may_be_any_yaml_value() -> None:
    house = load(layer_from_overrides(["doors=[{width: 3}, {colour: a=b}]", "name=x=y"]))
    assert house.doors == (Door(width=3), Door(colour="a=b"))
    assert house.name == "x=y"


def test_settings_are_frozen_and_infinity_is_no_setting() -> None:
    with pytest.raises(Exception, match="frozen"):
        House().name = "b"  # type: ignore[misc]
    assert "budget" in mistake(layer_from_overrides(["budget=.inf"]))


@given(st.integers(1, 10**9), st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8))
def test_what_a_model_dumps_loads_to_the_same_model(height: int, name: str) -> None:
    house = House(height=height, name=name, doors=(Door(width=height),))
    text = yaml.safe_dump(house.model_dump(mode="json"), allow_unicode=True)
    assert load(Layer("file", yaml.safe_load(text))) == house


def test_flatten_names_every_leaf_once_and_keeps_lists_whole() -> None:
    flat = flatten(House(doors=(Door(),)).model_dump(mode="json"))
    assert list(flat) == [
        "name",
        "budget",
        "height",
        "lights",
        "warm",
        "front.width",
        "front.colour",
        "doors",
    ]
    assert flat["doors"] == [{"width": 1, "colour": "red"}]
