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
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.inference.config import DecodeStep
from agent_r1.inference.kv_cache import LENGTH_MULTIPLE, CacheBlock, round_up
from agent_r1.inference.llama_decode import LlamaDecoder, LlamaLayer
from agent_r1.inference.native_library import NativeLibrary, Unavailable, find_compiler, load_library
from agent_r1.model.forward import has_dynamic_rope
from agent_r1.model.onednn import PLAIN_LINEAR, is_onednn_faster

log = logging.getLogger(__name__)

NATIVE_LIMIT = 20_000_000
"""The largest number of parameters of a model for which the setting ``auto`` chooses the C++ code
(docs/decisions/0020-native-decode.md)."""

AMD_NATIVE_LIMIT = 200_000_000
"""The largest number of parameters for which ``auto`` chooses the C++ code on an AMD processor with AVX-512.

This limit replaces ``NATIVE_LIMIT`` if the run has one thread. PyTorch's library MKL does not use AVX-512 on AMD
processors, so the C++ code is faster than PyTorch even for larger models. With several threads, PyTorch can be faster
than the C++ code.
"""

CHECKED_TOKENS = 24
CHECK_TOLERANCE = 1e-4
"""Largest accepted relative difference between the logits of C++ and the logits of PyTorch
(:meth:`NativeDecoder._measure_gap`)."""


def choose_native(choice: DecodeStep, model: PreTrainedModel) -> NativeDecoder | None:
    """Return a decoder that computes the model's decode steps in C++, or None if PyTorch has to compute them.

    Raise InvalidInput if ``choice`` is "native" and the C++ code cannot be used for the model.
    """
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
    """The decode step of a model, computed by one call of C++ code. Make an instance with ``NativeDecoder.of(model)``.

    The C++ code reads a copy of the weights in a layout of its own. The copy is renewed when the weights have changed.
    """

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
        """Return the native decode step of ``model``, or the reason why ``model`` has no native step.

        The native step is tested on a short sequence. If its logits differ from the model's own logits by more than
        rounding errors, the reason is returned.
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
        """Write the keys and values of N tokens to ``block``, and the logits after each token to ``logits``.

        The block must have room for the tokens, and hold all earlier tokens of the sequences. ``block.lengths`` is not
        changed.

        Args:
            token_ids: (N,) the tokens. The tokens of a sequence are adjacent and in order.
            rows: (N,) the row of each token's sequence.
            positions: (N,) the index of each token in its sequence.
            logits: (N, vocabulary) the tensor in fp32 that gets the logits. None: no logits are computed.
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
        """Copy weight matrices (outputs, inputs) to one tensor for the C++ code, and return the address of this tensor.

        One vector instruction computes L outputs. So the tensor has the shape (panels, inputs, L), and each panel has
        the weights of L outputs. Zeros fill up the last panel.
        """
        outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
        padded = torch.zeros(-(-outputs // self._lanes) * self._lanes, inputs)
        torch.cat([weight.detach() for weight in weights], out=padded[:outputs])
        return self._keep(padded.view(-1, self._lanes, inputs).transpose(1, 2))

    def _join(self, linears: Sequence[nn.Linear]) -> int | None:
        """Concatenate the biases of ``linears``. Return the address of the result, or None if there is no bias."""
        if all(linear.bias is None for linear in linears):
            return None
        return self._keep(
            torch.cat([torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears])
        )

    def _keep(self, tensor: Tensor) -> int:
        """Store a tensor until the next :meth:`_pack_weights`, and return the address of its memory."""
        self._packed.append(tensor.detach().contiguous())
        return self._packed[-1].data_ptr()

    @torch.inference_mode()
    def _measure_gap(self) -> float:
        """Return the relative difference between the logits of the C++ code and the logits of PyTorch.

        Each logit of the C++ code is compared with the same logit of PyTorch. The largest absolute difference is
        divided by PyTorch's largest absolute logit.
        """
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
