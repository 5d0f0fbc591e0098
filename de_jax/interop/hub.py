"""The Hugging Face hub: which exported folders it takes, and how they get there; data sets of it as folders here.

Each network fault is one sentence. Nothing is sent but by `push`.
"""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from de_jax.interop import peft_adapters, safetensors_model, sentence_transformers
from de_jax.training.run.run_folder import RUN
from de_jax.types import InputError

T = TypeVar("T")

CARD_FILE = "README.md"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_repo(repo: str) -> None:
    """Raises `InputError` unless this may be the name of a repository on the hub: "org/name"."""
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise InputError(f"--repo is {repo!r}; give it as organisation/name, such as my-org/my-retriever.")


def exported_files(folder: str | Path) -> list[Path]:
    """The files of an exported folder, below it, in order."""
    folder = Path(folder)
    adapters = (f"{tower}/{peft_adapters.CONFIG_FILE}" for tower in (".", *sentence_transformers.NAMES.values()))
    marks = (sentence_transformers.MODULES_FILE, safetensors_model.MODEL_FOLDER.file, "serving.json", *adapters)
    is_export = any((folder / mark).is_file() for mark in marks) or any(folder.glob("checkpoint_*/checkpoint"))
    if not is_export:
        if RUN.is_in(folder):
            raise InputError(
                f"{folder} is a run; export it first: de-jax export model --run_dir={folder} --format=sentence_transformers "
                "--out_dir=exported."
            )
        raise InputError(f"{folder} is not an exported model; give a folder that de-jax export model wrote.")
    files = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    if odd := next((path for path in files if path.is_symlink() or (path.name[0] == "." and path.name != ".zarray")), None):
        raise InputError(f"{odd} is a link or a hidden file, which no export writes; remove it.")
    return [path.relative_to(folder) for path in files]


def push(folder: str | Path, repo: str, *, private: bool) -> str:
    """Uploads an exported folder to a new or existing repository of the hub; returns its address."""
    import huggingface_hub

    check_repo(repo)
    names = [str(name) for name in exported_files(folder)]
    token = huggingface_hub.get_token()
    if not token:
        raise InputError("there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN.")

    def send() -> str:
        api = huggingface_hub.HfApi(token=token)
        api.create_repo(repo, private=private, repo_type="model", exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=str(folder), repo_type="model", allow_patterns=names, commit_message="Exported by de_jax"
        )
        return str(commit.commit_url)

    return _asked(f"the Hugging Face hub does not take {repo}", send)


def fetched_dataset(name: str, patterns: Sequence[str]) -> Path:
    """The folder on this machine with those files of a data set on the hub that match one of the patterns."""
    import huggingface_hub

    if not _REPO.fullmatch(name):
        raise InputError(f"{name!r} is no data set of the Hugging Face hub; its name is organisation/name.")
    fetch = functools.partial(huggingface_hub.snapshot_download, name, repo_type="dataset", allow_patterns=list(patterns))
    return Path(_asked(f"the Hugging Face hub does not give the data set {name}", fetch))


def _asked(refusal: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Exception as error:  # the package's own errors, httpx's and the system's have no common base
        raise InputError(f"{refusal} ({reason(error)}); check the name, the token and the network.") from None


def reason(error: Exception) -> str:
    """The first sentence of a package's error, without its line breaks."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".:") or type(error).__name__
