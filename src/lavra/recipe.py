"""The recipe: every room's settings in one frozen model, loaded from layers.

Precedence: command line > environment > recipe file > preset > default.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from lavra.corpus import config as corpus_config
from lavra.corpus.config import STANDARD_LIBRARY, CorpusConfig
from lavra.errors import UsageError
from lavra.evaluate import config as evaluate_config
from lavra.evaluate.config import EvaluateConfig
from lavra.model.config import ModelConfig
from lavra.optim.schedules import horizon_free
from lavra.schema import (
    Config,
    Count,
    KeyPath,
    Layer,
    Seconds,
    flatten,
    layer_from_environment,
    layer_from_overrides,
    merge,
    read_yaml,
    validate,
)
from lavra.tokenizer import config as tokenizer_config
from lavra.tokenizer.config import TokenizerConfig
from lavra.tokens import config as tokens_config
from lavra.tokens.config import TokensConfig
from lavra.train import config as train_config
from lavra.train.config import TrainConfig

PRESETS = Path(__file__).parent / "recipes"
_CRITERION = re.compile(
    r"\s*([a-z_]+)\s*(<=|>=|<|>)\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*"
)
_STAGE_METRICS: dict[str, tuple[str, ...]] = {
    "corpus": corpus_config.SUCCESS_METRICS,
    "tokenizer": tokenizer_config.SUCCESS_METRICS,
    "tokens": tokens_config.SUCCESS_METRICS,
    "pretrain": train_config.SUCCESS_METRICS,
    "evaluate": evaluate_config.SUCCESS_METRICS,
}


class Budget(Config):
    """What the run may spend: one of time, tokens or FLOPs."""

    time: Seconds | None = Field(default=None, description="Wall time from command start to report, e.g. 5m")
    tokens: Annotated[Count, Field(ge=1)] | None = Field(
        default=None, description="Training tokens, e.g. 100M"
    )
    flops: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Training FLOPs, e.g. 1.0e15"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Budget:
        given = [name for name in ("time", "tokens", "flops") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of time, tokens, flops, not {' and '.join(given) or 'none'}")
        if self.time is not None and self.time < 20:
            raise ValueError("a time budget below 20s leaves no time to train")
        return self


class Recipe(Config):
    """Everything a run is."""

    schema_version: Literal[1] = Field(default=1, description="Version of this format")
    preset: str = Field(default="", description="Preset that fills what this file leaves out")
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run")
    run_dir: str = Field(
        default="", description="Where the run lives; default: runs/<name> beside the recipe"
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Seed of initialisation, sampling and shuffling"
    )
    budget: Budget = Budget(time=300.0)
    corpus: CorpusConfig = CorpusConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    tokens: TokensConfig = TokensConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    success: dict[str, tuple[str, ...]] = Field(
        default={}, description="Criteria by stage, e.g. evaluate: [bits_per_byte < 1.8]"
    )

    @field_validator("success")
    @classmethod
    def _criteria(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for stage, criteria in value.items():
            if stage not in _STAGE_METRICS:
                raise ValueError(f"no stage `{stage}`; stages: {', '.join(_STAGE_METRICS)}")
            for text in criteria:
                metric, _, _ = parse_criterion(text)
                if metric not in _STAGE_METRICS[stage]:
                    known = ", ".join(_STAGE_METRICS[stage])
                    raise ValueError(f"stage `{stage}` measures no `{metric}`; it measures {known}")
        return value

    @model_validator(mode="after")
    def _schedule_fits_budget(self) -> Recipe:
        if self.budget.time is not None and not horizon_free(self.train.schedule):
            raise ValueError(
                f"train.schedule {self.train.schedule} needs a horizon known in advance; use wsd, or a budget in "
                "tokens or flops"
            )
        if self.train.schedule == "cyclic" and self.train.cycle < 2:
            raise ValueError("train.schedule cyclic needs train.cycle, 2 steps or more")
        return self

    @model_validator(mode="after")
    def _tokens_have_their_tokenizer(self) -> Recipe:
        given = [
            k
            for k, v in (("tokenizer.path", self.tokenizer.path), ("train.init_from", self.train.init_from))
            if v
        ]
        if self.tokens.sources and not given:
            raise ValueError(
                "tokens.sources needs tokenizer.path, the tokenizer.json that wrote those tokens"
            )
        if not self.corpus.sources and not self.tokens.sources:
            raise ValueError("corpus.sources is empty, and there are no tokens.sources either")
        if len(given) > 1:
            raise ValueError(
                "give tokenizer.path or train.init_from (which brings its own tokenizer), not both"
            )
        if self.tokenizer.path and self.tokenizer.vocab_size != "auto":
            raise ValueError("tokenizer.vocab_size is that of tokenizer.path; leave it out")
        return self

    @model_validator(mode="after")
    def _mixture_is_whole(self) -> Recipe:
        tokens = self.tokens
        for name in ("max_epochs", "curriculum"):
            if getattr(tokens, name) and not tokens.mixture:
                raise ValueError(f"tokens.{name} needs tokens.mixture, the weights to begin with")
        starts = [math.inf if s.start == "decay" else s.start for s in tokens.curriculum]
        if starts != sorted(set(starts)):
            raise ValueError("tokens.curriculum goes by rising `start`, `decay` last")
        for name, ramp in (
            ("tokens.seq_len_ramp", tokens.seq_len_ramp),
            ("train.batch_ramp", self.train.batch_ramp),
        ):
            untils = [stage.until for stage in ramp]
            if untils != sorted(set(untils)):
                raise ValueError(f"{name} goes by rising `until`")
        if tokens.seq_len != "auto" and any(tokens.seq_len % r.seq_len for r in tokens.seq_len_ramp):
            raise ValueError(f"every tokens.seq_len_ramp length must divide tokens.seq_len {tokens.seq_len}")
        if tokens.seq_len == "auto" and tokens.seq_len_ramp:
            raise ValueError("tokens.seq_len_ramp needs a tokens.seq_len that its lengths divide")
        return self


def parse_criterion(text: str) -> tuple[str, str, float]:
    """`"bits_per_byte < 1.8"` -> `("bits_per_byte", "<", 1.8)`.

    Raises:
        ValueError: not of the form METRIC < NUMBER (also <=, >, >=).
    """
    match = _CRITERION.fullmatch(text)
    if not match:
        raise ValueError(f"`{text}` is not a criterion; write for example bits_per_byte < 1.8")
    return match[1], match[2], float(match[3])


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, the text it came from and the origin of each value."""

    recipe: Recipe
    run_dir: Path
    text: str
    origins: Mapping[KeyPath, str]

    def resolved_yaml(self) -> str:
        """The whole recipe with every default written out."""
        return yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def rows(self) -> list[tuple[str, str, str]]:
        """(key, value, origin) of every value, for `lavra config show`."""
        return [
            (key, _shown(value), self.origins.get(tuple(key.split(".")), "default"))
            for key, value in flatten(self.recipe.model_dump(mode="json")).items()
        ]


