"""The corpus verb."""

from __future__ import annotations

import pytest

from lavra.cli.main import main
from lavra.corpus.rulesets.ruleset import built_in, load_ruleset


def test_rulesets_are_told_with_their_rules_and_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["corpus", "--rulesets"])
    said = capsys.readouterr().out
    for name in built_in():
        assert f"\n{name}\n" in f"\n{said}" and all(
            rule.text in said for rule in load_ruleset(name).rules.values()
        )
    assert "min_characters = 64" in said
