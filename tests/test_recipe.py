"""Where settings come from, what the paths in them are relative to, and what a recipe refuses."""

from __future__ import annotations

import json
import operator
import os
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lavra import recipe as recipe_module
from lavra.errors import UsageError
from lavra.pipeline import _COMPARISONS
from lavra.recipe import PRESETS, LoadedRecipe, Recipe, load_recipe, parse_criterion, preset_names


def load(*args: Any, environment: dict[str, str] | None = None) -> LoadedRecipe:
    name, *overrides = args or ("",)
    return load_recipe(str(name), overrides, environment or {})


def refusal(*args: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(*args)
    return str(caught.value)


@pytest.fixture
def presets(tmp_path: Path, monkeypatch) -> Path:
    """A folder of presets with one, `base`, that sets three values."""
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "base.yaml").write_text(
        "# A base.\nseed: 1\ntrain:\n  validations: 1\n  log_every: 1\n  grad_clip: 1.5\n"
    )
    monkeypatch.setattr(recipe_module, "PRESETS", folder)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "project/my.yaml"
    path.parent.mkdir()
    path.write_text("preset: base\nseed: 2\n\ntrain:\n  validations: 2\n  log_every: 2\n")
    return path


def test_command_line_beats_environment_beats_file_beats_preset_beats_default(
    presets: Path, file: Path
) -> None:
    environment = {"LAVRA__SEED": "3", "LAVRA__TRAIN__VALIDATIONS": "3", "LAVRAX": "no setting"}
    loaded = load(file, "seed=4", environment=environment)
    rows = {key: (value, origin) for key, value, origin in loaded.rows()}
    assert rows["seed"] == ("4", "command line (seed=4)")
    assert rows["train.validations"] == ("3", "environment (LAVRA__TRAIN__VALIDATIONS)")
    assert rows["train.log_every"] == ("2", "file (my.yaml:6)")
    assert rows["train.grad_clip"] == ("1.5", "preset (base.yaml:6)")
    assert rows["train.weight_decay"] == ("0.1", "default")
    assert loaded.recipe.seed == 4 and loaded.recipe.train.validations == 3


def test_a_preset_can_be_run_by_its_name_under_overrides(presets: Path) -> None:
    loaded = load("base", "seed=9")
    assert (loaded.recipe.seed, loaded.recipe.train.grad_clip) == (9, 1.5)
    assert ("train.grad_clip", "1.5", "preset (base.yaml:6)") in loaded.rows()
    assert "presets: base" in refusal("bass")


def test_a_preset_may_be_named_in_the_file_the_environment_or_on_the_command_line(
    presets: Path, file: Path
) -> None:
    (presets / "other.yaml").write_text("train: {grad_clip: 2.5}\n")
    assert load(file).recipe.train.grad_clip == 1.5
    assert load(file, "preset=other").recipe.train.grad_clip == 2.5
    assert load("", environment={"LAVRA__PRESET": "other"}).recipe.train.grad_clip == 2.5
    assert "no preset `bass`" in refusal("", "preset=bass")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_that_ships_loads_and_says_what_it_is_in_its_first_line(name: str) -> None:
    assert load(name).recipe.schema_version == 1
    assert (PRESETS / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.parametrize("name", preset_names())
def test_the_resolved_recipe_loads_to_the_same_recipe(name: str, tmp_path: Path) -> None:
    loaded = load(name, "train.compile=off", "tokenizer.vocab_size=1000")
    (tmp_path / "resolved.yaml").write_text(loaded.resolved_yaml())
    assert load(tmp_path / "resolved.yaml").recipe == loaded.recipe


def test_paths_in_a_file_are_relative_to_it_and_those_typed_here_to_the_current_folder(
    tmp_path: Path, monkeypatch
) -> None:
    project, here = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    here.mkdir()
    text = (
        "run_dir: ../out\n"
        "corpus: {sources: [{path: data/*.txt}, {path: python:stdlib}, {path: /abs/data}, {path: 's3://b/x'}]}\n"
        "train: {init_from: runs/old}\n"
    )
    (project / "my.yaml").write_text(text)
    monkeypatch.chdir(here)
    for name in ("../project/my.yaml", str(project / "my.yaml")):
        loaded = load(name)
        sources = [source.path for source in loaded.recipe.corpus.sources]
        assert sources == [f"{project}/data/*.txt", "python:stdlib", "/abs/data", "s3://b/x"]
        assert loaded.recipe.train.init_from == f"{project}/runs/old"
        assert loaded.run_dir == tmp_path / "out"
    typed = load(project / "my.yaml", "run_dir=mine", "corpus.sources=[{path: ../d}]")
    assert typed.run_dir == here / "mine"
    assert typed.recipe.corpus.sources[0].path == f"{tmp_path}/d"
    assert typed.recipe.train.init_from == f"{project}/runs/old"
    environment = {"LAVRA__TRAIN__INIT_FROM": "old", "LAVRA__RUN_DIR": "env"}
    assert load(project / "my.yaml", environment=environment).recipe.train.init_from == f"{here}/old"


def test_home_and_variables_in_paths_are_expanded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DATA", "/data")
    loaded = load("", "corpus.sources=[{path: ~/notes}, {path: $DATA/x}]")
    assert [s.path for s in loaded.recipe.corpus.sources] == ["/home/ada/notes", "/data/x"]


def test_a_run_lives_beside_its_recipe_and_a_presets_run_in_the_current_folder(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "my.yaml").write_text("name: first\n")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert load(tmp_path / "my.yaml").run_dir == tmp_path / "runs/first"
    assert load("quickstart").run_dir == here / "runs/quickstart"


def test_a_missing_recipe_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal("sub/none.yaml")
    assert str(tmp_path / "sub/none.yaml") in message and "lavra init" in message


def test_a_recipe_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "not UTF-8" in refusal(tmp_path / "latin.yaml")


# --- success criteria ---------------------------------------------------------------------------

NUMBERS = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6)


