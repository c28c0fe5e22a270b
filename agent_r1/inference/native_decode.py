"""Decode steps and prefill of small Llama-like models in C++ (``native/decode_step.cpp``), in float32 on a CPU.

In PyTorch, a decode step of a small model makes about a hundred calls of operations, and the calls take longer than the
arithmetic. In C++, a decode step is one call. The results differ from PyTorch's results only by rounding errors. The
bits of a sequence's result depend neither on the number of threads nor on the other sequences.

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
from collections.abc import Callable, Sequence
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
from agent_r1.inference.kv_cache import LENGTH_MULTIPLE, CacheBlock, round_up, weighted_values
from agent_r1.model.forward import has_dynamic_rope
from agent_r1.model.weights import PLAIN_LINEAR, is_onednn_faster

LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SeedOssForCausalLM")
"""Names of the model classes whose layers have the modules and the order of operations of Llama."""

ROWS_MULTIPLE = 16
""":meth:`LlamaDecoder.decode_rows` pads the number of rows to a multiple of this number. Otherwise, BLAS libraries
would use different kernels for different numbers of rows, and the bits of a row would depend on the number of rows."""

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A function of (index of the layer, queries (N, H, D), keys (N, K, D), values (N, K, D)) of N new tokens."""


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """The modules of one decoder layer, shared with the model. Norms are None if the model has none."""

    input_norm: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    mlp_norm: nn.Module
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    head_size: int
    scaling: float

    def linears(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down


class LlamaDecoder:
    """The decode step of a Llama-like model. Make an instance with ``LlamaDecoder.of(model)``."""

    def __init__(self, model: PreTrainedModel) -> None:
        backbone: Any = model.base_model
        self.embedding = backbone.embed_tokens
        self.rotary = backbone.rotary_emb
        self.norm = backbone.norm
        self.layers = [_layer(module) for module in backbone.layers]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LlamaDecoder | None:
        """Return a decoder for ``model``; None without a class of ``LLAMA_LIKE``, full attention, SiLU and plain
        layers.
        """
        config = model.config
        layer_types = getattr(config, "layer_types", None) or ()
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if type(model).__name__ not in LLAMA_LIKE or config.hidden_act != "silu":
            return None
        if window is not None or any(layer_type != "full_attention" for layer_type in layer_types):
            return None
        decoder = cls(model)
        plain = all(type(linear) in PLAIN_LINEAR for layer in decoder.layers for linear in layer.linears())
        return decoder if plain else None

    def __call__(self, token_ids: Tensor, block: CacheBlock, mask: Tensor) -> Tensor:
        rows, visible = torch.arange(block.rows, device=token_ids.device), mask.shape[-1]

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = block.layer(index, key[:, :, None])  # (R, K, capacity, D)
            keys[rows, :, block.lengths] = key
            values[rows, :, block.lengths] = value
            grouped = query.view(block.rows, key.shape[1], -1, query.shape[-1])  # (R, K, G, D)
            scores = torch.matmul(grouped, keys[:, :, :visible].transpose(2, 3)) + mask  # (R, K, G, L)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            return weighted_values(weights, values[:, :, :visible]).view(block.rows, -1)  # (R, H * D)

        return self._hidden_states(token_ids, block.lengths, attend)

    def decode_rows(self, token_ids: Tensor, block: CacheBlock, rows: Sequence[int]) -> Tensor:
        """Append one token to each row of ``block`` that ``rows`` lists. Return the last hidden states (N, E).

        N is the length of ``rows``, rounded up to a multiple of ``ROWS_MULTIPLE``; the states after ``rows`` are
        padding. The caller has to increase ``block.lengths``.
        """
        places = torch.tensor(rows, device=token_ids.device)  # (len(rows),)
        lengths = block.lengths[places]  # (len(rows),)
        padding = (0, round_up(len(rows), ROWS_MULTIPLE) - len(rows))

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = block.layer(index, key[:, :, None])  # (R, K, capacity, D)
            keys[places, :, lengths] = key[: len(rows)]
            values[places, :, lengths] = value[: len(rows)]
            mixed = query.new_zeros(len(query), query[0].numel())  # (N, H * D)
            for number, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
                grouped = query[number].view(key.shape[1], -1, query.shape[-1])  # (K, G, D)
                scores = torch.matmul(grouped, keys[row, :, : length + 1].transpose(1, 2))  # (K, G, L)
                weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
                mixed[number] = torch.matmul(weights, values[row, :, : length + 1]).flatten()
            return mixed

        return self._hidden_states(functional.pad(token_ids, padding), functional.pad(lengths, padding), attend)

    def _hidden_states(self, token_ids: Tensor, lengths: Tensor, attend: Attention) -> Tensor:
        count = len(token_ids)
        hidden = functional.embedding(token_ids, self.embedding.weight)  # (N, E)
        cos, sin = self.rotary(hidden[:, None], lengths[:, None])  # (N, 1, D)
        for index, layer in enumerate(self.layers):
            normed = _rms_norm(hidden, layer.input_norm)
            query = _linear(normed, layer.query).view(count, -1, layer.head_size)  # (N, H, D)
            key = _linear(normed, layer.key).view(count, -1, layer.head_size)  # (N, K, D)
            value = _linear(normed, layer.value).view(count, -1, layer.head_size)  # (N, K, D)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = _rms_norm(query, layer.query_norm), _rms_norm(key, layer.key_norm)
            query = query * cos + _rotate_half(query) * sin
            key = key * cos + _rotate_half(key) * sin
            hidden = hidden + _linear(attend(index, query * layer.scaling, key, value), layer.output)
            normed = _rms_norm(hidden, layer.mlp_norm)
            gated = functional.silu(_linear(normed, layer.gate)) * _linear(normed, layer.up)
            hidden = hidden + _linear(gated, layer.down)
        return _rms_norm(hidden, self.norm)

    @torch.inference_mode()
    def has_independent_rows(self, head: nn.Module, rows: int) -> bool:
        """Return whether a row of a product has the same bits for any number of rows, up to ``rows``."""
        random = torch.Generator().manual_seed(0)
        for linear in (*self.layers[0].linears(), head):
            weight = next(linear.parameters())
            states = torch.randn((round_up(rows, ROWS_MULTIPLE), weight.shape[1]), generator=random).to(weight)
            whole = linear(states)
            parts = [linear(states[:count]) for count in range(ROWS_MULTIPLE, rows, ROWS_MULTIPLE)]
            if not all(torch.equal(part, whole[: len(part)]) for part in parts):
                return False
        return True


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


def _linear(states: Tensor, linear: nn.Linear) -> Tensor:
    return functional.linear(states, linear.weight, linear.bias)


def _rms_norm(states: Tensor, norm: Any) -> Tensor:
    wide = states.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return norm.weight * (wide * torch.rsqrt(variance + norm.variance_epsilon)).to(states.dtype)


def _rotate_half(states: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    return torch.cat((-states[..., half:], states[..., :half]), dim=-1)


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

NATIVE_LIMIT = 20_000_000  # parameters up to which ``auto`` chooses the C++ code (docs/decisions/0020-native-decode.md)

AMD_NATIVE_LIMIT = 200_000_000
"""The limit of a run with one thread on an AMD processor with AVX-512, which PyTorch's library MKL does not use
there."""

CHECKED_TOKENS = 24
CHECK_TOLERANCE = 1e-4  # largest accepted relative difference between the logits of C++ and of PyTorch


def choose_native(choice: DecodeStep, model: PreTrainedModel) -> NativeDecoder | None:
    """Return a decoder that computes the model's decode steps in C++, or None if PyTorch has to compute them."""
    if not wants_native(choice, model.num_parameters()):
        return None
    native = NativeDecoder.of(model)
    if isinstance(native, NativeDecoder):
        return native
    if choice == "native":
        raise InvalidInput("engine.decode_step", got=choice, do=f"leave it out: {native.reason}")
    log.info("PyTorch computes the decode steps: %s", native.reason)
    return None


def wants_native(choice: DecodeStep, parameters: int) -> bool:
    """Return whether to try native decode steps for a model with this number of parameters."""
    is_slow = is_onednn_faster() and torch.get_num_threads() == 1  # whether PyTorch's products are slow here
    return choice == "native" or (choice == "auto" and parameters <= (AMD_NATIVE_LIMIT if is_slow else NATIVE_LIMIT))


class NativeDecoder:
    """The decode step of a model in C++, on a copy of the weights, renewed when they change. See :meth:`of`."""

    def __init__(self, model: PreTrainedModel, llama: LlamaDecoder, library: NativeLibrary) -> None:
        self._model, self._llama, self._library = model, llama, library
        self._lanes = int(library.functions.lanes())
        first = llama.layers[0]
        self._like = torch.empty(1, first.key.out_features // first.head_size, 1, first.head_size)  # (1, K, 1, D)
        self._cos = self._sin = torch.empty(0, first.head_size)  # (positions, D)
        self._scratch = torch.empty(0)
        self._packed: list[Tensor] = []
        self._weights = _Weights()
        self._version = -1
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])

    @classmethod
    def of(cls, model: PreTrainedModel) -> NativeDecoder | Unavailable:
        """Return the native decode step of ``model``, or why it has none, for example because a test of its logits
        failed.
        """
        llama = LlamaDecoder.of(model)
        if llama is None:
            return Unavailable("the model is not a plain Llama-like model")
        if model.device.type != "cpu" or model.dtype != torch.float32:
            return Unavailable(f"the model is in {str(model.dtype).removeprefix('torch.')} on {model.device}")
        if has_dynamic_rope(model):
            return Unavailable("the model's position embeddings depend on the length of the sequence")
        if (
            type(model.get_input_embeddings()) is not nn.Embedding
            or type(model.get_output_embeddings()) not in PLAIN_LINEAR
        ):
            return Unavailable("the model has other embeddings than a table and a linear map")
        if any(parameter.is_inference() for parameter in model.parameters()):
            return Unavailable("changes of the model's weights cannot be seen, because they are inference tensors")
        library = load_library(find_compiler())
        if isinstance(library, Unavailable):
            return library
        native = cls(model, llama, library)
        gap = native._measure_gap()
        return native if gap <= CHECK_TOLERANCE else Unavailable(f"its logits differ from PyTorch's by {gap:.2g}")

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
        self._packed = []
        llama, model = self._llama, self._model
        layers = [self._pack_layer(layer) for layer in llama.layers]
        first, head = llama.layers[0], model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        self._weights = _Weights(
            *(len(layers), first.output.out_features, first.query.out_features // first.head_size),
            *(self._like.shape[1], first.head_size, first.gate.out_features, head.out_features),
            *(llama.norm.variance_epsilon, first.scaling),
            *(self._keep(_weight(llama.embedding)), self._keep(_weight(llama.norm))),
            *(self._pack([head.weight]), self._join([head])),
            (_Layer * len(layers))(*layers),
        )

    def _pack_layer(self, layer: LlamaLayer) -> _Layer:
        attention, mlp = [layer.query, layer.key, layer.value], [layer.gate, layer.up]
        norms = [None if norm is None else self._keep(_weight(norm)) for norm in (layer.query_norm, layer.key_norm)]
        return _Layer(
            *(self._keep(_weight(layer.input_norm)), self._pack([linear.weight for linear in attention])),
            *(self._join(attention), *norms, self._pack([layer.output.weight]), self._join([layer.output])),
            *(self._keep(_weight(layer.mlp_norm)), self._pack([linear.weight for linear in mlp]), self._join(mlp)),
            *(self._pack([layer.down.weight]), self._join([layer.down])),
        )

    def _pack(self, weights: Sequence[Tensor]) -> int:
        outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
        padded = torch.zeros(-(-outputs // self._lanes) * self._lanes, inputs)
        torch.cat([weight.detach() for weight in weights], out=padded[:outputs])
        return self._keep(padded.view(-1, self._lanes, inputs).transpose(1, 2))

    def _join(self, linears: Sequence[nn.Linear]) -> int | None:
        if all(linear.bias is None for linear in linears):
            return None
        return self._keep(
            torch.cat([torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears])
        )

    def _keep(self, tensor: Tensor) -> int:
        self._packed.append(tensor.detach().contiguous())
        return self._packed[-1].data_ptr()

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


class _Layer(ctypes.Structure):
    """The struct ``Layer`` in ``native/decode_step.cpp``: the addresses of the weights of one layer."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("input_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "output", "output_bias"),
            *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
        )
    ]


class _Weights(ctypes.Structure):
    """The struct ``Model`` in ``native/decode_step.cpp``: the sizes of a model and the addresses of its weights."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("layers", "width", "heads", "kv_heads", "head_size", "inner", "vocabulary")),
        *((name, ctypes.c_float) for name in ("epsilon", "scaling")),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "head_bias")),
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
