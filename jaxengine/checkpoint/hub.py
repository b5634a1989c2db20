"""Downloads of model files from the Hugging Face hub, and the errors when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxengine.config.engine_config import ConfigError


def download(
    param: str,
    name: str,
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Download the files of a hub id that match `patterns`, unless they are already there; return their folder.

    Args:
      param: option that names the hub id, for the error.
      patterns: globs, as in fnmatch.
      revision: branch, tag or commit; None for the main branch.
      cache_dir: folder for downloads; None for the hub's own.
      token: token of the hub; None or True for the stored one, False for none.

    Raises ConfigError, with the reason and what to do.
    """
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=cache_dir, token=token, allow_patterns=list(patterns)
        )
    except Exception as error:  # the hub client's errors have no common base class
        raise _refusal(param, name, revision, error) from error
    return Path(folder)


def list_files(name: str, *, revision: str | None, token: str | bool | None) -> list[str]:
    """Ask the hub for the names of a model's files, for messages; return [] on any error.

    revision: branch, tag or commit; None for the main branch. token: token of the hub; None or True for the stored one,
    False for none.
    """
    import huggingface_hub

    try:
        return huggingface_hub.list_repo_files(name, revision=revision, token=token)
    except Exception:  # the hub client's errors have no common base class
        return []


def _refusal(param: str, name: str, revision: str | None, error: Exception) -> ConfigError:
    """Return the ConfigError for an error of the hub's client, with advice by its kind.

    The kinds are: gated, not found, no such revision, hub not reachable, and any other. param: option that names the
    hub id `name`. revision: as given, only shown.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        problem = f"{param} {name!r} is gated on the hub, and you do not have access"
        advice = f"request access at https://huggingface.co/{name}, then give hf_token or run `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = f"{param} {name!r} is not a local file or folder, and the hub has no such model that you can access"
        advice = "check the spelling; for a private one give hf_token or run `hf auth login`"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = f"{param} {name!r} has no branch, tag or commit {revision!r} on the hub"
        advice = "leave the revision out for the newest one"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        problem = f"{param} {name!r} is not a local file or folder, and the hub cannot be reached ({_brief(error)})"
        advice = "connect this machine, set HF_ENDPOINT to a mirror, or copy the model's folder here and name that"
    else:
        problem = f"{param} {name!r} is not a local file or folder, and the hub refuses it ({_brief(error)})"
        advice = "check the name, or copy the model's folder here and name that"
    return ConfigError.because(param, problem, advice)


def _brief(error: Exception) -> str:
    """Return the kind and the first 200 characters of an error, or of its cause if it has one, on one line."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
