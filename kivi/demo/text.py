"""The text that the demo and the model tests read.

`alice29.txt` is "Alice's Adventures in Wonderland" by Lewis Carroll (1865, public domain), the Millennium Fulcrum edition 2.9
as it stands in the Canterbury corpus; this copy is tests/testdata/alice29.txt of the brotli 1.2.1 source distribution,
unchanged (SHA-256 7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0).
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from kivi.errors import InputError


def alice() -> str:
    """The book as running text: no line breaks inside a paragraph, one blank line between paragraphs, no indents.

    The file breaks lines at 65 columns and indents for print; left in, a model would have to guess where the printer broke a line.
    """
    text = (resources.files("kivi.demo") / "alice29.txt").read_text("ascii").replace("\r\n", "\n").rstrip("\x1a")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"\n{2,}", "\n\n", text)


def alice_ids(tokenizer: Any, start: int, tokens: int) -> Any:
    """Tokens `start` .. `start + tokens` of the book, int64 [1, tokens]."""
    ids = tokenizer(alice(), return_tensors="pt", verbose=False).input_ids[:, start : start + tokens]
    if ids.shape[1] < tokens:
        raise InputError(f"the book ends before token {start + tokens}; start earlier or take fewer tokens")
    return ids
