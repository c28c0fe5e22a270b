"""Decode steps and prefill of Llama-like models in C++ (``native/decode_step.cpp``) on a CPU.

In PyTorch, a decode step of a small model makes about a hundred calls of operations, and the calls take longer than the
arithmetic. In C++, a decode step is one call. Weights are in float32 or bfloat16, and all arithmetic is in float32: the
results are those of a model in float32 with these weights, up to rounding errors. The bits of a sequence's result
depend neither on the number of threads nor on the other sequences.

A prefill runs the code of a decode step for several successive tokens, and computes no logits. So a token gets the same
keys and values in a prefill and in a decode step.

Shapes: N tokens, K key-value heads, D head size, V vocabulary size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import build_once
from agent_r1.inference.config import DecodeStep
from agent_r1.inference.kv_cache import LENGTH_MULTIPLE, CacheBlock, round_up
from agent_r1.model.adapter import adapted_layers, low_rank_matrices
from agent_r1.model.float32_products import Float32Head
from agent_r1.model.forward import has_dynamic_rope
from agent_r1.model.weights import PLAIN_LINEAR

LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SeedOssForCausalLM")
"""Names of the model classes whose layers have the modules and the order of operations of Llama."""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """The modules of one decoder layer, shared with the model. Norms are None if the model has none."""

    input_norm: nn.Module
    query: Any  # linear layers, perhaps with an adapter
    key: Any
    value: Any
    output: Any
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    mlp_norm: nn.Module
    gate: Any
    up: Any
    down: Any
    head_size: int
    scaling: float

    def linears(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down


class LlamaModules:
    """The modules of a Llama-like model. Make an instance with ``LlamaModules.of(model)``."""

    def __init__(self, model: PreTrainedModel) -> None:
        backbone: Any = model.base_model
        self.embedding = backbone.embed_tokens
        self.rotary = backbone.rotary_emb
        self.norm = backbone.norm
        self.layers = [_layer(module) for module in backbone.layers]
        self.adapted = frozenset(layer for _, layer in adapted_layers(model))

    @classmethod
    def of(cls, model: PreTrainedModel) -> LlamaModules | None:
        """Return the modules of ``model``; None without a class of ``LLAMA_LIKE``, full attention, SiLU and plain
        layers.
        """
        config = model.config
        layer_types = getattr(config, "layer_types", None) or ()
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if type(model).__name__ not in LLAMA_LIKE or config.hidden_act != "silu":
            return None
        if window is not None or any(layer_type != "full_attention" for layer_type in layer_types):
            return None
        modules = cls(model)
        plain = all(type(modules.base(each)) in PLAIN_LINEAR for layer in modules.layers for each in layer.linears())
        return modules if plain else None

    def base(self, layer: Any) -> nn.Linear:
        """Return a layer without its adapter."""
        base: nn.Linear = layer.base_layer if layer in self.adapted else layer
        return base


def _layer(module: Any) -> LlamaLayer:
    attention, mlp = module.self_attn, module.mlp
    modules = dict(attention.named_children())
    return LlamaLayer(
        module.input_layernorm,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        modules.get("q_norm"),
        modules.get("k_norm"),
        module.post_attention_layernorm,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        attention.head_dim,
        attention.scaling,
    )


SOURCE = Path(__file__).parent / "native" / "decode_step.cpp"
CACHE = Path("~/.cache/agent-r1/native")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
"""Names of C++ compilers, in the order of the search. The compiler in the environment variable CXX comes first."""

COMPILE_SECONDS = 300.0
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The reason why the native decode step cannot be used, such as "no C++ compiler was found"."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The loaded C++ library, with the name and version of its compiler."""

    functions: ctypes.CDLL
    compiler: str


