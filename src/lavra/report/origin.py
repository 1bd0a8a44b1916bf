"""Where the numbers come from: the machine, and the recipe as given and as resolved."""

from __future__ import annotations

from typing import Any

from lavra.report.quantities import quantity, words
from lavra.report.run import Run


def machine(run: Run) -> dict[str, Any]:
    """Context of the section "Machine"."""
    environment = run.facts("environment.json")
    if not environment:
        return run.missing("environment.json", "run")
    return {"facts": [(words(name), quantity(name, value)) for name, value in environment.items()]}


def recipe(run: Run) -> dict[str, Any]:
    """Context of the section "Recipe"."""
    given, resolved = run.text("recipe.yaml"), run.text("recipe.resolved.yaml")
    if not given and not resolved:
        return run.missing("recipe.yaml", "run")
    named = [("as given", given), ("with every setting", resolved)]
    return {"files": [{"caption": caption, "file": file} for caption, file in named if file]}
