"""`kivi doctor`: everything that a report of a problem needs, in one place."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import click

from kivi.cli.output import json_option, print_json, print_table

#: Packages that matter besides those that the backends require.
PACKAGES = ("kivi-kvcache", "numpy", "ml-dtypes", "msgspec", "safetensors", "torch", "transformers", "xdsl")


@click.command()
@click.option("--no-check", is_flag=True, help="Leave the self-checks out.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float32"]), default="float16", show_default=True, help="Of the checks.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, no_check: bool, dtype: str, as_json: bool) -> None:
    """Print versions, processor, devices, configuration, backends, and a self-check of each that can run on a device here.

    Nothing is taken from what was found out before. Exit 1 if a self-check failed.
    """
    import kivi
    from kivi import distributions, probing, selfcheck

    distributions.forget(kept=True)
    probing.forget()
    selfcheck.forget()
    infos = kivi.backends()
    checks = [] if no_check else _checks(infos, dtype)
    report = {**_system(), **_settings(), "backends": _backends(infos), "self_checks": checks}
    if as_json:
        print_json(report)
    else:
        _print(report)
    ctx.exit(0 if all(check["ok"] for check in checks) else 1)


def _system() -> dict[str, Any]:
    from kivi import distributions, machine, plugins

    names = {*PACKAGES, *(p.strip() for name in plugins.found() for mode in (None, *plugins.get(name).manifest.modes)
                          for packages in plugins.requirements(name, mode) for p in packages.split("|"))}  # fmt: skip
    versions = {name: found[1] for name in sorted(names) if (found := plugins.installed(name))}
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": machine.processor(),
        "cores": os.cpu_count(),
        "drivers": machine.drivers(),
        "versions": versions,
        "entry_points": [value for _, value in distributions.entry_points(plugins.ENTRY_POINTS)],
    }


def _settings() -> dict[str, Any]:
    from kivi import config, jit, plugins, probing

    own = {variable for found in plugins.found().values() for variable in found.manifest.environment}
    named = {*config.VARIABLES, *probing.ENVIRONMENT, *own, *(v for v in os.environ if v.startswith("KIVI_"))}
    path, folder = config.config_path(), jit.cache_folder()
    files = [p for p in folder.rglob("*") if p.is_file()] if folder.is_dir() else []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    stated = path.read_text("utf-8", "replace") if path is not None and path.is_file() else None
    return {
        "config": {"path": None if path is None else str(path), "exists": stated is not None, "text": stated or ""},
        "environment": {variable: os.environ[variable] for variable in sorted(named) if variable in os.environ},
        "cache_folder": {"path": str(folder), "writable": writable, "files": len(files), "bytes": sum(p.stat().st_size for p in files)},
    }


def _backends(infos: list[Any]) -> list[dict[str, Any]]:
    from kivi.cli.backends import facts

    return facts(infos)[0]


def _checks(infos: list[Any], dtype: str) -> list[dict[str, Any]]:
    from kivi import plugins, probing, selfcheck

    out = []
    for info in infos:
        if not info.available or info.mode != "device" or not plugins.get(info.name).manifest.self_check:
            continue
        versions = probing.probe(info.name, info.mode).versions
        for device in info.found:
            if device.device in info.devices:
                click.echo(f"checking {info.name} on {device}", err=True)
                result = selfcheck.check(info.name, info.mode, device, versions, dtype)
                facts = {"ok": result.ok, "reason": result.reason, "seconds": result.seconds, "cases": result.cases}
                out.append({"backend": info.name, "mode": info.mode, "device": str(device), "dtype": dtype, **facts})
    return out


def _print(report: dict[str, Any]) -> None:
    from kivi.cli.backends import conformance_words
    from kivi.cli.output import size

    config, folder = report["config"], report["cache_folder"]
    lines = {
        "python": report["python"],
        "platform": report["platform"],
        "processor": f"{report['processor']}, {report['cores']} cores",
        "drivers": "; ".join(f"{api}: {', '.join(facts)}" for api, facts in report["drivers"].items()) or "none of an accelerator",
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "entry points": ", ".join(report["entry_points"]) or "none",
        "config": f"{config['path']}{'' if config['exists'] else ' (not there)'}",
        "environment": ", ".join(f"{k}={v}" for k, v in report["environment"].items()) or "nothing set",
        "cache folder": f"{folder['path']}: {folder['files']} files, {size(folder['bytes'])}"
        + ("" if folder["writable"] else ", not writable"),
    }
    for name, text in lines.items():
        click.echo(f"{name + ':':<14}{text}")
    for line in config["text"].splitlines():
        click.echo(f"{'':<14}{line}")
    print_table(
        ("backend", "state", "mode", "devices", "conformance", "reason"),
        (
            (b["name"], b["state"], b["mode"], ", ".join(b["devices"]), conformance_words(b["conformance"]), b["reason"])
            for b in report["backends"]
        ),
    )
    for check in report["self_checks"]:
        said = f"passed, {check['cases']} cases in {check['seconds']:.1f} s" if check["ok"] else f"FAILED: {check['reason']}"
        click.echo(f"self-check of {check['backend']} on {check['device']}, {check['dtype']}: {said}")
