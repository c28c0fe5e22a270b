"""Train the same model on the same work with Agent-R1 and with TRL's GRPOTrainer, in turns, and compare their speed.

    make bench-peers                                # installs TRL into .venv/peers first
    .venv/bin/python benchmarks/peers.py 0.5M 1M 14M --repeats 3
    .venv/bin/python benchmarks/peers.py 135M 494M --dtype bfloat16 --groups 1 --steps 2 --repeats 1
    .venv/bin/python benchmarks/peers.py 494M --alone --lora 16 --dtype bfloat16 --turns 1 --prompt 300 --action 150 \\
        --groups 6 --steps 2

Llama models with random weights take steps of GRPO on groups of attempts with several turns: a prompt, an action, an
observation, an action, .. Both train in the same data type with as many torch threads, the same prompts, the same
limits and a random reward for each attempt, so that every group is trained. In bfloat16 the trained weights of both
stay in float32 (TRL: autocast). Each measurement is a process of its own. Its first step is left out. The first table
has medians over all other steps. The second table compares a step of Agent-R1 with the limits of a core, which are
measured in the same run, before and after each size: large matrix products of the data type, and copies. With
--alone, only Agent-R1 trains.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import agent_r1
from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.inference import Dtype
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.profile import CPU_SECONDS, format_profile, mean_profile
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.model.weights import DTYPES, PLAIN_LINEAR
from agent_r1.renderers.byte_tokenizer import TEMPLATE
from agent_r1.store.reader import RunReader
from agent_r1.training.progress import SilentProgress

PEERS_PYTHON = Path(".venv/peers/bin/python")
TRL_WORKER = Path(__file__).parent / "peers_trl.py"
VOCABULARY = 4096


@dataclass(frozen=True)
class Shape:
    """The shape of a random Llama model."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = VOCABULARY


SHAPES = {
    "0.5M": Shape(64, 192, 4, 4, 4),
    "1M": Shape(128, 384, 2, 4, 4),
    "14M": Shape(320, 960, 10, 5, 5),
    "60M": Shape(640, 1920, 11, 10, 10),
    "135M": Shape(576, 1536, 30, 9, 3, vocabulary=49152),  # as SmolLM2-135M
    "494M": Shape(896, 4864, 24, 14, 2, vocabulary=151936),  # as Qwen2.5-0.5B
}


@dataclass(frozen=True)
class Limits:
    """The speed of a core: GFLOP/s in large matrix products, and GB/s read and written in copies.

    In float32, the products are those of the faster one of PyTorch's libraries, MKL and oneDNN.
    """

    products: float
    copies: float


@dataclass(frozen=True)
class StepWork:
    """The work of a step.

    Attributes:
        model_tokens: the tokens that the passes of the update read.
        actions: the sampled tokens.
        decode_steps: the decode steps, each for all running attempts.
        contexts: the tokens before each sampled token, summed over all sampled tokens.
    """

    model_tokens: float
    actions: float
    decode_steps: int
    contexts: float


@dataclass(frozen=True)
class Rates:
    """What a step of Agent-R1 computes and reads per CPU second. The products of the attention are not counted.

    Attributes:
        learning: GFLOP/s of the forward and backward passes, with six operations for each weight and token.
        decoding: GFLOP/s of the decode steps, with two operations for each weight and token.
        reading: GB/s of the weights, keys and values that the decode steps read.
    """

    learning: float
    decoding: float
    reading: float


def rates_of(model: LlamaForCausalLM, work: StepWork, profile: Mapping[str, float], dtype: Dtype) -> Rates:
    """Return what a step computes and reads per CPU second. ``profile`` says where the time of the step went."""
    weights, head = model.num_parameters(), model.get_output_embeddings().weight.numel()  # tied: the head counts once
    attention = model.model.layers[0].self_attn
    cache = len(model.model.layers) * (attention.k_proj.out_features + attention.v_proj.out_features)  # per token
    learning, decoding = (
        sum(profile[CPU_SECONDS + part] for part in parts) for parts in (("forward", "backward"), ("generation",))
    )
    return Rates(
        6e-9 * ((weights - head) * work.model_tokens + head * work.actions) / learning,
        2e-9 * weights * work.actions / decoding,
        1e-9 * (DTYPES[dtype].itemsize * weights * work.decode_steps + 4 * cache * work.contexts) / decoding,
    )


