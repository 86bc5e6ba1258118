"""The demo on the terminal: which backend and why, the texts, the table."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kivi.demo import FULL, DemoResult

COLUMNS = ("cache", "measured", "formula", "of full", "tokens/s", "top-1", "KL", "perplexity")


def show(result: DemoResult) -> None:
    """Print a result to stdout."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120  # a pipe has no width; rich's default of 80 would break the table
    be = result.backend
    console.print(Text.assemble(("Backend  ", "bold"), (be["name"], "bold green"), f" ({be['mode']}, {be['device']}): {result.reason}"))
    console.print(Padding(be["summary"], (0, 0, 0, 9)), style="dim")
    for item in result.rejected:
        console.print(Padding(f"not {item['name']} ({item['mode']}): {item['reason']}", (0, 0, 0, 9)), style="dim")
    console.print(Text.assemble(("\nModel    ", "bold"), result.model))

    console.print(Text("\nThe model continues a text", "bold"))
    console.print(Padding(Text("... " + " ".join(result.prompt.split()[-40:]), "dim"), (0, 0, 0, 2)))
    for name, text in result.continuations.items():
        console.print(Padding(Text.assemble((f"{name:>14}  ", "cyan"), " ".join(text.split())), (0, 0, 0, 2)))

    console.print(Text(f"\nThe model predicts {result.text}", "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "cache" else "right", no_wrap=True)
    full = result.rows[0].measured
    for row in result.rows:
        table.add_row(
            row.name, f"{row.measured:,}", f"{row.formula:,}", f"{row.measured / full:.0%}", f"{row.tokens_per_second:.1f}",
            f"{row.top1:.1%}", f"{row.kl:.4f}", f"{row.perplexity:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(Padding(notes(result), (0, 0, 0, 2)), style="dim")
    console.print(f"\n{result.seconds:.0f} s" + (f"; report with plots: {result.report}" if result.report else ""))


def notes(result: DemoResult) -> str:
    """How to read the table."""
    far = result.long_context
    sizes = ", ".join(f"{far[b] / 2**20:.1f} MiB at {b} bits" for b in ("4", "2"))
    return (
        f"Bytes of all layers after {result.steps} steps, in float32; measured is what is allocated, formula is what the method needs. "
        f"At {far['tokens']:,} tokens in {far['dtype']} the formula gives {far[FULL] / 2**20:.1f} MiB in full precision, {sizes}. "
        "tokens/s is decoding while the text was written. top-1 and KL (nats a token) compare with the full-precision cache."
    )
