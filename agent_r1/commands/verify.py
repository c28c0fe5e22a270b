"""The command ``verify``."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict

import click
from rich.console import Group, RenderableType
from rich.text import Text

from agent_r1.commands.command import columns, json_option, show
from agent_r1.commands.runs import find_run
from agent_r1.core.errors import AgentR1Error
from agent_r1.store import RunReader
from agent_r1.store.digest import run_digest
from agent_r1.store.verification import VerificationReport
from agent_r1.store.verification import verify as verify_run


@click.command()
@click.argument("run")
@click.option("--digest", is_flag=True, help="Print only a digest that is the same for equal runs.")
@json_option
def verify(run: str, digest: bool, as_json: bool) -> None:
    """Verify that no record of a run is missing, changed or contradictory. RUN is a name in runs/, or a folder."""
    folder, value = find_run(run), None
    report = verify_run(folder)
    if report.is_valid and digest:
        with closing(RunReader(folder)) as reader:
            value = run_digest(reader)
    data = {"run": str(folder), "valid": report.is_valid, **asdict(report), "digest": value}
    show(as_json, data, value or _render(report))
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if not report.is_valid:
        raise AgentR1Error(f"{folder} is not valid: {len(report.violations)} rules are violated")


def _render(report: VerificationReport) -> RenderableType:
    if not report.is_valid:
        return Text("\n".join(report.violations))
    counts = {**report.attempts, "steps": report.steps, "segments": report.segments, "checkpoints": report.checkpoints}
    counts |= {"rows": report.rows, "rows not yet closed": report.not_closed}
    return Group("The run is valid.", columns({name: str(count) for name, count in counts.items()}))
