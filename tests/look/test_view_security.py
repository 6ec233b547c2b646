"""What `rolecall view` refuses: wrong token, Host and Origin, paths that lead elsewhere, and any wish to change something."""

import socket
import subprocess
from pathlib import Path

import pytest
from look_runs import HOSTILE
from view_server import CALL, viewing, write_run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("view")
    runs = place / "runs"
    write_run(runs / "first")
    write_run(runs / "sweep" / "lr=1")
    write_run(place / "secret")
    write_run(runs / "borrowed")
    (runs / "borrowed" / "config.json").unlink()
    (runs / "borrowed" / "config.json").symlink_to(place / "secret" / "config.json")
    (runs / "linked").symlink_to(place / "secret")
    write_run(runs / "loop")
    (runs / "loop.log").symlink_to("/etc/hostname")
    return place


@pytest.fixture(scope="module")
def server(place):
    with viewing(place / "runs") as server:
        yield server


def test_requests_without_token_from_elsewhere_or_to_change_something_are_refused(server, place):
    before = sorted((p, p.stat().st_mtime_ns) for p in place.rglob("*"))
    assert server.ask("/")[0] == 200
    for path in ("/", "/run/first", "/run/first/curves", "/run/first/events", "/events", "/static/view.js", "/nowhere"):
        assert server.ask(path, known=False)[0] == 401, path
        assert server.ask(f"{path}?token=wrong")[0] == 401, "a wrong token is not put right by a cookie"
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", f"127.0.0.1.evil:{server.port}", ""):
            assert server.ask(path, host=host)[0] == 403, (path, host)
        for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}", "http://127.0.0.1:1"):
            assert server.ask(path, origin=origin)[0] == 403, (path, origin)
        assert server.ask(path, sec_fetch_site="cross-site", sec_fetch_mode="no-cors")[0] == 403
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert server.ask(path, method)[0] == 405, (path, method)
            assert server.ask(path, method, known=False)[0] == 401
            assert server.ask(path, method, origin="http://evil.example")[0] == 403
    assert server.ask("/", origin=server.base)[0] == 200
    assert sorted((p, p.stat().st_mtime_ns) for p in place.rglob("*")) == before


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(server):
    status, headers, _ = server.ask(f"/run/first?token={server.token}&x=1", known=False)
    assert (status, headers["location"]) == (303, "/run/first?x=1")
    cookie = headers["set-cookie"].lower()
    assert f"rolecall-view-{server.port}=" in cookie
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_every_answer_has_a_strict_policy(server):
    for path in ("/", "/run/first", "/static/view.js", "/run/none", "/run/first/curves"):
        for known in (True, False):
            headers = server.ask(path, known=known)[1]
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert "access-control-allow-origin" not in headers
    page = server.ask("/run/first")[2]
    assert "<script>" not in page
    assert " style=" not in page
    assert " onclick" not in page


TRICKS = (
    *("/run/..", "/run/../secret", "/run/%2e%2e", "/run/%2e%2e/curves", "/run/..%2fsecret", "/run/%2e%2e%2f%2e%2e%2fx"),
    *(
        "/run/%2fetc%2fpasswd",
        "//etc/passwd",
        "/run//etc/passwd",
        "/run/first%00",
        "/run/..%5csecret",
        "/run/.",
        "/../x",
    ),
    *("/static/../run.py", "/static/%2e%2e/page.css", "/run/first/../../secret", "/run/first%0d%0a"),
)


@pytest.mark.parametrize("path", TRICKS)
def test_paths_that_lead_elsewhere_are_refused(path, server):
    status, _, body = server.ask(path)
    assert status == 400
    assert "tiny" not in body


def test_links_out_of_the_directory_are_not_followed(server, place):
    page = server.ask("/")[2]
    assert "first" in page
    assert "linked" not in page
    assert server.ask("/run/linked")[0] == 404
    assert server.ask("/run/sweep:lr=1")[0] == 200
    for name in ("..:secret", "sweep:..", "sweep:../..", "secret", ":first", "first:"):
        assert server.ask(f"/run/{name.replace('/', '%2f')}")[0] in (400, 404), name
    status, _, body = server.ask("/run/borrowed")
    assert status == 422
    assert "is a link that leads out of" in body
    assert "is a link that leads out of" in page
    assert "Output" not in server.ask("/run/loop")[2]


def test_it_listens_on_the_loopback_address_alone(server):
    sockets = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    port = f"{int(server.port):04X}"
    assert [words[1] for words in sockets if words[3] == "0A" and words[1].endswith(f":{port}")] == [f"0100007F:{port}"]


def test_hostile_names_settings_and_numbers_are_text_in_every_page(browser, tmp_path):
    names = [text.replace("/", "∕").replace("\0", "") for text in HOSTILE if text != "\0"]
    for name in names:
        write_run(tmp_path / name, model=name, rows=HOSTILE[1], **{HOSTILE[0]: HOSTILE[3]})
    write_run(tmp_path / "numbers")
    with (tmp_path / "numbers" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward": 1, "</script><script>x": 2}\n')
    (tmp_path / "numbers.log").write_text("\x1b[31mred\x1b[0m <b>bold</b> \u202eevil\n")
    with viewing(tmp_path) as server:
        pages = [server.ask("/")[2], server.ask("/run/numbers")[2]]
        found = server.json("/run/numbers/curves")["charts"]
        assert "</script><script>x" in [chart["title"] for chart in found], "data is data"
        browser.open(f"{server.base}/?token={server.token}")
        links = browser.js("return [...document.querySelectorAll('tbody th a')].map((a) => a.getAttribute('href'))")
        assert len(links) == len(names), "all but one, whose name holds an escape"
        assert "its name holds a character that no address may hold" in browser.one("tbody").text
        both = "&".join(link.replace("/run/", "run=") for link in links[:3])
        for path in ("/", *links, f"/compare?{both}"):
            browser.open(f"{server.base}{path}")
            if path != "/":
                browser.until(lambda: browser.all("#curves canvas"))
            assert browser.driver.title != "owned"
            assert not browser.all("main img, header img, svg[onload], main script")
            assert browser.complaints() == []
    for page in pages:
        for act in ("<img", "<svg onload", "<script>", "</script><script", "\u202e", "\x1b", "\u2028", "<b>bold"):
            assert act not in page, act
    assert "\\u202e" in pages[1]
    assert "\\x1b[31mred" in pages[1]


def refused(*words, cwd):
    done = subprocess.run([*CALL, "view", *words], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    (sentence,) = done.stderr.strip().splitlines()
    return sentence


def test_bad_input_is_a_sentence(tmp_path):
    assert "there is no directory nowhere" in refused("nowhere", cwd=tmp_path)
    (tmp_path / "file").write_text("")
    assert "file is a file" in refused("file", cwd=tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} is taken" in refused(".", "--port", port, cwd=tmp_path)
    hidden = "import sys; sys.modules['uvicorn'] = None; from rolecall.cli import main; sys.exit(main(['view', '--port', '0']))"
    done = subprocess.run([CALL[0], "-c", hidden], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "pip install 'rolecall[view]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
