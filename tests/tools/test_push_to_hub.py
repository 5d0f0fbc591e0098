"""export hub against a stand-in for the hub's API: nothing is sent unasked, and what is sent is the export."""

import types
from pathlib import Path

import huggingface_hub
import pytest

from de_jax import cli
from de_jax.interop import peft_adapters
from de_jax.types import InputError


class FakeApi:
    """Keeps what it is told; fails where it is asked to."""

    calls: list
    error = None

    def __init__(self, token):
        self.calls.append(("token", token))

    def create_repo(self, repo, **options):
        if self.error:
            raise self.error
        self.calls.append(("create_repo", repo, options))

    def upload_folder(self, **options):
        self.calls.append(("upload_folder", options))
        return types.SimpleNamespace(commit_url=f"https://hub/{options['repo_id']}/commit/1")


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(FakeApi, "calls", [], raising=False)
    monkeypatch.setattr(FakeApi, "error", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    return FakeApi


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "sde"
    cli.call("export model", [f"--run_dir={trained}", "--format=sentence_transformers", f"--out_dir={folder}", "--license=mit"])
    return folder


def pushed(printed, folder, **flags):
    """What the command prints; the folder comes first on its command line."""
    return printed("export hub", str(folder), **flags)


def test_it_sends_nothing_unless_told_so(exported, api, printed, capsys):
    report = pushed(printed, exported, repo="my-org/sde")
    assert api.calls == []
    assert (report["pushed"], report["url"]) == (False, None)
    there = {str(path.relative_to(exported)): path.stat().st_size for path in exported.rglob("*") if path.is_file()}
    assert report["files"] == there
    assert report["num_bytes"] == sum(there.values())
    assert report["card"] == (exported / "README.md").read_text()
    cli.call("export hub", [str(exported), "--repo=my-org/sde"])
    told = capsys.readouterr().err
    assert "Nothing was sent; with --yes this goes to my-org/sde." in told
    assert "license: mit" in told
    assert "modules.json" in told


def test_it_sends_the_files_of_the_export(exported, api, printed):
    report = pushed(printed, exported, repo="my-org/sde", private=True, yes=True)
    assert (report["pushed"], report["url"]) == (True, "https://hub/my-org/sde/commit/1")
    token, created, (_, sent) = api.calls
    assert token == ("token", "hf_secret")
    assert created == ("create_repo", "my-org/sde", {"private": True, "repo_type": "model", "exist_ok": True})
    assert (sent["repo_id"], sent["folder_path"], sent["repo_type"]) == ("my-org/sde", str(exported), "model")
    assert sorted(sent["allow_patterns"]) == sorted(report["files"])


def test_without_a_token_or_a_network_it_says_so(exported, api, printed, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(InputError, match="there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN"):
        pushed(printed, exported, repo="my-org/sde", yes=True)
    assert pushed(printed, exported, repo="my-org/sde")["pushed"] is False
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    monkeypatch.setattr(api, "error", ConnectionError("[Errno -2] Name or service\nnot known. Try again"))
    with pytest.raises(InputError, match=r"does not take my-org/sde \(\[Errno -2\] Name or service not known\); check the name"):
        pushed(printed, exported, repo="my-org/sde", yes=True)
    assert not [call for call in api.calls if call[0] == "upload_folder"]


def test_what_is_not_an_export_is_refused(trained, exported, api, printed, tmp_path):
    with pytest.raises(InputError, match=r"is a run; export it first: de-jax export model --run_dir=.* --format=sentence_tr"):
        pushed(printed, trained, repo="my-org/sde", yes=True)
    with pytest.raises(InputError, match="is not an exported model"):
        pushed(printed, tmp_path, repo="my-org/sde", yes=True)
    for repo in ("sde", "my-org/a/b", "my-org/a b", "my-org/..", "my--org/a"):
        with pytest.raises(InputError, match=r"--repo is '.*'; give it as organisation/name"):
            pushed(printed, exported, repo=repo, yes=True)
    (exported / ".env").write_text("secret")
    try:
        with pytest.raises(InputError, match=r"\.env is a link or a hidden file"):
            pushed(printed, exported, repo="my-org/sde", yes=True)
    finally:
        (exported / ".env").unlink()
    assert api.calls == []


@pytest.mark.parametrize("format", ["safetensors", "serving", "t5x"])
def test_every_format_is_known(trained, printed, tmp_path, format):
    printed("export model", run_dir=trained, format=format, out_dir=tmp_path / "out")
    assert "README.md" in pushed(printed, tmp_path / "out", repo="my-org/sde")["files"]


@pytest.mark.parametrize("towers", [[""], ["query", "document"]], ids=["one model", "two towers"])
def test_adapters_are_known(api, printed, tmp_path, towers):
    names = sorted(str(Path(tower) / name) for tower in towers for name in (peft_adapters.CONFIG_FILE, peft_adapters.FILE))
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert sorted(pushed(printed, tmp_path, repo="my-org/sde", yes=True)["files"]) == names
    assert sorted(api.calls[-1][1]["allow_patterns"]) == names
