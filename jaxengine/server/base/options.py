"""Options of the server, validated once. Names and meaning are vLLM's where vLLM has the option."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import re
import stat
from dataclasses import dataclass
from typing import Any

from jaxengine.config.base.errors import printable
from jaxengine.config.base.files import named_path, read_file
from jaxengine.config.base.values import kind_missed
from jaxengine.config.engine_config import ConfigError
from jaxengine.parsers.registry import reasoning_format, tool_format

MIB = 1 << 20
# Memory of stored responses.
_STORED_BYTES = 256 * MIB
# Origin of a page, as browsers send it: RFC 6454.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


# Field -> least and most value.
_BOUNDS = (
    ("port", 0, 65535),
    ("grpc_port", 0, 65535),
    ("metrics_port", 0, 65535),
    ("api_server_count", 1, 64),
    ("max_num_queued_reqs", 1, 2**31),
    ("max_num_queued_tokens", 1, 2**53),
    ("request_timeout", 0.001, 1e9),
    ("shutdown_timeout", 0, 86400),
    ("stream_write_timeout", 0.1, 86400),
    ("read_timeout", 0.1, 86400),
    ("max_connections", 1, 2**20),
    ("max_request_bytes", 1024, 2**31),
    ("max_header_bytes", 1024, 16 * MIB),
    ("max_stored_responses", 2, 2**20),
    ("max_stored_bytes", 4 * MIB, 2**40),
    ("max_stored_responses_per_client", 1, 2**20),
    ("max_stored_bytes_per_client", MIB, 2**40),
    ("max_stored_conversation_bytes", MIB, 2**40),
    ("max_n", 1, 16384),
    ("max_log_len", 0, 2**20),
    ("max_prompts", 1, 2**20),
    ("max_captured_bytes", 1, 2**31),
    ("batch_retention_hours", 1, 87600),
    ("batch_priority", -(2**63), 2**63 - 1),
    ("max_batch_file_bytes", 1024, 2**40),
    ("max_batch_bytes_per_client", 1024, 2**50),
    ("max_batch_files_per_client", 1, 2**20),
    ("max_batches_per_client", 1, 2**20),
)
# Field -> least and most value, of options where 0 means no limit, or none of it.
_BOUNDS_OR_NONE = (
    ("engine_hang_timeout", 1, 86400),
    ("api_hang_timeout", 1, 86400),
    ("sse_keep_alive_interval", 0.01, 86400),
    ("api_memory_limit_bytes", 256 * MIB, 2**53),
)


@dataclass(frozen=True)
class ServerConfig:
    """Server options. Raises ConfigError for a value of another type or out of bounds, and without options that one
    needs. The only value of a tuple may be given alone.

    Attributes:
      host: the address to listen on; use api_key with any other than loopback.
      port: port of HTTP; 0 takes a free one and prints it.
      uds: path of a Unix domain socket that HTTP listens on, instead of host and port.
      grpc_port: port of gRPC; None for no gRPC, 0 takes a free one.
      metrics_port: port that serves /metrics and /health alone, without a key and without TLS, for pickers and
        collectors; None: only `port` serves them.
      api_server_count: processes that serve clients, tokenise and detokenise.
      served_model_name: names that requests may use for the model; answers use the first.
      api_key: keys that clients may present as "Authorization: Bearer ..."; without any, no key is required. With
        scheduling_policy "fair" each key is one client, and without keys all are one.
      api_key_file: a file of further keys, one per line. It is refused if other users may write it, and a warning is
        logged if they may read it. The same holds for admin_key_file.
      enable_admin: also serve the routes and methods that change the server; they need admin_key_file.
      admin_key_file: a file with the keys for them.
      lora_modules: adapters to start with, each as name=path or as JSON with name and path; needs enable_lora.
      lora_root: the folder from which operators may load adapters at run time; None forbids loading.
      lora_dirs: folders whose adapters requests may name as their model, by the path of the adapter's folder in one of
        them; it is loaded then.
      lora_hub_owners: owners on the Hugging Face hub whose adapters requests may name in the same way, as owner/name.
      lora_routes: names that requests may give as their model, each for adapters by weight, as JSON: {"acme":
        [["acme-v1", 0.9], ["acme-v2", 0.1]]}. A conversation (X-Session-ID), and a request that is sent again with its
        X-Request-Id, get the same adapter; answers carry its name.
      weight_upload_dir: the folder that keeps the weights that operators send until the engine has read them; it needs
        room for all of them. None forbids sending. Weights in a folder are read where they are.
      ssl_certfile: certificate chain for TLS, PEM. This file and the next two are read again when they change.
      ssl_keyfile: private key of the certificate.
      ssl_ca_certs: certificate authorities; clients must present a certificate that one of them signed (mTLS).
      allowed_origins: origins that browsers may call from (CORS), or a JSON list of them; "*" for all.
      middleware: ASGI middleware of your own code around all HTTP requests of clients, as module.NAME: a class, or a
        coroutine function of (request, call_next). The last one is the outermost. Lines of batches, metrics_port and
        gRPC are not passed through it.
      root_path: prefix under which a proxy offers this server.
      max_num_queued_reqs: requests that may wait for a free slot; None: four times max_num_seqs. With scheduling_policy
        "fair" one client may have half of them.
      max_num_queued_tokens: prompt tokens that waiting requests may have together; None: no separate limit.
      request_timeout: seconds after which a request without its own timeout is ended; None: never.
      shutdown_timeout: seconds that running requests have to finish after SIGTERM; 0 aborts them.
      engine_hang_timeout: seconds after which an engine that has not finished a step is killed and restarted; 0: never.
        It must be far above the longest step, which with enforce_eager includes its compilation.
      api_hang_timeout: seconds after which an API process whose event loop is blocked is killed and restarted; 0:
        never.
      api_memory_limit_bytes: memory that an API process may take beyond its initial size; 0: no limit.
      stream_write_timeout: seconds after which a stream that its client does not read is ended.
      sse_keep_alive_interval: seconds without an event after which a stream over HTTP sends a comment, so that proxies
        keep the connection; 0 for none.
      read_timeout: seconds in which the headers of a request must arrive, and the same for its body, with one more for
        each 256 KiB received. An idle connection is closed after this time, too.
      max_connections: connections to each API process. Beyond them, the one that has waited longest for a request is
        closed, or the new one if none is waiting. None: 10,000. The system's limit of open files may allow fewer.
      max_request_bytes: largest body of a request.
      max_stored_responses: responses of /v1/responses that are stored at a time, of all clients. Beyond it, and beyond
        max_stored_bytes, the client that has most loses its oldest.
      max_stored_bytes: memory of stored responses, of all clients; None: 256 MiB, or a quarter of
        api_memory_limit_bytes if that is less.
      max_stored_responses_per_client: stored responses of one API key, which loses its own oldest beyond them; None:
        half of max_stored_responses.
      max_stored_bytes_per_client: their memory, likewise; None: half of max_stored_bytes.
      max_stored_conversation_bytes: largest conversation of a stored response, with all that it continues; None: a
        quarter of max_stored_bytes. A larger one is refused, or not stored if the request does not ask for it.
      max_header_bytes: largest headers of a request.
      max_n: largest number of outputs per prompt in a request.
      max_prompts: largest number of prompts in a request.
      max_captured_bytes: largest size in bytes of the activations in an answer, before base64 (capture,
        return_hidden_states).
      chat_template_kwargs_allowed: whether requests may set variables of the chat template.
      default_chat_template_kwargs: variables of the chat template for the conversations of all requests, such as
        {"enable_thinking": false}; those that a request sets replace them.
      trust_request_chat_template: whether requests may include their own chat template.
      exclude_tools_when_tool_choice_none: leave the tools of a request with tool_choice "none" out of its prompt.
      enable_auto_tool_choice: let the model choose whether to call a tool; needs tool_call_parser.
      tool_call_parser: the model's format of tool calls, one of those in docs/parsers.md; auto: chosen by its chat
        template. None: tool calls are not parsed.
      reasoning_parser: the model's format of reasoning, chosen in the same way. None, or the text "none", leaves
        reasoning in the content.
      response_role: the role of answers.
      enable_batch_api: serve /v1/files and /v1/batches; needs batch_storage_dir.
      batch_storage_dir: the folder that keeps files and batches, also over restarts. Servers of the same model may
        share it: one of them at a time runs the batches.
      batch_retention_hours: hours after which files, and batches that have ended, are removed.
      batch_priority: most urgent priority of a batch's requests, with scheduling_policy "priority"; None: the lowest.
        Under every policy batches leave a quarter of the slots free, and start no request while others wait.
      max_batch_file_bytes: largest file that a client may store.
      max_batch_bytes_per_client: bytes of all files and results of one API key.
      max_batch_files_per_client: files of one API key.
      max_batches_per_client: stored batches of one API key; the oldest that has ended makes room for a new one.
      disable_fastapi_docs: do not serve /docs and /openapi.json.
      enable_tokenizer_info_endpoint: serve /tokenizer_info, with the special tokens and the chat template.
      return_tokens_as_token_ids: show tokens of logprobs as token_id:N, unless a request sets it.
      enable_force_include_usage: include usage in every event of every stream, requested or not.
      enable_per_request_metrics: add the request's times to answers with one output, in the field `metrics`: to
        complete answers, and to the event of a stream that has the usage.
      disable_access_log: log no line for each request. Otherwise each request has one, but those of /health, /live,
        /ping, /metrics and /status.json only if they fail.
      log_format: "text", vLLM's lines, or "json", an object in each line, with time, level, process, pid, logger, place
        and message. Native libraries write plain text in either case.
      enable_log_requests: log the parameters of each request for text, up to 1000 characters of them.
      max_log_len: with enable_log_requests, characters of each prompt, and as many of its token ids, to log as well;
        None: neither.
      enable_reflection: gRPC reflection; None: on loopback only.
      otlp_traces_endpoint: where OpenTelemetry spans of requests are sent, http://host:4318/v1/traces or
        grpc://host:4317; None: nowhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None
    api_server_count: int = 1
    served_model_name: tuple[str, ...] = dataclasses.field(default=(), metadata={"nargs": "+"})
    api_key: tuple[str, ...] = dataclasses.field(default=(), repr=False, metadata={"nargs": "+"})
    api_key_file: str | None = None
    enable_admin: bool = False
    admin_key_file: str | None = None
    lora_modules: tuple[str, ...] = dataclasses.field(default=(), metadata={"nargs": "+"})
    lora_root: str | None = None
    lora_dirs: tuple[str, ...] = dataclasses.field(default=(), metadata={"nargs": "+"})
    lora_hub_owners: tuple[str, ...] = dataclasses.field(default=(), metadata={"nargs": "+"})
    lora_routes: str | None = None
    weight_upload_dir: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: tuple[str, ...] = ()
    middleware: tuple[str, ...] = ()
    root_path: str = ""
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    request_timeout: float | None = None
    shutdown_timeout: float = 0.0
    engine_hang_timeout: float = 300.0
    api_hang_timeout: float = 60.0
    api_memory_limit_bytes: int = 4096 * MIB
    stream_write_timeout: float = 60.0
    sse_keep_alive_interval: float = 0
    read_timeout: float = 30.0
    max_connections: int | None = None
    max_request_bytes: int = 32 * MIB
    max_stored_responses: int = 2000
    max_stored_bytes: int | None = None
    max_stored_responses_per_client: int | None = None
    max_stored_bytes_per_client: int | None = None
    max_stored_conversation_bytes: int | None = None
    max_header_bytes: int = 64 << 10
    max_n: int = 128
    max_prompts: int = 1024
    max_captured_bytes: int = 64 * MIB
    chat_template_kwargs_allowed: bool = True
    default_chat_template_kwargs: dict[str, Any] | None = None
    trust_request_chat_template: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    response_role: str = "assistant"
    enable_batch_api: bool = False
    batch_storage_dir: str | None = None
    batch_retention_hours: float = 720.0
    batch_priority: int | None = None
    max_batch_file_bytes: int = 200 * MIB
    max_batch_bytes_per_client: int = 20480 * MIB
    max_batch_files_per_client: int = 1000
    max_batches_per_client: int = 1000
    disable_fastapi_docs: bool = False
    enable_tokenizer_info_endpoint: bool = False
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    disable_access_log: bool = False
    log_format: str = "text"
    enable_log_requests: bool = False
    max_log_len: int | None = None
    enable_reflection: bool | None = None
    otlp_traces_endpoint: str | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            printable(field.name, getattr(self, field.name))
        if isinstance(self.lora_routes, dict):
            with contextlib.suppress(TypeError, ValueError):  # it is then refused as a dict
                object.__setattr__(self, "lora_routes", json.dumps(self.lora_routes))
        self._take_vllm_forms()
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind.startswith("tuple"):
                value = tuple(value) if type(value) in (list, tuple) else (value,)
                object.__setattr__(self, field.name, value)
                wanted = None if all(isinstance(item, str) and item for item in value) else "texts that are not empty"
            else:
                wanted = kind_missed(value, kind)
            if wanted:
                if not field.repr:  # a secret
                    problem = f"{field.name} has a key that is empty or no text"
                    raise ConfigError.because(field.name, problem, f"give {wanted}")
                raise ConfigError(field.name, value, wanted)
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(name, value, f"{least} to {most}")
        for name, least, most in _BOUNDS_OR_NONE:
            value = getattr(self, name)
            if value and not least <= value <= most:
                raise ConfigError(name, value, f"0 or {least} to {most}")
        for name, other in (
            ("ssl_certfile", "ssl_keyfile"),
            ("ssl_keyfile", "ssl_certfile"),
            ("ssl_ca_certs", "ssl_certfile"),
            ("enable_auto_tool_choice", "tool_call_parser"),
            ("enable_admin", "admin_key_file"),
            ("weight_upload_dir", "enable_admin"),
            ("max_log_len", "enable_log_requests"),
            ("enable_batch_api", "batch_storage_dir"),
            ("batch_storage_dir", "enable_batch_api"),
        ):
            if getattr(self, name) and not getattr(self, other):
                flag = "--" + other.replace("_", "-")
                raise ConfigError.because(name, f"{name} needs {other}, which is not given", f"give {flag} too")
        # Lone surrogates cannot be sent. A model's name may have any other character: answers and metrics escape it.
        for name, wrong in (
            ("served_model_name", r"[\ud800-\udfff]"),
            ("response_role", r"[\x00-\x1f\x7f\ud800-\udfff]"),
            ("root_path", r"[\x00-\x1f\x7f\ud800-\udfff]"),
        ):
            if found := re.search(wrong, "".join(getattr(self, name))):
                raise ConfigError(name, getattr(self, name), f"text without the character {found[0]!r}")
        if self.log_format not in ("text", "json"):
            raise ConfigError("log_format", self.log_format, "text, json")
        self._check_store()
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):  # no browser sends it
                raise ConfigError("allowed_origins", origin, '"*", or SCHEME://HOST[:PORT] without a path or a slash')
        tool_format(self.tool_call_parser)
        reasoning_format(self.reasoning_parser)

    def _take_vllm_forms(self) -> None:
        """Replace values in forms that vLLM's command line has: "none" for no reasoning parser, an empty text for no
        adapters, and a JSON list of origins in one text. Other values stay as they are, to be checked later.
        """
        if isinstance(self.reasoning_parser, str) and self.reasoning_parser.lower() == "none":
            object.__setattr__(self, "reasoning_parser", None)
        if self.lora_modules in ("", [""], ("",)):
            object.__setattr__(self, "lora_modules", ())
        given = self.allowed_origins
        (only,) = given if isinstance(given, (list, tuple)) and len(given) == 1 else (given,)
        if isinstance(only, str) and only.startswith("["):
            with contextlib.suppress(ValueError, RecursionError):  # it is then refused as an origin
                object.__setattr__(self, "allowed_origins", tuple(json.loads(only)))

    def store_bounds(self) -> dict[str, int]:
        """Return the bounds of the store of responses as keyword arguments of StoreBounds: `responses` and
        `client_responses` in responses, `num_bytes`, `client_bytes` and `conversation_bytes` in bytes. An option that
        is None is replaced by its default, which is computed from the other options: half of the responses is rounded
        up, shares of bytes are rounded down.
        """
        most = self.api_memory_limit_bytes // 4 if self.api_memory_limit_bytes else _STORED_BYTES
        total = self.max_stored_bytes or min(_STORED_BYTES, most)
        return {
            "responses": self.max_stored_responses,
            "num_bytes": total,
            "client_responses": self.max_stored_responses_per_client or -(-self.max_stored_responses // 2),
            "client_bytes": self.max_stored_bytes_per_client or total // 2,
            "conversation_bytes": self.max_stored_conversation_bytes or total // 4,
        }

    def _check_store(self) -> None:
        """Raise ConfigError if one client's limit of responses or bytes exceeds that of all clients together, or one
        conversation's limit of bytes exceeds one client's. Options that are None count with the defaults of
        `store_bounds`.
        """
        bounds = self.store_bounds()
        for name, inner, outer_name, outer in (
            ("max_stored_responses_per_client", "client_responses", "max_stored_responses", "responses"),
            ("max_stored_bytes_per_client", "client_bytes", "max_stored_bytes", "num_bytes"),
            ("max_stored_conversation_bytes", "conversation_bytes", "max_stored_bytes_per_client", "client_bytes"),
        ):
            if bounds[inner] > bounds[outer]:
                problem = f"{name} is {bounds[inner]}, more than {outer_name}, which is {bounds[outer]}"
                raise ConfigError.because(name, problem, f"allowed: at most {outer_name}")

    def api_keys(self) -> tuple[str, ...]:
        """Return all client keys: those of api_key, then those of api_key_file, which is read now; () if there are
        none. Raises ConfigError for an unusable file.
        """
        return (*self.api_key, *_read_keys("api_key_file", self.api_key_file))

    def admin_keys(self) -> tuple[str, ...]:
        """Return all operator keys, read from admin_key_file now; () without such a file. Raises ConfigError for an
        unusable file.
        """
        return _read_keys("admin_key_file", self.admin_key_file)


def _read_keys(name: str, path: str | None) -> tuple[str, ...]:
    """Return the keys in a file, one on each line, without surrounding white space; () if `path` is None. Empty lines
    are skipped.

    name: the option's name, for errors. Raises ConfigError for a file that cannot be read, is not regular, has more
    than 1 MiB or is not UTF-8, that every user may write, or that has no key.
    """
    if path is None:
        return ()
    try:
        content, status = read_file(named_path(name, path), MIB)
        lines = content.decode("utf-8-sig").splitlines()
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        problem = f"{name} {path!r} cannot be read ({why})"
        raise ConfigError.because(name, problem, "name a file with one key a line") from None
    if status.st_mode & stat.S_IWOTH:
        problem = f"{name} {path!r} is a file that others may write, who could add a key of their own"
        raise ConfigError.because(name, problem, f"chmod o-w {path}")
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError.because(name, f"{name} {path!r} contains no key", "write one per line into it")
    return keys


def is_loopback(host: str) -> bool:
    """Whether a host is reachable only from this machine: a loopback address, or the name "localhost". Other names are
    not resolved.
    """
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
