"""A run directory in, one offline HTML page out."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lavra import __version__
from lavra.artifact import atomic_writer
from lavra.report import (
    comparison,
    corpus,
    diagnosis,
    evaluation,
    headline,
    origin,
    samples,
    tokenizer,
    training,
)
from lavra.report.run import Run

_HERE = Path(__file__).parent
_VIEWS: Mapping[str, Callable[[Run], dict[str, Any]]] = {
    "headline": headline.view,
    "comparison": comparison.view,
    "training": training.view,
    "diagnosis": diagnosis.view,
    "samples": samples.view,
    "evaluation": evaluation.view,
    "corpus": corpus.view,
    "tokenizer": tokenizer.view,
    "machine": origin.machine,
    "recipe": origin.recipe,
}
# Control characters would vanish or, as NUL, not be HTML; their pictures are honest.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"} | {127: 0x2421}


def render_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from whatever the run directory holds, and return its path."""
    run = Run(run_dir)
    views = {name: _guarded(run, name, view) for name, view in _VIEWS.items()}
    page = _template().render(**views, problems=run.problems, version=__version__, **_assets())
    path = run_dir / "report.html"
    with atomic_writer(path) as file:
        file.write(page.translate(_PICTURES).encode("utf-8", "replace"))
    return path


def _guarded(run: Run, name: str, view: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """One section; a file of unexpected form costs that section, said aloud, never the whole report."""
    try:
        return view(run)
    except Exception as error:
        run.problems.append(f"the part {name!r} cannot be shown: {type(error).__name__}: {error}")
        return {"broken": f"{type(error).__name__}: {error}"}


def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # for our own drawings only: charts.py and bars.py escape their texts
    return environment.get_template("template.html.j2")


def _assets() -> dict[str, Any]:
    """Style and script of the page; the policy allows this one script by its hash, and no network."""
    script = (_HERE / "charts.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "style": Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
    }
