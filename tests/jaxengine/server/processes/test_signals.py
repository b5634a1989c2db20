"""What a server logs when it is told to end: nothing that looks like a failure."""

from __future__ import annotations

import os
import signal

import httpx


def test_a_server_with_several_api_processes_logs_its_requests_and_ends_without_a_false_alarm(make_server):
    # However slowly its processes end: one that takes longer than this is killed, which is an error in the log.
    options = {"enable_log_requests": True, "max_log_len": 5, "shutdown_timeout": 60.0}
    server = make_server(fresh=True, grpc_port=None, api_server_count=2, **options)
    for pid in (server.engine_pid, *server.api_pids, *server.store_pids):
        assert os.getpgid(pid) == pid  # Ctrl-C reaches the supervisor only
    body = {"prompt": "The quick brown fox", "max_tokens": 3}
    assert httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=30).status_code == 200
    server.process.send_signal(signal.SIGHUP)  # the terminal is closed
    assert server.process.wait(90) == 0
    assert "prompt 'The q...'" in server.errors()
    assert "ERROR" not in server.errors() and "Traceback" not in server.errors()
