"""Training that continues from the last checkpoint after a rank of the trainer has died."""

from __future__ import annotations

from dataclasses import replace

from agent_r1.core.events import LogEvent
from agent_r1.core.threads import run_in_thread
from agent_r1.store.writer import RunWriter
from agent_r1.trainer.ranks import RankDied
from agent_r1.training.build import rebuild_trainer
from agent_r1.training.checkpoint.restore import restore_run
from agent_r1.training.loop import TrainingRun, make_collector, train_loop
from agent_r1.training.shutdown import GracefulShutdown

RANKS_RESTARTED = "ranks restarted"


async def train_with_restarts(run: TrainingRun, writer: RunWriter, shutdown: GracefulShutdown) -> None:
    """Train until the last step, then close the trainer.

    If a rank dies, start all ranks again at the last checkpoint, at most ``trainer.rank_restarts`` times. Engines and
    environments keep running.

    Raises:
        RankDied: a rank died after the last allowed restart.
        ShutdownRequested: as for :func:`agent_r1.training.loop.train_loop`.
    """
    allowed = run.runtime.config.trainer.rank_restarts
    death: RankDied | None = None
    for restarts in range(allowed + 1):
        try:
            if death is not None:
                run = await _restart(run, writer, f"{death.event} (restart {restarts} of {allowed})")
            await train_loop(run, shutdown)
            return
        except RankDied as error:
            death = error
        finally:
            run.runtime.trainer.close()
    assert death is not None
    raise death


async def _restart(run: TrainingRun, writer: RunWriter, reason: str) -> TrainingRun:
    run.progress.print_line(f"WARNING: {reason}; the ranks are started again")
    runtime = await run_in_thread(rebuild_trainer, run.runtime)
    try:
        start = await run_in_thread(restore_run, run.folder, runtime.policy, runtime.updater)
        await writer.continue_from(start.progress.step, runtime.config.model_dump(mode="json"))
    except BaseException:
        runtime.trainer.close()
        raise
    run.progress.finish()
    run.progress.start(runtime.config.steps, start.progress.step)
    return replace(
        run,
        runtime=runtime,
        collector=make_collector(runtime, run.recorder, writer.run),
        start=replace(start, events=(*start.events, LogEvent(RANKS_RESTARTED, reason))),
    )
