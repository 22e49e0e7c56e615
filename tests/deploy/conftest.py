"""What the tests on a real engine found, or that there was none, stands in pytest's summary."""

import pytest

NO_ENGINE = "no Docker engine with Compose answers"
FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the summary."""
    lines: list[str] = request.config.stash.setdefault(FIGURES, [])
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures, or that this part was left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    if any(NO_ENGINE in str(report.longrepr) for report in skipped):
        terminalreporter.section("docker compose")
        terminalreporter.line(f"LEFT OUT: docker compose on a real engine ({NO_ENGINE})")
    elif lines := config.stash.get(FIGURES, []):
        terminalreporter.section("docker compose")
        for line in lines:
            terminalreporter.line(line)
