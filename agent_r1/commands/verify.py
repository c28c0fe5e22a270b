"""verify: what a run's files prove."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.text import Text

from agent_r1.commands.command import Broken, Command, Invocation, columns, declare_json, show
from agent_r1.store import RunReader, run_folder
from agent_r1.store.digest import run_digest
from agent_r1.store.verify import Verdict, verify


def _declare_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="a run's name, in runs/, or its folder")
    parser.add_argument("--digest", action="store_true", help="print what is equal for equal runs, and nothing else")
    declare_json(parser)


def _verify(invocation: Invocation) -> None:
    folder, digest = run_folder(invocation.options["folder"]), None
    verdict = verify(folder)
    if verdict.holds and invocation.options["digest"]:
        with closing(RunReader(folder)) as reader:
            digest = run_digest(reader)
    data = {"run": str(folder), "holds": verdict.holds, **asdict(verdict), "digest": digest}
    show(invocation, data, digest or _rendered(verdict))
    if not verdict.holds:
        raise Broken(f"{folder} does not hold: {len(verdict.violations)} of the rules are broken")


def _rendered(verdict: Verdict) -> RenderableType:
    if not verdict.holds:
        return Text("\n".join(verdict.violations))
    counts = {fate: str(count) for fate, count in verdict.attempts.items()}
    rest = {"steps": verdict.steps, "lineages": verdict.lineages, "checkpoints": verdict.checkpoints}
    return Group("The run holds.", columns(counts | {name: str(count) for name, count in rest.items()}))


VERIFY = Command("prove that a run is whole and every attempt accounted for", _verify, _declare_verify)
