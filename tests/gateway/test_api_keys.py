"""Who may use the API, whose request it is, and keys that come and go while the gateway runs."""

import hashlib
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from gateway.__main__ import main as gateway_main
from gateway.api_keys import ApiKeys, draw_key, parse_keys
from gateway.key import main as key_main
from protos.watched_files import FileMistakeError
from tests.gateway.fakes import MODEL_NAME, Cell, running_cell
from tests.gateway.test_pages import samples

OPEN_PAGES = ("/health", "/ready", "/metrics", "/version")
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hello"}]}
GUARDED: dict[tuple[str, str], dict[str, object] | None] = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/completions"): {"prompt": "hello"},
    ("GET", "/v1/models"): None,
    ("GET", f"/v1/models/{MODEL_NAME}"): None,
    ("POST", "/tokenize"): {"prompt": "hello"},
    ("POST", "/detokenize"): {"tokens": [1]},
}


def line_of(tenant: str, key: str) -> str:
    """What a file has for a key, made by hand."""
    return f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_every_route_that_costs_something_needs_a_key(model_folder: Path) -> None:
    async with running_cell(model_folder, api_keys=line_of("acme", "good")) as cell:
        cell.answer("ok")
        schema = (await cell.http.get("/openapi.json")).json()["paths"]
        routes = {(method.upper(), path) for path, methods in schema.items() for method in methods}
        assert {path for _, path in routes} - {path.replace(MODEL_NAME, "{name}") for _, path in GUARDED} == {
            *OPEN_PAGES
        }
        for (method, path), body in GUARDED.items():
            for headers in (
                {},
                bearer("guess"),
                {"Authorization": "Bearer"},
                {"Authorization": "good"},
                {"Authorization": "Basic good"},
            ):
                response = await cell.http.request(method, path, json=body, headers=headers)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (401, "invalid_api_key"), (path, headers)
                assert set(error) == {"message", "type", "param", "code"}
            assert (await cell.http.request(method, path, json=body, headers=bearer("good"))).status_code == 200
        for path in OPEN_PAGES:
            assert (await cell.http.get(path)).status_code == 200
        page = list(samples((await cell.http.get("/metrics")).text))
        assert ("quire_gateway_refused_keys_total", {}, 5.0 * len(GUARDED)) in page
        assert [submit.tenant for submit in cell.scheduler.submits] == ["acme", "acme"]


async def test_stranger_is_refused_before_his_body_is_read(model_folder: Path) -> None:
    async with running_cell(model_folder, api_keys=line_of("acme", "good")) as cell:
        response = await cell.http.post("/v1/completions", content=b"no JSON", headers=bearer("guess"))
        assert response.status_code == 401
        assert cell.scheduler.submits == []


async def test_official_client_sends_its_key_and_is_told_of_a_wrong_one(model_folder: Path) -> None:
    async with running_cell(model_folder, api_keys=line_of("acme", "good")) as cell:
        cell.answer("ok")
        async with AsyncOpenAI(base_url=f"{cell.url}/v1", api_key="good", max_retries=0) as client:
            answer = await client.completions.create(model=MODEL_NAME, prompt="hello")
            assert answer.choices[0].text == "ok"
        with pytest.raises(openai.AuthenticationError) as caught:
            await cell.openai.models.list()
        assert caught.value.code == "invalid_api_key"


async def test_tenant_is_the_keys_whatever_else_the_client_says(model_folder: Path) -> None:
    keys = ",".join((line_of("acme", "one"), line_of("acme", "two"), line_of("other", "three")))
    async with running_cell(model_folder, api_keys=keys) as cell:
        cell.answer("ok")
        for key in ("one", "two", "three"):
            headers = bearer(key) | {"X-Quire-Tenant": "victim"}
            body = {"prompt": "hello", "user": "victim"}
            assert (await cell.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert [submit.tenant for submit in cell.scheduler.submits] == ["acme", "acme", "other"]


async def test_without_keys_the_tenant_is_what_the_client_says(cell: Cell) -> None:
    cell.answer("ok")
    for headers, fields in (
        ({}, {}),
        ({}, {"user": "ann"}),
        ({"X-Quire-Tenant": "lab"}, {"user": "ann"}),
        ({"X-Quire-Tenant": "lab", "Authorization": "Bearer none"}, {}),
    ):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello"})):
            assert (await cell.http.post(path, json=body | fields, headers=headers)).status_code == 200
    tenants = [submit.tenant for submit in cell.scheduler.submits]
    assert tenants == ["", "", "ann", "ann", "lab", "lab", "lab", "lab"]


async def test_tenants_name_that_is_too_long_is_refused(cell: Cell) -> None:
    response = await cell.complete(user="x" * 257)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "user")
    response = await cell.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Quire-Tenant": "x" * 257})
    assert (response.status_code, "X-Quire-Tenant" in response.json()["error"]["message"]) == (400, True)
    assert cell.scheduler.submits == []


