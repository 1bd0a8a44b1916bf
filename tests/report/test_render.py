"""The page: numbers with units, escaping, missing and damaged pieces, no network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lavra.report import render
from lavra.report.comparison import stage_seconds
from lavra.report.corpus import MAX_FILES, SAMPLES_PER_REASON, samples
from lavra.report.run import Run
from lavra.report.samples import sample_names, spread
from lavra.report.training import layer_charts, tokens_at

STAGE_FILES = {
    "plan.json": "plan",
    "metrics.jsonl": "pretrain",
    "samples/": "pretrain",
    "eval/results.json": "evaluate",
    "corpus/accounting.json": "corpus",
    "tokenizer/COMPLETE": "tokenizer",
}


class Tags(HTMLParser):
    """Collects start tags and the text of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def html(full_run: Path) -> str:
    path = render.render_report(full_run)
    assert path == full_run / "report.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Tags:
    return Tags(html)


@pytest.mark.parametrize(
    "text",
    [
        "A model of 5.31M parameters has read 9.83M tokens of text in 4m41s.",
        "10% fewer than the compressor xz -9e (2.120)",
        "plan: 1.2 GiB (+16.0 %)",
        "331 TFLOP",
        "41.6k tokens/s",
        "2.973 nats/token",
        "1.912 bits/byte",
        "uncertain by a third",
        "3.41 bytes/token",
        "412 GFLOP/s",
        "code: 3.35 bytes/token, prose: 4.10 bytes/token",
        "7.82M",
        "1,831 · 25.5 MiB",
        "too short: 140, duplicate: 88",
        "budget: 5m00s",
        "step 1,200",
        "14 tokens for",
        "2,210",
        "budget",
    ],
)
def test_numbers_appear_with_their_units(page: Tags, text: str) -> None:
    assert text in page.text


def test_the_last_stage_is_shown_as_complete_since_it_writes_the_page(html: str) -> None:
    assert 'class="pill state-complete">complete<' in html


def test_criteria_appear_as_passed_and_failed(html: str) -> None:
    assert html.count('class="badge passed"') == 2
    assert html.count('class="badge failed"') == 1


def test_hostile_text_is_text(html: str, page: Tags) -> None:
    assert "<img" not in html and "onerror=" not in "".join(str(attrs) for _, attrs in page.tags)
    assert [tag for tag, _ in page.tags].count("script") == 1
    # recipe, note, source, excerpts, sample, token, file name and event all carry it
    assert page.text.count('<script>document.title="owned"</script>') >= 8


def test_nothing_is_loaded_from_anywhere(html: str, page: Tags) -> None:
    for tag, attributes in page.tags:
        assert tag not in {"img", "link", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"https?://|url\(|@import", html)


