"""`python -m fuzz.serve`: the dashboard of the fuzzing service, over the store of campaigns."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.run import CannotRun, Parser, Usage, said

if TYPE_CHECKING:
    from fuzz.service.web.access import Access

TOKEN, WEBHOOK = "MASKPROOF_TOKEN", "MASKPROOF_WEBHOOK"
HELP = f"""\
It reads the store, and may do so while campaigns fill it. Without a token nothing can be changed in
it, and only this machine can reach it. A token is a file of one line, or the variable {TOKEN}:

  (umask 077; head -c 24 /dev/urandom | base64 > token)

examples:
  python -m fuzz.serve nightly.toml
  python -m fuzz.serve --store nightly/store.sqlite --token-file token
  python -m fuzz.serve --store postgresql://db/maskproof --host 0.0.0.0 --token-file token \\
      --certificate server.pem --key server.key
  curl -H "Authorization: Bearer $(cat token)" http://127.0.0.1:8765/api/findings?state=new

A webhook is sent JSON for each finding that becomes new or regressed; with a token, its header
X-Maskproof-Signature has the HMAC-SHA256 of the body under the token.

exit status: 0 it was ended; 2 bad usage; 3 it could not run.
"""
PORT = 8765
NOT_INSTALLED = "is not installed: pip install 'maskproof[service]'"


def parser() -> Parser:
    found = Parser(
        prog="python -m fuzz.serve", epilog=HELP, allow_abbrev=False,
        description="Serve the dashboard of fuzzing campaigns.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("file", type=Path, nargs="?", metavar="FILE", help="a campaign's file: serve its store")
    add("--store", metavar="STORE", help="the store instead: a path or postgresql://...")
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="where to listen (default %(default)s); any other than this machine's own needs a "
             "token")
    add("--port", type=port, default=PORT, help="0 takes a free one (default %(default)s)")
    add("--token-file", type=Path, metavar="TOKEN",
        help=f"the token, for changes; instead of the variable {TOKEN}")
    add("--name", action="append", default=[], metavar="HOST",
        help="a host name that a proxy in front of it has; reading then needs the token, too")
    add("--certificate", type=Path, metavar="PEM", help="serve by TLS, with this certificate")
    add("--key", type=Path, metavar="PEM", help="and this key, where it is not in the same file")
    add("--webhook", metavar="URL",
        help=f"told of new and regressed findings; instead of the variable {WEBHOOK}")
    return found


def port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parser().parse_args(arguments))
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        from fuzz.campaign import expected

        if (status := expected(error)) is None:
            raise
        return said(status, str(error), "fuzz.serve")


def run(options: argparse.Namespace) -> int:
    """Serves until it is ended."""
    token = token_of(options)
    webhook = options.webhook or os.environ.get(WEBHOOK)
    for path in (options.certificate, options.key):
        if path is not None and not path.is_file():
            raise Usage(f"{path}: no such file")
    if options.key is not None and options.certificate is None:
        raise Usage("--key needs --certificate")
    try:
        import uvicorn

        from fuzz.service.store import opened
        from fuzz.service.web.app import application
        from fuzz.service.web.webhook import Webhook, is_address, kept_at
    except ModuleNotFoundError as error:
        raise CannotRun(f"{error.name} {NOT_INSTALLED}") from None
    if webhook and not is_address(webhook):
        raise Usage("--webhook: it is http://... or https://...")

    access = access_of(options, token)
    store = opened(there(options))
    sockets = [listening(options.host, options.port)]
    base = address(options, sockets[0].getsockname()[1])
    hook = Webhook(store, webhook, base, kept_at(store, webhook), token, note) if webhook else None
    server = uvicorn.Server(uvicorn.Config(
        application(store, access), log_level="warning", access_log=False, server_header=False,
        proxy_headers=False, ws="none", limit_concurrency=200, timeout_graceful_shutdown=3,
        ssl_certfile=options.certificate, ssl_keyfile=options.key))
    try:
        if hook is not None:
            hook.start()
        sys.stdout.write(f"dashboard: {base}/\n")
        sys.stdout.flush()
        server.run(sockets)
    finally:
        if hook is not None:
            hook.stop()
        store.close()
    return 0


def note(text: str) -> None:
    sys.stderr.write(f"fuzz.serve: {text}\n")


def token_of(options: argparse.Namespace) -> str | None:
    """The token, from its file or the environment. Raises Usage where one is needed."""
    from fuzz.service.web.access import SHORTEST, is_loopback

    token = os.environ.get(TOKEN)
    if options.token_file is not None:
        try:
            token = options.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not a line of text"
            raise Usage(f"{options.token_file}: {why}; --help says how to make a token") from None
    if token is not None and (len(token) < SHORTEST or not token.isascii()
                              or not token.isprintable()):
        raise Usage(f"the token has to be one line of at least {SHORTEST} characters of ASCII")
    if token is None and (not is_loopback(options.host) or options.name):
        raise Usage(f"{options.name[0] if options.name else options.host} can be reached by "
                    f"others: a token is needed (--token-file, or {TOKEN})")
    return token


def access_of(options: argparse.Namespace, token: str | None) -> Access:
    from fuzz.service.web.access import LOCAL, Access, is_loopback

    names = tuple(name.lower() for name in options.name)
    if not is_loopback(options.host):
        names = ()
    elif options.host not in LOCAL:
        names += (options.host, f"[{options.host}]")
    public = bool(options.name) or not is_loopback(options.host)
    return Access(token, public, names and (*LOCAL, *names) if names or public else LOCAL,
                  secure=options.certificate is not None)


def there(options: argparse.Namespace) -> Any:
    """The store that was asked for. Raises Usage, StoreError, or what reading the file does."""
    from fuzz.service.campaign_file import load
    from fuzz.service.store import StoreError, url_of

    if (options.file is None) == (options.store is None):
        raise Usage("name a campaign's FILE, or its --store")
    if options.file is not None:
        campaign = load(options.file)
        url = url_of(campaign.store, campaign.findings)
    else:
        url = url_of(options.store, Path.cwd())
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        raise StoreError(f"no store yet at {url.database}: run the campaign first")
    return url


def listening(host: str, number: int) -> Any:
    """A socket that listens. Raises CannotRun."""
    import socket

    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((bare, number))
        found.listen(128)
    except OSError as error:
        found.close()
        hint = "; --port takes another" if number else ""
        raise CannotRun(f"{host}:{number}: {error.strerror or error}{hint}") from None
    return found


def address(options: argparse.Namespace, number: int) -> str:
    """Its own address, as a browser is given it."""
    if options.name:
        return f"https://{options.name[0]}"
    host = options.host.strip("[]")
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if options.certificate else 'http'}://{host}:{number}"


@contextmanager
def beside(file: Path, number: int) -> Iterator[None]:
    """The dashboard of a campaign's file as a process of its own, until the scope ends. What keeps
    it from starting is said, and stops no campaign."""
    from fuzz.service.campaign_file import load
    from fuzz.service.store import StoreError, opened, url_of

    campaign = load(file)
    try:
        opened(url_of(campaign.store, campaign.findings)).close()
    except StoreError as error:
        note(f"no dashboard: {error}")
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "fuzz.serve", str(file), "--port", str(number)],
        stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        if process.poll() is None:  # else it has said why
            _end(process)
            note(f"the dashboard has ended with the campaign; again: python -m fuzz.serve {file}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
        return
    process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
