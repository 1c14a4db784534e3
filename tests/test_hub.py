from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from dflash_jax.checkpoint import hf, hub

HTTPError = errors.HfHubHTTPError.__bases__[0]


def refused(cls, code: int):
    """An error as the hub's client makes it of an answer."""
    response = SimpleNamespace(headers={}, request=None, status_code=code)
    return cls(f"{code} Client Error.\n\nrefused by the hub", response=response)


def unreachable():
    """As `snapshot_download` raises it: over the reason."""
    error = errors.LocalEntryNotFoundError("cannot find an appropriate\nsnapshot folder")
    error.__cause__ = HTTPError("name or service not known")
    return error


@pytest.fixture
def hub_says(monkeypatch):
    """Makes each download fail with an error, over an empty cache."""

    def fail(error, cached=()):
        def download(*args, **kwargs):
            raise error

        def scan():
            if not cached:
                raise errors.CacheNotFound("no cache", "")
            repos = [SimpleNamespace(repo_id=i, repo_type="model") for i in cached]
            return SimpleNamespace(repos=repos)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)

    return fail


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refused(errors.GatedRepoError, 403), "is gated: accept its licence .* `hf auth login`"),
        (refused(errors.RepositoryNotFoundError, 404), "no such repository, or a private one"),
        (unreachable(), "not in the hub's local cache, .* no connection .*name or service not known"),
        (errors.OfflineModeIsEnabled("offline"), "not in the hub's local cache, .*offline"),
        (refused(errors.HfHubHTTPError, 500), "could not be fetched from the hub: 500 Client Error"),
        (HTTPError("timed out"), "could not be fetched from the hub: timed out"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)  # fmt: skip
def test_a_failed_download_is_one_clear_line(hub_says, error, said):
    hub_says(error)
    with pytest.raises(ValueError, match=f"'org/name' .*{said}") as e:
        hf.resolve("org/name")
    assert "\n" not in str(e.value)
    assert "did you mean" not in str(e.value)


def test_offline_mode_is_named(hub_says, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_says(unreachable())
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        hf.resolve("org/name")


@pytest.mark.parametrize(
    ("ref", "near"),
    [
        ("Qwen/Qwen3-4b", "did you mean Qwen/Qwen3-4B"),
        ("z-lab/Qwen3-4B-DFlash", "did you mean z-lab/Qwen3-4B-DFlash-b16"),
        ("meta-lama/Llama-3.1-8B-Instruct", r"did you mean meta-llama/Llama-3.1-8B-Instruct\?"),
        ("Qwen3-4B", "neither .*did you mean Qwen/Qwen3-4B"),
        ("me/my-modle", r"did you mean me/my-model\?"),
    ],
)
def test_a_misspelt_id_brings_the_nearest_names(hub_says, ref, near, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hub_says(refused(errors.RepositoryNotFoundError, 404), cached=["me/my-model"])
    with pytest.raises(ValueError, match=near):
        hf.resolve(ref)


def test_names_are_near_as_a_whole_or_without_their_owner():
    known = ["a/Model-7B", "b/model-7b-chat", "c/other"]
    assert hub.nearest("x/model-7B", known)[0] == "a/Model-7B"
    assert hub.nearest("nothing/alike", known) == []