def test_the_policy_allows_no_network_and_only_the_script_of_the_page(page: Tags) -> None:
    (policy,) = (a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy and "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_no_drawing_holds_a_number_that_is_not_finite(html: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(drawings) >= 12
    assert not any(re.search(r"\b(nan|inf|none)\b", drawing, flags=re.IGNORECASE) for drawing in drawings)


def test_rendering_twice_gives_the_same_bytes(full_run: Path, html: str) -> None:
    assert render.render_report(full_run).read_text(encoding="utf-8") == html


def test_an_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    page = Tags(render.render_report(tmp_path).read_text(encoding="utf-8"))
    for file, stage in STAGE_FILES.items():
        assert f"Not there. {file} is missing or empty: the stage “{stage}” has not run." in page.text
    assert "environment.json is missing" in page.text and "recipe.yaml is missing" in page.text


def test_a_plan_without_measurements_says_that_the_run_has_not_finished(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"predictions": {"final_loss": 3.5}}', encoding="utf-8")
    page = Tags(render.render_report(tmp_path).read_text(encoding="utf-8"))
    assert "3.500 nats/token" in page.text and "the run has not finished" in page.text


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'"text"', b"[" * 100_000])
@pytest.mark.parametrize(
    "name", ["plan.json", "measured.json", "eval/results.json", "corpus/accounting.json", "STATUS"]
)
def test_a_damaged_file_is_named_and_costs_no_report(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    page = Tags(render.render_report(tmp_path).read_text(encoding="utf-8"))
    assert "Some files could not be read." in page.text and name in page.text


@pytest.mark.parametrize("odd", [None, 3, "text", [], [1], {}, {"a": None}, True, 1e400])
def test_values_of_unexpected_form_cost_no_report(tmp_path: Path, odd: object) -> None:
    keys = "decisions horizon budget predictions basis notes stage_seconds totals by_kind by_file_type total"
    keys += " all_together files examples longest_tokens bits_per_byte summary parameters tokens_per_second"
    everything = json.dumps(dict.fromkeys(keys.split(), odd))
    for name in (
        "plan.json",
        "measured.json",
        "tokenizer/COMPLETE",
        "tokenizer/facts.json",
        "eval/results.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(everything, encoding="utf-8")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/accounting.json").write_text(everything, encoding="utf-8")
    (tmp_path / "success.json").write_text(
        json.dumps([odd, {"criterion": odd, "passed": odd}]), encoding="utf-8"
    )
    line = json.dumps({"step": odd, "tokens": odd, "train/loss": odd, "kind": odd, "text": odd})
    (tmp_path / "metrics.jsonl").write_text(
        f'{line}\n{{"step": 1, "tokens": 9, "train/loss": 2.5}}\n', encoding="utf-8"
    )
    (tmp_path / "events.jsonl").write_text(line + "\n", encoding="utf-8")
    page = Tags(render.render_report(tmp_path).read_text(encoding="utf-8"))
    assert "the part '" not in page.text  # no section had to be given up
    assert "nats per token" in page.text  # what is good is shown


def test_a_section_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Run) -> dict[str, object]:
        raise TypeError("an odd form <b>")

    monkeypatch.setattr(render, "_VIEWS", {**render._VIEWS, "evaluation": fail})
    page = Tags(render.render_report(tmp_path).read_text(encoding="utf-8"))
    assert "Cannot be shown: TypeError: an odd form <b>" in page.text


def ill_run(folder: Path) -> Path:
    """A run whose attention logits grow and whose layers were recorded."""
    lines = []
    for step in range(1, 61):
        logit = 3.0 * step
        layers = {
            name: {"grad_norm": 0.1, "update_ratio": 0.004, "activation_rms": 1.5, "attention_logit": logit}
            for name in (f"blocks.{b}" for b in range(12))
        }
        layers = {"embedding": {"grad_norm": 0.2, "update_ratio": 0.01}, **layers}
        record = {"step": step, "tokens": 10 * step, "train/loss": 5 - step / 30, "train/lr": 0.003}
        lines.append(json.dumps(record | ({"layers": layers} if step % 5 == 0 else {})))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_a_finding_shows_its_evidence_its_charts_and_the_change_to_try(tmp_path: Path) -> None:
    html = render.render_report(ill_run(tmp_path)).read_text(encoding="utf-8")
    section = html[html.index('<section id="diagnosis">') : html.index('<section id="samples">')]
    page = Tags(section)
    assert "Attention logits have grown" in page.text and "to 180 at step 60" in page.text
    assert "<code>train.learning_rate=0.001</code>" in section
    labels = [a["aria-label"] for tag, a in page.tags if tag == "svg"]
    assert "blocks.0 attention logit over tokens read" in labels and "train/loss over tokens read" in labels
    assert "a block that" not in page.text and "dead blocks" in page.text  # looked for, not found
    assert "text read too often: the sizes of the sources are not known" in page.text