def find_compiler() -> str | None:
    names = (os.environ.get("CXX", ""), *COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


@functools.cache
def load_library(compiler: str | None) -> NativeLibrary | Unavailable:
    """Compile the library, once for each processor and compiler, and return it, or why it is not available."""
    if compiler is None:
        return Unavailable("no C++ compiler was found: install g++ or clang++, or set CXX")
    try:
        version = _run([compiler, "--version"]).stdout.splitlines()[0]
        origin = {
            "source": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
            "compiler": f"{compiler}, {version}",
            "flags": " ".join(FLAGS),
            "processor": _processor(),
        }
        name = hashlib.sha256(repr(origin).encode()).hexdigest()[:16]
        folder = build_once(CACHE.expanduser() / name, origin, lambda made: _compile(compiler, made))
        return NativeLibrary(ctypes.CDLL(str(folder / _FILE)), version)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return Unavailable(f"{compiler} failed: {[*lines, error.stderr.strip(), str(error)][0]}")
    except (OSError, RuntimeError, IndexError, subprocess.TimeoutExpired) as error:  # RuntimeError: no home folder
        return Unavailable(f"the library could not be built or loaded: {type(error).__name__}: {error}")


_FILE = "decode_step.so"


def _compile(compiler: str, folder: Path) -> None:
    _run([compiler, *FLAGS, "-o", str(folder / _FILE), str(SOURCE)])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, check=True, encoding="utf-8", timeout=COMPILE_SECONDS)