def measure_limits(dtype: Dtype) -> Limits:
    """Return the limits of a core, in CPU seconds of the process."""
    torch.set_num_threads(1)
    matrix, source = torch.randn(1024, 1024, dtype=DTYPES[dtype]), torch.randn(1 << 26)
    target = torch.empty_like(source)
    with torch.no_grad():
        layers = [kind(1024, 1024, bias=False, dtype=DTYPES[dtype]) for kind in PLAIN_LINEAR]
        products = [seconds_of(partial(layer, matrix)) for layer in layers]
    copies = seconds_of(lambda: target.copy_(source))
    return Limits(2 * 1.024**3 / min(products), 2 * source.nbytes / copies / 1e9)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, the mean of ten calls after a first one."""
    work()
    start = time.process_time()
    for _ in range(10):
        work()
    return (time.process_time() - start) / 10


def limits_table(measured: Mapping[str, Rates], limits: Limits) -> Table:
    """Return the table that compares a step of Agent-R1 with the limits of a core."""
    title = f"limits of a core: {limits.products:.0f} GFLOP/s in products, {limits.copies:.1f} GB/s in copies"
    headers = ("forward, backward GFLOP/s", "share", "decode GFLOP/s", "share", "decode GB/s", "share")
    table = Table("model", *headers, title=title)
    for name, rates in measured.items():
        cells = [name]
        for rate, limit in (
            (rates.learning, limits.products),
            (rates.decoding, limits.products),
            (rates.reading, limits.copies),
        ):
            cells += [f"{rate:.1f}", f"{rate / limit:.0%}"]
        table.add_row(*cells)
    return table


@dataclass(frozen=True)
class Measures:
    """The measures of one process.

    Attributes:
        wall: the wall seconds of each step after the first.
        cpu: the CPU seconds of each step after the first.
        tokens: the tokens of a step by kind: prompt, action, observation.
        peak_mib: the peak of resident memory.
        profile: where the time of a step went; "" if it was not measured.
        rates: what a step computed and read per CPU second; None if it was not measured.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    tokens: Mapping[str, float]
    peak_mib: float
    profile: str = ""
    rates: Rates | None = None


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, and further tokens that only a model writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]
    words = [f"Ġw{number}" for number in range(vocabulary - len(alphabet) - len(special))]
    names = {name: index for index, name in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = TEMPLATE
    return fast


def write_model(folder: Path, shape: Shape) -> None:
    """Write a Llama model with random weights and its tokenizer to ``folder``."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(shape.vocabulary)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True, max_position_embeddings=16384, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_workload(folder: Path, shape: Shape, options: argparse.Namespace) -> None:
    """Write the model, the tokenizer and ``workload.json`` to ``folder``."""
    write_model(folder, shape)
    letters = random.Random(0)

    def text(length: int) -> str:
        return "".join(letters.choices(string.ascii_lowercase, k=length))

    observation = text(options.observation)
    workload = {
        "prompts": [[{"role": "user", "content": text(options.prompt)}] for _ in range(options.groups * options.steps)],
        "observation": observation,
        "after_action": f"<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n",
        **{
            name: vars(options)[name]
            for name in ("turns", "action", "groups", "group_size", "steps", "threads", "dtype", "lora")
        },
        "trl_batch": options.trl_batch or options.groups * options.group_size,
        "context": 64 + options.prompt + options.turns * (options.action + options.observation + 64),
        "learning_rate": 1e-6,
    }
    (folder / "workload.json").write_text(json.dumps(workload), "utf-8")


@dataclass
class Dialogue:
    """An environment that answers every action but the last with the same observation."""

    observation: str
    turns: int
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> DialogueEpisode:
        return DialogueEpisode(self, task.messages)


@dataclass
class DialogueEpisode:
    env: Dialogue
    start: tuple[Message, ...]
    actions: int = 0

    async def step(self, action: Action) -> Transition:
        self.actions += 1
        is_last = self.actions == self.env.turns
        return Transition((), end="terminal") if is_last else Transition((Message.user(self.env.observation),))

    async def close(self) -> None:
        return None


def random_reward(trajectory: Trajectory, task: Task) -> float:
    """Return a pseudo-random reward for each attempt, so that every group has a training signal."""
    return random.Random("".join(turn.action.text for turn in trajectory.turns)).random()


def train_ours(folder: Path, profile: bool) -> Measures:
    """Train with Agent-R1 on the workload in ``folder``, in this process."""
    workload = json.loads((folder / "workload.json").read_text("utf-8"))
    wall, cpu = list[float](), list[float]()

    def on_step(_: object) -> None:
        wall.append(time.perf_counter())
        cpu.append(time.process_time())

    tasks = [Task(str(n), (Message.user(chat[0]["content"]),)) for n, chat in enumerate(workload["prompts"])]
    run = folder / f"run-{os.getpid()}"
    agent_r1.train(
        Dialogue(workload["observation"], workload["turns"]), tasks, model=str(folder), algorithm="grpo",
        rewards=[random_reward], callbacks=[on_step], progress=SilentProgress(), run=str(run), steps=workload["steps"],
        groups_per_step=workload["groups"], group_size=workload["group_size"], max_tokens=workload["action"],
        context=workload["context"],
        threads=workload["threads"], engine={"dtype": workload["dtype"]}, evaluate_n=1,
        trainer={
            "learning_rate": workload["learning_rate"], "dtype": workload["dtype"], "lora": {"rank": workload["lora"]}
        },
        checkpoint_every=0, profile=int(profile) and workload["steps"],
    )  # fmt: skip
    with closing(RunReader(run)) as reader:
        trajectories = list(reader.trajectories())
        mean = mean_profile({name: reader.curve(name) for name in reader.metric_names()}, first_step=2)
        model_tokens = statistics.mean(reader.curve("model_tokens").values())
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    steps = workload["steps"]
    tokens = {
        "prompt": sum(len(turn.new_ids) for turn in turns if turn.parent is None) / steps,
        "action": sum(len(turn.action_ids) for turn in turns) / steps,
        "observation": sum(len(turn.new_ids) for turn in turns if turn.parent is not None) / steps,
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not profile:
        return Measures(differences(wall), differences(cpu), tokens, peak)
    contexts = sum(
        len(trajectory.prompt_ids(turn)) + place
        for trajectory in trajectories
        for turn in trajectory.turns
        for place in range(len(turn.action_ids))
    )
    decode_steps = workload["turns"] * workload["action"]  # all attempts decode together
    work = StepWork(model_tokens, tokens["action"], decode_steps, contexts / steps)
    rates = rates_of(LlamaForCausalLM.from_pretrained(folder), work, mean, workload["dtype"])
    return Measures(differences(wall), differences(cpu), tokens, peak, format_profile(mean, "time of a step"), rates)


def differences(times: Sequence[float]) -> tuple[float, ...]:
    """Return the durations of all steps but the first, from the times at which steps ended."""
    return tuple(end - begin for begin, end in pairwise(times))


def measure_ours(folder: Path, profile: bool) -> Measures:
    """Train with Agent-R1 in a process of its own."""
    output = run_worker([sys.executable, __file__, "--worker", str(folder), *(["--profile"] if profile else [])])
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return Measures(**found | {"rates": Rates(**found["rates"]) if found["rates"] else None})


def measure_trl(folder: Path, python: Path) -> Measures:
    """Train with TRL in a process of its own."""
    found: dict[str, Any] = json.loads(run_worker([str(python), str(TRL_WORKER), str(folder)]).splitlines()[-1])
    tokens = {kind: found[f"{kind}_tokens"] for kind in ("prompt", "action", "observation")}
    return Measures(differences(found["wall"]), differences(found["cpu"]), tokens, found["peak_mib"])


def run_worker(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def compare(name: str, options: argparse.Namespace) -> tuple[list[str], Measures]:
    """Return the row of a size in the table, and the measures of Agent-R1 with the profile."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_workload(folder, SHAPES[name], options)
        ours, peers = [], []
        for repeat in range(0 if options.alone else options.repeats):
            peers.append(measure_trl(folder, options.python))
            ours.append(measure_ours(folder, profile=False))
            say(f"{name}: repeat {repeat + 1} of {options.repeats}")
        profiled = measure_ours(folder, profile=True)
    if options.alone:
        cpu, wall = (statistics.median(times) for times in (profiled.cpu, profiled.wall))
        row = [name, f"{sum(profiled.tokens.values()):,.0f}", "", f"{wall:.2f}", "", "", f"{cpu:.2f}", "", ""]
        return [*row, f"{profiled.peak_mib:,.0f}"], profiled
    for kind, count in peers[0].tokens.items():
        if abs(ours[0].tokens[kind] - count) > 0.04 * count:
            sys.exit(f"the work differs: {ours[0].tokens[kind]:.0f} {kind} tokens a step, with TRL {count:.0f}")
    cells = [name, f"{sum(ours[0].tokens.values()):,.0f}"]
    for pick in (lambda measures: measures.wall, lambda measures: measures.cpu):
        one, other = (statistics.median(x for m in side for x in pick(m)) for side in (peers, ours))
        cells += [f"{one:.2f}", f"{other:.2f}", f"{one / other:.1f}"]
    cells += [f"{statistics.median(m.peak_mib for m in side):,.0f}" for side in (peers, ours)]
    return cells, profiled


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["0.5M", "1M", "14M"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each library and size")
    parser.add_argument("--steps", type=int, default=4, help="steps of each process, of which the first is left out")
    parser.add_argument("--groups", type=int, default=8, help="tasks a step")
    parser.add_argument("--group_size", type=int, default=8, help="attempts at each task")
    parser.add_argument("--turns", type=int, default=2, help="actions of an attempt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a task")
    parser.add_argument("--action", type=int, default=32, help="tokens of an action")
    parser.add_argument("--observation", type=int, default=64, help="tokens between two actions")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="data type of passes and engines")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapter of Agent-R1; 0: none")
    parser.add_argument("--alone", action="store_true", help="measure Agent-R1 only, once")
    parser.add_argument("--trl_batch", type=int, default=0, help="attempts in a pass of TRL; 0: all of a step")
    parser.add_argument("--python", type=Path, default=PEERS_PYTHON, help="Python of the environment with TRL")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.sizes if name not in SHAPES]
    if unknown:
        parser.error(f"unknown size {unknown[0]}: give some of {', '.join(SHAPES)}")
    if options.lora and not options.alone:
        parser.error("--lora needs --alone: TRL trains all weights here")
    if options.worker is None and not options.alone and not options.python.exists():
        parser.error(f"{options.python} does not exist: run 'make bench-peers', which installs TRL")
    if options.trl_batch and options.groups * options.group_size % options.trl_batch:
        parser.error(f"--trl_batch {options.trl_batch} does not divide {options.groups * options.group_size} attempts")
    return options


def main() -> None:
    options = parse()
    if options.worker is not None:
        print(json.dumps(asdict(train_ours(options.worker, options.profile))))
        return
    load = os.getloadavg()[0]
    table = Table("model", "tokens", "TRL s", "ours s", "ratio", "TRL CPU s", "ours CPU s", "ratio", "TRL MiB", "ours")
    profiled, limits = {}, [measure_limits(options.dtype)]
    for name in options.sizes:
        row, profiled[name] = compare(name, options)
        table.add_row(*row)
        limits.append(measure_limits(options.dtype))
    console = Console(width=120, highlight=False)
    console.print(table)
    for name, measures in profiled.items():
        console.print(f"\n{name}, Agent-R1\n{measures.profile}")
    products, copies = (statistics.median(pick) for pick in zip(*map(astuple, limits), strict=True))
    rates = {name: measures.rates for name, measures in profiled.items() if measures.rates is not None}
    console.print(limits_table(rates, Limits(products, copies)))
    console.print(f"{os.cpu_count()} cores, load {load:.1f} before and {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
