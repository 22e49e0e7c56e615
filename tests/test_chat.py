"""What `quire chat` reads from its surroundings."""

import pytest

from protos.settings import read_settings
from quire.chat import ChatSettings


def test_variables_of_other_programs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URL", "http://elsewhere")
    monkeypatch.setenv("MODEL", "another")
    monkeypatch.setenv("QUIRE_CHAT_SYSTEM", "Be short.")
    settings = read_settings(ChatSettings, [])
    assert (settings.url, settings.model, settings.system) == ("http://localhost:8000", "", "Be short.")
