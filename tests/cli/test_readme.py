"""README.md tells the truth: its NumPy example prints what its comments say, and its table lists the commands that there are."""

import contextlib
import io
import re
from pathlib import Path

from kivi.cli import COMMANDS, cli

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_prints_what_its_comments_say(monkeypatch):
    monkeypatch.delenv("KIVI_BACKEND")
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    wanted = re.findall(r"^print\(.*\) +# (.*)$", example, re.MULTILINE)
    assert len(wanted) == example.count("print(")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert printed.getvalue().splitlines() == wanted


def test_the_table_lists_every_command():
    listed = re.findall(r"^\| `kivi ([a-z-]+)(?: ([a-z]+))?", README, re.MULTILINE)
    spec = cli.get_command(None, "spec")
    assert {name for name, _ in listed} == set(COMMANDS)
    assert {sub for name, sub in listed if name == "spec"} == set(spec.commands)