async def status(http: httpx.AsyncClient, key: str) -> int:
    return (await http.get("/v1/models", headers=bearer(key))).status_code


async def test_keys_come_and_go_without_a_restart(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    assert key_main(["acme", "--add", str(file)]) == 0
    first = capsys.readouterr().out.strip()
    async with running_cell(model_folder, api_keys_file=str(file), api_keys=line_of("admin", "fixed")) as cell:
        assert [await status(cell.http, key) for key in (first, "fixed")] == [200, 200]
        assert key_main(["other", "--add", str(file)]) == 0
        second = capsys.readouterr().out.strip()
        assert [await status(cell.http, key) for key in (first, second)] == [200, 200]
        file.write_text(file.read_text().splitlines()[1])
        assert [await status(cell.http, key) for key in (first, second, "fixed")] == [401, 200, 200]
        file.write_text("a mistake")
        assert [await status(cell.http, key) for key in (first, second)] == [401, 200]
        assert "stays in force" in caplog.text
        file.unlink()
        assert [await status(cell.http, key) for key in (first, second)] == [401, 200]
        file.write_text("# nobody\n")
        assert [await status(cell.http, key) for key in (first, second, "fixed")] == [401, 401, 200]


async def test_empty_file_of_keys_lets_in_nobody(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("")
    async with running_cell(model_folder, api_keys_file=str(file)) as cell:
        assert await status(cell.http, "none") == 401


def test_file_never_holds_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    file.write_text(line_of("acme", "by hand"))  # without an end of line
    assert key_main(["acme", "--add", str(file)]) == 0
    captured = capsys.readouterr()
    key = captured.out.strip()
    assert key not in file.read_text()
    assert captured.err == ""
    keys = ApiKeys("", str(file))
    assert [keys.tenant_of(candidate) for candidate in ("by hand", key, key[:-1], "")] == ["acme", "acme", None, None]


def test_new_key_is_printed_once_and_its_line_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert key_main(["acme"]) == 0
    captured = capsys.readouterr()
    assert captured.err == line_of("acme", captured.out.strip()) + "\n"
    assert key_main(["acme"]) == 0
    assert capsys.readouterr().out != captured.out


@pytest.mark.parametrize("tenant", ["", "a:b", "a,b", "a b", "#a", "x" * 129])
def test_name_that_no_tenant_may_have_is_named(tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert key_main([tenant]) == 2
    assert "no tenant's name" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no tenant's name"):
        draw_key(tenant)


def test_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert key_main(["acme", "--add", str(tmp_path / "no folder" / "keys")]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "no folder" in captured.err


def test_comments_and_blank_lines_are_no_keys() -> None:
    text = (
        f"# people\n\n{line_of('acme', 'one')}  # Ann\n{line_of('acme', 'two')}, {line_of('other', 'three').upper()}\n"
    )
    assert [key.tenant for key in parse_keys(text.replace("OTHER", "other"))] == ["acme", "acme", "other"]


@pytest.mark.parametrize(
    "entry", ["sk-quire-abc", "acme:sk-quire-abc", "acme:" + "0" * 63, ":" + "0" * 64, "a b:" + "0" * 64]
)
def test_mistake_names_the_entry_and_shows_nothing_of_it(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{line_of('acme', 'one')}\n{entry}\n")
    with pytest.raises(FileMistakeError, match=r"--api-keys-file .*: entry 2 is not TENANT:SHA256") as caught:
        ApiKeys("", str(file))
    assert entry not in str(caught.value)
    with pytest.raises(FileMistakeError, match="QUIRE_API_KEYS: entry 1 is not TENANT:SHA256"):
        ApiKeys(entry, "")


def test_gateway_does_not_start_with_a_mistake_in_its_files(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, words in (
        (("--api-keys-file", "/no/such/file"), "--api-keys-file /no/such/file: No such file"),
        (("--tls-cert", "/no/such/file"), "--tls-cert needs --tls-key too"),
        (("--tls-ca", "/no/such/file"), "--tls-ca /no/such/file: No such file"),
    ):
        monkeypatch.setattr("sys.argv", ["gateway", "--model", str(model_folder), *flags])
        assert gateway_main() == 1
        message = capsys.readouterr().err
        assert words in message
        assert message.count("\n") == 1
