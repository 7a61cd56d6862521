"""The server gives out the timeline and the report, and the UI when it is bundled."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import served

from verl_profiling.commands.view import TimelineServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("served")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "timeline.json.gz").write_bytes(b"timeline")
    (tmp_path / "served" / "report.html").write_bytes(b"report")
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / "index.html").write_bytes(b"<head></head>perfetto")
    return tmp_path


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[TimelineServer]:
    with served(folder / "served", folder / "ui") as server:
        yield server


@pytest.fixture(scope="module")
def online(folder: Path) -> Iterator[TimelineServer]:
    with served(folder / "served", None) as server:
        yield server


def get(address: str) -> tuple[bytes, str | None]:
    """Return the content of an address, and who may read it."""
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read(), answer.headers["Access-Control-Allow-Origin"]


def test_files_and_ui_are_served(offline: TimelineServer) -> None:
    """The timeline and the report by name, everything else from the UI."""
    assert get(offline.address("timeline.json.gz"))[0] == b"timeline"
    assert get(offline.address("report.html"))[0] == b"report"
    for page in ("", "index.html"):
        assert get(offline.address(page))[0] == b"<head></head>perfetto"
    assert offline.timeline_address("timeline.json.gz").startswith(
        offline.address("#!/?url=http://127.0.0.1:")
    )


def test_the_online_ui_may_fetch_the_timeline(online: TimelineServer) -> None:
    assert get(online.address("timeline.json.gz")) == (b"timeline", "https://ui.perfetto.dev")
    assert online.timeline_address("t").startswith("https://ui.perfetto.dev/#!/?url=http://127.0.0.1:")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9001", "127.0.0.1.evil.example:80", ""])
def test_a_page_under_another_name_gets_nothing(online: TimelineServer, host: str) -> None:
    """DNS rebinding: the browser believes that this server is the page's own, and says so in Host."""
    request = urllib.request.Request(online.address("timeline.json.gz"), headers={"Host": host})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request, timeout=60)


@pytest.mark.parametrize("path", ["../secret", "%2e%2e/secret", "nothing.txt"])
def test_nothing_else_is_served(
    offline: TimelineServer, online: TimelineServer, folder: Path, path: str
) -> None:
    """Files outside of the UI's folder stay where they are."""
    (folder / "secret").write_bytes(b"secret")
    for server in (offline, online):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.address(path))


def test_only_this_machine_is_served(offline: TimelineServer) -> None:
    assert offline.server_address[0] == "127.0.0.1"
