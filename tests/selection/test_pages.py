"""What README.md and docs/selection.md show of `kivi select --explain` is what it prints: the same backends, in the same states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kivi import machine
from kivi.cli import cli

ROOT = Path(__file__).parents[2]
STATES = ("chosen", "ranked behind", "no device", "unavailable", "not installed", "wrong version", "cannot serve", "unfit device", "broken")


def states(text: str) -> dict[str, str]:
    """Backend -> state, of a printed table."""
    rows = re.findall(rf"^ +([a-z_]+) +({'|'.join(STATES)}) ", text, re.MULTILINE)
    assert rows
    return dict(rows)


def shown(page: str) -> list[str]:
    return re.findall(r"^\$ kivi select --explain\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(bool(machine.drivers()), reason="the pages show a machine without an accelerator")
def test_the_pages_show_what_is_printed():
    printed = CliRunner().invoke(cli, ("select", "--explain")).stdout
    blocks = shown("docs/selection.md")
    assert len(blocks) == 1
    for block in [*blocks, *shown("README.md")]:
        assert states(block) == states(printed)
        assert block.splitlines()[0] == printed.splitlines()[0]


def test_the_page_names_every_field_of_the_configuration():
    from kivi.config import Config

    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "selection.md").read_text(), re.DOTALL)
    assert set(re.findall(r"^(\w+) =", text, re.MULTILINE)) == set(Config.__struct_fields__)
    assert set(re.findall(r"# (KIVI_\w+)", text)) == {f"KIVI_{name.upper()}" for name in Config.__struct_fields__}