@given(
    st.sampled_from(["bits_per_byte", "val_loss"]),
    st.sampled_from(["<", "<=", ">", ">="]),
    NUMBERS,
    st.booleans(),
)
def test_a_criterion_is_a_metric_a_comparison_and_a_number(
    metric: str, sign: str, limit: float, spaced: bool
) -> None:
    gap = " " if spaced else ""
    assert parse_criterion(f"{metric}{gap}{sign}{gap}{limit!r}") == (metric, sign, float(limit))


@given(NUMBERS, NUMBERS)
def test_comparisons_mean_what_they_say(a: float, b: float) -> None:
    oracle = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
    assert {s: f(a, b) for s, f in _COMPARISONS.items()} == {s: f(a, b) for s, f in oracle.items()}


@pytest.mark.parametrize(
    "text", ["bits_per_byte", "bits_per_byte < much", "< 1", "a == 1", "a < 1 < 2", "", "a < 1e", "a < ."]
)
def test_what_is_no_criterion_is_refused_with_an_example(text: str) -> None:
    message = refusal("", f"success.evaluate=[{json.dumps(text)}]")
    assert "is not a criterion" in message and "bits_per_byte < 1.8" in message


def test_a_criterion_on_an_unknown_stage_or_metric_is_refused_with_the_known_ones() -> None:
    assert (
        "no stage `evalute`" in (text := refusal("", "success.evalute=[bits_per_byte < 1]"))
        and "evaluate" in text
    )
    text = refusal("", "success.evaluate=[bits_per_bite < 1]")
    assert "measures no `bits_per_bite`" in text and "bits_per_byte" in text


# --- what a recipe refuses ----------------------------------------------------------------------


def test_cosine_needs_a_horizon_known_in_advance() -> None:
    assert "cosine needs a horizon" in refusal("", "train.schedule=cosine")
    for budget in ("budget={tokens: 1M}", "budget={flops: 1e15}"):
        assert load("", "train.schedule=cosine", budget).recipe.train.schedule == "cosine"


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("{time: 5m, tokens: 1M}", "give one of time, tokens, flops, not time and tokens"),
        ("{time: null}", "give one of time, tokens, flops, not none"),
        ("{}", "give one of time, tokens, flops, not none"),
        ("{time: 5s}", "leaves no time to train"),
        ("{tokens: 0}", "greater than or equal to 1"),
        ("{flops: 0}", "greater than 0"),
    ],
)
def test_a_budget_is_exactly_one_of_time_tokens_and_flops(budget: str, words: str) -> None:
    assert words in refusal("", f"budget={budget}")


@pytest.mark.parametrize(
    "override",
    [
        "train.betas=[0.9, 1.5]",
        "train.learning_rate=0",
        "model.n_layers=0",
        "name=../up",
        "seed=-1",
        "schema_version=2",
    ],
)
def test_values_that_cannot_work_are_refused_before_anything_runs(override: str) -> None:
    assert f"command line ({override})" in refusal("", override)


# --- every field is documented ------------------------------------------------------------------


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """All config models of a recipe by the path that leads to them."""
    found: dict[str, type[BaseModel]] = {}

    def look(annotation: Any, path: str) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found[path] = annotation
            for name, field in annotation.model_fields.items():
                look(field.annotation, f"{path}.{name}")
        for part in get_args(annotation):
            look(part, path)

    look(model, "recipe")
    return found


def test_every_setting_of_every_section_has_a_description() -> None:
    found = sections(Recipe)
    assert {"recipe.budget", "recipe.corpus.sources", "recipe.train"} <= found.keys()
    undocumented = [
        f"{path}.{name}"
        for path, model in found.items()
        for name, field in model.model_fields.items()
        if not (field.description or f"{path}.{name}" in found)
    ]
    assert undocumented == []
    assert all(model.__doc__ for model in found.values())


def test_the_json_schema_knows_every_section_and_forbids_other_keys() -> None:
    schema = Recipe.model_json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())
    assert json.loads(json.dumps(schema)) == schema


def test_the_starter_names_only_values_that_are_the_defaults_or_its_own() -> None:
    """Deleting what one does not need, as the starter says, must not change what is left."""
    starter = yaml.safe_load((PRESETS / "starter.yaml").read_text())
    kept = {k: v for k, v in starter.items() if k not in ("model", "train", "tokens")}
    assert Recipe.model_validate(kept) == Recipe.model_validate(starter)


def test_the_environment_is_read_when_loading_not_when_importing(monkeypatch) -> None:
    monkeypatch.setenv("LAVRA__SEED", "41")
    assert os.environ["LAVRA__SEED"] == "41"
    assert load_recipe().recipe.seed == 41
