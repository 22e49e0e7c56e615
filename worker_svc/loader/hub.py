"""Models from the Hugging Face Hub, by `huggingface_hub`: its cache, its token, its progress bar.

Only what serving needs is fetched (config, tokenizer, safetensors), never a repository's other copies of its weights.
"""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from worker_svc.loader.errors import HubError
from worker_svc.loader.folder import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
)

NEEDED_FILES = [
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "chat_template.jinja",
    WEIGHTS_FILE,
    INDEX_FILE,
    "model-*.safetensors",
]

# The Hub library's own look-up would hang for longer when packets are dropped on the way.
LOOK_UP_TIMEOUT_S = 4.0


def download(repo_id: str) -> Path:
    """Return the local folder of the Hub repository `repo_id` ("owner/name"), downloading what is not there yet.

    Without a network, a copy downloaded before is used. Raises HubError in one line: no such repository, no access, no
    network, or a repository without safetensors.
    """
    try:
        siblings = HfApi().model_info(repo_id, timeout=LOOK_UP_TIMEOUT_S).siblings or []
    except Exception as error:  # whatever network and Hub do, the user gets one line
        return _cached_copy(repo_id, error)
    names = {sibling.rfilename for sibling in siblings}
    if CONFIG_FILE not in names or not names & {WEIGHTS_FILE, INDEX_FILE}:
        raise HubError(
            f"{repo_id} on the Hugging Face Hub has no {CONFIG_FILE} with {WEIGHTS_FILE}: not a model to serve"
        )
    try:
        return Path(snapshot_download(repo_id, allow_patterns=NEEDED_FILES))
    except Exception as error:
        raise HubError(_explain(repo_id, error)) from error


def download_config(repo_id: str) -> Path:
    """Return the local copy of `config.json` of the Hub repository `repo_id`, downloading nothing else.

    Without a network, a copy downloaded before is used. Raises HubError in one line.
    """
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=[CONFIG_FILE], etag_timeout=LOOK_UP_TIMEOUT_S))
    except Exception as error:  # as above
        raise HubError(_explain(repo_id, error)) from error
    if not (folder / CONFIG_FILE).is_file():
        raise HubError(f"{repo_id} on the Hugging Face Hub has no {CONFIG_FILE}: not a model to serve")
    return folder / CONFIG_FILE


def _cached_copy(repo_id: str, look_up_error: Exception) -> Path:
    try:
        return Path(snapshot_download(repo_id, allow_patterns=NEEDED_FILES, local_files_only=True))
    except Exception:
        raise HubError(_explain(repo_id, look_up_error)) from look_up_error


def _explain(repo_id: str, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return (
            f"{repo_id} needs its licence accepted at https://huggingface.co/{repo_id}, and then your token in HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"{repo_id} is neither a local folder nor on the Hugging Face Hub (a private one needs HF_TOKEN)"
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return f"cannot download {repo_id} from the Hugging Face Hub, and there is no local copy: {reason[0]}"
