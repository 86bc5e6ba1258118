"""The support matrix: which backend serves what, on which devices, and what conformance said. Made of manifests and result summaries alone,
so that it is the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kivi import plugins, results
from kivi.backend import Manifest

HEAD = """# Support

Made by `kivi backends --matrix > docs/support.md` from the manifests of the backends and from conformance/results; a test compares. A
result holds for its mode only: to pass under an interpreter, a shim or a simulator is not to pass on a device.
"""


def matrix() -> str:
    """docs/support.md: the backends of this repository."""
    manifests = [f.manifest for f in plugins.found().values() if f.package.startswith("kivi.backends.")]
    manifests.sort(key=lambda m: (-m.priority, m.name))
    parts = [
        HEAD,
        "## Backends\n",
        _table(("backend", "mode", "devices", "priority", "requires", "install"), (row for m in manifests for row in _modes(m))),
        "## Capabilities\n",
        _table(("backend", "bits", "dtypes", "metadata", "numerics", "order", "layouts", "head_dim"), map(_capabilities, manifests)),
        "## Devices\n",
        "Capabilities are compared exactly; a newer one serves only where the table says so. A backend without rows takes any device.\n",
        _table(("backend", "devices", "capabilities", "newer", "for", "since"), (row for m in manifests for row in _devices(m))),
        "## Conformance\n",
        _table(
            ("backend", "mode", "profile", "size", "passed", "failed", "unsupported", "xfailed", "on", "date"),
            (row for m in manifests for mode in m.modes for row in _results(m.name, mode)),
        ),
    ]
    return "\n".join(parts)


def _modes(m: Manifest) -> Iterable[Sequence[object]]:
    for mode, devices in m.modes.items():
        needs = ", ".join(f"{p.replace(' | ', ' or ')}{v}" for p, v in plugins.requirements(m.name, mode).items())
        command = plugins.install_command(m.name)
        yield m.name, mode, ", ".join(devices), m.priority, needs, f"`{command}`" if command else "comes with kivi"


def _capabilities(m: Manifest) -> Sequence[object]:
    can = m.capabilities
    multiple = f"multiples of {can.head_dim_multiple} up to" if can.head_dim_multiple > 1 else "up to"
    layouts = f"{can.layouts if can.layouts == 'any' else ', '.join(can.layouts)} (native {can.native_layout})"
    lists = (can.bits, can.dtypes, can.metadata, can.numerics, can.order)
    return m.name, *(", ".join(map(str, values)) for values in lists), layouts, f"{multiple} {can.head_dim_max}"


def _devices(m: Manifest) -> Iterable[Sequence[object]]:
    for rule in m.requires_device:
        above = [f"head_dim above {rule.head_dim_above}"] if rule.head_dim_above else []
        which = ", ".join([*rule.dtypes, *above]) or "all requests"
        yield m.name, rule.api, ", ".join(rule.capabilities), "yes" if rule.newer else "no", which, rule.reason


def _results(name: str, mode: str) -> Iterable[Sequence[object]]:
    found = results.shipped().get((name, mode))
    profiles: dict[str, dict[str, Any]] = found.profiles if found else {}
    for profile in results.PROFILES:
        if profile not in profiles:
            yield name, mode, profile, "not run", "", "", "", "", "", ""
            continue
        e = profiles[profile]
        where = e["device"] if e["device"] != "cpu" else f"{e['platform']['system']} {e['platform']['machine']}"
        yield name, mode, profile, e["size"], e["passed"], e["failed"] + e["errored"], e["unsupported"], e["xfailed"], where, e["date"]


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
