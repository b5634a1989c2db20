"""The command `jaxengine trace`, which writes a server's timeline to a file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.key_file import read_api_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine trace` to a parser, and set `run` as its function."""
    parser.add_argument("output", metavar="FILE", help="where to write it")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how far back (default: %(default)s)")
    parser.add_argument("--api-key-file", metavar="FILE", help="a file with the server's key")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the timeline of a server to a file, replacing an earlier one, and print how to open it. Return 0, or 1 if
    the server refuses, after printing its error to stderr.

    args: options of `add_arguments`. Raises ConfigError for an address that is not HTTP, for an unusable key file and
    for a server that does not answer, OSError for a file that cannot be written.
    """
    url = f"{args.url.rstrip('/')}/trace?{urllib.parse.urlencode({'seconds': args.seconds})}"
    try:
        usable = urllib.parse.urlsplit(url).scheme in ("http", "https")
    except ValueError:  # such as half an IPv6 address
        usable = False
    if not usable:
        raise ConfigError("url", args.url, "an address that begins with http:// or https://")
    request = urllib.request.Request(url)
    if args.api_key_file:
        # Unredirected: another host must not get the key.
        request.add_unredirected_header("Authorization", f"Bearer {read_api_key(args.api_key_file)}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        print(f"jaxengine: error: {args.url} answered {error.code}: {_reason(error)}", file=sys.stderr)
        return 1
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        problem = f"no server answers at {args.url} ({getattr(error, 'reason', error)})"
        raise ConfigError.because("url", problem, "start one with `jaxengine serve`, or give its --url") from None
    Path(args.output).write_bytes(content)
    print(f"{args.output}: open it at https://ui.perfetto.dev")
    return 0


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message in the JSON body of an HTTP error, whose body is read, or else its status text."""
    try:
        return json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return error.reason
