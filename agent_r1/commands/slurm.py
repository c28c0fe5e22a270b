"""The command ``slurm``."""

from __future__ import annotations

import click

from agent_r1.commands.command import with_file
from agent_r1.commands.training import train
from agent_r1.config import resolve, restrict
from agent_r1.training.config import TrainConfig, TrainSettings


@click.command()
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of nodes.")
@click.option("--gpus_per_node", type=click.IntRange(1), default=1, show_default=True, help="GPUs of each node.")
@click.option("--time", default="24:00:00", show_default=True, help="Time limit of the job.")
@click.option("--sbatch", multiple=True, metavar="OPTION", help="A further option of sbatch: --partition=gpu.")
@click.option(
    "--server_model",
    default="",
    help="Folder of a copy of the run's model, with an untied output head, that the servers load at their start.",
)
@click.argument("words", nargs=-1, metavar="-- [ARGUMENTS OF TRAIN]", type=click.UNPROCESSED)
def slurm(
    nodes: int, gpus_per_node: int, time: str, sbatch: tuple[str, ...], server_model: str, words: tuple[str, ...]
) -> None:
    """Print a batch script for Slurm that trains on one node, and samples on vLLM servers on the other nodes.

    After --, give the arguments of 'agent-r1 train'. Before the time limit, the run saves a checkpoint. Then the job is
    queued again, and continues the run.
    """
    with train.make_context("train", list(words), parent=click.get_current_context()) as context:
        layers = with_file(context.params["settings"], context.params["config_file"])
    config = resolve(TrainSettings, [restrict(layer, TrainSettings, TrainConfig) for layer in layers])
    from agent_r1.training.slurm import SlurmJob

    click.echo(SlurmJob(nodes, gpus_per_node, time, sbatch, server_model).script(words, config), nl=False)