def test_layers_are_drawn_in_the_order_of_the_model_and_a_deep_one_is_thinned_out(tmp_path: Path) -> None:
    html = render.render_report(ill_run(tmp_path)).read_text(encoding="utf-8")
    charts = {chart.title: chart for chart in layer_charts(Run(tmp_path).records("metrics.jsonl"), [])}
    assert all(title in html for title in charts)
    names = {title: re.findall(r'data-name="([^"]+)"', chart.linear) for title, chart in charts.items()}
    assert set(names) == {
        "Gradient norm by layer", "Update ratio by layer", "Activations by layer", "Attention logits by layer"
    }  # fmt: skip
    assert names["Gradient norm by layer"][0] == "embedding"
    assert names["Attention logits by layer"][0] == "blocks.0"
    assert all(len(shown) == 8 and shown[-1] == "blocks.11" for shown in names.values())
    points = re.findall(r'data-points="([^"]+)"', charts["Attention logits by layer"].linear)[0].split(";")
    assert [p.split("|")[3] for p in points][:3] == ["15", "30", "45"]


def test_a_healthy_run_is_told_so(full_run: Path, page: Tags) -> None:
    assert "Nothing was found that needs a change." in page.text
    assert "dead blocks: no statistics of the layers were recorded" in page.text


def test_every_drawing_has_switches_of_its_own(tmp_path: Path) -> None:
    page = Tags(render.render_report(ill_run(tmp_path)).read_text(encoding="utf-8"))
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))


def test_a_torn_log_is_shown_up_to_the_damage(tmp_path: Path) -> None:
    good = '{"step": 1, "tokens": 10, "train/loss": 3.0}\n{"step": 2, "tokens": 20, "train/loss": 2.0}\n'
    (tmp_path / "metrics.jsonl").write_text(good + "\0\0\0\n" + good, encoding="utf-8")
    page = Tags(render.render_report(tmp_path).read_text(encoding="utf-8"))
    assert "metrics.jsonl cannot be read past record 2" in page.text and "Loss" in page.text


def test_control_characters_and_lone_surrogates_do_not_break_the_page(tmp_path: Path) -> None:
    (tmp_path / "STATUS").write_text('{"state": "a\\u0000b\\ud800c"}', encoding="utf-8")
    assert "a␀b?c" in render.render_report(tmp_path).read_text(encoding="utf-8")


def test_excerpts_are_a_few_a_reason_and_damaged_parquet_is_named(full_run: Path, tmp_path: Path) -> None:
    dropped = samples(Run(full_run), "corpus/dropped")
    assert {reason: len(rows) for reason, rows in dropped.items()} == {
        "duplicate": SAMPLES_PER_REASON,
        "few_letters": 3,
        "too_short": 3,
    }
    folder = tmp_path / "documents" / "errors"
    folder.mkdir(parents=True)
    for i in range(MAX_FILES + 1):
        (folder / f"{i:05}.parquet").write_bytes(b"PAR1 no")
    run = Run(tmp_path)
    assert samples(run, "documents/errors") == {} and len(run.problems) == MAX_FILES


def test_samples_are_in_training_order_with_the_final_ones_last(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for name in ("final.md", "step-00000900.md", "step-00001000.md", "step-00000000.md", "notes.txt"):
        (tmp_path / "samples" / name).touch()
    expected = ["step-00000000.md", "step-00000900.md", "step-00001000.md", "final.md"]
    assert sample_names(Run(tmp_path)) == expected
    assert spread(list("abcdefg"), 3) == ["a", "d", "g"]


def test_stages_are_in_the_order_of_the_pipeline() -> None:
    expected = stage_seconds(
        {"stage_seconds": {"mine": 1, "report": 2, "pretrain": 3.5, "corpus": 4, "odd": None}}
    )
    assert list(expected) == ["corpus", "pretrain", "report", "mine"]


def test_an_event_stands_between_the_recorded_steps_around_it() -> None:
    steps = [(10.0, 1000.0), (20.0, 2000.0)]
    assert [tokens_at(steps, step) for step in (5, 10, 15, 20, 99)] == [500, 1000, 1500, 2000, 2000]