def _shown(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
        .removesuffix("...\n")
        .strip()
    )


def load_recipe(
    name_or_path: str = "", overrides: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> LoadedRecipe:
    """Load a recipe file (or a preset by name) under environment and command line.

    Relative paths in a file are relative to that file; those on the command line and in the
    environment to the current directory.

    Raises:
        UsageError: every mistake of the recipe at once.
    """
    here = Path.cwd()
    layers: list[Layer] = []
    text = ""
    base = here
    if name_or_path:
        file = _find(name_or_path)
        is_preset = file.parent == PRESETS
        layer = read_yaml(file, origin="preset" if is_preset else "file")
        text = file.read_text(encoding="utf-8-sig")
        base = here if is_preset else file.resolve().parent
        layers = [_absolute_paths(layer, base)]
    layers += [
        _absolute_paths(layer_from_environment(environment), here),
        _absolute_paths(layer_from_overrides(overrides), here),
    ]
    if presets := [preset for layer in layers if (preset := layer.data.get("preset"))]:
        layers.insert(0, _absolute_paths(read_yaml(_preset(str(presets[-1])), origin="preset"), here))
    data, origins = merge(layers)
    recipe = validate(Recipe, data, origins)
    run_dir = Path(recipe.run_dir) if recipe.run_dir else base / "runs" / recipe.name
    return LoadedRecipe(recipe, run_dir, text, origins)


def preset_names() -> list[str]:
    """Names of the presets that ship with lavra."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if path.suffix not in (".yaml", ".yml") and "/" not in name_or_path:
        return _preset(name_or_path)
    raise UsageError(f"no recipe at {path.resolve()}", hint="write a starter: lavra init my-recipe.yaml")


def _preset(name: str) -> Path:
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        raise UsageError(f"no preset `{name}`", hint=f"presets: {', '.join(preset_names())}")
    return path


def _absolute_paths(layer: Layer, base: Path) -> Layer:
    """Make the recipe's path values absolute, seen from where they were written."""

    def absolute(value: Any) -> Any:
        if not isinstance(value, str) or not value or value == STANDARD_LIBRARY or "://" in value:
            return value
        return os.path.normpath(base / os.path.expandvars(os.path.expanduser(value)))

    def with_path(entry: Any) -> Any:
        return (
            {**entry, "path": absolute(entry["path"])}
            if isinstance(entry, Mapping) and "path" in entry
            else entry
        )

    data = {key: value for key, value in layer.data.items()}
    if "run_dir" in data:
        data["run_dir"] = absolute(data["run_dir"])
    for name, key in (("train", "init_from"), ("tokenizer", "path")):
        if isinstance(section := data.get(name), Mapping) and key in section:
            data[name] = {**section, key: absolute(section[key])}
    for name in ("corpus", "tokens"):
        section = data.get(name)
        if isinstance(section, Mapping) and isinstance(section.get("sources"), list):
            data[name] = {**section, "sources": [with_path(source) for source in section["sources"]]}
    if isinstance(section := data.get("corpus"), Mapping) and isinstance(section.get("rulesets"), list):
        rulesets = [absolute(r) if str(r).endswith((".yaml", ".yml")) else r for r in section["rulesets"]]
        data["corpus"] = section = {**section, "rulesets": rulesets}
    if isinstance(section, Mapping) and isinstance(wanted := section.get("decontamination"), Mapping):
        benchmarks = wanted.get("benchmarks")
        if isinstance(benchmarks, list):
            data["corpus"] = {
                **section,
                "decontamination": {**wanted, "benchmarks": [with_path(b) for b in benchmarks]},
            }
    return Layer(layer.origin, data, layer.marks)