def _processor() -> str:
    if not CPU_INFO.exists():
        return f"{platform.machine()} {platform.processor()}"
    first = CPU_INFO.read_text("utf-8", "replace").split("\n\n")[0]
    lines = [line for line in first.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


log = logging.getLogger(__name__)

CHECKED_TOKENS = 24
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""The largest accepted relative difference between the logits of C++ and of PyTorch. With weights in bfloat16, PyTorch
rounds hidden states to bfloat16, and the C++ code does not: deep models with large weights differ by up to 0.2."""

SMALL_MODEL, MAX_THREADS = 20_000_000, 4
"""Larger models take PyTorch if the run has more threads, because the C++ code computes a sequence in one thread."""


def choose_native(choice: DecodeStep, model: PreTrainedModel) -> NativeDecoder | None:
    """Return a decoder that computes the model's decode steps in C++, or None if PyTorch has to compute them."""
    if not wants_native(choice, model):
        return None
    native = NativeDecoder.of(model)
    if isinstance(native, NativeDecoder):
        return native
    if choice == "native":
        raise InvalidInput("engine.decode_step", got=choice, do=f"leave it out: {native.reason}")
    log.warning("PyTorch computes the decode steps, which is slow with few running sequences: %s", native.reason)
    return None


def wants_native(choice: DecodeStep, model: PreTrainedModel) -> bool:
    """Return whether to try the C++ code. "auto" does not try what it cannot do, or would do slowly."""
    if choice != "auto":
        return choice == "native"
    is_small = model.num_parameters() <= SMALL_MODEL or torch.get_num_threads() <= MAX_THREADS
    return is_small and model.device.type == "cpu" and type(model).__name__ in LLAMA_LIKE


class NativeDecoder:
    """The decode step of a model in C++, on a copy of the weights, renewed when they change. See :meth:`of`."""

    def __init__(self, model: PreTrainedModel, llama: LlamaModules, library: NativeLibrary) -> None:
        self._model, self._llama, self._library = model, llama, library
        self._lanes = int(library.functions.lanes())
        first = llama.layers[0]
        self._like = torch.empty(1, first.key.out_features // first.head_size, 1, first.head_size)  # (1, K, 1, D)
        self._cos = self._sin = torch.empty(0, first.head_size)  # (positions, D)
        self._scratch = torch.empty(0)
        self._kept: list[Tensor] = []  # what the addresses in ``_weights`` point to
        self._packed: dict[tuple[int, ...], Tensor] = {}  # packed matrices, by addresses and versions of the weights
        self._weights = _Weights()
        self._version = -1
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])

    @classmethod
    def of(cls, model: PreTrainedModel) -> NativeDecoder | Unavailable:
        """Return the native decode step of ``model``, or why it has none, for example because a test of its logits
        failed.
        """
        llama = LlamaModules.of(model)
        if llama is None:
            return Unavailable("the model is not a plain Llama-like model")
        if model.device.type != "cpu" or model.dtype not in CHECK_TOLERANCE:
            return Unavailable(f"the model is in {str(model.dtype).removeprefix('torch.')} on {model.device}")
        if has_dynamic_rope(model):
            return Unavailable("the model's position embeddings depend on the length of the sequence")
        if type(model.get_input_embeddings()) is not nn.Embedding or type(model.get_output_embeddings()) not in (
            *PLAIN_LINEAR,
            Float32Head,
        ):
            return Unavailable("the model has other embeddings than a table and a linear map")
        matrices = (*(llama.base(each) for layer in llama.layers for each in layer.linears()), model.lm_head)
        if {_weight(matrix).dtype for matrix in (*matrices, llama.embedding)} != {model.dtype}:
            return Unavailable("the model's matrices have several data types")
        if any(parameter.is_inference() for parameter in model.parameters()):
            return Unavailable("changes of the model's weights cannot be seen, because they are inference tensors")
        library = load_library(find_compiler())
        if isinstance(library, Unavailable):
            return library
        native = cls(model, llama, library)
        gap = native._measure_gap()
        if gap > CHECK_TOLERANCE[model.dtype]:
            return Unavailable(f"its logits differ from PyTorch's by {gap:.2g}")
        return native

    def __str__(self) -> str:
        return f"native ({self._library.compiler}, {self._lanes} lanes)"

    def append(
        self, token_ids: Tensor, rows: Tensor, positions: Tensor, block: CacheBlock, logits: Tensor | None = None
    ) -> None:
        """Write keys and values of N tokens to ``block``, and the logits after each to ``logits`` (N, vocabulary).

        The block has room, and holds all earlier tokens. The ``token_ids`` (N,) of a sequence are adjacent and in
        order, at ``positions`` (N,) of ``rows`` (N,). ``block.lengths`` is not changed.
        """
        version = sum(parameter._version for parameter in self._model.parameters())
        if version != self._version:
            self._pack_weights()
            self._version = version
        layers = [block.layer(index, self._like) for index in range(self._weights.layers)]
        pointers = ctypes.c_void_p * len(layers)
        longest = round_up(int(positions.max()) + 1, LENGTH_MULTIPLE)
        floats = self._library.functions.scratch_floats(ctypes.byref(self._weights), len(rows), longest)
        if len(self._scratch) < floats:
            self._scratch = torch.empty(floats)  # intermediate results
        # RoPE's factors are computed in parts of equal size, so that their bits do not depend on the length.
        for start in range(len(self._cos), longest, LENGTH_MULTIPLE):
            part = torch.arange(start, start + LENGTH_MULTIPLE)[None]
            cos, sin = self._llama.rotary(self._like, part)  # (1, LENGTH_MULTIPLE, D)
            self._cos, self._sin = torch.cat([self._cos, cos[0]]), torch.cat([self._sin, sin[0]])
        step = _Step(
            *(len(rows), torch.get_num_threads(), block.capacity, longest),
            *(token_ids.data_ptr(), rows.data_ptr(), positions.data_ptr()),
            *(pointers(*(keys.data_ptr() for keys, _ in layers)), pointers(*(v.data_ptr() for _, v in layers))),
            *(self._cos.data_ptr(), self._sin.data_ptr(), self._scratch.data_ptr()),
            None if logits is None else logits.data_ptr(),
        )
        self._library.functions.decode_step(ctypes.byref(self._weights), ctypes.byref(step))

    def _pack_weights(self) -> None:
        self._kept = []
        # With an adapter, most weights are frozen, and stay as they are. Else the old ones would need further memory.
        packed, self._packed = self._packed if self._llama.adapted else {}, {}
        llama, model = self._llama, self._model
        first, head = llama.layers[0], model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        layers = [
            _Layer(
                *(self._norm(layer.input_norm), self._norm(layer.query_norm), self._norm(layer.key_norm)),
                *(self._norm(layer.mlp_norm), self._linear([layer.query, layer.key, layer.value], packed)),
                *(self._linear([layer.output], packed), self._linear([layer.gate, layer.up], packed)),
                self._linear([layer.down], packed),
            )
            for layer in llama.layers
        ]
        longest = max(
            linear.rank for layer in layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        self._weights = _Weights(
            *(len(layers), first.output.out_features, first.query.out_features // first.head_size),
            *(self._like.shape[1], first.head_size, first.gate.out_features, head.out_features),
            *(head.weight.dtype == torch.bfloat16, longest, llama.norm.variance_epsilon, first.scaling),
            *(self._norm(llama.norm), self._keep(_weight(llama.embedding)), self._linear([head], packed)),
            (_Layer * len(layers))(*layers),
        )

    def _norm(self, module: nn.Module | None) -> int | None:
        return None if module is None else self._keep(_weight(module).float())

    def _linear(self, layers: Sequence[Any], packed: dict[tuple[int, ...], Tensor]) -> _Linear:
        # Several layers of the same inputs become one, with the outputs of all.
        bases = [self._llama.base(layer) for layer in layers]
        weights = [base.weight for base in bases]
        key = tuple(number for weight in weights for number in (weight.data_ptr(), weight._version))
        self._packed[key] = packed[key] if key in packed else self._pack(torch.cat([w.detach() for w in weights]))
        bias = None
        if any(base.bias is not None for base in bases):
            zeros = [torch.zeros(base.out_features) if base.bias is None else base.bias.float() for base in bases]
            bias = self._keep(torch.cat(zeros))
        a = b = None
        matrices = {i: low_rank_matrices(layer) for i, layer in enumerate(layers) if layer in self._llama.adapted}
        rank = sum(len(a) for a, _ in matrices.values())
        if matrices:
            a = self._keep(self._pack(torch.cat([low for low, _ in matrices.values()])))  # (rank, inputs)
            empty = torch.empty(0)
            parts = [matrices[i][1] if i in matrices else empty.new_empty(len(w), 0) for i, w in enumerate(weights)]
            b = self._keep(self._pack(torch.block_diag(*parts)))  # (outputs, rank)
        return _Linear(*(self._packed[key].data_ptr(), bias, a, b, weights[0].shape[1], sum(map(len, weights)), rank))

    def _pack(self, weights: Tensor) -> Tensor:
        outputs, inputs = weights.shape
        padded = functional.pad(weights, (0, 0, 0, -outputs % self._lanes))
        return padded.view(-1, self._lanes, inputs).transpose(1, 2).contiguous()

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    @torch.inference_mode()
    def _measure_gap(self) -> float:
        token_ids = torch.arange(CHECKED_TOKENS) % self._model.config.vocab_size
        expected = self._model(input_ids=token_ids[None], use_cache=False).logits[0, -1]
        rows, positions = torch.zeros_like(token_ids), torch.arange(CHECKED_TOKENS)
        block, logits = CacheBlock(1, LENGTH_MULTIPLE, torch.device("cpu")), torch.empty(1, self.vocabulary)
        prompt = CHECKED_TOKENS // 2
        self.append(token_ids[:prompt], rows[:prompt], positions[:prompt], block)
        for i in range(prompt, CHECKED_TOKENS):
            self.append(token_ids[i : i + 1], rows[i : i + 1], positions[i : i + 1], block, logits)
        return float((logits[0] - expected).abs().max() / expected.abs().max())


def _weight(module: nn.Module) -> Tensor:
    return next(module.parameters())


class _Linear(ctypes.Structure):
    """The struct ``Linear`` in ``native/decode_step.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "bias", "a", "b")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "rank")),
    )


class _Layer(ctypes.Structure):
    """The struct ``Layer`` in ``native/decode_step.cpp``: the addresses of the weights of one layer."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Weights(ctypes.Structure):
    """The struct ``Model`` in ``native/decode_step.cpp``: the sizes of a model and the addresses of its weights."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "width", "heads", "kv_heads", "head_size", "inner")),
        *((name, ctypes.c_int64) for name in ("vocabulary", "is_half", "widest_rank")),
        *((name, ctypes.c_float) for name in ("epsilon", "scaling")),
        *((name, ctypes.c_void_p) for name in ("norm", "embedding")),
        ("head", _Linear),
        ("layer", ctypes.POINTER(_Layer)),
    )


class _Step(ctypes.Structure):
    """The struct ``Step`` in ``native/decode_step.cpp``: the inputs and the outputs of one decode step."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "threads", "capacity", "longest")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "places", "lengths")),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "scratch", "logits")),
    )
