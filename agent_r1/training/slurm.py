"""The Slurm batch script of a training run. The first node trains, and the other nodes run the vLLM servers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent_r1.core.errors import InvalidInput
from agent_r1.inference.vllm import SERVER_ENVIRONMENT, SERVER_OPTIONS, adapter_options
from agent_r1.store.folder import DATABASE, run_folder
from agent_r1.training.config import TrainSettings
from agent_r1.training.servers import VISIBLE, Hardware, gpus_per_server, plan_devices

FIRST_PORT = 8100

SAVE_SECONDS = 600
"""The seconds between Slurm's SIGTERM and the time limit of the job, for saving the run."""

CORES = 1024
"""The assumed number of CPU cores of a node, so large that it is never the limit."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A Slurm job that trains on its first node, and samples on vLLM servers on the other nodes.

    Attributes:
        time: the time limit of the job, such as 24:00:00.
        options: more options of sbatch, such as --partition=gpu.
        server_model: the model that the servers load at the start; "" for the model of the run.
    """

    nodes: int
    gpus_per_node: int
    time: str
    options: tuple[str, ...] = ()
    server_model: str = ""

    def script(self, words: Sequence[str], config: TrainSettings) -> str:
        """Return the batch script of a job that runs ``agent-r1 train``.

        ``words`` are the command-line arguments of ``agent-r1 train``. ``config`` has the settings in these arguments.

        Raise InvalidInput if the job cannot run.
        """
        self._check(config)
        name = run_folder(config.run)
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in self._options(name.name)),
            "set -uo pipefail",
            "",
            'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
            f"step=(srun --nodes=1 --ntasks=1 --overlap --gpus-per-node={self.gpus_per_node})",
            "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
            "arguments=()",
            f"if [ -e {shlex.quote(str(name / DATABASE))} ]; then arguments+=(--resume); fi",
            *(self._servers(config) if self.nodes > 1 else ()),
            "",
            f'"${{step[@]}}" --nodelist="${{nodes[0]}}" agent-r1 train {shlex.join(words)} "${{arguments[@]}}" &',
            *_TRAINING,
        ]
        return "\n".join(lines) + "\n"

    def _options(self, name: str) -> Iterator[str]:
        yield f"--job-name={shlex.quote(name)}"
        yield f"--nodes={self.nodes}"
        yield "--ntasks-per-node=1"
        yield f"--gpus-per-node={self.gpus_per_node}"
        yield f"--time={self.time}"
        yield f"--signal=B:TERM@{SAVE_SECONDS}"
        yield "--requeue"
        yield "--open-mode=append"
        yield from self.options

    def _servers(self, config: TrainSettings) -> Iterator[str]:
        engine, size = config.engine, gpus_per_server(config.engine)
        model = self.server_model or config.model
        command = [engine.vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--dtype", engine.dtype, "--max-model-len", str(config.context)]
        adapters = adapter_options(config.trainer.lora.rank, engine.vllm.arguments)
        command += ["--max-num-seqs", str(engine.max_sequences + 1), *SERVER_OPTIONS, *adapters]
        command += shlex.split(engine.vllm.arguments)
        yield ""
        yield 'urls=""'
        yield 'for node in "${nodes[@]:1}"; do'
        for number in range(self.gpus_per_node // size):
            gpus = ",".join(str(gpu) for gpu in range(number * size, (number + 1) * size))
            variables = {VISIBLE: gpus, **SERVER_ENVIRONMENT}
            environment = " ".join(["env", *(f"{name}={value}" for name, value in variables.items())])
            port = FIRST_PORT + number
            yield f'  "${{step[@]}}" --nodelist="$node" {environment} {shlex.join(command)} \\'
            yield f'    --host "$node" --port {port} > "slurm-$SLURM_JOB_ID-vllm-$node-{number}.log" 2>&1 &'
            yield f'  urls="$urls,http://$node:{port}"'
        yield "done"
        yield "SECONDS=0"
        yield "for url in ${urls//,/ }; do"
        yield "  until curl --silent --fail --noproxy '*' --output /dev/null \"$url/health\"; do"
        yield f'    if [ "$SECONDS" -gt {engine.vllm.start_seconds:.0f} ]; then'
        yield '      echo "$url does not answer" >&2; exit 1'
        yield "    fi"
        yield "    sleep 2"
        yield "  done"
        yield "done"
        yield 'arguments+=(--engine.vllm.python "" --engine.replicas 1 --engine.vllm.urls "${urls#,}")'

    def _check(self, config: TrainSettings) -> None:
        if not config.run:
            do = "name it, as --run NAME: a job that is started again continues it"
            raise InvalidInput("run", got="nothing", do=do)
        gpus = Hardware(tuple(map(str, range(self.gpus_per_node))), CORES)
        if self.nodes == 1:
            plan_devices(config, gpus)
            return
        engine, vllm = config.engine, config.engine.vllm
        size = gpus_per_server(engine)
        do = ""
        if engine.backend != "vllm":
            do = "give 1, or --engine.backend vllm: one node trains, and the others are for vLLM servers"
        elif vllm.urls or vllm.devices:
            do = "leave out engine.vllm.urls and engine.vllm.devices: the servers of the job are used"
        elif vllm.weights_folder is None:
            do = "give --engine.vllm.weights_folder, a folder that all nodes mount: the servers read weights there"
        elif size > self.gpus_per_node:
            do = f"give more --gpus_per_node: a server takes {size} GPUs (engine.vllm.arguments)"
        elif not (self.server_model or config.model):
            do = "give --model: the servers on the other nodes start with it"
        if do:
            raise InvalidInput("nodes", got=self.nodes, do=do)
        local = config.model_copy(update={"engine": type(engine)()})
        plan_devices(local, gpus)  # the ranks


_TRAINING = """
train=$!
trap 'kill -TERM "$train"' TERM
code=0
wait "$train" || code=$?
while kill -0 "$train" 2>/dev/null; do code=0; wait "$train" || code=$?; done  # a signal interrupts wait
if [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
""".strip().splitlines()
"""The end of the script, which passes Slurm's signal to the run.

After the signal, the run saves its state and exits with code 143. The script then queues the job again.
"""
