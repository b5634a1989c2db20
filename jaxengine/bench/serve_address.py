"""Address and lengths of `bench serve` in the flags of vLLM's command, in addition to this command's own.

vLLM's command has a base URL without /v1, or a host and a port, and a separate option for the endpoint; its lengths are
those of its data set "random". `settle` replaces these by --url, --route, --lengths and the others.
"""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import urlsplit

ROUTES = ("completions", "chat/completions")
# vLLM's names of clients -> route.
_BACKENDS = {"vllm": ROUTES[0], "openai": ROUTES[0], "openai-chat": ROUTES[1]}


def add_address(parser: argparse.ArgumentParser, share: Any) -> None:
    """Add the flags for the server's address and route, and vLLM's names of other flags, to a parser.

    share: parses a number from 0 to 1.
    """
    parser.add_argument("--url", help="base URL of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--route", choices=ROUTES, help=f"route of the requests (default: {ROUTES[0]})")
    parser.add_argument("--base-url", metavar="URL", help="instead of --url: the URL without /v1")
    parser.add_argument("--host", help="instead of --url: the server's host (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="instead of --url: its port (default: 8000)")
    parser.add_argument("--endpoint", metavar="PATH", help="instead of --route: such as /v1/chat/completions")
    parser.add_argument("--backend", choices=_BACKENDS, help="instead of --route: openai-chat sends chats")
    parser.add_argument("--insecure", action="store_true", help="accept every certificate of the server")
    parser.add_argument("--dataset-name", choices=("random",), default="random", help="prompts are random tokens")
    parser.add_argument(
        "--random-range-ratio", type=share, metavar="RANGE_RATIO", help="as --lengths uniform --range-ratio; 0: fixed"
    )
    parser.add_argument("--random-prefix-len", type=int, default=0, help="as --num-prefixes 1 --prefix-len; 0: none")


def settle(args: argparse.Namespace) -> None:
    """Replace the alternatives to a flag by the flag itself, in `args` in place.

    Sets url (by default http://127.0.0.1:8000/v1) and route (by default the first of ROUTES), which are complete
    afterwards, and lengths, range_ratio, num_prefixes and prefix_len if vLLM's flags give them. Raises ValueError for
    flags that contradict each other, an endpoint that is not a route, and a negative random_prefix_len.
    """
    if args.url is not None:
        if wrong := [name for name in ("base_url", "host", "port", "endpoint") if getattr(args, name) is not None]:
            raise ValueError(f"--url and --{wrong[0].replace('_', '-')} are both given; give one")
        if not urlsplit(args.url).path.strip("/"):
            args.url = args.url.rstrip("/") + "/v1"
    elif args.base_url is not None and (args.host is not None or args.port is not None):
        raise ValueError("--base-url and --host or --port are both given; give one")
    routes = {name: _BACKENDS.get(value, value) for name in ("route", "backend") if (value := getattr(args, name))}
    prefix = "/v1"
    if args.endpoint is not None:
        route = next((each for each in reversed(ROUTES) if args.endpoint.endswith(f"/{each}")), None)
        if route is None:
            raise ValueError(f"--endpoint is {args.endpoint!r}; allowed: a path that ends with /completions")
        routes["endpoint"], prefix = route, args.endpoint.removesuffix(f"/{route}")
    if len(set(routes.values())) > 1:
        raise ValueError(f"--{' and --'.join(routes)} name different routes; give one")
    args.route = next(iter(routes.values()), ROUTES[0])
    if args.url is None:
        host = args.host or "127.0.0.1"
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host  # IPv6
        base = args.base_url or f"http://{host}:{8000 if args.port is None else args.port}"
        args.url = base.rstrip("/") + prefix
    if args.random_prefix_len < 0:
        raise ValueError(f"--random-prefix-len is {args.random_prefix_len}; allowed: whole numbers from 0")
    for name, other, clash in (
        ("random-range-ratio", "lengths", args.random_range_ratio is not None and args.lengths != "fixed"),
        ("random-prefix-len", "prefix-len", args.random_prefix_len and (args.num_prefixes or args.prefix_len)),
    ):
        if clash:
            raise ValueError(f"--{name} and --{other} are both given; give one")
    if args.random_range_ratio:
        args.lengths, args.range_ratio = "uniform", args.random_range_ratio
    if args.random_prefix_len:
        args.num_prefixes, args.prefix_len = 1, args.random_prefix_len
